"""FSMoE's solver (Section 4) for the numbers of chunks of ``pipeline="solve"``, on measured costs.

The costs are measured on this machine, for evenly routed tokens, of which some stay on their rank. They are
seconds of

- the all-to-all among nodes;
- the all-gather and the reduce-scatter inside a node;
- the experts: their products. If experts are a user's modules, whole modules are timed (Section 3.2).

Letters: B tokens of the rank that has most, K choices of a token, P ranks across nodes, L ranks inside a
node, M = d_model.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor, nn

from pmoe.choose.trials import TrialBatch
from pmoe.comm.agreement import largest
from pmoe.comm.grid import Grid
from pmoe.measure.module_cost import profile_module
from pmoe.measure.profile import load_or_measure
from pmoe.planner.costs import LayerCosts, LineCost
from pmoe.planner.degree import DEGREES
from pmoe.planner.degree_search import ScheduleOptions, best_degree, pass_seconds
from pmoe.planner.granularity import PassDegrees
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.priced_choices import TriedBy
from pmoe.planner.profile import Operations, alphas
from pmoe.schedule.restore import Restore
from pmoe.warn import log

BLACK_BOX_ROWS = (64, 256, 1024)
"""Numbers of rows with which an expert is timed if it is a user's module."""

TRIED = (1, 8)
"""Two numbers of chunks for trials. The difference of their seconds gives the fixed cost of a chunk."""

HALVINGS = 24
"""Steps of the bisection that finds the fixed cost of a chunk (`with_chunk_cost`)."""

_operations: dict[tuple[str, str, torch.device, torch.dtype], Operations] = {}


def operations_of(grid: Grid, device: torch.device, dtype: torch.dtype) -> Operations:
    """Returns the measured costs of FSMoE's operations, as lines alpha + beta * size, for these ranks.

    The operations are products and collectives. Their costs are read from a stored profile, or measured.
    Collective the first time for these ranks, device and dtype.

    grid: the ranks of the layer, across nodes and inside a node.
    device, dtype: of the rows.
    """
    key = (grid.all.name, f"{grid.ep.name} {grid.esp.size}", device, dtype)
    if key not in _operations:
        profile = load_or_measure(grid.all, device, dtype, operations=True, across=grid.ep, inside=grid.esp)
        assert profile.operations is not None
        _operations[key] = profile.operations
    return _operations[key]


def layer_costs(
    shape: LayerSizes,
    operations: Operations,
    num_tokens: int,
    device_type: str,
    expert: LineCost | None = None,
) -> LayerCosts:
    """Returns the seconds of each stage of a forward pass as lines alpha + beta * fraction.

    The fraction is a chunk's share of the batch. The whole batch has these sizes, for B tokens of a rank, K
    choices of a token, P ranks across nodes, L ranks inside a node and M = d_model:

        all-to-all                  B K (P - 1) / P * M elements
        all-gather, reduce-scatter  B K (L - 1) * M elements
        experts                     B K L rows

    shape: sizes of the layer.
    operations: measured costs of single operations.
    num_tokens: B.
    device_type: "cpu" or "cuda".
    expert: seconds of one expert by its number of rows, if it is a user's module; None for pmoe's experts.
    """
    esp_size = shape.esp_size
    ep_size = shape.ep_size
    rows = num_tokens * shape.top_k
    row_bytes = shape.d_model * shape.element_size
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
    node_bytes = rows * (esp_size - 1) * row_bytes
    return LayerCosts(
        a2a=operations.all_to_all.line.shared(rows * (ep_size - 1) / ep_size * row_bytes),
        ag=operations.all_gather.line.shared(node_bytes),
        rs=operations.reduce_scatter.line.shared(node_bytes),
        exp=expert_line.shared(expert_size),
    )


def degrees_by_solver(batch: TrialBatch, restore: Restore, tried: TriedBy[int]) -> PassDegrees:
    """Returns the number of chunks n of both passes with the fewest predicted seconds.

    n is chosen for the number of tokens of the rank that has most. The layer remembers the answer.

    batch: the routed batch. The answer depends only on numbers that all ranks share, so all get the same n.
    restore: the restore pair of the call: whether dispatched rows and hidden activation are kept, offloaded
        or made again for backward.
    tried: function that measures both passes for some numbers of chunks. It returns None if trials must not
        run.

    Collective the first time.
    """
    modules = batch.modules
    options = batch.modules.options
    x_TM = batch.inputs.x_TM
    max_tokens = batch.counts.max_tokens
    if modules.ranks.size == 1:
        return PassDegrees(1, 1)
    t_gar = 0.0 if modules.gradients is None else modules.gradients.t_gar
    key = ("solved", options, restore, x_TM.dtype, max_tokens, t_gar)
    solved = modules.cache.choosers
    if key not in solved:
        solved[key] = _solved(batch, restore if options.rotates else None, t_gar, tried)
        log_values = (solved[key].forward, solved[key].backward, max_tokens)
        log.info('pipeline="solve" takes n=%d/%d for %d tokens a rank', *log_values)
    degrees: PassDegrees = solved[key]
    return degrees


def _solved(batch: TrialBatch, restore: Restore | None, t_gar: float, tried: TriedBy[int]) -> PassDegrees:
    """Returns the numbers of chunks n with the fewest simulated seconds, from measured costs.

    batch: the routed batch.
    restore: the restore pair (whether dispatched rows and hidden activation are kept, offloaded or made again
        for backward); None if chunks share no buffers. Without shared buffers both passes have the same
        chunks, so one n is chosen for the sum of their seconds.
    t_gar: seconds of the all-reduce of other layers' gradients, which runs inside the backward pass.
    tried: function that measures both passes for some numbers of chunks. It returns None if trials must not
        run.
    """
    modules = batch.modules
    x_TM = batch.inputs.x_TM
    sizes = batch.sizes
    operations = operations_of(modules.grid, x_TM.device, x_TM.dtype)
    expert_forward, expert_backward = _black_box_of(batch)
    make_costs = functools.partial(layer_costs, sizes, operations, batch.counts.max_tokens, x_TM.device.type)
    forward = make_costs(expert_forward)
    backward = forward.backward() if expert_backward is None else make_costs(expert_backward)
    make_options = functools.partial(
        ScheduleOptions, one_lane=modules.options.switches.one_lane, restore=restore, stays=sizes.stays
    )
    forward_options = make_options(direction="forward")
    backward_options = make_options(direction="backward")
    seconds = tried(TRIED)
    if seconds is not None:
        forward_few, forward_many, backward_few, backward_many = (
            trial[pass_index] for pass_index in (0, 1) for trial in seconds
        )
        forward = with_chunk_cost(forward, forward_options, forward_many - forward_few)
        backward = with_chunk_cost(backward, backward_options, backward_many - backward_few)

    def step(n: int) -> float:
        return pass_seconds(forward, n, forward_options) + pass_seconds(backward, n, backward_options, t_gar)

    if restore is None:
        best = min(DEGREES, key=step)
        return PassDegrees(best, best)
    forward_n = best_degree(forward, forward_options, degrees=DEGREES)
    return PassDegrees(forward_n, best_degree(backward, backward_options, t_gar, DEGREES))


def _black_box_of(batch: TrialBatch) -> tuple[LineCost | None, LineCost | None]:
    """Returns the seconds of an expert's forward and backward pass if it is a user's module.

    The seconds of each pass are a line over the expert's number of rows, alpha + beta * rows. Returns (None,
    None) if the experts are pmoe's own. Measured once for each layer and dtype of the rows. Collective if it
    measures.
    """
    modules = batch.modules
    rows_TM = batch.inputs.x_TM
    expert_modules = modules.experts.as_modules()
    key = ("black box", rows_TM.dtype)
    if expert_modules and key not in modules.cache.choosers:
        modules.cache.choosers[key] = black_box(expert_modules[0], rows_TM, modules.grid)
    lines: tuple[LineCost | None, LineCost | None] = modules.cache.choosers.get(key, (None, None))
    return lines


def with_chunk_cost(costs: LayerCosts, options: ScheduleOptions, measured: float) -> LayerCosts:
    """Returns the costs of a pass with a fixed cost added to each chunk, so that they agree with trials.

    The fixed cost is chosen so that the predicted seconds satisfy

        seconds of many chunks - seconds of few chunks = measured          (few, many = TRIED)

    It stands for launches of small kernels and for work of the host, and is added to the experts' alpha. The
    paper's model has no such term. Without it, more chunks always look better on a fast link.

    costs: costs of one pass. If they already predict a difference of ``measured`` or more, they are returned
        unchanged.
    options: the schedule of this pass.
    measured: measured difference in seconds. It may be negative.
    """
    few, many = TRIED

    def with_more(seconds: float) -> LayerCosts:
        return replace(costs, exp=LineCost(costs.exp.alpha_seconds + seconds, costs.exp.beta_seconds))

    def differ(seconds: float) -> float:
        fixed_costs = with_more(seconds)
        return pass_seconds(fixed_costs, many, options) - pass_seconds(fixed_costs, few, options)

    # The difference grows with the fixed cost, which many chunks pay more often than few. `high` is enough:
    # 8 chunks pay it 8 times or more, 1 chunk pays it at most 3 times.
    low = 0.0
    high = abs(measured) + pass_seconds(costs, few, options)
    if differ(low) >= measured:
        return costs
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if differ(middle) < measured else (low, middle)
    return with_more(high)


def black_box(module: nn.Module, rows_TM: Tensor, grid: Grid) -> tuple[LineCost, LineCost]:
    """Measures a user's expert. Returns the seconds of its forward and backward pass as lines over its rows.

    A line is alpha + beta * rows. Each alpha and each beta is the largest of any rank, so all ranks return
    the same lines. Collective.

    module: the expert.
    rows_TM: (T, M), T rows of the layer with M = d_model columns. Only their width, dtype and device are
        used.
    grid: the ranks that agree.
    """

    def make(count: int) -> Tensor:
        return torch.randn(count, rows_TM.shape[1], dtype=rows_TM.dtype, device=rows_TM.device)

    lines = [fit.line for fit in profile_module(module, BLACK_BOX_ROWS, make)]
    numbers = [number for line in lines for number in (line.alpha_seconds, line.beta_seconds)]
    stage = "agreeing on the seconds of an expert"
    alpha, beta, alpha_back, beta_back = largest(grid.all, rows_TM.device, numbers, stage=stage)
    return LineCost(alpha, beta), LineCost(alpha_back, beta_back)
