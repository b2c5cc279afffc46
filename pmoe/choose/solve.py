"""The degrees of pipeline="solve": FSMoE's solver (Section 4) on what was measured of this machine.

Costs are those of evenly routed tokens, a part of which stay on their rank: of the all-to-all, of the
all-gather and the reduce-scatter inside a node, and of the experts' products, or of a user's modules as black
boxes (Section 3.2).

Letters: B tokens of the fullest rank, K choices, P ranks across nodes, L inside one, M = d_model.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor, nn

from pmoe.choose.trials import Batch
from pmoe.comm.agreement import largest
from pmoe.comm.ranks import Grid
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
"""Over which an expert that is a module is profiled."""

TRIED, HALVINGS = (1, 8), 24
"""Numbers of chunks whose difference tells what a chunk costs, and how closely it is found."""

_operations: dict[tuple[str, str, torch.device, torch.dtype], Operations] = {}


def operations_of(grid: Grid, device: torch.device, dtype: torch.dtype) -> Operations:
    """The stored lines of this device and these groups, or measured ones; collective the first time."""
    key = (grid.all.name, f"{grid.across.name} {grid.inside.size}", device, dtype)
    if key not in _operations:
        profile = load_or_measure(
            grid.all, device, dtype, operations=True, across=grid.across, inside=grid.inside
        )
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
    """The work of a forward pass over ``num_tokens`` tokens of each rank. expert: seconds of an expert's rows
    where it is a black box."""
    inside, across = shape.inside, shape.num_across
    rows = num_tokens * shape.top_k
    row_bytes = shape.d_model * shape.element_size
    num_local = shape.num_experts // across
    gathered = rows * inside
    if expert is not None:
        line, size = LineCost(expert.alpha_seconds * num_local, expert.beta_seconds), gathered
    else:
        # Two products an expert, one launch each at worst.
        gemm, of_row = operations.gemm.line, shape.d_model * (shape.columns.hidden + shape.columns.scratch)
        launches = 2 * num_local * alphas(of_row / 2, device_type)
        line = LineCost(gemm.alpha_seconds * launches, gemm.beta_seconds)
        size = gathered * of_row
    shared = rows * (inside - 1) * row_bytes
    return LayerCosts(
        a2a=operations.all_to_all.line.shared(rows * (across - 1) / across * row_bytes),
        ag=operations.all_gather.line.shared(shared),
        rs=operations.reduce_scatter.line.shared(shared),
        exp=line.shared(size),
    )


def solved_degrees(batch: Batch, restore: Restore, tried: TriedBy[int]) -> PassDegrees:
    """n of both passes for the largest number of any rank's tokens, from numbers that all ranks share; the
    layer remembers them. tried: measures both passes in some numbers of chunks, where it can. Collective the
    first time."""
    parts, spec, x_TM, tokens = batch.parts, batch.parts.spec, batch.inputs.x_TM, batch.counts.max_tokens
    if parts.ranks.size == 1:
        return PassDegrees(1, 1)
    t_gar = 0.0 if parts.gradients is None else parts.gradients.t_gar
    key, known = ("solved", spec, restore, x_TM.dtype, tokens, t_gar), parts.known.choosers
    if key not in known:
        known[key] = _solved(batch, restore if spec.rotates else None, t_gar, tried)
        told = (known[key].forward, known[key].backward, tokens)
        log.info('pipeline="solve" takes n=%d/%d for %d tokens a rank', *told)
    found: PassDegrees = known[key]
    return found


def _solved(batch: Batch, restore: Restore | None, t_gar: float, tried: TriedBy[int]) -> PassDegrees:
    """t_gar: seconds of other layers' gradients in the backward pass. restore: None where buffers do not
    rotate; both passes then have the same chunks."""
    parts, x_TM, sizes = batch.parts, batch.inputs.x_TM, batch.sizes
    operations = operations_of(parts.grid, x_TM.device, x_TM.dtype)
    ahead, back = _black_box_of(batch)
    costs = functools.partial(layer_costs, sizes, operations, batch.counts.max_tokens, x_TM.device.type)
    forward = costs(ahead)
    backward = forward.backward() if back is None else costs(back)
    options = functools.partial(
        ScheduleOptions, one_lane=parts.spec.switches.one_lane, restore=restore, stays=sizes.stays
    )
    way, way_back = options(direction="forward"), options(direction="backward")
    seconds = tried(TRIED)
    if seconds is not None:
        ahead_few, ahead_many, back_few, back_many = (pair[at] for at in (0, 1) for pair in seconds)
        forward = with_chunk_cost(forward, way, ahead_many - ahead_few)
        backward = with_chunk_cost(backward, way_back, back_many - back_few)

    def step(n: int) -> float:
        return pass_seconds(forward, n, way) + pass_seconds(backward, n, way_back, t_gar)

    if restore is None:
        best = min(DEGREES, key=step)
        return PassDegrees(best, best)
    ahead_n = best_degree(forward, way, degrees=DEGREES)
    return PassDegrees(ahead_n, best_degree(backward, way_back, t_gar, DEGREES))


def _black_box_of(batch: Batch) -> tuple[LineCost | None, LineCost | None]:
    """Seconds of an expert's rows in both passes, where experts are modules: measured once a layer."""
    parts, rows_TM = batch.parts, batch.inputs.x_TM
    modules, key = parts.experts.as_modules(), ("black box", rows_TM.dtype)
    if modules and key not in parts.known.choosers:
        parts.known.choosers[key] = black_box(modules[0], rows_TM, parts.grid)
    found: tuple[LineCost | None, LineCost | None] = parts.known.choosers.get(key, (None, None))
    return found


def with_chunk_cost(costs: LayerCosts, options: ScheduleOptions, measured: float) -> LayerCosts:
    """The costs with what a chunk takes beside its products, launches of small kernels and the host's work:
    as much more as lets the numbers of chunks that were tried differ by the ``measured`` seconds. The paper's
    model has no such term, and without it more chunks are ever better on a fast link."""
    few, many = TRIED

    def with_more(seconds: float) -> LayerCosts:
        return replace(costs, exp=LineCost(costs.exp.alpha_seconds + seconds, costs.exp.beta_seconds))

    def differ(seconds: float) -> float:
        found = with_more(seconds)
        return pass_seconds(found, many, options) - pass_seconds(found, few, options)

    low, high = 0.0, abs(measured) + pass_seconds(costs, few, options)
    if differ(low) >= measured:
        return costs
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if differ(middle) < measured else (low, middle)
    return with_more(high)


def black_box(module: nn.Module, rows_TM: Tensor, grid: Grid) -> tuple[LineCost, LineCost]:
    """Seconds of an expert's forward and backward by rows: the slowest rank's. Collective."""

    def make(count: int) -> Tensor:
        return torch.randn(count, rows_TM.shape[1], dtype=rows_TM.dtype, device=rows_TM.device)

    lines = [fit.line for fit in profile_module(module, BLACK_BOX_ROWS, make)]
    numbers = [number for line in lines for number in (line.alpha_seconds, line.beta_seconds)]
    stage = "agreeing on the seconds of an expert"
    alpha, beta, alpha_back, beta_back = largest(grid.all, rows_TM.device, numbers, stage=stage)
    return LineCost(alpha, beta), LineCost(alpha_back, beta_back)
