"""Trials: measure the seconds of both passes on a real batch, for several choices.

A choice is a number of chunks (micro-batches) for each pass and a restore pair, which says whether the
dispatched rows and the hidden activation are kept, offloaded or made again for backward. A trial runs the
plan that the layer itself would make with the choice. Nothing in the layer changes.
"""

from __future__ import annotations

import copy
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
from pmoe.engine.plan.make_plan import RowsFor, SortedSlots
from pmoe.measure.profile import profile_of
from pmoe.measure.timing import begin_together, clock_of, median_seconds
from pmoe.planner.degree import DEGREES, Choice
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.profile import Profile
from pmoe.runners.pipeline import PipelineRunner

MIN_ROWS = 1024
"""Smallest number of rows of a chunk. With fewer, small products cost more than better overlap saves.

bench/bench_overlap.py: with 4096 rows of a rank, 2 to 4 chunks are best."""

REPEATS = 3
"""Timed runs of each choice."""

CLOSE = 1.15
"""Choices that take at most this many times the fastest choice's seconds are timed again."""

MORE = 7
"""Timed runs of each choice that is close to the fastest, after the first ones."""


def adaptive_degree(max_rows: int, num_ranks: int) -> int:
    """Returns a number of chunks by a rule: the largest with at least MIN_ROWS rows in each chunk.

    max_rows: number of rows (tokens times choices) of the rank that has most, so that all ranks get the same
        result. Too few rows for two chunks give 1.
    num_ranks: number of ranks. With one rank no rows travel, and 1 is returned.
    """
    return 1 if num_ranks == 1 else max(n for n in DEGREES if n == 1 or max_rows >= n * MIN_ROWS)


@dataclass(frozen=True)
class TrialBatch:
    """A batch after gating and the exchange of row counts: all that a trial needs.

    modules: the modules and options of the layer.
    counts: the row counts, after the ranks have exchanged them.
    inputs: the rows and parameters of the call.
    orders: the routing of the call, from which plans are made.
    rows_for: returns the row counts and the routing for given numbers of chunks, with ``pipeline="solve"``;
        None if ``counts`` suit all numbers that the options allow.
    """

    modules: LayerModules
    counts: RankCounts
    inputs: Inputs
    orders: SortedSlots
    rows_for: RowsFor | None = None

    @property
    def rows(self) -> int:
        """Number of rows (tokens times choices) of the rank that has most."""
        return self.counts.max_tokens * self.modules.options.top_k

    @property
    def sizes(self) -> LayerSizes:
        """The sizes of the layer, for rows of the dtype that reaches the experts."""
        return memory_shape(self.modules, self.inputs.x_TM)

    def profile(self) -> Profile:
        """Returns the profile of this device and group: measured rates of products and messages.

        Collective the first time.
        """
        return profile_of(self.modules.ranks, self.inputs.x_TM.device, self.inputs.x_TM.dtype)

    @property
    def trials_allowed(self) -> bool:
        """Whether trials may run: they are worth their time, and change nothing in the model.

        They are worth their time if rows travel, gradients are wanted, and there are enough rows for two
        chunks. They would change something if experts are a user's modules, which may count the rows that
        they compute, or if there are callbacks. No trials run if all tasks run one after the other
        (``sequential``).
        """
        modules = self.modules
        shared = modules.shared_expert
        is_worth_it = self.counts.needs_grad and modules.ranks.size > 1 and self.rows >= 2 * MIN_ROWS
        are_modules = modules.experts.are_modules or (shared is not None and shared.are_modules)
        return is_worth_it and not (are_modules or modules.hooks is not None or modules.sequential)

    def runners(self, choices: Sequence[Choice]) -> list[Runner]:
        """Returns a runner for each choice, which computes this batch with its chunks and restore pair.

        The runners do not reduce other layers' gradients in their backward passes, as the layer does beside a
        `pmoe.GradientReducer`: a trial must not touch gradients. Collective if rows must be counted again.

        choices: the numbers of chunks and restore pairs.
        """
        counts = self.counts
        orders = self.orders
        if self.rows_for is not None:
            counts, orders = self.rows_for(
                tuple(dict.fromkeys(n for choice in choices for n in choice.degrees))
            )
        if orders.modules.gradients is not None:
            assert isinstance(orders.modules, LayerModules)
            orders = copy.copy(orders)
            orders.modules = replace(orders.modules, gradients=None)
        return [PipelineRunner(orders.plan(counts, choice)) for choice in choices]


def measure_trials(batch: TrialBatch, choices: Sequence[Choice]) -> list[tuple[float, float]]:
    """Returns the median seconds of forward and backward with each choice. Collective.

    1. Each choice runs one step that is not timed.
    2. All choices run in turns and are timed.
    3. Choices close to the fastest are timed again, because two equal steps on a CPU may differ by a tenth.

    Each median is the largest of any rank, so all ranks time the same choices again. The bytes that trials
    send do not count as traffic of the model.

    batch: the routed batch.
    choices: the numbers of chunks and restore pairs to try.
    """
    ranks = batch.modules.ranks
    device = batch.inputs.x_TM.device
    traffic = batch.modules.traffic
    traffic_before = replace(traffic)
    clock = clock_of(device)
    runs = [functools.partial(_run_both, runner, batch.inputs, clock) for runner in batch.runners(choices)]
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
    """Runs both passes once, and returns the seconds of each.

    The output T_O serves as its own gradient in backward.

    runner: computes both passes.
    inputs: the rows and parameters of the call.
    now: a clock in seconds.
    """
    start = now()
    y_TM, saved = runner.forward(inputs, keep=True)
    middle = now()
    assert saved is not None
    wanted = [tensor is not None and tensor.requires_grad for tensor in inputs.all]
    saved.backward(saved.tensors, wanted, y_TM)
    return middle - start, now() - middle
