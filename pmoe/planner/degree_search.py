"""The solver for pipeline degrees of layers with sharded experts (FSMoE, Section 4).

1. Algorithm 1 estimates a pass by formulas. Its schedule has three lanes: inter-node (all dispatches, then
   other layers' gradients, then all combines), intra-node (all all-gathers before all reduce-scatters), and
   the experts. Four formulas, one for each possible bottleneck, bound the time; the longest holds. The
   degree with the shortest time wins.
2. `best_degree` starts from that degree and improves it by simulating the schedule that the engine really
   runs.

The longest formula is the exact length of Algorithm 1's schedule if all-gather and reduce-scatter take the
same time, as the paper assumes. If not, it may be too short; and the engine's schedule differs from the
paper's, for example in separate weight gradients. Hence step 2.

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
"""The largest degree that is searched by default."""


def case_seconds(costs: LayerCosts, r: float, t_gar: float = 0.0) -> tuple[float, float, float, float]:
    """Returns f1 to f4 of Section 4.2, the seconds of a pass by bottleneck.

    f1    the inter-node lane with its gradients
    f2    the experts
    f3    the all-to-alls
    f4    the intra-node lane
    """
    a2a, ag, rs, exp = costs.chunk(r)
    return (
        2 * r * a2a + t_gar,
        2 * a2a + ag + rs + r * exp,
        2 * r * a2a + ag + rs,
        2 * a2a + r * (ag + rs),
    )


def formula_seconds(costs: LayerCosts, r: float, t_gar: float = 0.0) -> float:
    """Returns the longest of the four formulas for r chunks.

    The paper's constraints Q1 to Q7 compare the formulas by pairs, with ag for (ag + rs) / 2. If ag and rs
    are equal, the case that the constraints select is the longest formula.
    """
    return max(case_seconds(costs, r, t_gar))


def find_degree(costs: LayerCosts, t_gar: float = 0.0, max_degree: int = MAX_DEGREE) -> int:
    """Algorithm 1: returns the degree that is fastest by the four formulas; of equals the lowest.

    The paper minimizes each formula by SLSQP within its constraints, and rounds. A degree is a whole number
    up to ``max_degree``, so here each is tried, which finds the same degree.

    Example: experts of 8 s for any r, all else free -> degree 1. Experts of 8 s in all and two all-to-alls
    of 4 s, no cost per chunk -> the largest degree.
    """
    return min(range(1, max_degree + 1), key=lambda r: formula_seconds(costs, r, t_gar))


# ---- on the schedule that runs


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Options that select the schedule of a pass.

    direction: "forward" or "backward".
    one_lane: whether collectives inside the node wait for those between nodes (FSMoE-No-IIO, Tutel).
    wgrad_share: fraction of the experts' backward seconds that weight gradients take. The layer computes
        them in tasks of their own. 0 gives the paper's schedule, in which the experts' backward is one
        task.
    restore: the restore pair, if the layer's buffers rotate; else None. Copies to the host and back count
        as free.
    stays: fraction of the rows that stay on their rank. They are computed while others travel.
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

    Tasks that the paper's model has no term for take no time: arranging rows, sending routing weights, and
    summing the returned rows.
    """
    a2a, ag, rs, _ = costs.chunk(n)
    apart = options.wgrad_share if options.direction == "backward" else 0.0
    alpha, whole = costs.exp.alpha_seconds, costs.exp.beta_seconds
    remote = alpha + whole * (1 - options.stays) / n
    pieces = n if options.restore is not None else local_pieces(n, local=True, remote=True)
    # The first piece of local rows has the rows that the others leave. Each of the others has those of one
    # chunk.
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

    t_gar: seconds of other layers' gradients in a backward pass; 0 in a forward pass, which carries none.
    """
    return makespan(simulate(options.schedule(n).tasks, stage_seconds(costs, n, options, t_gar)))


def simulated_degrees(
    costs: LayerCosts, options: ScheduleOptions, degrees: Sequence[int]
) -> tuple[DegreeSeconds, ...]:
    """Returns the simulated seconds of each degree as a function of t_gar, from two simulations each.

    The gradients are one task. The longest path either includes it or not, so

        seconds = max(alone, beside + t_gar)

    The first simulation has t_gar = 0 and gives ``alone``. The second has t_gar = 2 * alone, long enough
    for the task to be on the longest path, and gives ``beside``.
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
    """Returns the best degree by simulation: starts from Algorithm 1's, moves to neighbours while faster.

    degrees: allowed degrees, in rising order. If Algorithm 1's own degree is not among them, the search
        starts from the faster of the allowed degrees below and above it.

    All ranks that share the costs find the same degree.
    """
    seconds_at = functools.cache(lambda at: pass_seconds(costs, degrees[at], options, t_gar))
    start = find_degree(costs, t_gar, degrees[-1])
    last = len(degrees) - 1
    above = min(bisect.bisect(degrees, start), last)
    at = min(max(above - 1, 0), above, key=seconds_at)
    while (faster := min(at, max(at - 1, 0), min(at + 1, last), key=seconds_at)) != at:
        at = faster
    return degrees[at]
