"""Limits for received rows, which ranks compare when they exchange row counts.

Chunks (micro-batches) share a few buffers, the ring slots. A ring slot has room for a fixed number of rows,
and the host has room for a limited number of offloaded rows.
"""

from __future__ import annotations

from pmoe.call.modules import LayerModules
from pmoe.call.routed import RoutedBatch
from pmoe.comm.counts import RankCounts, Slots
from pmoe.engine.buffers.arena import pool
from pmoe.schedule.buffer_sizes import ALIGNMENT
from pmoe.schedule.restore import Restore
from pmoe.warn import warn_once


def requested_slots(modules: LayerModules, routed: RoutedBatch, degrees: tuple[int, ...]) -> Slots:
    """Returns the limits for received rows that are compared in the exchange of row counts.

    It is for layers whose chunks share buffers, the ring slots. Without them there are no limits. The
    comparison answers two questions: into how many more chunks the batch must be cut so that each chunk
    fits into a ring slot on every rank, and whether the host memory of every rank has room for an offloaded
    T_DI (the dispatched rows). Chunks are micro-batches.

    modules: the modules and options of the layer.
    routed: the batch after the gate.
    degrees: the numbers of chunks that may be chosen for the call.
    """
    options = modules.options
    x_TM = routed.x_TM
    host_rows = None
    if any(pair.dispatched == "offload" for pair in modules.pairs):
        # In each bin (the smallest possible chunk), rows that travel and rows that stay each begin on an
        # aligned address, so up to two alignments are lost.
        free = pool(x_TM.device).host.free_bytes - 2 * modules.bins_for(degrees) * ALIGNMENT
        host_rows = max(free, 0) // (options.d_model * x_TM.element_size())
    return Slots(
        slack=options.slack,
        top_k=options.top_k * modules.grid.esp.size,
        degrees=degrees,
        own_rank=modules.ranks.rank if modules.stages.local else None,
        host_rows=host_rows,
    )


def without_host_offload(restore: Restore, counts: RankCounts) -> Restore:
    """Returns the restore pair, changed if it would offload dispatched rows and a host lacks memory.

    The restore pair says whether the dispatched rows (T_DI) and the hidden activation (T_M) are kept,
    offloaded or made again for backward. If any rank lacks host memory for T_DI, all ranks send T_DI again in
    backward instead.

    restore: the restore pair.
    counts: the row counts, which also say whether any rank lacks host memory.
    """
    if not counts.host_shortage or restore.dispatched != "offload":
        return restore
    if counts.needs_grad:  # without a backward pass nothing is offloaded
        warn_once(
            "too little host memory is left on some rank to offload T_DI: it is sent again in backward, one "
            'more all-to-all for each chunk. Free host memory, or choose memory_reuse="S2" or "S4"'
        )
    return Restore("communicate", restore.hidden)
