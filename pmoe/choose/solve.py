"""FSMoE's solver (Section 4) for the numbers of chunks of ``pipeline="solve"``, on measured costs.

The costs are measured on this machine. The tokens are assumed to be evenly routed, so that 1 / P of the rows
stay on their rank. The costs are the seconds of

- the all-to-all among nodes, of the kind that the layer uses (flat or hierarchical);
- the all-gather and the reduce-scatter inside a node;
- the experts' products; if experts are a user's modules, one whole module is timed (Section 3.2);
- the layer's gate;
- the layer's order, the module that copies tokens to rows sorted by expert, and sums the rows of each token.

Every pair of numbers of chunks that the layer allows is simulated, with the costs of each pass.

Letters: B tokens of the rank that has most, K choices of a token, P ranks across nodes, L ranks inside a
node, M = d_model. n and m are the numbers of chunks of forward and of backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pmoe.call.module_calls import is_watched
from pmoe.call.modules import LayerModules
from pmoe.call.sizes import memory_shape
from pmoe.choose.trials import TrialBatch
from pmoe.comm.agreement import digest, largest
from pmoe.comm.base import Exchange, FlatAllToAll
from pmoe.comm.failures import publishing_failures
from pmoe.comm.grid import Grid
from pmoe.comm.hierarchical import HierarchicalExchange
from pmoe.measure.layer_modules import ROWS, gate_lines, order_lines, rows_within
from pmoe.measure.module_cost import profile_module
from pmoe.measure.operations import measure_exchange
from pmoe.measure.profile import WHOLE_BYTES, WIDER, load_or_measure
from pmoe.planner.costs import FREE, LayerCosts, LineCost
from pmoe.planner.degree import TRIED
from pmoe.planner.degree_search import (
    ScheduleOptions,
    StepCosts,
    best_degree,
    first_of_fastest,
    pass_seconds,
)
from pmoe.planner.granularity import PassDegrees
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.priced_choices import TriedBy, rounded_up
from pmoe.planner.profile import Operations, alphas
from pmoe.planner.timed_rounds import OUT_OF_MEMORY
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import PassDirection
from pmoe.schedule.wire import AS_THEY_ARE
from pmoe.warn import log, warn_once

HALVINGS = 24
"""Steps of the bisection that finds the fixed cost of a chunk (`with_chunk_cost`)."""

# ---- measured costs


_operations: dict[tuple[object, ...], tuple[Operations, float]] = {}
"""Costs that this process has measured or loaded, each with the most bytes that its measurement could take.

The key holds the ranks, the device, the dtype and the names of the all-to-alls (`operations_of`).
"""


def operations_of(
    grid: Grid,
    device: torch.device,
    dtype: torch.dtype,
    exchanges: Mapping[str, Exchange] | None = None,
    most_bytes: float | None = None,
) -> Operations:
    """Returns the measured costs of FSMoE's operations, as lines alpha + beta * size, for these ranks.

    The operations are products and collectives. Their costs are read from a stored profile, or measured.
    Collective the first time for these ranks, device, dtype and exchanges, and if costs are measured again.

    grid: the ranks of the layer, across nodes and inside a node.
    device, dtype: device and dtype of the rows.
    exchanges: the layer's all-to-alls that are not flat, by name. Their costs are measured in addition.
    most_bytes: how many bytes a measurement may take, the same on every rank. Costs whose earlier measurement
        could take fewer than ``most_bytes`` / `WIDER` bytes are measured again. None: only missing costs are
        measured, without a limit.
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
    """Returns whether costs of an earlier measurement may be used, so that nothing is measured now.

    limit: how many bytes the earlier measurement could take; 0 if nothing was measured.
    most_bytes: how many bytes a new measurement could take. The earlier costs are used if this is at most
        `WIDER` times ``limit``. If None, the costs of any earlier measurement are used.
    """
    return limit > 0 if most_bytes is None else most_bytes <= WIDER * limit


@dataclass(frozen=True, kw_only=True)
class ModuleLines:
    """Measured costs of a layer's own modules, as lines alpha + beta * size, equal on all ranks.

    dispatch, combine: seconds of this all-to-all by the bytes that a rank sends to other ranks; None for the
        flat all-to-all, whose cost is in `Operations`.
    order, restore: seconds of copying tokens to rows, and of summing rows to tokens, by the number of rows.
    sort: seconds of sorting rows by chunk and expert, by the number of rows.
    gate: seconds of the gate's forward and backward pass, by the number of tokens; 0 for a gate that cannot
        be timed outside of a call (`_gate_costs`).
    expert: seconds of an expert's forward and backward pass by its number of rows, if it is a user's module;
        None for pmoe's own experts.
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
    """Returns the measured costs of FSMoE's operations and of a layer's own modules.

    Collective the first time for a layer and a dtype of rows, and if costs are measured again.

    modules: the modules and options of the layer.
    rows_TM: (T, M), T rows of the layer with M = d_model columns. Only their width, dtype and device are
        used.
    most_bytes: how many bytes a measurement may take, the same on every rank. Costs whose earlier measurement
        could take fewer than ``most_bytes`` / `WIDER` bytes are measured again. None: only missing costs are
        measured, without a limit.
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
                measured = measure_exchange(
                    modules.ranks,
                    rows_TM.device,
                    rows_TM.dtype,
                    exchange,
                    modules.options.row_columns,
                    most_bytes=most,
                )
                messages[side] = measured.line
            else:
                messages[side] = operations.exchanges[name].line if name else None
        new_lines = ModuleLines(
            **messages,
            order=order,
            restore=restore,
            sort=sort,
            gate=(gate_forward, gate_backward),
            expert=black_box(experts[0], rows_TM, modules.grid, rows) if experts else None,
        )
        # The largest number of rows of the measurement fits into this many bytes: more would change nothing.
        is_whole = most >= ROWS[-1] * row_bytes
        modules.cache.choosers[key] = (new_lines, math.inf if is_whole else most)
    lines: ModuleLines = modules.cache.choosers[key][0]
    return operations, lines


def _row_bytes(modules: LayerModules, rows_TM: Tensor) -> int:
    """Returns an upper bound of the bytes for each row while one module of the layer is timed.

    The module is the gate, an expert, or the order (which copies tokens to rows and sums rows to tokens). For
    each row the measurement holds at most four rows of M columns (the input, a copy of it, the output, a
    gradient), four rows of hidden columns, and six 4-byte numbers for each expert, which a gate keeps for its
    backward pass.
    """
    sizes = memory_shape(modules, rows_TM)
    return 4 * (sizes.d_model + sizes.columns.hidden + sizes.columns.scratch) * sizes.element_size + (
        24 * sizes.num_experts
    )


def exchange_name(exchange: Exchange) -> str | None:
    """Returns the name under which a profile keeps the costs of an all-to-all.

    A name has the class, the number of nodes, and a digest of the ranks of each node, for example
    "HierarchicalAllToAll2D on 2 nodes, 5a3e9c417d2b". Two kinds of all-to-all have no name:

        ""      is returned for one that sends each row straight to its rank. Every profile has its costs
        None    is returned for one that a user has written. No profile has its costs
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
    """Returns this rank's costs of copying tokens to rows, of summing rows to tokens, and of sorting rows.

    Each cost is a line over the number of rows (`pmoe.measure.layer_modules.order_lines`).

    rows: the numbers of rows that are timed.
    """
    options = modules.options
    with publishing_failures(modules.ranks, "timing the order"):
        return order_lines(modules.order, rows_TM, options.top_k, options.num_experts, rows)


def _gate_costs(modules: LayerModules, rows_TM: Tensor, rows: Sequence[int]) -> tuple[LineCost, ...]:
    """Returns this rank's costs of the gate's forward and backward pass, by number of tokens.

    Each cost is a line alpha + beta * tokens, in seconds.

    The costs are 0 if the gate cannot be timed outside of a call of the layer: the layer's caller passes the
    routing, the gate's parameters are DTensors, or the gate has hooks or a wrapper, which may communicate.
    The costs are also 0 if a user's gate raises an error for random tokens; a warning then says so.

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
            return gate_lines(gate, rows_TM, rows)
    try:
        return gate_lines(gate, rows_TM, rows)
    except Exception as error:  # timing a gate is no collective, so no other rank waits for this rank
        warn_once(
            f"the gate ({type(gate).__name__}) could not be timed with random tokens, and counts as free in "
            f'the step that pipeline="solve" predicts: {type(error).__name__}: {error}'
        )
        return FREE.line, FREE.line


def black_box(
    module: nn.Module, rows_TM: Tensor, grid: Grid, rows: Sequence[int] = ROWS
) -> tuple[LineCost, LineCost]:
    """Measures a user's expert: returns the seconds of its forward and backward pass by rows.

    Both are lines alpha + beta * rows, in seconds. Each alpha and each beta is the largest of any rank, so
    all ranks return the same lines. Collective.

    module: the expert.
    rows_TM: (T, M), T rows of the layer with M = d_model columns. Only their width, dtype and device are
        used.
    grid: the ranks that agree.
    rows: the numbers of rows that are timed.
    """

    def make(count: int) -> Tensor:
        return torch.randn(count, rows_TM.shape[1], dtype=rows_TM.dtype, device=rows_TM.device)

    with publishing_failures(grid.all, "timing an expert"):
        fits = profile_module(module, rows, make)
    forward, backward = _agreed(grid, rows_TM.device, [fit.line for fit in fits])
    return forward, backward


def _agreed(grid: Grid, device: torch.device, lines: Sequence[LineCost]) -> list[LineCost]:
    """Returns lines that are equal on all ranks: each alpha and each beta is the largest of any rank.

    A line is alpha + beta * size, in seconds. Collective.

    grid: the ranks that agree.
    device: device of the rows.
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
    """Returns the seconds of each stage of a forward pass as lines alpha + beta * fraction.

    The fraction is a chunk's share of the batch. The whole batch has these sizes, for B tokens of a rank, K
    choices of a token, P ranks across nodes, L ranks inside a node and M = d_model:

        all-to-all                  B K (P - 1) / P * M elements
        all-gather, reduce-scatter  B K (L - 1) * M elements
        experts                     B K L rows
        order, its inverse          B K rows

    The order copies tokens to rows that are sorted by expert. Its inverse sums the rows of each token.

    shape: sizes of the layer.
    operations: measured costs of single operations.
    num_tokens: B.
    device_type: "cpu" or "cuda".
    expert: seconds of one expert by its number of rows, if it is a user's module; None for pmoe's experts.
    lines: measured costs of the layer's own modules.
    direction: the pass. It matters only if dispatched rows are sent in another form (`Wires`).
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
        # An expert computes two products, each with a launch of its own at worst.
        gemm = operations.gemm.line
        row_multiply_adds = shape.d_model * (shape.columns.hidden + shape.columns.scratch)
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
        combine=(lines.combine or flat).shared(sent_rows * row_bytes),
        order=lines.order.shared(rows),
        restore=lines.restore.shared(rows),
    )


def step_costs(
    modules: LayerModules,
    rows_TM: Tensor,
    num_tokens: int,
    restore: Restore,
    most_bytes: float | None = None,
) -> StepCosts:
    """Returns the predicted costs of the tasks of a layer's forward and backward pass.

    FSMoE's solver and the partition of gradients use these costs. Collective the first time for a layer and a
    dtype of rows.

    modules: the modules and options of the layer.
    rows_TM: (T, M), T rows of the layer with M = d_model columns. Only their width, dtype and device are
        used.
    num_tokens: number of tokens of the rank that has most.
    restore: the restore pair: whether dispatched rows and hidden activation are kept, offloaded or made again
        for backward.
    most_bytes: how many bytes a measurement may take, the same on every rank. Costs whose earlier measurement
        could take fewer than ``most_bytes`` / `WIDER` bytes are measured again. None: only missing costs are
        measured, without a limit.

    If `measure_chunk_cost` has measured the fixed cost of a chunk for batches of this size, the result
    includes it: the seconds of a chunk that do not depend on its number of rows.
    """
    options = modules.options
    operations, lines = module_lines(modules, rows_TM, most_bytes)
    sizes = memory_shape(modules, rows_TM)
    make_costs = functools.partial(layer_costs, sizes, operations, num_tokens, rows_TM.device.type)
    if lines.expert is None:
        forward = make_costs(lines=lines)
        backward = make_costs(lines=lines, direction="backward").backward()
    else:
        forward = make_costs(lines.expert[0], lines)
        backward = make_costs(lines.expert[1], lines, "backward")
    if sizes.wires != AS_THEY_ARE:
        backward = replace(backward, again=(forward.a2a, forward.ag))
    make_options = functools.partial(
        ScheduleOptions,
        one_lane=options.switches.one_lane,
        restore=restore if options.rotates else None,
        stays=sizes.stays,
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
        backward_options=make_options(direction="backward"),
        copy_of_block=lines.order.alpha_seconds * len(kept_columns) * local_experts,
        copy_of_rows=lines.order.beta_seconds * sum(kept_columns) * rows * sizes.esp_size,
        sort=lines.sort(rows),
        gate=(lines.gate[0](num_tokens), lines.gate[1](num_tokens)),
    )


def _with_fixed(costs: LayerCosts, seconds: float) -> LayerCosts:
    """Returns ``costs`` with ``seconds`` added to the experts' computation of each chunk."""
    return replace(costs, exp=LineCost(costs.exp.alpha_seconds + seconds, costs.exp.beta_seconds))


def with_chunk_cost(costs: LayerCosts, options: ScheduleOptions, measured: float) -> LayerCosts:
    """Returns the costs of a pass with a fixed cost added to each chunk, so that they agree with trials.

    The fixed cost is the same for chunks of any size. It is added to the seconds of the experts' computation,
    and chosen so that for the two numbers of chunks of `TRIED`

        predicted seconds of many chunks - predicted seconds of few chunks = measured

    The fixed cost stands for launches of small kernels and for work of the host. FSMoE's model leaves these
    out, so on a fast link it always prefers more chunks.

    costs: costs of one pass, returned unchanged if they already predict a difference of ``measured`` or more.
    options: the schedule of this pass.
    measured: measured difference in seconds. It may be negative.
    """
    few, many = TRIED

    def differ(seconds: float) -> float:
        fixed_costs = _with_fixed(costs, seconds)
        return pass_seconds(fixed_costs, many, options) - pass_seconds(fixed_costs, few, options)

    # The difference grows with the fixed cost, because many chunks pay that cost more often than few. `high`
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
    """Measures the fixed cost of a chunk in both passes by trials. Returns whether it is known now.

    The fixed cost of a chunk is its seconds that do not depend on its number of rows. It is computed from the
    seconds of trials with the two numbers of chunks of `TRIED` (`with_chunk_cost`).

    The layer remembers the cost for this size of batch, and `step_costs` includes it. Trials run without the
    all-reduces that a `pmoe.GradientReducer` adds to the backward pass. Collective the first time.

    Returns False, and remembers nothing, if trials may not run on this batch (`TrialBatch.may_try`). If a
    trial runs out of memory, or if no trial could run, the layer remembers a cost of 0 s, and the result is
    True.

    batch: the routed batch, on which trials run.
    restore: the restore pair of the call.
    tried: function that measures both passes for some numbers of chunks. It returns None if no trial ran, and
        `OUT_OF_MEMORY` for a trial that ran out of memory.
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
        costs = step_costs(modules, rows_TM, batch.counts.max_tokens, restore, batch.measuring_bytes)
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
    """Returns the key under which the layer's cache keeps the result of `measure_chunk_cost`.

    The number of tokens in the key is rounded, so that batches of nearly the same size share a key.
    """
    return ("chunk cost", modules.options, restore, rows_TM.dtype, rounded_up(num_tokens))


# ---- the answer


def degrees_by_solver(batch: TrialBatch, restore: Restore, tried: TriedBy[int]) -> PassDegrees:
    """Returns the numbers of chunks n and m of both passes with the fewest predicted seconds.

    Every allowed pair (n, m) is simulated (`LayerModules.degree_pairs`). Of equally fast pairs, the one with
    fewest chunks is taken. Without a backward pass, the result is (n, n) with the n that is fastest in the
    forward pass. On a single rank the result is (1, 1).

    The seconds are predicted for the number of tokens of the rank that has most, rounded up to three
    significant binary digits, so that similar batches have the same n and m. The layer remembers the answer.

    batch: the routed batch. The answer depends only on numbers that all ranks share, so all get the same n
        and m.
    restore: the restore pair of the call: whether dispatched rows and hidden activation are kept, offloaded
        or made again for backward.
    tried: function that measures both passes for some numbers of chunks, for `measure_chunk_cost`. It returns
        None if trials must not run.

    Collective the first time.
    """
    modules = batch.modules
    options = modules.options
    x_TM = batch.inputs.x_TM
    if modules.ranks.size == 1:
        return PassDegrees(1, 1)
    needs_grad = batch.counts.needs_grad
    tokens = rounded_up(batch.counts.max_tokens)
    t_gar = 0.0 if modules.gradients is None or not needs_grad else modules.gradients.t_gar
    has_chunk_cost = measure_chunk_cost(batch, restore, tried)
    key = ("solved", options, restore, x_TM.dtype, tokens, t_gar, needs_grad, has_chunk_cost)
    solved = modules.cache.choosers
    if key not in solved:
        costs = step_costs(modules, x_TM, tokens, restore, batch.measuring_bytes)
        if needs_grad:
            seconds = costs.seconds(modules.degree_pairs(restore), t_gar)
            n, m = first_of_fastest(seconds)
            predicted = seconds[n, m]
        else:
            n = m = best_degree(costs.forward, costs.forward_options, degrees=options.degrees)
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
