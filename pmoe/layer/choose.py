"""What a call chooses: n of both passes and the restore pair, from numbers that all ranks share."""

from __future__ import annotations

from pmoe.comm.counts import RankCounts, Slots
from pmoe.engine.arena import pool
from pmoe.engine.cut import Orders
from pmoe.engine.passes import Inputs
from pmoe.layer.parts import Parts
from pmoe.layer.route import Routed
from pmoe.planner.degree import Choice
from pmoe.schedule.restore import Restore
from pmoe.schedule.slots import ALIGNMENT
from pmoe.warn import warn_once


def choose(
    parts: Parts, counts: RankCounts, inputs: Inputs, orders: Orders, restore: Restore | None = None
) -> Choice:
    """orders: for the plans of trials. restore: the pair, where something else has chosen it. Collective
    where something is measured (`pmoe.layer.chosen`)."""
    spec, n, several = parts.spec, parts.spec.fixed_degree, len(parts.pairs) > 1 and counts.needs_grad
    is_open = n is None or (restore is None and (several or spec.budget is not None))
    if is_open or inputs.x_TM.is_cuda:
        from pmoe.layer import chosen
        from pmoe.layer.chosen import Batch

        with inputs.autocast_for(parts.experts):  # as the experts will compute
            chosen.measure_products_of(parts, counts, inputs)
            if is_open:
                return chosen.choose_among(Batch(parts, counts, inputs, orders), restore)
    assert n is not None
    restore = with_room(restore or parts.pairs[0], counts)
    return Choice(forward=n, backward=spec.pipeline_backward or n, restore=restore)


def with_room(restore: Restore, counts: RankCounts) -> Restore:
    """The same pair, or one that sends T_DI again in place of offloading it where a host is full."""
    if not counts.host_shortage or restore.dispatched != "offload":
        return restore
    if counts.needs_grad:  # else nothing is offloaded at all
        warn_once("too little host memory is left on some rank to offload T_DI: it is sent again instead")
    return Restore("communicate", restore.hidden)


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
