"""The solver for pipeline degrees of layers with sharded experts (FSMoE, Section 4).

The degree is the number of chunks (micro-batches) of a pass. Experts are sharded if the ranks of a node split
each expert's hidden columns.

1. Algorithm 1 estimates the time of a pass by formulas. The algorithm's schedule has three lanes, queues that
   run side by side: the link between nodes (all dispatches, then other layers' gradients, then all combines),
   the link inside a node (all all-gathers, then all reduce-scatters), and the experts. Each of four formulas
   assumes another bottleneck and gives a lower bound of the time. The largest bound is the estimate. The
   degree with the smallest estimate is the result.
2. `best_degree` and `StepCosts.best` simulate the schedule that the engine really runs, for every degree. A
   layer uses the degree that they return.

Step 1 is not enough for two reasons. First, the estimate is exact for Algorithm 1's schedule only if
all-gather and reduce-scatter take the same time, as the paper assumes; otherwise the estimate may be too
short. Second, the engine's schedule differs from the paper's: for example, weight gradients are separate
tasks.

Letters (FSMoE's): r or n chunks; a2a one of the layer's two all-to-alls, ag all-gather, rs reduce-scatter,
exp experts; t_gar seconds of the all-reduce of other layers' gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pmoe.planner.copy_work import NO_COPIES, CopyWork
from pmoe.planner.costs import DegreeSeconds, LayerCosts, LineCost
from pmoe.planner.degree import MAX_DEGREE, SOLVER_DEGREES
from pmoe.planner.simulator import LOCAL_TWIN, makespan, simulate, task_seconds
from pmoe.schedule.restore import GATHERED_AGAIN, Restore
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, PassDirection, Schedule, Stages, Task, local_pieces

# ---- Algorithm 1


def case_seconds(costs: LayerCosts, r: float, t_gar: float = 0.0) -> tuple[float, float, float, float]:
    """Returns f1 to f4 of FSMoE's Section 4.2: lower bounds of the seconds of a pass in r chunks.

    Each formula adds up tasks that cannot overlap:

        f1    on the link between nodes: all all-to-alls, and the all-reduce of gradients
        f2    the experts of all chunks; before them the first dispatch and all-gather, and after them the
              last reduce-scatter and combine
        f3    all all-to-alls, and between dispatches and combines one all-gather and one reduce-scatter
        f4    on the link inside a node: all all-gathers and reduce-scatters; before them the first dispatch,
              and after them the last combine

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

    The paper does not take the largest formula, but selects one by its constraints Q1 to Q7. A constraint
    compares two formulas, and assumes that all-gather (ag) and reduce-scatter (rs) take equally long: (ag +
    rs) / 2 each. If they do, the formula that the paper selects is the largest.

    costs: seconds of the layer's stages.
    r: number of chunks.
    t_gar: seconds of the all-reduce of other layers' gradients in this pass.
    """
    return max(case_seconds(costs, r, t_gar))


def find_degree(costs: LayerCosts, t_gar: float = 0.0, max_degree: int = MAX_DEGREE) -> int:
    """Returns the number of chunks that is fastest by FSMoE's four formulas (Algorithm 1).

    If several numbers are equally fast, the lowest is returned. The paper minimizes each formula by SLSQP, a
    numerical optimizer, and rounds the result. This function tries every number up to ``max_degree``, and
    finds the same number.

    costs: seconds of the layer's stages.
    t_gar: seconds of the all-reduce of other layers' gradients in this pass.
    max_degree: the largest number of chunks to try.

    Two examples:

    - Each chunk takes 8 s in the experts, however small it is, and all else is free -> 1.
    - All chunks together take 8 s in the experts and 4 s in each of two all-to-alls, and a chunk has no fixed
      cost -> max_degree.
    """
    return min(range(1, max_degree + 1), key=lambda r: formula_seconds(costs, r, t_gar))


# ---- on the schedule that runs


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Options that select the schedule of a pass.

    direction: "forward" or "backward".
    one_lane: whether collectives inside the node and between nodes share one lane (a queue of tasks), so that
        they wait for each other, as in the systems FSMoE-No-IIO and Tutel of the paper.
    wgrad_share: fraction of the experts' backward seconds that weight gradients take. The layer computes them
        in tasks of their own. 0 gives the paper's schedule, in which the experts' backward is one task.
    restore: whether the experts' inputs (T_DI) and hidden activations (T_M) are kept, offloaded or made again
        between the passes; None if the layer has no ring slots (reused buffers). Copies from and to the host
        count as free.
    stays: fraction of the rows whose experts are on their own rank. These rows are computed while the other
        rows are sent.
    rearranged: whether backward has another number of chunks than forward, so that tensors that forward kept
        are copied to backward's chunks. Needs ring slots.
    copies: the work that copies of busy experts add to the pass.
    """

    direction: PassDirection
    one_lane: bool = False
    wgrad_share: float = 0.5
    restore: Restore | None = None
    stays: float = 0.0
    rearranged: bool = False
    copies: CopyWork = NO_COPIES

    @property
    def copies_stay(self) -> bool:
        """Whether separate tasks compute the rows that stay on their rank for its copies of experts."""
        return bool(self.copies.scattered) and self.stays > 0 and self.restore is None

    def schedule(self, n: int) -> Schedule:
        """Returns the schedule of the pass in n chunks."""
        local = self.stays > 0
        backward = self.direction == "backward"
        stages = Stages(
            local=local, remote=True, sharded=not local, gradients=backward, one_lane=self.one_lane
        )
        stages = self.copies.in_stages(stages, self.restore)
        if self.restore is not None:
            return rotating(self.direction, n, stages, restore=self.restore, rearranged=self.rearranged)
        return (backward_schedule if backward else forward_schedule)(n, stages)


def stage_seconds(
    costs: LayerCosts, n: int, options: ScheduleOptions, t_gar: float = 0.0
) -> Callable[[Task], float]:
    """Returns a function that gives the seconds of each task of a pass in n chunks.

    costs: seconds of the layer's stages.
    n: number of chunks.
    options: direction and form of the schedule.
    t_gar: seconds of the all-reduce of other layers' gradients in this pass.

    Two kinds of tasks count as free: sending routing weights, and sorting arrived rows by expert.
    """
    a2a, ag, rs, _ = costs.chunk(n)
    is_backward = options.direction == "backward"
    apart = options.wgrad_share if is_backward else 0.0
    pieces = n if options.restore is not None else local_pieces(n, local=True, remote=True)
    travelling = (1 - options.stays) / n
    # Rows that stay are cut into pieces, one for each task. The first piece has the rows of several chunks,
    # every later piece has the rows of one chunk.
    first = options.stays * (1 - (pieces - 1) / n)
    other = options.stays / n
    gathers_again = options.restore is not None and options.restore.dispatched in GATHERED_AGAIN
    # How often a task copies rows that stay (not to the host, and not copies of experts). Forward copies the
    # rows' tokens, and backward the gradients of the rows' outputs. Backward copies the tokens again, too, if
    # the restore pair says so for T_DI.
    copies = 2 if is_backward and gathers_again else 1

    remote = costs.exp(travelling)
    rearranging = costs.rearrange(travelling)

    # The rank's copies of experts compute this fraction of the rows that stay, if they have tasks of their
    # own. The tasks of the rank's own experts compute the other rows that stay.
    of_copies = options.copies.computed * options.copies_stay

    def local(share: float, task: Task) -> float:
        fraction = first if task.chunk % pieces == 0 else other
        fraction *= 1 - of_copies if task.chunk < pieces else of_copies
        moved = copies * costs.order(fraction) + costs.rearrange(fraction) if task.kind is Kind.LOCAL else 0.0
        return costs.exp(fraction) * share + moved

    first_product = 1 / 4  # backward has 4 products, and recomputing T_M repeats one product of forward
    gathering = costs.order(travelling)
    by_kind: dict[Kind, float | Callable[[Task], float]] = {
        Kind.GATHER: gathering,
        Kind.GATHER_AGAIN: gathering,
        Kind.DISPATCH: a2a,
        Kind.ALL_GATHER: ag,
        Kind.REDUCE_SCATTER: rs,
        Kind.COMBINE: a2a if costs.combine is None else costs.combine(1 / n),
        Kind.OUTPUT: costs.restore(1 / n),
        Kind.GRADIENTS: t_gar,
    }
    if costs.again is not None:
        by_kind[Kind.DISPATCH_AGAIN], by_kind[Kind.ALL_GATHER_AGAIN] = (line(1 / n) for line in costs.again)
    for kind, share in ((Kind.COMPUTE, 1 - apart), (Kind.WGRAD, apart), (Kind.RECOMPUTE, first_product)):
        by_kind[kind] = remote * share
        by_kind[LOCAL_TWIN[kind]] = functools.partial(local, share)
    by_kind[Kind.COMPUTE] = remote * (1 - apart) + rearranging
    by_kind[Kind.LOCAL_COPY_WGRAD] = functools.partial(local, apart)
    by_kind |= options.copies.shared_wgrad(remote * apart)
    by_kind |= options.copies.message_seconds(costs.copies)
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
    """Returns the seconds of a pass for each number of chunks, with and without an all-reduce during it.

    The all-reduce is that of other layers' gradients. It runs during the pass as one task of t_gar seconds. A
    path is a chain of tasks in which each task starts when the one before it has ended. The longest path of
    the pass either includes the all-reduce or does not, so

        seconds of the pass = max(alone, beside + t_gar)

        alone   seconds of the pass without the all-reduce
        beside  seconds of the other tasks on the longest path that includes the all-reduce

    Two simulations for each number of chunks are enough. The first has t_gar = 0 and gives ``alone``. The
    second has t_gar = 2 * alone, long enough for the all-reduce to be on the longest path. The seconds of the
    second simulation minus 2 * alone are ``beside``.

    costs: seconds of the layer's stages.
    options: direction and form of the schedule.
    degrees: numbers of chunks.
    """
    degree_seconds = []
    for n in degrees:
        alone = pass_seconds(costs, n, options)
        degree_seconds.append(DegreeSeconds(n, alone, pass_seconds(costs, n, options, 2 * alone) - 2 * alone))
    return tuple(degree_seconds)


TIE = 1e-9
"""Two predictions of seconds count as equal if their relative difference is at most TIE.

Equal predictions can differ a little, because their sums are rounded differently.
"""

T = TypeVar("T")


def first_of_fastest(seconds: Mapping[T, float]) -> T:
    """Returns the key with the fewest seconds. If several keys are equally fast, the first is returned.

    seconds: predicted seconds by number of chunks, or by a pair of numbers. Seconds that differ by less than
        `TIE` count as equal.

    Example: {1: 3.0, 2: 2.0, 4: 2.0} -> 2.
    """
    limit = min(seconds.values()) * (1 + TIE)
    return next(chunks for chunks, took in seconds.items() if took <= limit)


def best_degree(
    costs: LayerCosts,
    options: ScheduleOptions,
    t_gar: float = 0.0,
    degrees: Iterable[int] = SOLVER_DEGREES,
) -> int:
    """Returns the number of chunks that is fastest by simulation of the engine's schedule.

    Every allowed number is simulated: if chunks share ring slots (reused buffers), the seconds may rise and
    fall several times as the number of chunks grows. Of equally fast numbers, the lowest is returned. All
    ranks with the same costs find the same number.

    costs: seconds of the layer's stages.
    options: direction and form of the schedule.
    t_gar: seconds of the all-reduce of other layers' gradients in this pass.
    degrees: allowed numbers of chunks.
    """
    return first_of_fastest({n: pass_seconds(costs, n, options, t_gar) for n in sorted(degrees)})


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Costs of a layer's forward and backward pass for one size of batch.

    The numbers of chunks are chosen from these costs: n in forward, m in backward. If they differ, tensors
    that forward kept are copied block by block to the chunks of backward, and rows are sorted once more, by
    the chunks of backward.

    forward, backward: costs of each pass.
    forward_options, backward_options: the schedule of each pass.
    copy_of_block: fixed seconds of copying a block, which do not depend on its number of rows. A block is the
        part of the batch that is in one chunk of forward and in one chunk of backward. It is copied
        separately for each expert of a rank and for each kept tensor; the number is the sum over all of them.
    copy_of_rows: seconds to copy all rows of all kept tensors, without the fixed seconds. 0 if forward keeps
        nothing.
    sort: seconds to sort the rows once more.
    gate: seconds of the gate in forward and in backward, which do not depend on n and m.
    """

    forward: LayerCosts
    backward: LayerCosts
    forward_options: ScheduleOptions
    backward_options: ScheduleOptions
    copy_of_block: float = 0.0
    copy_of_rows: float = 0.0
    sort: float = 0.0
    gate: tuple[float, float] = (0.0, 0.0)

    def backward_pass(self, n: int, m: int) -> tuple[LayerCosts, ScheduleOptions]:
        """Returns costs and schedule of a backward pass in m chunks after a forward pass in n chunks.

        If n and m differ, kept tensors are copied to the chunks of backward. An expert's rows are then cut
        wherever a chunk of either pass ends. At gcd(n, m) positions, chunks of both passes end together. So
        there are n + m - gcd(n, m) blocks, and copying each block costs `copy_of_block` seconds.

        Example: n = 2 and m = 3 cut the rows after 1/3, 1/2 and 2/3, so there are 4 blocks.
        """
        if n == m:
            return self.backward, self.backward_options
        blocks = n + m - math.gcd(n, m)
        whole = self.copy_of_block * blocks + self.copy_of_rows
        return (
            replace(self.backward, rearrange=LineCost(0.0, whole)),
            replace(self.backward_options, rearranged=True),
        )

    def seconds(self, pairs: Iterable[tuple[int, int]], t_gar: float = 0.0) -> dict[tuple[int, int], float]:
        """Returns the predicted seconds of both passes, including the gate, for each pair (n, m).

        pairs: numbers of chunks: n of forward, m of backward.
        t_gar: seconds of the all-reduce of other layers' gradients in the backward pass.
        """
        forward = functools.cache(lambda n: pass_seconds(self.forward, n, self.forward_options))
        backward = functools.cache(lambda m, costs, options: pass_seconds(costs, m, options, t_gar))
        return {
            (n, m): forward(n)
            + backward(m, *self.backward_pass(n, m))
            + self.sort * (n != m)
            + sum(self.gate)
            for n, m in pairs
        }
