"""What a call chooses: n of both passes and the restore pair, from numbers that all ranks share."""

from __future__ import annotations

from pmoe.call.modules import Parts
from pmoe.choose.slots import with_room
from pmoe.comm.counts import RankCounts
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.make_plan import Orders
from pmoe.planner.degree import Choice
from pmoe.schedule.restore import Restore


def choose(
    parts: Parts, counts: RankCounts, inputs: Inputs, orders: Orders, restore: Restore | None = None
) -> Choice:
    """orders: for the plans of trials. restore: the pair, where something else has chosen it. Collective
    where something is measured (`pmoe.choose.trials`)."""
    spec, n, several = parts.spec, parts.spec.fixed_degree, len(parts.pairs) > 1 and counts.needs_grad
    is_open = n is None or (restore is None and (several or spec.budget is not None))
    if is_open or inputs.x_TM.is_cuda:
        from pmoe.choose import open_choice
        from pmoe.choose.trials import Batch

        with inputs.autocast_for(parts.experts):  # as the experts will compute
            open_choice.measure_products_of(parts, counts, inputs)
            if is_open:
                return open_choice.choose_among(Batch(parts, counts, inputs, orders), restore)
    assert n is not None
    restore = restore or parts.pairs[0]
    if counts.host_shortage:
        restore = with_room(restore, counts)
    return Choice(forward=n, backward=spec.pipeline_backward or n, restore=restore)
