"""The solver for pipeline degrees of layers with sharded experts (FSMoE, Section 4).

The degree is the number of chunks (micro-batches) of a pass. Experts are sharded if the ranks of a node split
each expert's hidden columns.

1. Algorithm 1 estimates the time of a pass by formulas. Its schedule has three lanes, queues that run side by
   side: the link between nodes (all dispatches, then other layers' gradients, then all combines), the link
   inside a node (all all-gathers before all reduce-scatters), and the experts. Four formulas, one for each
   possible bottleneck, are lower bounds of the time. The largest is the estimate. The degree with the
   smallest estimate wins.
2. `best_degree` starts from that degree and improves it by simulating the schedule that the engine really
   runs.

The estimate is the exact length of Algorithm 1's schedule if all-gather and reduce-scatter take the same
time, as the paper assumes. If not, it may be too short. Also, the engine's schedule differs from the paper's,
for example in separate weight gradients. Hence step 2.

Letters (FSMoE's): r or n chunks; a2a one of the layer's two all-to-alls, ag all-gather, rs reduce-scatter,
exp experts; t_gar seconds of the all-reduce of other layers' gradients.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pmoe.planner.costs import DegreeSeconds, LayerCosts
from pmoe.planner.simulator import LOCAL_TWIN, makespan, simulate, task_seconds
from pmoe.schedule.restore import Restore
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, PassDirection, Schedule, Stages, Task, local_pieces

# ---- Algorithm 1


MAX_DEGREE = 16
"""The largest number of chunks that is searched by default."""


def case_seconds(costs: LayerCosts, r: float, t_gar: float = 0.0) -> tuple[float, float, float, float]:
    """Returns f1 to f4 of FSMoE's Section 4.2: the seconds of a pass in r chunks, by possible bottleneck.

    Each formula is a lower bound of the seconds of the pass, because this resource must do all its work:

        f1    the link between nodes, which also carries gradients
        f2    the experts
        f3    the all-to-alls, without gradients
        f4    the link inside a node

    costs: seconds of the layer's stages.
    r: number of chunks.
    t_gar: seconds of the all-reduce of other layers' gradients in this pass.
    """
    a2a, ag, rs, exp = costs.chunk(r)
    return (
        2 * r * a2a + t_gar,
        2 * a2a + ag + rs + r * exp,
        2 * r * a2a + ag + rs,
        2 * a2a + r * (ag + rs),
    )


def formula_seconds(costs: LayerCosts, r: float, t_gar: float = 0.0) -> float:
    """Returns the estimated seconds of a pass in r chunks: the largest of FSMoE's formulas f1 to f4.

    The paper selects one formula by constraints Q1 to Q7. They compare the formulas by pairs, as if
    all-gather (ag) and reduce-scatter (rs) both took (ag + rs) / 2. If ag and rs are equal, the selected
    formula is the largest.

    costs: seconds of the layer's stages.
    t_gar: seconds of the all-reduce of other layers' gradients in this pass.
    """
    return max(case_seconds(costs, r, t_gar))


def find_degree(costs: LayerCosts, t_gar: float = 0.0, max_degree: int = MAX_DEGREE) -> int:
    """Returns the number of chunks that is fastest by FSMoE's four formulas (Algorithm 1).

    If several numbers are equally fast, the lowest is returned. The paper minimizes each formula by SLSQP
    within its constraints, and rounds the result. This function tries every number up to ``max_degree``,
    which finds the same.

    costs: seconds of the layer's stages.
    t_gar: seconds of the all-reduce of other layers' gradients in this pass.
    max_degree: the largest number of chunks to try.

    Examples: each chunk takes 8 s in the experts, even if it is small, and all else is free -> 1. All chunks
    together take 8 s in the experts and 4 s in each of two all-to-alls, without a fixed cost for each chunk
    -> max_degree.
    """
    return min(range(1, max_degree + 1), key=lambda r: formula_seconds(costs, r, t_gar))


# ---- on the schedule that runs


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Options that select the schedule of a pass.

    direction: "forward" or "backward".
    one_lane: whether collectives inside the node and between nodes share one lane (a queue of tasks), so that
        they wait for each other (FSMoE-No-IIO, Tutel).
    wgrad_share: fraction of the experts' backward seconds that weight gradients take. The layer computes them
        in tasks of their own. 0 gives the paper's schedule, in which the experts' backward is one task.
    restore: whether the experts' inputs (T_DI) and hidden activations (T_M) are kept, offloaded or made again
        between the passes, if the layer has ring slots (reused buffers); else None. Copies from and to the
        host count as free.
    stays: fraction of the rows whose experts are on their own rank. They are computed while other rows
        travel.
    """

    direction: PassDirection
    one_lane: bool = False
    wgrad_share: float = 0.5
    restore: Restore | None = None
    stays: float = 0.0

    def schedule(self, n: int) -> Schedule:
        """Returns the schedule of the pass in n chunks."""
        local = self.stays > 0
        backward = self.direction == "backward"
        stages = Stages(
            local=local, remote=True, sharded=not local, gradients=backward, one_lane=self.one_lane
        )
        if self.restore is not None:
            return rotating(self.direction, n, stages, restore=self.restore)
        return (backward_schedule if backward else forward_schedule)(n, stages)


def stage_seconds(
    costs: LayerCosts, n: int, options: ScheduleOptions, t_gar: float = 0.0
) -> Callable[[Task], float]:
    """Returns a function that gives the seconds of each task of a pass in n chunks.

    costs: seconds of the layer's stages.
    options: direction and form of the schedule.
    t_gar: seconds of the all-reduce of other layers' gradients in this pass.

    The paper has no cost for arranging rows, for sending routing weights and for summing the returned rows.
    These tasks take 0 seconds.
    """
    a2a, ag, rs, _ = costs.chunk(n)
    apart = options.wgrad_share if options.direction == "backward" else 0.0
    alpha, whole = costs.exp.alpha_seconds, costs.exp.beta_seconds
    remote = alpha + whole * (1 - options.stays) / n
    pieces = n if options.restore is not None else local_pieces(n, local=True, remote=True)
    # Rows that stay are cut into pieces. Every piece but the first has the rows of one chunk; the first has
    # all others.
    first = alpha + whole * options.stays * (1 - (pieces - 1) / n)
    other = alpha + whole * options.stays / n

    def local(share: float, task: Task) -> float:
        return (other if task.chunk else first) * share

    first_product = 1 / 4  # backward has 4 products; recomputing T_M repeats one
    by_kind: dict[Kind, float | Callable[[Task], float]] = {
        Kind.DISPATCH: a2a,
        Kind.ALL_GATHER: ag,
        Kind.REDUCE_SCATTER: rs,
        Kind.GRADIENTS: t_gar,
    }
    for kind, share in ((Kind.COMPUTE, 1 - apart), (Kind.WGRAD, apart), (Kind.RECOMPUTE, first_product)):
        by_kind[kind] = remote * share
        by_kind[LOCAL_TWIN[kind]] = functools.partial(local, share)
    return task_seconds(by_kind)


def pass_seconds(costs: LayerCosts, n: int, options: ScheduleOptions, t_gar: float = 0.0) -> float:
    """Returns the simulated seconds of a pass in n chunks.

    costs: seconds of the layer's stages.
    options: direction and form of the schedule.
    t_gar: seconds of the all-reduce of other layers' gradients in a backward pass; 0 in a forward pass, which
        has none.
    """
    return makespan(simulate(options.schedule(n).tasks, stage_seconds(costs, n, options, t_gar)))


def simulated_degrees(
    costs: LayerCosts, options: ScheduleOptions, degrees: Sequence[int]
) -> tuple[DegreeSeconds, ...]:
    """Returns the seconds of a pass for each number of chunks, depending on the seconds of an all-reduce.

    The all-reduce is that of other layers' gradients. It runs during the pass as one task of t_gar seconds.
    The longest path through the schedule either includes this task or does not, so

        seconds of the pass = max(alone, beside + t_gar)

    Two simulations for each number of chunks are enough. The first has t_gar = 0 and gives ``alone``. The
    second has t_gar = 2 * alone, long enough for the task to be on the longest path, and gives ``beside``.

    costs: seconds of the layer's stages.
    options: direction and form of the schedule.
    degrees: numbers of chunks.
    """
    degree_seconds = []
    for n in degrees:
        alone = pass_seconds(costs, n, options)
        degree_seconds.append(DegreeSeconds(n, alone, pass_seconds(costs, n, options, 2 * alone) - 2 * alone))
    return tuple(degree_seconds)


def best_degree(
    costs: LayerCosts,
    options: ScheduleOptions,
    t_gar: float = 0.0,
    degrees: Sequence[int] = range(1, MAX_DEGREE + 1),
) -> int:
    """Returns the number of chunks that is fastest by simulation of the engine's schedule.

    The search starts from the result of FSMoE's Algorithm 1 (`find_degree`). It moves to the next lower or
    higher allowed number as long as this makes the simulated pass faster.

    costs: seconds of the layer's stages.
    options: direction and form of the schedule.
    t_gar: seconds of the all-reduce of other layers' gradients in this pass.
    degrees: allowed numbers of chunks, in rising order. If Algorithm 1's result is not among them, the search
        starts from the nearest allowed number below or above it, whichever is faster.

    All ranks with the same costs find the same number.
    """
    seconds_at = functools.cache(lambda at: pass_seconds(costs, degrees[at], options, t_gar))
    start = find_degree(costs, t_gar, degrees[-1])
    last = len(degrees) - 1
    above = min(bisect.bisect(degrees, start), last)
    at = min(max(above - 1, 0), above, key=seconds_at)
    while (faster := min(at, max(at - 1, 0), min(at + 1, last), key=seconds_at)) != at:
        at = faster
    return degrees[at]
