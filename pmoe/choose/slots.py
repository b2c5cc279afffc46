"""Limits for received rows, which ranks check when they exchange row counts.

Chunks (micro-batches) take turns in a few buffers, the ring slots. A ring slot has room for a fixed number of
rows, and the host's memory has room for a limited number of offloaded rows.
"""

from __future__ import annotations

from torch import Tensor

from pmoe.call.modules import LayerModules
from pmoe.comm.counts import RankCounts, Slots
from pmoe.engine.buffers.arena import pool
from pmoe.schedule.buffer_sizes import ALIGNMENT
from pmoe.schedule.restore import Restore
from pmoe.warn import warn_once


def requested_slots(modules: LayerModules, x_TM: Tensor, degrees: tuple[int, ...]) -> Slots:
    """Returns the limits for received rows that ranks check when they exchange row counts.

    Only layers that reuse memory need limits (`LayerModules.limits_rows`). There are two limits:

    - A chunk must fit into a ring slot, a buffer of fixed size that chunks share. If a chunk does not fit on
      every rank, all ranks cut the batch into more chunks.
    - The dispatched rows (T_DI) must fit into the free host memory of every rank if a pair offloads them.

    modules: the modules and options of the layer.
    x_TM: (T, M), the rows of the batch: T tokens, M = d_model. Only its device and the bytes of an element
        are used.
    degrees: the numbers of chunks that may be chosen for the call.
    """
    options = modules.options
    host_rows = None
    if any(pair.dispatched == "offload" for pair in modules.pairs):
        # In each bin (the smallest possible chunk), the rows that are sent and the rows that stay on their
        # rank each begin at an aligned address, so padding of up to two alignments is lost.
        free = pool(x_TM.device).host.free_bytes - 2 * modules.bins_for(degrees) * ALIGNMENT
        host_rows = max(free, 0) // (options.row_columns * x_TM.element_size())
    return Slots(
        slack=options.slack,
        top_k=options.top_k * modules.grid.esp.size,
        degrees=degrees,
        own_rank=modules.ranks.rank if modules.stages.local else None,
        host_rows=host_rows,
        num_staying=modules.experts.num_local_experts,
    )


def without_host_offload(restore: Restore, counts: RankCounts) -> Restore:
    """Returns ``restore``, or a pair that sends T_DI again if a rank lacks host memory to offload it.

    T_DI are the dispatched rows. The restore pair says whether T_DI and the hidden activation (T_M) are kept,
    offloaded or made again for backward. If the pair offloads T_DI and any rank lacks host memory for it, all
    ranks send T_DI again in backward instead, and a warning says so.

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
