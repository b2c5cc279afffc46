"""Trials: timed runs of both passes on a real batch, once for each of several choices.

A choice is a number of chunks (micro-batches) for each pass and a restore pair, which says whether the
dispatched rows and the hidden activation are kept, offloaded or made again for backward. A trial cuts the
batch into chunks and runs both passes, as the layer itself would with this choice. The layer's parameters,
gradients and statistics stay unchanged.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pmoe.call.modules import LayerModules
from pmoe.call.sizes import agreed_sizes, counted_degrees, rows_of_call
from pmoe.comm.agreement import largest, smallest
from pmoe.comm.counts import RankCounts, cuts
from pmoe.comm.failures import publishing_failures
from pmoe.engine.buffers.arena import pool
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.copies import trained_share
from pmoe.engine.plan.make_plan import RowsFor, SortedSlots
from pmoe.engine.plan.plan import Plan
from pmoe.engine.variants.trial import TrialBackward, TrialForward, is_out_of_memory
from pmoe.measure.profile import profile_of, stored_profile_of
from pmoe.measure.timing import begin_together, clock_of, in_rounds
from pmoe.planner.copy_work import NO_COPIES, CopyWork
from pmoe.planner.degree import DEGREES, MAX_DEGREE, TRIED, Choice, all_choices
from pmoe.planner.layer_sizes import CopyNumbers, LayerSizes
from pmoe.planner.memory import GRADIENTS, bytes_before_rows, peak_of_passes, predict
from pmoe.planner.profile import Profile
from pmoe.planner.rows_per_pass import counted_rows
from pmoe.planner.timed_rounds import MOST_ROUNDS, PassTimes, timed_rounds
from pmoe.runners.pipeline import make_backward, make_forward
from pmoe.schedule.restore import Restore
from pmoe.warn import warn_once

MIN_ROWS = 1024
"""Smallest number of rows of a chunk.

With fewer rows, matrix products are slower, and lose more time than the overlap of chunks saves. Measured by
bench/bench_overlap.py: with 4096 rows on a rank, 2 to 4 chunks are best.
"""


MEASURING_SHARE = 0.4
"""Fraction of the lowest peak of a step that the measurement of a profile may take.

It is less than 1 because the call already holds some memory.
"""

T = TypeVar("T")


def adaptive_degree(max_rows: int, num_ranks: int) -> int:
    """Returns the largest number of chunks with at least `MIN_ROWS` rows in each chunk, or 1.

    The result is one of `DEGREES` (1, 2, 4, 8, 16). It is 1 if there are too few rows for two chunks. It is
    also 1 with one rank, because no rows are sent.

    max_rows: number of rows (tokens times choices) of the rank with most rows, so that all ranks get the same
        result.
    num_ranks: number of ranks.
    """
    return 1 if num_ranks == 1 else max(n for n in DEGREES if n == 1 or max_rows >= n * MIN_ROWS)


def may_overlap(max_rows: int, num_ranks: int) -> bool:
    """Returns whether chunks may save time: there are several ranks, and enough rows for two chunks.

    max_rows: number of rows (tokens times choices) of the rank with most rows.
    num_ranks: number of ranks.
    """
    return adaptive_degree(max_rows, num_ranks) > 1


@dataclass(frozen=True)
class TrialBatch:
    """A routed batch: all that a trial needs, after gating and after ranks have exchanged their row counts.

    A trial is a timed run of both passes.

    modules: the modules and options of the layer.
    counts: the row counts, after the ranks have exchanged them.
    inputs: the rows and parameters of the call.
    orders: the routing of the call. A trial needs it to cut the batch into chunks (micro-batches).
    rows_for: a function that takes several numbers of chunks. It returns row counts and routing with which
        the batch can be cut into any of these numbers of chunks. Only ``pipeline="solve"`` needs it. If it is
        None, the batch can be cut only into the numbers of chunks in `degrees`.
    """

    modules: LayerModules
    counts: RankCounts
    inputs: Inputs
    orders: SortedSlots
    rows_for: RowsFor | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the rank with most tokens: its tokens times the choices of a token (top_k)."""
        return self.counts.max_tokens * self.modules.options.top_k

    @property
    def sizes(self) -> LayerSizes:
        """Sizes of the layer: widths, numbers of experts and ranks, and bytes of an element of a row.

        The number of copies of busy experts in the result is that of this batch, and not the largest number
        that the layer allows.
        """
        sizes = agreed_sizes(self.modules, self.inputs.x_TM, sorts_results=self.counts.sorts_results)
        num_local = self.modules.experts.num_local_experts
        hosted = self.orders.modules.copies
        stay = hosted is not None and hosted.stay
        copies = CopyNumbers.at_most(self.hosted_copies, num_local, self.modules.grid.ep.size, stay=stay)
        copies = replace(copies, limits_rows=self.modules.has_copies)
        return replace(sizes, copies=copies, copy_work=self.copy_work)

    @property
    def copy_work(self) -> CopyWork:
        """The work that copies of busy experts add to the tasks of this batch, equal on all ranks."""
        copies = self.orders.modules.copies
        if copies is None:
            return NO_COPIES
        return CopyWork.of(
            copies.plan,
            copies.rank_nodes.of_rank,
            is_sent=copies.fate != "present",
            stays=copies.stay,
            learned=trained_share(
                self.modules.experts.copied_parameters(self.inputs.parameters), copies.trained
            ),
        )

    @property
    def hosted_copies(self) -> int:
        """The most copies of busy experts that any rank hosts for this batch; 0 without copies."""
        copies = self.orders.modules.copies
        return 0 if copies is None else copies.per_rank

    def profile(self) -> Profile:
        """Returns the profile for this device and process group: measured rates of products and messages.

        A missing profile is measured first, in less memory than any step of the layer needs. The first call
        is collective.
        """
        x_TM = self.inputs.x_TM
        return profile_of(self.modules.ranks, x_TM.device, x_TM.dtype, self.measuring_bytes)

    def stored_profile(self) -> Profile | None:
        """Returns the profile for this device and process group, or None; never measures one.

        A profile has measured rates of matrix products and messages. The first call is collective.
        """
        return stored_profile_of(self.modules.ranks, self.inputs.x_TM.device, self.inputs.x_TM.dtype)

    @functools.cached_property
    def measuring_bytes(self) -> float:
        """The bytes that a measurement of the speed of products and messages may allocate.

        The number is the same on every rank. It is `MEASURING_SHARE` times the lowest predicted peak of a
        step, on the rank that needs the least, so that a measurement needs less memory than a step on every
        rank. The step with the most chunks has the lowest peak. The prediction needs row counts for this
        number of chunks. With ``pipeline="solve"`` these counts are not known yet, so the rows are counted
        first. The first access is collective.
        """
        batch = self.counted_for(all_choices([(n, n) for n in TRIED], self.modules.pairs[:1]))
        choices = all_choices([(n, n) for n in batch.degrees], self.modules.pairs)
        own = min(own_peaks(batch, choices))
        device = self.inputs.x_TM.device
        stage = "comparing the predicted memory of ranks"
        return MEASURING_SHARE * smallest(self.modules.ranks, device, own, stage=stage)

    @functools.cached_property
    def peaks(self) -> dict[tuple[int, int, Restore], float]:
        """Cache of the predicted peaks: bytes of memory of a step, on the rank that needs the most.

        A key is (number of chunks of forward, number of chunks of backward, restore pair), where the restore
        pair says how backward gets the rows and the hidden activation. The cache is empty at first.
        `predicted_peaks` fills it, with the same numbers on all ranks.
        """
        return {}

    @functools.cached_property
    def memory_of_rank(self) -> dict[tuple[int, int, Restore], StepMemory]:
        """Cache of the predicted memory of steps on this rank, with the same keys as `peaks`.

        The cache is empty at first. `own_memory` fills it.
        """
        return {}

    @property
    def trials_allowed(self) -> bool:
        """Whether trials on this batch are worth their time, and change nothing in the model.

        Trials are worth their time if all of these are true: there are several ranks, gradients are needed,
        there are enough rows for two chunks, and communication may overlap with computation (the layer is not
        ``sequential``).

        Trials may change something in the model if the layer has callbacks, or if experts are a user's
        modules, because a trial runs callbacks and modules, too. A user's module may, for example, count the
        rows that it computes.
        """
        return self.counts.needs_grad and trials_pay(self.modules, self.rows)

    @property
    def may_try(self) -> bool:
        """Whether trials may run on this batch: they are allowed, and no rank lacks host memory for them.

        A trial is a timed run of both passes. Trials with restore pairs that offload need free host memory.
        """
        return self.trials_allowed and not self.counts.host_shortage

    @property
    def degrees(self) -> tuple[int, ...]:
        """The numbers of chunks into which this batch can be cut without counting its rows again.

        Rows are counted in equal parts of the batch. n chunks can be made if n divides the number of parts.
        With ``pipeline="solve"`` the options allow many n, and no reasonable number of parts is a multiple of
        all these n. So the result has only some of the n. Without ``pipeline="solve"`` it has all n that the
        options allow.
        """
        options = self.modules.options
        if not options.solves:
            return options.degrees
        bins = self.counts.send.shape[0]
        return tuple(n for n in options.degrees if bins % n == 0 and n in (self.counts.depth or {n}))

    def counted_for(self, choices: Sequence[Choice]) -> TrialBatch:
        """Returns this batch, with rows counted so that it can be cut into all given numbers of chunks.

        With ``pipeline="solve"``, the present counts fit only some numbers of chunks (`degrees`), so
        ``rows_for`` counts the rows again, which is collective. If there is no ``rows_for``, the batch is
        returned unchanged.

        If all numbers of chunks divide `MAX_DEGREE`, rows are also counted for `MAX_DEGREE` chunks, so that
        the memory of a step with so many chunks can be predicted. That step needs the least memory. Trials
        (timed runs of both passes) may take only this much memory
        (`pmoe.choose.part_of_batch.smallest_peak`).

        choices: a choice has the numbers of chunks of both passes, and a restore pair: how backward gets the
            rows and the hidden activation.
        """
        if self.rows_for is None:
            return self
        degrees = tuple(dict.fromkeys(n for choice in choices for n in choice.degrees))
        if all(MAX_DEGREE % n == 0 for n in degrees):
            degrees = tuple(dict.fromkeys((*degrees, MAX_DEGREE)))
        counts, orders = self.rows_for(degrees)
        return replace(self, counts=counts, orders=orders)

    @functools.cached_property
    def _orders(self) -> SortedSlots:
        """The rows' order for a trial, in which backward all-reduces no gradients of other modules.

        A trial is a timed run of both passes. In a training step, a `pmoe.GradientReducer` all-reduces
        gradients of other modules during this layer's backward pass. A trial is not a training step, so its
        backward pass does not begin these all-reduces.
        """
        orders = self.orders
        if orders.modules.gradients is not None:
            assert isinstance(orders.modules, LayerModules)
            orders = copy.copy(orders)
            orders.modules = replace(orders.modules, gradients=None)
        return orders

    def plan(self, choice: Choice) -> Plan:
        """Returns the plan for this batch with a choice: how many rows of each chunk go where.

        It is the plan that the layer itself would make, without the all-reduces of a `pmoe.GradientReducer`.

        choice: the numbers of chunks and the restore pair: how backward gets the rows and the hidden
            activation.
        """
        return self._orders.plan(self.counts, choice)


def first_inputs(inputs: Inputs, count: int, num_rows: int) -> Inputs:
    """Returns the inputs of a call with only the first tokens, detached from the graph.

    inputs: the inputs of a call.
    count: number of tokens.
    num_rows: number of lines of ``weight_TK`` for these tokens: ``count``, unless the gate picks tokens.
    """
    shared_weight_T = inputs.shared_weight_T
    return inputs._replace(
        x_TM=_first(inputs.x_TM, count),
        weight_TK=_first(inputs.weight_TK, num_rows),
        shared_weight_T=None if shared_weight_T is None else _first(shared_weight_T, count),
    )


def _first(tensor: Tensor, count: int) -> Tensor:
    """Returns the first ``count`` rows of a tensor, detached, but with the tensor's ``requires_grad``."""
    return tensor.detach()[:count].requires_grad_(tensor.requires_grad)


def predicted_peaks(batch: TrialBatch, choices: Sequence[Choice]) -> list[float]:
    """Returns the predicted peak of a step with each choice, in bytes, on the rank that needs the most.

    A step is a forward and a backward pass; only a forward pass if no gradients are needed. The prediction
    uses the row counts of the batch (`pmoe.planner.memory.predict`). It includes the gradients of the
    experts' parameters, but not the gate's memory, because trials (timed runs of both passes) do not run the
    gate.

    The peaks are cached (`TrialBatch.peaks`). Collective if a peak is not in the cache.

    batch: the routed batch.
    choices: the numbers of chunks and restore pairs. A restore pair says how backward gets the rows and the
        hidden activation.
    """
    keys = [_key(choice) for choice in choices]
    missing = {key: choice for key, choice in zip(keys, choices, strict=True) if key not in batch.peaks}
    if missing:
        peaks = own_peaks(batch, list(missing.values()))
        device = batch.inputs.x_TM.device
        stage = "comparing the predicted memory of choices"
        agreed = largest(batch.modules.ranks, device, peaks, stage=stage)
        batch.peaks.update(zip(missing, agreed, strict=True))
    return [batch.peaks[key] for key in keys]


def own_peaks(batch: TrialBatch, choices: Sequence[Choice]) -> list[float]:
    """Returns the predicted peak of a step with each choice, in bytes on this rank. Not collective.

    batch: the routed batch.
    choices: the numbers of chunks and restore pairs (`StepMemory.peak`).
    """
    return [memory.peak for memory in own_memory(batch, choices)]


def own_gradients(batch: TrialBatch, choices: Sequence[Choice]) -> list[float]:
    """Returns the bytes of gradients in the peak of a step with each choice, on this rank. Not collective.

    batch: the routed batch.
    choices: the numbers of chunks and restore pairs (`StepMemory.gradients`).
    """
    return [memory.gradients for memory in own_memory(batch, choices)]


def own_memory(batch: TrialBatch, choices: Sequence[Choice]) -> list[StepMemory]:
    """Returns the predicted memory of a step with each choice on this rank. Not collective.

    The predictions are cached (`TrialBatch.memory_of_rank`).

    batch: the routed batch.
    choices: the numbers of chunks and restore pairs (`predicted_memory`).
    """
    known = batch.memory_of_rank
    for choice in choices:
        if _key(choice) not in known:
            known[_key(choice)] = predicted_memory(batch, choice)
    return [known[_key(choice)] for choice in choices]


def _key(choice: Choice) -> tuple[int, int, Restore]:
    """Returns the key under which the predicted peak of a step with this choice is cached."""
    return choice.forward, choice.backward, choice.restore


def trials_pay(modules: LayerModules, max_rows: int) -> bool:
    """Returns whether trials are worth their time in training, and change nothing in the model.

    A trial is a timed run of both passes. `TrialBatch.trials_allowed` lists the conditions.

    modules: the modules and options of the layer.
    max_rows: number of rows (tokens times choices) of the rank with most tokens.
    """
    shared = modules.shared_expert
    is_worth_it = may_overlap(max_rows, modules.ranks.size)
    are_modules = modules.experts.are_modules or (shared is not None and shared.are_modules)
    return is_worth_it and not (are_modules or modules.hooks is not None or modules.sequential)


def routing_bytes(batch: TrialBatch) -> int:
    """Returns the bytes that this rank holds when a call has routed the tokens of the batch.

    The call holds them while trials (timed runs of both passes) run on a part of its tokens.

    batch: the routed batch of all tokens.
    """
    # The rows of a call with pad_to_capacity depend on the numbers of chunks for which they were counted.
    call = rows_of_call(batch.modules, batch.inputs.x_TM.shape[0], batch.degrees)
    return bytes_before_rows(batch.sizes, call)


class StepMemory(NamedTuple):
    """Predicted bytes of a step with one choice on this rank.

    peak: the most bytes in use at once. It includes the gradients of parameters, but not the gate's memory.
    gradients: bytes of the gradients of parameters that exist during the backward pass, at most ``peak``.
        Sums of bfloat16 and float16 gradients may be float32. 0 if no gradients are needed.
    """

    peak: float
    gradients: float


def predicted_memory(batch: TrialBatch, choice: Choice) -> StepMemory:
    """Predicts the bytes of a step with a choice on this rank.

    batch: the routed batch.
    choice: the numbers of chunks and the restore pair: how backward gets the rows and the hidden activation.
    """
    modules = batch.modules
    counts = batch.counts
    call = rows_of_call(modules, batch.inputs.x_TM.shape[0], counted_degrees(modules, choice))
    sizes = replace(batch.sizes, rotates=batch.sizes.rotates or choice.rearranged)
    # A skewed batch is cut into more chunks than the choice says, so that each fits into its buffer.
    degrees = [
        cuts(n, counts.send.shape[0])[counts.depth.get(n, 0)] for n in (choice.forward, choice.backward)
    ]
    forward, backward = (
        counted_rows(sizes, counts, modules.ranks.rank, n, modules.grid.esp.rank) for n in degrees
    )
    memory = predict(sizes, call, forward, backward, choice.restore, rearranged=degrees[0] != degrees[1])
    if not counts.needs_grad:  # there is no backward pass, and forward saves nothing
        output = batch.inputs.x_TM.nbytes
        return StepMemory(float(memory.forward_peak - memory.saved + output), 0.0)
    return StepMemory(float(peak_of_passes(memory)), float(memory.tensors[GRADIENTS]))


DROPPED = (math.inf, math.inf)
"""The (forward, backward) seconds that a trial returns if any rank had too little memory."""


def measure_trials(
    batch: TrialBatch, choices: Sequence[Choice], most_rounds: int = MOST_ROUNDS
) -> dict[Choice, PassTimes]:
    """Runs and times both passes with each choice. Returns the seconds of each choice. Collective.

    If any rank runs out of memory with a choice, all ranks leave the choice out of the result, and rank 0
    warns once.

    The arguments are those of `run_trials`.

    Raises OutOfMemoryError on every rank if no choice is left.
    """
    times, failed = run_trials(batch, choices, most_rounds)
    warn_of_dropped(batch, failed, len(choices))
    return times


def run_trials(
    batch: TrialBatch, choices: Sequence[Choice], most_rounds: int = MOST_ROUNDS
) -> tuple[dict[Choice, PassTimes], list[Trial]]:
    """Runs and times both passes with each choice. Collective.

    Returns the seconds of each choice, and the trials in which some rank ran out of memory. Both are for the
    same choices on all ranks. The choices of these trials have no seconds.

    First a step runs with each choice, to warm up. Then come timed rounds, each with one step of every choice
    that may still be the fastest, until it is clear which choice is (`pmoe.planner.timed_rounds`). After each
    round the ranks agree on the seconds of the slowest rank, so all ranks time the same choices in the next
    round. The bytes that trials send do not count in the layer's statistics of traffic.

    batch: the routed batch.
    choices: the numbers of chunks and restore pairs to try, each once. A restore pair says how backward gets
        the rows and the hidden activation.
    most_rounds: largest number of timed rounds.
    """
    ranks = batch.modules.ranks
    device = batch.inputs.x_TM.device
    traffic = batch.modules.traffic
    traffic_before = replace(traffic)
    trials = {choice: Trial(batch, choice) for choice in choices}

    def run_round(round_choices: Sequence[Choice]) -> list[tuple[float, float]]:
        """Runs a step with each choice. Returns the (forward, backward) seconds of each step.

        They are the seconds of the slowest rank, which may be one rank in forward and another in backward.
        """
        runs = [trials[choice].run for choice in round_choices]
        turns = in_rounds(runs, 1, warm_up=0, begin=begin_together(ranks, device))
        own_seconds = [seconds for [passes] in turns for seconds in passes]
        agreed = largest(ranks, device, own_seconds, stage="agreeing on the seconds of trials")
        return list(zip(agreed[::2], agreed[1::2], strict=True))

    times = timed_rounds(choices, run_round, most_rounds)
    vars(traffic).update(vars(traffic_before))
    return times, [trial for trial in trials.values() if trial.has_failed]


class Trial:
    """Runs both passes of a batch with one choice, and finds out whether any rank runs out of memory.

    batch: the routed batch.
    choice: the numbers of chunks and the restore pair: how backward gets the rows and the hidden activation.
    has_failed: whether any rank ran out of memory, equal on all ranks. If True, this choice is not run again.
    failure: the out-of-memory error of this rank; None if this rank had enough memory.
    """

    def __init__(self, batch: TrialBatch, choice: Choice) -> None:
        self.batch = batch
        self.choice = choice
        self.has_failed: bool = False
        self.failure: Exception | None = None

    @torch.no_grad()
    def run(self) -> tuple[float, float]:
        """Runs both passes once, and returns the (forward, backward) seconds of this rank. Collective.

        The seconds are infinite (`DROPPED`) if any rank runs out of memory, now or in an earlier run.

        Each pass first allocates its buffers. Then the ranks exchange whether any of them ran out of memory.
        If one rank did, no rank begins to send, so that no rank waits for messages that never come. A rank
        that runs out of memory later still takes part in all messages of the pass
        (`pmoe.engine.variants.trial`). The layer's output serves as the gradient with which the backward pass
        begins, because only the time matters.
        """
        if self.has_failed:
            return DROPPED
        inputs = self.batch.inputs
        with publishing_failures(self.batch.modules.ranks, "a trial"):
            # The plan is made for each run: the plans of all choices together would take too much memory.
            plan, _ = self._timed(lambda: self.batch.plan(self.choice))
            forward, made = self._timed(lambda: make_forward(_some(plan), inputs, True, TrialForward))
            if self._any_failed() or forward is None:
                return DROPPED
            y_TM, ran = self._timed(forward.run)
            self.failure = self.failure or forward.failure
            forward_seconds = made + ran
            backward, made = self._timed(lambda: self._backward(forward, _some(y_TM)))
            if self._any_failed() or backward is None:
                return DROPPED
            _, ran = self._timed(backward.run)
            self.failure = self.failure or backward.failure
            backward_seconds = made + ran
            if self._any_failed():
                return DROPPED
        return forward_seconds, backward_seconds

    @torch.no_grad()
    def has_memory(self, num_bytes: float) -> bool:
        """Returns whether every rank has enough memory for a step with the choice. Collective.

        ``num_bytes`` bytes are allocated and freed again; no pass runs. First the buffers of the forward pass
        are allocated as in a step. The remaining bytes are allocated in blocks as large as the layer's input
        (at least `MIN_ROWS` rows).

        num_bytes: the predicted bytes of the step on this rank.
        """
        inputs = self.batch.inputs
        rows_TM = inputs.x_TM
        memory = pool(rows_TM.device).device
        with publishing_failures(self.batch.modules.ranks, "a trial"):
            plan, _ = self._timed(lambda: self.batch.plan(self.choice))
            forward, _ = self._timed(lambda: make_forward(_some(plan), inputs, True, TrialForward))
            if forward is not None:
                # On a rank with few tokens, blocks as small as its input would be millions of blocks.
                shape = (max(rows_TM.shape[0], MIN_ROWS), rows_TM.shape[1])
                block_bytes = math.prod(shape) * rows_TM.element_size()
                num_blocks = max(int(num_bytes) - forward.taken_bytes, 0) // block_bytes
                self._timed(lambda: [memory.new(rows_TM, *shape) for _ in range(num_blocks)])
                forward.arena.close()
        return not self._any_failed()

    def _backward(self, forward: TrialForward, grad_TM: Tensor) -> TrialBackward:
        """Makes the backward pass that follows a forward pass, and allocates its buffers.

        forward: the forward pass, after it has run.
        grad_TM: (T, M), the gradient of the layer's output: T tokens, M = d_model.
        """
        state = forward.saved
        state.wanted = [tensor is not None and tensor.requires_grad for tensor in self.batch.inputs.all]
        return make_backward(forward.plan, grad_TM, state, TrialBackward)

    def _timed(self, function: Callable[[], T]) -> tuple[T | None, float]:
        """Calls a function and measures its seconds, unless this rank has run out of memory.

        There are three cases:

        - This rank ran out of memory in an earlier call (`failure` is set): the function is not called.
          Returns (None, 0).
        - The rank runs out of memory in this call: the error is stored in `failure`. Returns (None, 0).
        - Otherwise: returns (result of the function, seconds). Any other error is raised.
        """
        if self.failure is not None:
            return None, 0.0
        now = clock_of(self.batch.inputs.x_TM.device)
        start = now()
        try:
            result = function()
            return result, now() - start
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.failure = error.with_traceback(None)  # a traceback's frames keep tensors alive
            return None, 0.0

    def _any_failed(self) -> bool:
        """Returns whether any rank has run out of memory, and stores this in `has_failed`. Collective."""
        ranks = self.batch.modules.ranks
        own = [float(self.failure is not None)]
        [failed] = largest(
            ranks, self.batch.inputs.x_TM.device, own, stage="agreeing on the memory of a trial"
        )
        self.has_failed = bool(failed)
        return self.has_failed


def _some(value: T | None) -> T:
    """Returns ``value``, which must not be None. Type checkers then know that it is not None."""
    assert value is not None
    return value


def warn_of_dropped(batch: TrialBatch, dropped: Sequence[Trial], num_trials: int) -> None:
    """Warns on rank 0 of choices that are not used because some rank has too little memory for them.

    A trial is a timed run of both passes.

    batch: the routed batch.
    dropped: the trials in which some rank ran out of memory, the same on every rank. If there are none,
        nothing is done.
    num_trials: the number of all trials, each with another choice.

    Raises OutOfMemoryError on every rank if ``dropped`` holds all choices that were tried.
    """
    if not dropped:
        return
    choices = [trial.choice for trial in dropped]
    listed = ", ".join(f"n={choice.forward} {choice.restore}" for choice in choices)
    if batch.modules.ranks.rank == 0:
        warn_once(f"a trial ran out of memory on some rank, so these choices are not used: {listed}")
    if len(dropped) == num_trials:
        own = next((trial.failure for trial in dropped if trial.failure is not None), None)
        raise torch.OutOfMemoryError(
            f"some rank has too little memory for every tried choice: {listed}"
        ) from own


def smallest_with_enough_memory(batch: TrialBatch, choices: Sequence[Choice]) -> Choice:
    """Returns the choice with the lowest predicted peak, after testing that every rank has memory for it.

    The test allocates the memory of a step and frees it again. The function is for a batch for which all
    other choices have run out of memory. Collective.

    batch: the routed batch.
    choices: the numbers of chunks and restore pairs to choose from. A restore pair says how backward gets the
        rows and the hidden activation.

    Raises OutOfMemoryError, with the bytes that would be enough, on every rank if any rank has too little
    memory for the choice.
    """
    peaks = predicted_peaks(batch, choices)
    least, num_bytes = min(zip(choices, peaks, strict=True), key=lambda pair: pair[1])
    trial = Trial(batch, least)
    if not trial.has_memory(own_peaks(batch, [least])[0]):
        raise torch.OutOfMemoryError(
            "some rank has too little memory for these tokens, with every number of chunks. The least is of "
            f"n={least.forward} with {least.restore}: about {num_bytes / 2**20:.1f} MiB beside the model "
            "and the layer's input. Free memory, pass fewer tokens, or use more ranks"
        ) from trial.failure
    return least
