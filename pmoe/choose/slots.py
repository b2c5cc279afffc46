"""The room for received rows: the limits that travel with the row counts, and a pair for a full host."""

from __future__ import annotations

from pmoe.call.modules import LayerModules
from pmoe.call.routed import RoutedBatch
from pmoe.comm.counts import RankCounts, Slots
from pmoe.engine.buffers.arena import pool
from pmoe.schedule.buffer_sizes import ALIGNMENT
from pmoe.schedule.restore import Restore
from pmoe.warn import warn_once


def requested_slots(modules: LayerModules, routed: RoutedBatch) -> Slots | None:
    """Returns the limits about which ranks ask together with the row counts; None if no buffer rotates.

    The answers are the depth to which each n must be cut so that no ring slot overflows, and whether the host
    has room for an offloaded T_DI.
    """
    options = modules.options
    x_TM = routed.x_TM
    if not options.rotates:
        return None
    host_rows = None
    if any(pair.dispatched == "offload" for pair in modules.pairs):
        # The rows of a chunk that travel, and those that stay, each start on an aligned address.
        free = pool(x_TM.device).host.free_bytes - 2 * modules.num_bins * ALIGNMENT
        host_rows = max(free, 0) // (options.d_model * x_TM.element_size())
    return Slots(
        slack=options.slack,
        top_k=options.top_k * modules.grid.esp.size,
        degrees=options.degrees,
        own_rank=modules.ranks.rank if modules.stages.local else None,
        host_rows=host_rows,
    )


def without_host_offload(restore: Restore, counts: RankCounts) -> Restore:
    """Returns the pair, or one that sends T_DI again in place of offloading it if a rank's host is full."""
    if not counts.host_shortage or restore.dispatched != "offload":
        return restore
    if counts.needs_grad:  # without a backward pass nothing is offloaded
        warn_once(
            "too little host memory is left on some rank to offload T_DI: it is sent again in backward, one "
            'more all-to-all for each chunk. Free host memory, or choose memory_reuse="S2" or "S4"'
        )
    return Restore("communicate", restore.hidden)
