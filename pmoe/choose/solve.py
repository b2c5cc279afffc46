"""Chooses the numbers of chunks for ``pipeline="solve"``: FSMoE's solver (Section 4), on measured costs.

The solver predicts the seconds of a step for every pair of numbers of chunks that the layer allows, one for
each pass, and takes the fastest pair. To predict a step, both passes are simulated with costs that are
measured on this machine. The costs are the seconds of

- the all-to-all among nodes, of the kind that the layer uses (flat or hierarchical);
- the all-gather and the reduce-scatter inside a node;
- the experts' matrix products; if experts are a user's modules, one whole module is timed (Section 3.2);
- the layer's gate;
- the layer's order, the module that copies tokens to rows sorted by expert, and sums the rows of each token.

The simulation assumes that tokens are evenly routed: of the rows of an all-to-all among P ranks, 1 / P stay
on their rank. If busy experts have copies, sending their weights and gradients counts, too.

Letters: B tokens of the rank with most tokens, K choices of a token, P ranks of the all-to-all among nodes, L
ranks of the collectives inside a node, M = d_model. n and m are the numbers of chunks of forward and of
backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pmoe.call.module_calls import is_watched
from pmoe.call.modules import LayerModules
from pmoe.call.sizes import agreed_sizes
from pmoe.choose.trials import TrialBatch
from pmoe.comm.agreement import digest, largest
from pmoe.comm.base import Exchange, FlatAllToAll
from pmoe.comm.failures import publishing_failures
from pmoe.comm.grid import Grid
from pmoe.comm.hierarchical import HierarchicalExchange
from pmoe.engine.variants.trial import is_out_of_memory
from pmoe.measure.layer_modules import ROWS, gate_lines, order_lines, rows_within
from pmoe.measure.module_cost import profile_module
from pmoe.measure.operations import measure_exchange
from pmoe.measure.profile import WHOLE_BYTES, WIDER, in_less_memory, load_or_measure
from pmoe.planner.copy_work import NO_COPIES, CopyWork
from pmoe.planner.costs import FREE, LayerCosts, LineCost
from pmoe.planner.degree import TRIED, all_choices
from pmoe.planner.degree_search import (
    ScheduleOptions,
    StepCosts,
    best_degree,
    first_of_fastest,
    pass_seconds,
)
from pmoe.planner.granularity import PassDegrees
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.priced_choices import TriedBy, evaluate, rounded_up, roundings_up, within_budget
from pmoe.planner.profile import Operations, alphas
from pmoe.planner.timed_rounds import OUT_OF_MEMORY
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import PassDirection
from pmoe.schedule.wire import AS_THEY_ARE
from pmoe.warn import log, warn_once

HALVINGS = 24
"""Number of steps of the bisection that finds the fixed cost of a chunk (`with_chunk_cost`)."""

# ---- measured costs


_operations: dict[tuple[object, ...], tuple[Operations, float]] = {}
"""The costs that this process has measured or loaded, and the limit of bytes of each measurement.

A key has the ranks, the device, the dtype and the names of the all-to-alls. A value has the costs, and how
many bytes their measurement was allowed to allocate (`operations_of`).
"""


def operations_of(
    grid: Grid,
    device: torch.device,
    dtype: torch.dtype,
    exchanges: Mapping[str, Exchange] | None = None,
    most_bytes: float | None = None,
) -> Operations:
    """Returns the measured seconds of matrix products and collectives, each as a line alpha + beta * size.

    FSMoE's solver predicts a step from these costs. They are read from a stored profile if there is one, and
    otherwise measured. Collective the first time for these ranks, device, dtype and exchanges, and if costs
    are measured again.

    grid: the ranks of the layer, across nodes and inside a node.
    device, dtype: device and dtype of the rows.
    exchanges: the layer's all-to-alls that are not flat (a flat one sends each row directly to its rank), by
        name. Their costs are measured in addition.
    most_bytes: how many bytes a measurement may allocate, the same on every rank. Earlier costs are measured
        again if they come from a measurement with a much lower limit, less than ``most_bytes`` / `WIDER`.
        None: there is no limit, and earlier costs are never measured again.
    """
    key = (grid.all.name, f"{grid.ep.name} {grid.esp.size}", device, dtype, *sorted(exchanges or ()))
    _, limit = _operations.get(key, (None, 0.0))
    if not _is_enough(limit, most_bytes):
        most = math.inf if most_bytes is None else most_bytes
        profile = load_or_measure(
            grid.all,
            device,
            dtype,
            operations=True,
            across=grid.ep,
            inside=grid.esp,
            exchanges=exchanges,
            most_bytes=most,
        )
        assert profile.operations is not None
        _operations[key] = (profile.operations, most if most < WHOLE_BYTES else math.inf)
    return _operations[key][0]


def _is_enough(limit: float, most_bytes: float | None) -> bool:
    """Returns whether the costs of an earlier measurement may be used instead of a new measurement.

    limit: how many bytes the earlier measurement was allowed to allocate; 0 if there was none.
    most_bytes: how many bytes a new measurement may allocate. The earlier costs are used if ``most_bytes`` is
        at most `WIDER` times ``limit``. With None, the costs of any earlier measurement are used.
    """
    return limit > 0 if most_bytes is None else most_bytes <= WIDER * limit


@dataclass(frozen=True, kw_only=True)
class ModuleLines:
    """Measured costs of a layer's own modules, each as a line: seconds = alpha + beta * size.

    They are equal on all ranks.

    dispatch, combine: the layer's all-to-all in each direction; size = bytes that a rank sends to other
        ranks. None for the flat all-to-all, whose cost is in `Operations`.
    order: copying tokens to rows that are sorted by expert; size = rows.
    restore: summing the rows of each token; size = rows.
    sort: sorting rows by chunk and expert; size = rows.
    gate: the gate's forward and backward pass; size = tokens. The lines are 0 for a gate that cannot be timed
        outside of a call of the layer (`_gate_costs`).
    expert: the forward and backward pass of one expert that is a user's module; size = its rows. None for
        pmoe's own experts.
    """

    dispatch: LineCost | None = None
    combine: LineCost | None = None
    order: LineCost = FREE.line
    restore: LineCost = FREE.line
    sort: LineCost = FREE.line
    gate: tuple[LineCost, LineCost] = (FREE.line, FREE.line)
    expert: tuple[LineCost, LineCost] | None = None


def module_lines(
    modules: LayerModules, rows_TM: Tensor, most_bytes: float | None = None
) -> tuple[Operations, ModuleLines]:
    """Returns the measured costs of products and collectives (`Operations`), and of a layer's own modules.

    The modules are the gate, the order (which copies tokens to sorted rows), all-to-alls that are not flat,
    and experts that are a user's modules. Costs are measured if they are not known yet. Collective the first
    time for a layer and a dtype of rows, and if costs are measured again.

    modules: the modules and options of the layer.
    rows_TM: (T, M), T rows of the layer with M = d_model columns. Only their width, dtype and device are
        used.
    most_bytes: how many bytes a measurement may allocate, the same on every rank. Earlier costs are measured
        again if they come from a measurement with a much lower limit, less than ``most_bytes`` / `WIDER`.
        None: there is no limit, and earlier costs are never measured again.
    """
    own_exchanges = {side: getattr(modules, side) for side in ("dispatch", "combine")}
    names = {side: exchange_name(exchange) for side, exchange in own_exchanges.items()}
    stored = {name: own_exchanges[side] for side, name in names.items() if name}
    operations = operations_of(modules.grid, rows_TM.device, rows_TM.dtype, stored, most_bytes)
    key = ("module lines", rows_TM.dtype)
    _, limit = modules.cache.choosers.get(key, (None, 0.0))
    if not _is_enough(limit, most_bytes):
        most = math.inf if most_bytes is None else most_bytes
        row_bytes = _row_bytes(modules, rows_TM)
        rows = rows_within(most, row_bytes)
        order, restore, sort = _agreed(modules.grid, rows_TM.device, _order_costs(modules, rows_TM, rows))
        gate_forward, gate_backward = _agreed(
            modules.grid, rows_TM.device, _gate_costs(modules, rows_TM, rows)
        )
        experts = modules.experts.as_modules()
        messages: dict[str, LineCost | None] = {}
        for side, exchange in own_exchanges.items():
            name = names[side]
            if name is None:
                measure_within = functools.partial(
                    measure_exchange,
                    modules.ranks,
                    rows_TM.device,
                    rows_TM.dtype,
                    exchange,
                    modules.options.row_columns,
                )
                measured, _ = in_less_memory(modules.ranks, most, measure_within)
                messages[side] = measured.line
            else:
                messages[side] = operations.exchanges[name].line if name else None
        new_lines = ModuleLines(
            **messages,
            order=order,
            restore=restore,
            sort=sort,
            gate=(gate_forward, gate_backward),
            expert=measure_expert_module(experts[0], rows_TM, modules.grid, rows) if experts else None,
        )
        # If the largest number of rows of the measurement fits into the limit, a higher limit would change
        # nothing. So no limit is recorded.
        is_whole = most >= ROWS[-1] * row_bytes
        modules.cache.choosers[key] = (new_lines, math.inf if is_whole else most)
    lines: ModuleLines = modules.cache.choosers[key][0]
    return operations, lines


def _row_bytes(modules: LayerModules, rows_TM: Tensor) -> int:
    """Returns an upper bound of the bytes, for each input row, that are needed to time one module.

    The module is the gate, an expert, or the order (which copies tokens to rows and sums the rows of each
    token). A row needs memory for at most

    - four rows of M columns, M = d_model: the input, a copy of the input, the output, and a gradient;
    - four rows of an expert's hidden columns;
    - six 4-byte numbers for each expert, which a gate keeps for its backward pass.

    modules: the modules and options of the layer.
    rows_TM: (T, M), T rows of the layer. Only their width, dtype and device are used.
    """
    sizes = agreed_sizes(modules, rows_TM)
    return 4 * (sizes.d_model + sizes.columns.hidden + sizes.columns.scratch) * sizes.element_size + (
        24 * sizes.num_experts
    )


def exchange_name(exchange: Exchange) -> str | None:
    """Returns the name under which a stored profile has the measured costs of an all-to-all.

        hierarchical     its class, the number of nodes, and a digest of the ranks of each node, for example
                         "HierarchicalAllToAll2D on 2 nodes, 5a3e9c417d2b"
        flat             "". It sends each row directly to its rank. Every profile has its costs
        a user's class   None. No profile has the costs of an all-to-all that a user has written

    exchange: the all-to-all.
    """
    if isinstance(exchange, FlatAllToAll):
        return ""
    if not isinstance(exchange, HierarchicalExchange):
        return None
    topology = exchange.topology
    if topology.is_level:
        return ""
    return f"{type(exchange).__name__} on {topology.num_nodes} nodes, {digest([repr(topology.members)]):x}"


def _order_costs(modules: LayerModules, rows_TM: Tensor, rows: Sequence[int]) -> tuple[LineCost, ...]:
    """Measures three steps: copying tokens to sorted rows, summing each token's rows, and sorting rows.

    Returns a line alpha + beta * rows for each step, in seconds on this rank.

    modules: the modules and options of the layer.
    rows_TM: (T, M), T rows of the layer with M = d_model columns. Only their width, dtype and device are
        used.
    rows: the numbers of rows that are timed.
    """
    options = modules.options
    with publishing_failures(modules.ranks, "timing the order"):
        return _lines_or_free(
            3, lambda: order_lines(modules.order, rows_TM, options.top_k, options.num_experts, rows)
        )


def _lines_or_free(count: int, timed: Callable[[], tuple[LineCost, ...]]) -> tuple[LineCost, ...]:
    """Returns the cost lines of a module of the layer, or free lines if this rank has too little memory.

    The ranks then take the largest costs of any rank (`_agreed`), so the other ranks' costs count.

    count: the number of lines.
    timed: times the module on this rank, without a collective, and returns the lines.
    """
    try:
        return timed()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return (FREE.line,) * count


def _gate_costs(modules: LayerModules, rows_TM: Tensor, rows: Sequence[int]) -> tuple[LineCost, ...]:
    """Measures the gate's forward and backward pass. Returns a line alpha + beta * tokens for each.

    The lines are in seconds on this rank. They are 0 if the gate cannot be timed outside of a call of the
    layer, in these cases:

    - the caller of the layer passes the routing, so no gate runs;
    - the gate's parameters are DTensors;
    - the gate has hooks or a wrapper, which may communicate;
    - a user's gate raises an error for random tokens. A warning says so.

    modules: the modules and options of the layer.
    rows_TM: (T, M), T rows of the layer with M = d_model columns. Only their width, dtype and device are
        used.
    rows: the numbers of tokens that are timed.
    """
    gate = modules.gate
    rows_TM = rows_TM.new_empty(0, modules.options.d_model)
    is_spread = any(hasattr(parameter, "to_local") for parameter in gate.parameters())
    is_outside = getattr(modules.router, "has_external_routing", False)
    if is_spread or is_outside or gate is not modules.router or is_watched(gate):
        return FREE.line, FREE.line
    if modules.trusts_gate:
        with publishing_failures(modules.ranks, "timing the gate"):
            return _lines_or_free(2, lambda: gate_lines(gate, rows_TM, rows))
    try:
        return gate_lines(gate, rows_TM, rows)
    except Exception as error:  # timing a gate is no collective, so no other rank waits for this rank
        warn_once(
            f"the gate ({type(gate).__name__}) could not be timed with random tokens, and counts as free in "
            f'the step that pipeline="solve" predicts: {type(error).__name__}: {error}'
        )
        return FREE.line, FREE.line


def measure_expert_module(
    module: nn.Module, rows_TM: Tensor, grid: Grid, rows: Sequence[int] = ROWS
) -> tuple[LineCost, LineCost]:
    """Measures the seconds of the forward and backward pass of an expert that is a user's own module.

    The module is timed as a whole, because pmoe does not know what it computes. Returns a line alpha + beta *
    rows for each pass, in seconds. Each alpha and each beta is the largest of any rank, so all ranks return
    the same lines. Collective.

    module: the expert.
    rows_TM: (T, M), T rows of the layer with M = d_model columns. Only their width, dtype and device are
        used.
    grid: the ranks of the layer.
    rows: the numbers of rows that are timed.
    """

    def make(count: int) -> Tensor:
        return torch.randn(count, rows_TM.shape[1], dtype=rows_TM.dtype, device=rows_TM.device)

    def timed() -> tuple[LineCost, ...]:
        return tuple(fitted.line for fitted in profile_module(module, rows, make))

    with publishing_failures(grid.all, "timing an expert"):
        lines = _lines_or_free(2, timed)
    forward, backward = _agreed(grid, rows_TM.device, lines)
    return forward, backward


def _agreed(grid: Grid, device: torch.device, lines: Sequence[LineCost]) -> list[LineCost]:
    """Returns the cost lines with the largest alpha and the largest beta of any rank. Collective.

    A line is alpha + beta * size, in seconds. The result is equal on all ranks.

    grid: the ranks of the layer.
    device: device of the tensor that the ranks exchange.
    lines: this rank's lines, equally many on every rank.
    """
    numbers = [number for line in lines for number in (line.alpha_seconds, line.beta_seconds)]
    agreed = largest(grid.all, device, numbers, stage="agreeing on the seconds of the layer's modules")
    return [LineCost(alpha, beta) for alpha, beta in zip(agreed[::2], agreed[1::2], strict=True)]


# ---- costs of a step


def layer_costs(
    shape: LayerSizes,
    operations: Operations,
    num_tokens: int,
    device_type: str,
    expert: LineCost | None = None,
    lines: ModuleLines = ModuleLines(),
    direction: PassDirection = "forward",
) -> LayerCosts:
    """Returns the seconds of each stage of a pass, as a line alpha + beta * fraction.

    The fraction is a chunk's share of the batch. A stage handles these sizes for the whole batch, with B
    tokens of a rank, K choices of a token, P ranks among which rows are dispatched, L ranks that share an
    expert, and M = d_model:

        all-to-all                  B K (P - 1) / P * M elements
        all-gather, reduce-scatter  B K (L - 1) * M elements
        experts                     B K L rows
        order, restore              B K rows

    The stage "order" copies tokens to rows that are sorted by expert; "restore" sums the rows of each token.

    For pmoe's own experts the result always has the seconds of a forward pass, even if ``direction`` is
    "backward". They take twice as long in backward, so the caller doubles the seconds of that stage
    (`LayerCosts.backward`). If experts are a user's modules, the caller passes the measured seconds of the
    right pass as ``expert``, and doubles nothing.

    shape: sizes of the layer.
    operations: measured costs of matrix products and collectives.
    num_tokens: B, the number of tokens.
    device_type: "cpu" or "cuda".
    expert: seconds of one expert in this pass by its number of rows, if it is a user's module; None for
        pmoe's experts.
    lines: measured costs of the layer's own modules.
    direction: the pass. It changes only the bytes of dispatched rows, and only if the layer sends them in a
        narrower number format: the two passes may use different formats (`Wires`).
    """
    esp_size = shape.esp_size
    ep_size = shape.ep_size
    rows = num_tokens * shape.top_k
    row_bytes = shape.sent_bytes()
    dispatched_bytes = shape.sent_bytes(shape.wires.of(direction))
    num_local = shape.num_experts // ep_size
    gathered_rows = rows * esp_size
    if expert is not None:
        expert_line = LineCost(expert.alpha_seconds * num_local, expert.beta_seconds)
        expert_size = gathered_rows
    else:
        # An expert computes two matrix products, and at worst each product is a kernel launch of its own.
        gemm = operations.gemm.line
        row_multiply_adds = shape.multiply_adds
        launches = 2 * num_local * alphas(row_multiply_adds / 2, device_type)
        expert_line = LineCost(gemm.alpha_seconds * launches, gemm.beta_seconds)
        expert_size = gathered_rows * row_multiply_adds
    node_rows = rows * (esp_size - 1)
    sent_rows = rows * (ep_size - 1) / ep_size
    flat = operations.all_to_all.line
    return LayerCosts(
        a2a=(lines.dispatch or flat).shared(sent_rows * dispatched_bytes),
        ag=operations.all_gather.line.shared(node_rows * dispatched_bytes),
        rs=operations.reduce_scatter.line.shared(node_rows * row_bytes),
        exp=expert_line.shared(expert_size),
        combine=(lines.combine or flat).shared(sent_rows * shape.sent_bytes(shape.wires.results)),
        order=lines.order.shared(rows),
        restore=lines.restore.shared(rows),
        copies=flat.shared(shape.expert_bytes),
    )


def step_costs(
    modules: LayerModules,
    rows_TM: Tensor,
    num_tokens: int,
    restore: Restore,
    most_bytes: float | None = None,
    copies: CopyWork = NO_COPIES,
) -> StepCosts:
    """Returns the costs from which the seconds of a layer's forward and backward pass are predicted.

    The costs are the seconds of the stages (gate, all-to-alls, experts and so on) for a batch of this size.
    The fixed cost of a chunk is the part of its seconds that does not depend on its number of rows. The
    result includes the fixed cost if `measure_chunk_cost` has measured it for batches of this size.

    FSMoE's solver uses the costs. `pmoe.GradientReducer` uses them too, to decide how many bytes of gradients
    are all-reduced beside each layer's backward pass. Collective at the first call for a layer and a dtype of
    rows.

    modules: the modules and options of the layer.
    rows_TM: (T, M), T rows of the layer with M = d_model columns. Only their width, dtype and device are
        used.
    num_tokens: number of tokens of the rank with most tokens.
    restore: the restore pair: whether dispatched rows and hidden activation are kept, offloaded or made again
        for backward.
    most_bytes: how many bytes a measurement may allocate, the same on every rank. Earlier costs are measured
        again if they come from a measurement with a much lower limit, less than ``most_bytes`` / `WIDER`.
        None: there is no limit, and earlier costs are never measured again.
    copies: the work that copies of busy experts add to the tasks of the call.
    """
    options = modules.options
    operations, lines = module_lines(modules, rows_TM, most_bytes)
    sizes = agreed_sizes(modules, rows_TM)
    make_costs = functools.partial(layer_costs, sizes, operations, num_tokens, rows_TM.device.type)
    if lines.expert is None:
        forward = make_costs(lines=lines)
        backward = make_costs(lines=lines, direction="backward").backward()
        # Weight gradients take as long as gradients of rows if all weights are trained. They take less if
        # only an adapter is trained, and no time if nothing is trained.
        trained = sizes.gradient_multiply_adds / sizes.multiply_adds
        if trained != 1:
            exp = LineCost(*((1 + trained) * number for number in vars(forward.exp).values()))
            backward = replace(backward, exp=exp)
    else:
        forward = make_costs(lines.expert[0], lines)
        backward = make_costs(lines.expert[1], lines, "backward")
        trained = 1.0
    if sizes.wires != AS_THEY_ARE:
        backward = replace(backward, again=(forward.a2a, forward.ag))
    make_options = functools.partial(
        ScheduleOptions,
        one_lane=options.switches.one_lane,
        restore=restore if options.rotates else None,
        stays=sizes.stays,
        copies=copies,
    )
    rows = num_tokens * sizes.top_k
    # Backward copies the kept tensors of each row: M columns of T_DI and H columns of T_M.
    kept_columns = [1.0] * (restore.dispatched == "keep")
    kept_columns += [sizes.columns.hidden / sizes.d_model] * (restore.hidden == "keep")
    local_experts = sizes.num_experts // sizes.ep_size * (1 + (sizes.stays > 0))
    fixed = modules.cache.choosers.get(_chunk_key(modules, rows_TM, num_tokens, restore), (0.0, 0.0))
    return StepCosts(
        forward=_with_fixed(forward, fixed[0]),
        backward=_with_fixed(backward, fixed[1]),
        forward_options=make_options(direction="forward"),
        backward_options=make_options(direction="backward", wgrad_share=trained / (1 + trained)),
        copy_of_block=lines.order.alpha_seconds * len(kept_columns) * local_experts,
        copy_of_rows=lines.order.beta_seconds * sum(kept_columns) * rows * sizes.esp_size,
        sort=lines.sort(rows),
        gate=(lines.gate[0](num_tokens), lines.gate[1](num_tokens)),
    )


def _with_fixed(costs: LayerCosts, seconds: float) -> LayerCosts:
    """Returns the costs of a pass with a fixed number of seconds added to each chunk.

    The seconds are added to the experts' computation.

    costs: the costs of a pass.
    seconds: the seconds to add to each chunk.
    """
    return replace(costs, exp=LineCost(costs.exp.alpha_seconds + seconds, costs.exp.beta_seconds))


def with_chunk_cost(costs: LayerCosts, options: ScheduleOptions, measured: float) -> LayerCosts:
    """Adds a fixed cost per chunk to the costs of a pass, so that the prediction agrees with trials.

    The fixed cost stands for launches of small kernels and for work of the host. FSMoE's model leaves these
    out, so on a fast link it always prefers more chunks. The fixed cost is the same for chunks of any size,
    and is added to the seconds of the experts' computation. Trials (timed runs of both passes) have measured
    two numbers of chunks, 1 and 8 (`TRIED`). The fixed cost is chosen so that

        predicted seconds of the larger number - predicted seconds of the smaller number = measured

    costs: costs of one pass. If the difference that they predict is at least ``measured``, they are returned
        unchanged.
    options: the schedule of this pass.
    measured: the difference between the seconds of the two trials. It may be negative.
    """
    few, many = TRIED

    def differ(seconds: float) -> float:
        fixed_costs = _with_fixed(costs, seconds)
        return pass_seconds(fixed_costs, many, options) - pass_seconds(fixed_costs, few, options)

    # The difference grows with the fixed cost, because 8 chunks pay that cost more often than 1 chunk. `high`
    # is large enough: 8 chunks pay the cost at least 8 times, 1 chunk at most 3 times.
    low = 0.0
    high = abs(measured) + pass_seconds(costs, few, options)
    if differ(low) >= measured:
        return costs
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if differ(middle) < measured else (low, middle)
    return _with_fixed(costs, high)


def measure_chunk_cost(batch: TrialBatch, restore: Restore, tried: TriedBy[int]) -> bool:
    """Measures the fixed cost of a chunk in both passes, by trials. Collective the first time.

    The fixed cost of a chunk is its seconds that do not depend on its number of rows. It is computed from the
    seconds of two trials (timed runs), one with 1 chunk and one with 8 chunks (`with_chunk_cost`). The layer
    remembers the fixed cost for batches of this size, and `step_costs` includes it.

    Returns whether the layer now has a fixed cost for batches of this size:

        True    this call or an earlier call found it. It is 0 s if a trial ran out of memory, or if
                ``tried`` returned None
        False   no trials are allowed on this batch (`TrialBatch.may_try`); nothing is remembered

    batch: the routed batch, on which trials run.
    restore: the restore pair of the call: how backward gets the rows and the hidden activation.
    tried: function that measures both passes for some numbers of chunks, without the all-reduces that a
        `pmoe.GradientReducer` adds to the backward pass. It returns None if nothing could be
        measured, and `OUT_OF_MEMORY` for a trial that ran out of memory.
    """
    modules = batch.modules
    rows_TM = batch.inputs.x_TM
    key = _chunk_key(modules, rows_TM, batch.counts.max_tokens, restore)
    if key in modules.cache.choosers:
        return True
    if not batch.may_try:
        return False
    times = tried(TRIED)
    fixed = (0.0, 0.0)
    if times is not None and OUT_OF_MEMORY not in times:
        costs = step_costs(
            modules, rows_TM, batch.counts.max_tokens, restore, batch.measuring_bytes, batch.copy_work
        )
        few, many = times
        forward = with_chunk_cost(costs.forward, costs.forward_options, many.forward - few.forward)
        backward = with_chunk_cost(costs.backward, costs.backward_options, many.backward - few.backward)
        fixed = (
            forward.exp.alpha_seconds - costs.forward.exp.alpha_seconds,
            backward.exp.alpha_seconds - costs.backward.exp.alpha_seconds,
        )
    modules.cache.choosers[key] = fixed
    return True


def _chunk_key(
    modules: LayerModules, rows_TM: Tensor, num_tokens: int, restore: Restore
) -> tuple[object, ...]:
    """Returns the key under which the layer's cache has the measured fixed cost of a chunk.

    The fixed cost is the part of a chunk's seconds that does not depend on its number of rows. The number of
    tokens in the key is rounded, so that batches of nearly the same size share a key.

    modules: the modules and options of the layer.
    rows_TM: (T, M), T rows of the layer with M = d_model columns, of which only the dtype is used.
    num_tokens: number of tokens of the rank with most tokens.
    restore: the restore pair of the call: how backward gets the rows and the hidden activation.
    """
    return ("chunk cost", modules.options, restore, rows_TM.dtype, rounded_up(num_tokens))


# ---- the answer


def degrees_by_solver(batch: TrialBatch, restore: Restore, tried: TriedBy[int]) -> PassDegrees:
    """Returns the numbers of chunks, n in forward and m in backward, with the fewest predicted seconds.

    A step is simulated for every allowed pair (n, m) (`LayerModules.degree_pairs`). If several pairs are
    equally fast, the pair with the fewest chunks is taken. Without a backward pass, the result is (n, n) with
    the n that is fastest in the forward pass. On a single rank the result is the pair with the fewest chunks.
    With a memory budget, a pair is allowed only if memory stays within the budget for any routing.

    The seconds are predicted for the number of tokens of the rank with most tokens, rounded up to three
    significant binary digits, so that batches of similar size have the same n and m. The layer remembers the
    result. It depends only on numbers that all ranks share, so it is equal on all ranks. Collective the first
    time.

    batch: the routed batch.
    restore: the restore pair of the call: whether dispatched rows and hidden activation are kept, offloaded
        or made again for backward.
    tried: function that measures both passes for some numbers of chunks, for `measure_chunk_cost`. It returns
        None if nothing could be measured.
    """
    modules = batch.modules
    options = modules.options
    x_TM = batch.inputs.x_TM
    pairs, tokens = _allowed_degrees(batch, restore)
    if modules.ranks.size == 1:
        return PassDegrees(*pairs[0])
    needs_grad = batch.counts.needs_grad
    t_gar = 0.0 if modules.gradients is None or not needs_grad else modules.gradients.t_gar
    has_chunk_cost = measure_chunk_cost(batch, restore, tried)
    copies = batch.copy_work
    key = ("solved", options, restore, x_TM.dtype, tokens, t_gar, needs_grad, has_chunk_cost, copies)
    solved = modules.cache.choosers
    if key not in solved:
        costs = step_costs(modules, x_TM, tokens, restore, batch.measuring_bytes, copies)
        if needs_grad:
            seconds = costs.seconds(pairs, t_gar)
            n, m = first_of_fastest(seconds)
            predicted = seconds[n, m]
        else:
            both = [n for n, m in pairs if n == m]
            n = m = best_degree(costs.forward, costs.forward_options, degrees=both)
            predicted = costs.gate[0] + pass_seconds(costs.forward, n, costs.forward_options)
        solved[key] = PassDegrees(n, m)
        log.info(
            'pipeline="solve" takes n=%d/%d for up to %d tokens a rank: %.3g ms predicted, %.3g ms of them '
            "in the gate",
            n,
            m,
            tokens,
            predicted * 1e3,
            (sum(costs.gate) if needs_grad else costs.gate[0]) * 1e3,
        )
    degrees: PassDegrees = solved[key]
    return degrees


def _allowed_degrees(batch: TrialBatch, restore: Restore) -> tuple[Sequence[tuple[int, int]], int]:
    """Returns the allowed pairs of numbers of chunks, and the number of tokens for which they are allowed.

    The first result is a list of pairs (chunks in forward, chunks in backward), the fewest chunks first. With
    a memory budget, a pair is in the list only if memory stays within the budget for any routing. The layer
    remembers the list.

    The second result is the number of tokens of the rank with most tokens. It is rounded up, so that batches
    of similar sizes share a list. If the budget allows no pair for the rounded number, the number is rounded
    up less (`roundings_up`).

    batch: the routed batch.
    restore: the restore pair of the call: how backward gets the rows and the hidden activation.

    Raises ValueError if the budget allows no pair. The message names the smallest budget that would be
    enough.
    """
    modules = batch.modules
    options = modules.options
    max_tokens = batch.counts.max_tokens
    pairs = modules.degree_pairs(restore)
    if options.budget is None:
        return pairs, rounded_up(max_tokens)
    allowed = modules.cache.choosers
    choices = all_choices(pairs, [restore])
    for tokens in roundings_up(max_tokens):
        key = ("within the budget", options, restore, batch.sizes, tokens)
        if key not in allowed:
            candidates = evaluate(batch.sizes, tokens, choices, profile=None, slack=options.slack)
            allowed[key] = [
                (choice.forward, choice.backward)
                for choice in candidates
                if choice.memory.promised <= options.budget
            ]
        if allowed[key]:
            return allowed[key], tokens
    candidates = evaluate(batch.sizes, max_tokens, choices, profile=None, slack=options.slack)
    within_budget(candidates, options.budget)  # raises ValueError: even the exact number does not fit
    raise AssertionError("unreachable: no pair is within the budget")
