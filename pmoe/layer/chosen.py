"""n and the restore pair where options leave a choice: the cheapest pair by Eq. 10, the fastest choice within
a memory budget, n by trials and n of ``pipeline="solve"``.

A trial runs both passes of the experts on the batch at hand, by the plan that the layer itself
would make, and leaves nothing behind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from pmoe.comm.agreement import largest
from pmoe.comm.counts import RankCounts
from pmoe.engine.arena import pool
from pmoe.engine.autograd import Runner
from pmoe.engine.cut import Orders
from pmoe.engine.passes import Inputs
from pmoe.layer.choose import with_room
from pmoe.layer.memory import memory_shape
from pmoe.layer.parts import Parts
from pmoe.measure.products import measure_products
from pmoe.measure.profile import PROFILES, profile_of
from pmoe.measure.rounds import begin_together, clock_of, median_seconds
from pmoe.planner.candidates import Chooser, Measured
from pmoe.planner.degree import DEGREES, SOLVE, Choice, all_choices
from pmoe.planner.granularity import PassDegrees
from pmoe.planner.layer_seconds import step_seconds
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.profile import Profile
from pmoe.runners.pipeline import PipelineRunner
from pmoe.schedule.restore import Restore
from pmoe.warn import warn_once

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


# ---- what is chosen


WRONG, HOST_SECONDS = 2.0, 2e-3
"""A profile is contradicted by steps that take so many times what it predicts, or the reciprocal. The host
may add so many seconds to a step."""

_compared: set[str] = set()  # when profiles were measured


def measure_products_of(parts: Parts, counts: RankCounts, inputs: Inputs) -> None:
    """Has the ways to compute the experts' products measured where that has not been done."""
    device, dtype = inputs.x_TM.device, inputs.x_TM.dtype
    if device.type != "cuda":  # else there is one way only
        return
    even_rows = counts.max_tokens * parts.spec.top_k * parts.grid.inside.size
    for experts, rows in ((parts.experts, even_rows), (parts.shared_expert, counts.max_tokens)):
        if experts is not None:
            measure_products(experts, parts.ranks, dtype, device, rows, needs_grad=counts.needs_grad)


def choose_among(batch: Batch, restore: Restore | None) -> Choice:
    """As `pmoe.layer.choose.choose`."""
    parts, spec, counts = batch.parts, batch.parts.spec, batch.counts
    if restore is None and spec.budget is not None:
        return _compared_with_steps(batch, _within_budget(batch))
    if restore is None:
        several = len(parts.pairs) > 1 and counts.needs_grad
        restore = with_room(_cheapest_pair(batch) if several else parts.pairs[0], counts)
    n = spec.fixed_degree
    if n is not None:
        found = PassDegrees(n, spec.pipeline_backward or n)
    elif spec.pipeline == SOLVE:
        from pmoe.layer import solved

        def tried(degrees: Sequence[int]) -> Measured:
            return _tried(batch, all_choices([(n, n) for n in degrees], [restore]))

        found = solved.solved_degrees(batch, restore, tried)
    else:
        from pmoe.layer import searched

        found = searched.tried_degrees(batch, restore)
    return _compared_with_steps(batch, Choice(**vars(found), restore=restore))


def _chooser_of(batch: Batch) -> Chooser:
    """The layer's for these options and this type of rows, which remembers what it has chosen."""
    parts, spec = batch.parts, batch.parts.spec
    new = Chooser(pairs=parts.pairs, budget=spec.budget, slack=spec.slack, bins=parts.num_bins)
    key = ("predicted", spec, batch.inputs.x_TM.dtype)
    found: Chooser = parts.known.choosers.setdefault(key, new)
    return found


def _tried(batch: Batch, choices: Sequence[Choice]) -> Measured:
    """None where trials are not for this layer."""
    if not batch.may_be_tried or batch.parts.gradients is not None or batch.counts.host_shortage:
        return None  # a choice that offloads would fail on the rank alone whose host is full
    return tried_seconds(batch, choices)


def _compared_with_steps(batch: Batch, choice: Choice) -> Choice:
    """The choice. Once for each profile in use, rank 0 warns where real steps contradict it. Collective."""
    counts, x_TM, ranks = batch.counts, batch.inputs.x_TM, batch.parts.ranks
    profile = PROFILES.get((ranks.name, x_TM.device, x_TM.dtype))
    if profile is None or profile.when in _compared or (measured := _tried(batch, [choice])) is None:
        return choice
    _compared.add(profile.when)
    seconds = step_seconds(batch.sizes, profile, counts.max_tokens, choice)
    [rows] = largest(ranks, x_TM.device, [float(counts.recv.sum())], stage="comparing a profile with a step")
    seconds *= rows / (batch.rows * batch.parts.grid.inside.size)  # of the fullest rank
    took = sum(measured[0])
    if ranks.rank == 0 and not seconds / WRONG <= took <= WRONG * seconds + HOST_SECONDS:
        warn_once(
            f"the profile of {profile.when} is contradicted by the first steps, so choices may be wrong: "
            f"{seconds * 1e3:.3g} ms predicted, {took * 1e3:.3g} ms measured (`pmoe profile` renews it)"
        )
    return choice


def _cheapest_pair(batch: Batch) -> Restore:
    """MPipeMoE's Eq. 10, on measured rates."""
    spec = batch.parts.spec
    n, m = spec.fixed_degree or 2, spec.pipeline_backward  # 2 where n follows the pair

    def tried(pairs: Sequence[Restore]) -> Measured:
        return _tried(batch, all_choices([(n, m or n)], pairs))

    return _chooser_of(batch).pair(batch.sizes, batch.counts.max_tokens, batch.profile, tried)


def _within_budget(batch: Batch) -> Choice:
    """The fastest n and pair whose bytes hold the budget for any routing. Raises ValueError, on every rank,
    that says what the least budget would be."""
    spec, counts = batch.parts.spec, batch.counts
    pool(batch.inputs.x_TM.device).device.keep_at_most(spec.budget or 0)
    candidates = DEGREES if spec.fixed_degree is None else (spec.fixed_degree,)
    choices = all_choices([(n, spec.pipeline_backward or n) for n in candidates], batch.parts.pairs)
    tried = functools.partial(_tried, batch)
    fitting = functools.partial(
        _chooser_of(batch).fitting, batch.sizes, counts.max_tokens, choices, batch.profile, tried
    )
    choice = fitting()
    if counts.host_shortage and choice.restore.dispatched == "offload":
        choice = fitting(host_is_full=True)
    return choice
