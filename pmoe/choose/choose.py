"""The choice of a call: n of both passes and the restore pair, from numbers that all ranks share."""

from __future__ import annotations

from pmoe.call.modules import LayerModules
from pmoe.choose.slots import without_host_offload
from pmoe.comm.counts import RankCounts
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.make_plan import SortedSlots
from pmoe.planner.degree import Choice
from pmoe.schedule.restore import Restore


def choose(
    modules: LayerModules,
    counts: RankCounts,
    inputs: Inputs,
    orders: SortedSlots,
    restore: Restore | None = None,
) -> Choice:
    """Returns n of both passes and the restore pair. Collective if something is measured.

    modules: the modules of the layer.
    counts: the exchanged row counts.
    inputs: the rows and parameters of the call, with which trials run.
    orders: the slots of the call, from which the plans of trials are made.
    restore: the pair, if it is chosen already; None lets the options decide.

    If the options fix both, nothing is measured. Otherwise see `pmoe.choose.open_choice.choose_among`.
    """
    options = modules.options
    n = options.fixed_degree
    has_several_pairs = len(modules.pairs) > 1 and counts.needs_grad
    is_open = n is None or (restore is None and (has_several_pairs or options.budget is not None))
    if is_open or inputs.x_TM.is_cuda:
        from pmoe.choose import open_choice
        from pmoe.choose.trials import TrialBatch

        with inputs.autocast_for(modules.experts):  # as the experts will compute
            open_choice.measure_products_of(modules, counts, inputs)
            if is_open:
                return open_choice.choose_among(TrialBatch(modules, counts, inputs, orders), restore)
    assert n is not None
    restore = restore or modules.pairs[0]
    if counts.host_shortage:
        restore = without_host_offload(restore, counts)
    return Choice(forward=n, backward=options.pipeline_backward or n, restore=restore)
