"""Chooses how a call runs: the number of chunks (micro-batches) of each pass, and the restore pair.

The restore pair says how backward gets the experts' inputs (the dispatched rows, T_DI) and their hidden
activations (T_M): kept, offloaded to the host, or made again (sent or computed a second time).

The choice depends only on numbers that are equal on all ranks, so all ranks choose the same.
"""

from __future__ import annotations

from pmoe.call.modules import LayerModules
from pmoe.choose.slots import without_host_offload
from pmoe.comm.counts import RankCounts
from pmoe.comm.failures import publishing_failures
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.make_plan import RowsFor, SortedSlots
from pmoe.planner.degree import Choice
from pmoe.schedule.restore import Restore


def choose(
    modules: LayerModules,
    counts: RankCounts,
    inputs: Inputs,
    orders: SortedSlots,
    restore: Restore | None = None,
    rows_for: RowsFor | None = None,
) -> Choice:
    """Returns the numbers of chunks of both passes and the restore pair of a call.

    The restore pair says how backward gets the experts' inputs (T_DI, the dispatched rows) and their hidden
    activations (T_M): kept, offloaded to the host, or made again (sent or computed a second time).

    If the layer's options fix the numbers of chunks and the pair, these are returned. Otherwise
    `pmoe.choose.open_choice.choose_among` chooses, for example by trials: timed runs of both passes.

    On a GPU, several kernels can compute the experts' matrix products. The first call with about so many rows
    times them. The call is collective if kernels are timed or trials run.

    modules: the modules and options of the layer.
    counts: the row counts, after the ranks have exchanged them.
    inputs: the rows and parameters of the call; trials use them.
    orders: the routing of the call. Trials need it to cut the batch into chunks.
    restore: the pair, if the caller has chosen it; None if the options or this function choose it.
    rows_for: a function that takes several numbers of chunks. It returns row counts and routing with which
        the batch can be cut into any of these numbers of chunks. Only ``pipeline="solve"`` needs it. If it is
        None, the batch can be cut only into the numbers of chunks for which ``counts`` were made.
    """
    options = modules.options
    n = options.fixed_degree
    has_several_pairs = len(modules.pairs) > 1 and counts.needs_grad
    is_open = n is None or (restore is None and (has_several_pairs or options.budget is not None))
    timed = modules.cache.timed_products
    if is_open or (inputs.x_TM.is_cuda and _products_key(modules, counts, inputs) not in timed):
        from pmoe.choose.open_choice import choose_among, measure_products_of
        from pmoe.choose.trials import TrialBatch

        # Trials compute in the dtype that the call will use. An error of one rank, such as a warning that the
        # user turns into an error, would leave the other ranks waiting in a trial.
        with (
            inputs.autocast_for(modules.experts),
            publishing_failures(modules.ranks, "the choice of n and of the restore pair"),
        ):
            if measure_products_of(modules, counts, inputs) and inputs.x_TM.is_cuda:
                timed.add(_products_key(modules, counts, inputs))
            if is_open:
                return choose_among(TrialBatch(modules, counts, inputs, orders, rows_for), restore)
    assert n is not None
    restore = restore or modules.pairs[0]
    if counts.host_shortage:
        restore = without_host_offload(restore, counts)
    return Choice(forward=n, backward=options.pipeline_backward or n, restore=restore)


def _products_key(modules: LayerModules, counts: RankCounts, inputs: Inputs) -> tuple[object, ...]:
    """Returns the key under which a layer notes that kernels were timed for calls with about so many rows.

    `pmoe.measure.products.measure_products` rounds numbers of rows up to a power of two. So the key has the
    bits of two numbers of rows: those of the experts, and those of the shared expert. It also has the
    names of the parameters: a bias may be removed from experts that stay in the layer, and products without
    a bias are timed apart.
    """
    num_rows = counts.max_tokens * modules.options.top_k * modules.grid.esp.size
    buckets = ((num_rows - 1).bit_length(), (counts.max_tokens - 1).bit_length())
    shared = modules.shared_expert
    names = (modules.experts.operand_names, None if shared is None else shared.operand_names)
    return (inputs.x_TM.dtype, inputs.x_TM.device, buckets, counts.needs_grad, names)
