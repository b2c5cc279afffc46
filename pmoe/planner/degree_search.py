"""Pipeline degrees of layers with sharded experts: Algorithm 1, and on the schedule that runs (FSMoE, 4).

Algorithm 1's schedule: on the inter-node lane all dispatches, then other layers' gradients (t_gar), then all
combines; on the intra-node lane all all-gathers before all reduce-scatters; experts on a lane of their own.
The longest of four formulas, each of what may take longest, holds; the degree of which it is least is taken.

Where all-gather and reduce-scatter take the same time, which the paper assumes, the longest formula is the
length of that schedule. Where they do not, it may be too short: `best_degree` goes on from there on the
engine's own schedule, in which experts' backward need not be one task, for few degrees.

Letters: r or n chunks; a2a, ag, rs, exp: all-to-all (each of two), all-gather, reduce-scatter, experts; t_gar
seconds.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pmoe.planner.costs import DegreeSeconds, LayerCosts
from pmoe.planner.simulator import LOCAL_TWIN, makespan, simulate, task_seconds
from pmoe.schedule.restore import Restore
from pmoe.schedule.rings import rotating
from pmoe.schedule.straight import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, PassDirection, Schedule, Stages, Task, local_pieces

# ---- Algorithm 1


MAX_DEGREE = 16
"""The largest r that is looked at where the caller names none."""


def case_seconds(costs: LayerCosts, r: float, t_gar: float = 0.0) -> tuple[float, float, float, float]:
    """f1 to f4 of Section 4.2, by what takes longest: 1 inter-node lane and gradients, 2 experts, 3
    all-to-alls, 4 intra-node lane."""
    a2a, ag, rs, exp = costs.chunk(r)
    return (
        2 * r * a2a + t_gar,
        2 * a2a + ag + rs + r * exp,
        2 * r * a2a + ag + rs,
        2 * a2a + r * (ag + rs),
    )


def formula_seconds(costs: LayerCosts, r: float, t_gar: float = 0.0) -> float:
    """The longest of the four formulas for r chunks.

    The paper's constraints Q1 to Q7 compare the formulas by pairs, with ag for (ag + rs) / 2: where the two
    are equal, the case that they lead to is the longest formula.
    """
    return max(case_seconds(costs, r, t_gar))


def find_degree(costs: LayerCosts, t_gar: float = 0.0, max_degree: int = MAX_DEGREE) -> int:
    """Algorithm 1: the degree that is fastest by the four formulas; of equals the lowest.

    The paper minimises each formula where it holds by SLSQP, and rounds. A degree is whole and at most
    ``max_degree``: here each is tried, which finds the same one.

    Example: experts of 8 s whatever r is, all else free -> degree 1; experts of 8 s in all and two
    all-to-alls of 4 s, nothing per chunk -> the largest degree.
    """
    return min(range(1, max_degree + 1), key=lambda r: formula_seconds(costs, r, t_gar))


# ---- on the schedule that runs


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Which schedule a pass has.

    one_lane: collectives inside the node wait for those between nodes (FSMoE-No-IIO, Tutel).
    wgrad_share: of the experts' seconds in backward, those of weight gradients, which the layer makes in
        tasks of their own; 0 is the paper's schedule, where experts' backward is one task.
    restore: of a layer whose buffers rotate; its copies to the host and back are taken to be free.
    stays: the share of rows that stay on their rank, and are computed while others travel.
    """

    direction: PassDirection
    one_lane: bool = False
    wgrad_share: float = 0.5
    restore: Restore | None = None
    stays: float = 0.0

    def schedule(self, n: int) -> Schedule:
        """Of the pass in n chunks."""
        local, backward = self.stays > 0, self.direction == "backward"
        stages = Stages(
            local=local, remote=True, sharded=not local, gradients=backward, one_lane=self.one_lane
        )
        if self.restore is not None:
            return rotating(self.direction, n, stages, restore=self.restore)
        return (backward_schedule if backward else forward_schedule)(n, stages)


def stage_seconds(
    costs: LayerCosts, n: int, options: ScheduleOptions, t_gar: float = 0.0
) -> Callable[[Task], float]:
    """Seconds of each task in n chunks of a pass with these costs; none where the paper's model has no term:
    arranging rows, the routing weights, the sum of returned rows."""
    a2a, ag, rs, _ = costs.chunk(n)
    apart = options.wgrad_share if options.direction == "backward" else 0.0
    alpha, whole = costs.exp.alpha_seconds, costs.exp.beta_seconds
    remote = alpha + whole * (1 - options.stays) / n
    pieces = n if options.restore is not None else local_pieces(n, local=True, remote=True)
    # The first piece is what is not in pieces of a chunk each.
    first = alpha + whole * options.stays * (1 - (pieces - 1) / n)
    other = alpha + whole * options.stays / n

    def local(share: float, task: Task) -> float:
        return (other if task.chunk else first) * share

    first_product = 1 / 4  # of a pass of twice two
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
    """Simulated seconds of a pass in n chunks. t_gar: 0 in a forward pass, which carries no gradients."""
    return makespan(simulate(options.schedule(n).tasks, stage_seconds(costs, n, options, t_gar)))


def simulated_degrees(
    costs: LayerCosts, options: ScheduleOptions, degrees: Sequence[int]
) -> tuple[DegreeSeconds, ...]:
    """`pass_seconds` of each degree, for any t_gar, from two simulations of it.

    Gradients are one task: the longest path either has it or has not, so seconds are max(alone, beside +
    t_gar). The second simulation carries enough of them for the longest path to have it.
    """
    found = []
    for n in degrees:
        alone = pass_seconds(costs, n, options)
        found.append(DegreeSeconds(n, alone, pass_seconds(costs, n, options, 2 * alone) - 2 * alone))
    return tuple(found)


def best_degree(
    costs: LayerCosts,
    options: ScheduleOptions,
    t_gar: float = 0.0,
    degrees: Sequence[int] = range(1, MAX_DEGREE + 1),
) -> int:
    """Algorithm 1's degree, made better on the simulator: a neighbour is taken while it is faster.

    degrees: those allowed, in rising order. Algorithm 1's own need not be among them: the search begins at
    the allowed ones below and above it. All ranks that share the costs find the same degree.
    """
    asked = functools.cache(lambda at: pass_seconds(costs, degrees[at], options, t_gar))
    found = find_degree(costs, t_gar, degrees[-1])
    last = len(degrees) - 1
    above = min(bisect.bisect(degrees, found), last)
    at = min(max(above - 1, 0), above, key=asked)
    while (faster := min(at, max(at - 1, 0), min(at + 1, last), key=asked)) != at:
        at = faster
    return degrees[at]
