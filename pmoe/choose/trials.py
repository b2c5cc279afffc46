"""Trials: measured seconds of both passes on the batch at hand, for some choices of n and the pair.

A trial runs the plan that the layer itself would make. Nothing of it is left when it ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from pmoe.call.modules import Parts
from pmoe.call.sizes import memory_shape
from pmoe.comm.agreement import largest
from pmoe.comm.counts import RankCounts
from pmoe.engine.autograd import Runner
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.make_plan import Orders
from pmoe.measure.profile import profile_of
from pmoe.measure.timing import begin_together, clock_of, median_seconds
from pmoe.planner.degree import DEGREES, Choice
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.profile import Profile
from pmoe.runners.pipeline import PipelineRunner

MIN_ROWS = 1024
"""Below this many rows a chunk, smaller products cost more than finer overlap hides
(bench/bench_overlap.py: n = 2 to 4 is best at 4096 rows a rank)."""

REPEATS, CLOSE, MORE = 3, 1.15, 7
"""Runs of each choice, and then of those that take at most so many times the fastest one's seconds."""


def adaptive_degree(max_rows: int, num_ranks: int) -> int:
    """n by a rule, from numbers that all ranks share: the largest that leaves MIN_ROWS a chunk; 1 where
    nothing travels. max_rows: the largest T * K of a rank."""
    return 1 if num_ranks == 1 else max(n for n in DEGREES if n == 1 or max_rows >= n * MIN_ROWS)


@dataclass(frozen=True)
class Batch:
    """A routed batch whose counts are known, with its layer and its rows."""

    parts: Parts
    counts: RankCounts
    inputs: Inputs
    orders: Orders

    @property
    def rows(self) -> int:
        """The largest T * K of a rank."""
        return self.counts.max_tokens * self.parts.spec.top_k

    @property
    def sizes(self) -> LayerSizes:
        return memory_shape(self.parts, self.inputs.x_TM)

    def profile(self) -> Profile:
        """Of this device and group. Collective the first time."""
        return profile_of(self.parts.ranks, self.inputs.x_TM.device, self.inputs.x_TM.dtype)

    @property
    def may_be_tried(self) -> bool:
        """Whether trials are worth it, and change nothing that lasts: modules may count what they compute."""
        parts, shared = self.parts, self.parts.shared_expert
        worth = self.counts.needs_grad and parts.ranks.size > 1 and self.rows >= 2 * MIN_ROWS
        are_modules = parts.experts.are_modules or (shared is not None and shared.are_modules)
        return worth and not (are_modules or parts.hooks is not None or parts.sequential)

    def runner(self, choice: Choice) -> Runner:
        return PipelineRunner(self.orders.plan(self.counts, choice))


def tried_seconds(batch: Batch, choices: Sequence[Choice]) -> list[tuple[float, float]]:
    """Median seconds of forward and backward with each choice: one untimed step each, then in turns.

    Those close to the fastest run again: a step on a CPU differs by a tenth from the next like it. All ranks
    take the slowest rank's medians, and so the same choices again. What is sent is no traffic of the model.
    """
    ranks, device, traffic = batch.parts.ranks, batch.inputs.x_TM.device, batch.parts.traffic
    before, clock = replace(traffic), clock_of(device)
    runs = [functools.partial(_run_both, batch.runner(each), batch.inputs, clock) for each in choices]
    agree = functools.partial(largest, ranks, device, stage="agreeing on the fastest trials")
    timed = functools.partial(median_seconds, begin=begin_together(ranks), agree=agree)
    found = timed(runs, REPEATS)
    close = [at for at, each in enumerate(found) if sum(each) <= CLOSE * min(map(sum, found))]
    if len(close) > 1:
        for at, each in zip(close, timed([runs[at] for at in close], MORE, warm_up=0), strict=True):
            found[at] = each
    vars(traffic).update(vars(before))
    return [(ahead, back) for ahead, back in found]


@torch.no_grad()
def _run_both(runner: Runner, inputs: Inputs, now: Callable[[], float]) -> tuple[float, float]:
    """Runs both passes, T_O as its own gradient, and drops all results: the seconds of each."""
    start = now()
    y_TM, saved = runner.forward(inputs, keep=True)
    middle = now()
    assert saved is not None
    wanted = [tensor is not None and tensor.requires_grad for tensor in inputs.all]
    saved.backward(saved.tensors, wanted, y_TM)
    return middle - start, now() - middle
