"""Trials: measured seconds of both passes on the batch at hand, for some choices of n and the pair.

A trial runs the plan that the layer itself would make. Nothing of it is left when it ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from pmoe.call.modules import LayerModules
from pmoe.call.sizes import memory_shape
from pmoe.comm.agreement import largest
from pmoe.comm.counts import RankCounts
from pmoe.engine.autograd import Runner
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.make_plan import SortedSlots
from pmoe.measure.profile import profile_of
from pmoe.measure.timing import begin_together, clock_of, median_seconds
from pmoe.planner.degree import DEGREES, Choice
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.profile import Profile
from pmoe.runners.pipeline import PipelineRunner

MIN_ROWS = 1024
"""The smallest number of rows of a chunk for which finer overlap hides more than smaller products cost.

bench/bench_overlap.py: with 4096 rows of a rank, n = 2 to 4 is best.
"""

REPEATS = 3
"""Timed runs of each choice."""

CLOSE = 1.15
"""Choices that take at most this many times the fastest one's seconds are run again."""

MORE = 7
"""Further timed runs of choices that are close to the fastest."""


def adaptive_degree(max_rows: int, num_ranks: int) -> int:
    """Returns n by a rule: the largest that leaves MIN_ROWS rows a chunk; 1 if nothing travels.

    max_rows: the largest T * K of any rank, so that all ranks get the same n.
    """
    return 1 if num_ranks == 1 else max(n for n in DEGREES if n == 1 or max_rows >= n * MIN_ROWS)


@dataclass(frozen=True)
class TrialBatch:
    """A routed batch whose row counts are known: all that a trial needs.

    modules: the modules of the layer.
    counts: the exchanged row counts.
    inputs: the rows and parameters of the call.
    orders: its slots, from which plans are made.
    """

    modules: LayerModules
    counts: RankCounts
    inputs: Inputs
    orders: SortedSlots

    @property
    def rows(self) -> int:
        """The largest T * K of any rank."""
        return self.counts.max_tokens * self.modules.options.top_k

    @property
    def sizes(self) -> LayerSizes:
        """The sizes of the layer, for rows of the dtype that reaches the experts."""
        return memory_shape(self.modules, self.inputs.x_TM)

    def profile(self) -> Profile:
        """Returns the profile of this device and group. Collective the first time."""
        return profile_of(self.modules.ranks, self.inputs.x_TM.device, self.inputs.x_TM.dtype)

    @property
    def trials_allowed(self) -> bool:
        """Whether trials are worth their time, and leave no trace.

        They would leave one in modules, which may count the rows that they compute, and in callbacks.
        """
        modules = self.modules
        shared = modules.shared_expert
        is_worth_it = self.counts.needs_grad and modules.ranks.size > 1 and self.rows >= 2 * MIN_ROWS
        are_modules = modules.experts.are_modules or (shared is not None and shared.are_modules)
        return is_worth_it and not (are_modules or modules.hooks is not None or modules.sequential)

    def runner(self, choice: Choice) -> Runner:
        """Returns the runner of this batch with a choice."""
        return PipelineRunner(self.orders.plan(self.counts, choice))


def measure_trials(batch: TrialBatch, choices: Sequence[Choice]) -> list[tuple[float, float]]:
    """Returns the median seconds of forward and of backward with each choice. Collective.

    Each choice runs one untimed step, then all run in turns. Choices close to the fastest run again, because
    two equal steps on a CPU differ by a tenth. All ranks take the slowest rank's medians, so all run the same
    choices again. The bytes that trials send do not count as traffic of the model.
    """
    ranks = batch.modules.ranks
    device = batch.inputs.x_TM.device
    traffic = batch.modules.traffic
    traffic_before = replace(traffic)
    clock = clock_of(device)
    runs = [functools.partial(_run_both, batch.runner(choice), batch.inputs, clock) for choice in choices]
    agree = functools.partial(largest, ranks, device, stage="agreeing on the fastest trials")
    timed = functools.partial(median_seconds, begin=begin_together(ranks), agree=agree)
    medians = timed(runs, REPEATS)
    fastest = min(map(sum, medians))
    close = [index for index, median in enumerate(medians) if sum(median) <= CLOSE * fastest]
    if len(close) > 1:
        again = timed([runs[index] for index in close], MORE, warm_up=0)
        for index, median in zip(close, again, strict=True):
            medians[index] = median
    vars(traffic).update(vars(traffic_before))
    return [(forward, backward) for forward, backward in medians]


@torch.no_grad()
def _run_both(runner: Runner, inputs: Inputs, now: Callable[[], float]) -> tuple[float, float]:
    """Runs both passes, with T_O as its own gradient, and returns the seconds of each."""
    start = now()
    y_TM, saved = runner.forward(inputs, keep=True)
    middle = now()
    assert saved is not None
    wanted = [tensor is not None and tensor.requires_grad for tensor in inputs.all]
    saved.backward(saved.tensors, wanted, y_TM)
    return middle - start, now() - middle
