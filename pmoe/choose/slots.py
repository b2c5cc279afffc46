"""The room for received rows: what ranks ask with the row counts, and the pair if a host has too little
memory."""

from __future__ import annotations

from pmoe.call.modules import Parts
from pmoe.call.routed import Routed
from pmoe.comm.counts import RankCounts, Slots
from pmoe.engine.buffers.arena import pool
from pmoe.schedule.buffer_sizes import ALIGNMENT
from pmoe.schedule.restore import Restore
from pmoe.warn import warn_once


def slots_to_ask(parts: Parts, routed: Routed) -> Slots | None:
    """What ranks ask with the counts, where buffers rotate: how deep each n must be cut, and whether the host
    has room for T_DI."""
    spec, x_TM = parts.spec, routed.x_TM
    if not spec.rotates:
        return None
    host_rows = None
    if any(pair.dispatched == "offload" for pair in parts.pairs):
        # Every unit of a chunk, travelling or not, starts on a boundary of its own.
        free = pool(x_TM.device).host.free_bytes - 2 * parts.num_bins * ALIGNMENT
        host_rows = max(free, 0) // (spec.d_model * x_TM.element_size())
    return Slots(
        slack=spec.slack,
        top_k=spec.top_k * parts.grid.inside.size,
        degrees=spec.degrees,
        own_rank=parts.ranks.rank if parts.stages.local else None,
        host_rows=host_rows,
    )


def with_room(restore: Restore, counts: RankCounts) -> Restore:
    """The same pair, or one that sends T_DI again in place of offloading it where a host is full."""
    if not counts.host_shortage or restore.dispatched != "offload":
        return restore
    if counts.needs_grad:  # else nothing is offloaded at all
        warn_once("too little host memory is left on some rank to offload T_DI: it is sent again instead")
    return Restore("communicate", restore.hidden)
