"""What a call chooses: n of both passes and the restore pair, from numbers that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass

from pmoe.comm.counts import RankCounts, Slots
from pmoe.engine.arena import pool
from pmoe.engine.passes import Inputs
from pmoe.layer.orders import PlanFor
from pmoe.layer.parts import Parts
from pmoe.layer.route import Routed
from pmoe.planner.degree import SOLVE, Choice
from pmoe.schedule.restore import Restore
from pmoe.schedule.slots import ALIGNMENT
from pmoe.warn import warn_once


@dataclass(frozen=True)
class Batch:
    """A routed batch whose counts are known. plan_for: makes the plan of any choice, for trials."""

    parts: Parts
    routed: Routed
    counts: RankCounts
    inputs: Inputs
    plan_for: PlanFor


def choose(batch: Batch, restore: Restore | None = None) -> Choice:
    """restore: the pair, where something else has chosen it. Collective where something is measured."""
    with batch.routed.autocast_for(batch.parts):  # as the experts will compute
        _measure_products(batch)
        return _chosen(batch, restore)


def _chosen(batch: Batch, restore: Restore | None) -> Choice:
    spec = batch.parts.spec
    if spec.budget is not None and restore is None:
        from pmoe.layer import predicted

        return predicted.choice_within_budget(batch)
    if restore is None:
        restore = _pair(batch)
    n = spec.fixed_degree
    if n is not None:
        return Choice(forward=n, backward=spec.pipeline_backward or n, restore=restore)
    if spec.pipeline == SOLVE:
        from pmoe.layer import predicted

        found = predicted.solved_degrees(batch, restore)
    else:
        from pmoe.layer import searched

        found = searched.degrees(batch, restore)
    return Choice(forward=found.forward, backward=found.backward, restore=restore)


def _pair(batch: Batch) -> Restore:
    """The one pair that is allowed, or the cheapest; none that offloads T_DI where a host is full."""
    pairs, counts = batch.parts.pairs, batch.counts
    restore = pairs[0]
    if len(pairs) > 1 and counts.needs_grad:
        from pmoe.layer import predicted

        restore = predicted.pair_of_batch(batch)
    if counts.host_shortage and restore.dispatched == "offload":
        restore = Restore("communicate", restore.hidden)
        if counts.needs_grad:  # else nothing is offloaded at all
            warn_once("too little host memory is left on some rank to offload T_DI: it is sent again instead")
    return restore


def _measure_products(batch: Batch) -> None:
    """Has the ways to compute the experts' products measured where that has not been done."""
    parts, counts, dtype, device = batch.parts, batch.counts, batch.routed.dtype, batch.routed.x.device
    if device.type != "cuda":  # else there is one way only
        return
    from pmoe.measure.products import measure_products

    even_rows = counts.max_tokens * parts.spec.top_k * parts.grid.inside.size
    for experts, rows in ((parts.experts, even_rows), (parts.shared_expert, counts.max_tokens)):
        if experts is not None:
            measure_products(experts, parts.ranks, dtype, device, rows, needs_grad=counts.needs_grad)


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
