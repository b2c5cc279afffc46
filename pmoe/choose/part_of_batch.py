"""Runs trials on only the first tokens of a batch, to save memory. A trial is a timed step.

A chunk is a micro-batch, n the number of chunks. Trials with several n find the fastest n. In a layer that
reuses memory, chunks share a few buffers, each as large as one chunk. So a step with n = 1 needs the most
memory, and a step with the largest n needs the least.

A trial must not need more memory than the layer's later steps. How much memory these steps need depends on
the n that is chosen in the end, which is not known yet. A trial on fewer tokens needs less memory. So trials
run in stages. A stage has a limit of memory. The trials of a stage run on the first tokens of the batch, as
many as stay within the limit. A stage usually tries three n: the fastest so far, and the next smaller n.

If a stage finds that n = 2 is faster than larger n, the layer's later steps will have at most 2 chunks. So
they will need at least the memory of a step with n = 2. The next stage may take this much memory, so more
tokens fit. The stages end when the fastest n of a stage needs the least memory of all n in this stage, and a
step with this n needs no more memory than the stage was allowed:

    stage   allowed memory      n that are tried     fastest
      1     a step with n = 16  8, 4, 2              2
      2     a step with n = 2   2, 1                 2, which needs the least: the search ends

The seconds of the whole batch are computed by a formula that is fitted to the trials:

    seconds(n) = rows + filling / n + chunk * n

    rows      proportional to the tokens: matrix products and messages
    filling   proportional to the tokens: the messages of the first and the last chunk, during which no
              computation runs
    chunk     independent of the tokens: kernel launches, and work of the host for each chunk
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from pmoe.choose.padded_part import first_padded_tokens
from pmoe.choose.slots import requested_slots
from pmoe.choose.trials import (
    Trial,
    TrialBatch,
    first_inputs,
    measure_trials,
    own_gradients,
    own_peaks,
    predicted_peaks,
    routing_bytes,
    warn_of_dropped,
)
from pmoe.comm.agreement import smallest
from pmoe.comm.counts import CountsExchange, Fault
from pmoe.comm.failures import publishing_failures
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.make_plan import SortedSlots
from pmoe.engine.variants.trial import is_out_of_memory
from pmoe.ordering.sorted import Tokens
from pmoe.planner.degree import Choice, all_choices
from pmoe.planner.degree_trials import NEAR
from pmoe.planner.timed_rounds import MOST_ROUNDS, PassTimes
from pmoe.planner.trial_memory import ALIKE, fraction_of_tokens
from pmoe.schedule.restore import Restore

MIN_TOKENS = 240
"""Smallest number of tokens of a trial. With fewer tokens, the seconds say nothing about the whole batch."""

STAGE = 3
"""Number of choices (number of chunks and restore pair) that a stage of trials usually tries.

A stage runs on as many tokens as fit for the choice that needs the most memory. With more choices, a stage
would have to run on fewer tokens.
"""

SHRINKS = 6
"""How often the number of tokens of a trial is reduced if its predicted peak is above the allowed memory."""

TESTED = 0.85
"""Fraction of a step's predicted memory that a memory test allocates. The rest is for the call's routing."""


def measure_in_stages(
    batch: TrialBatch,
    choices: Sequence[Choice],
    most_rounds: int = MOST_ROUNDS,
    one_is_taken: bool = False,
) -> dict[Choice, PassTimes]:
    """Measures choices by trials on the first tokens. Returns the seconds of the whole batch. Collective.

    A trial is a timed run of both passes. A choice is a number of chunks (micro-batches) and a restore pair:
    how backward gets the rows and the hidden activation. The result is a dict {choice: seconds}. The caller
    takes one of the choices for the layer's steps.

    A trial must not need more memory than the layer's later steps. How much memory these steps need depends
    on the choice that is taken in the end. So trials start with little memory: the predicted peak of the
    layer's smallest step, the step that needs the least memory. If all choices need about as much memory as
    the smallest step, all are tried together (`measure_in_little_memory`). Otherwise trials run in stages, on
    the first tokens of the batch:

    1. The first stage may take the memory of the layer's smallest step. It tries the choices that need the
       least memory, on as many tokens as fit into this memory. More chunks need less memory.
    2. The layer will not take the choices that need less memory than the fastest choice of a stage, because
       they are slower. So the layer's later steps will need at least the memory of the fastest choice. The
       next stage may take this much memory. It tries the fastest choice again, and choices that need more
       memory.
       But if the fastest choice is the one of ``choices`` that needs the least memory, the caller may ask for
       a choice with still less memory, and take that one. So the next stage may take no more memory. It
       compares the fastest choice with the next one that was not much slower. Usually more tokens fit.
    3. The stages end in one of four cases:

       - The fastest choice of a stage needs the least memory of all choices in this stage, and the stage
         could take as much memory as a step with this choice.
       - The choice of ``choices`` that needs the least memory is clearly the fastest, or is the fastest in a
         stage with only two choices. The caller may then ask for a choice with still less memory, and the
         later steps may run with it. This case is skipped if ``one_is_taken``.
       - All choices that need more memory than the fastest choice were tried, and each of them took more than
         `NEAR` times as long as the fastest choice.
       - A later stage lacks memory. The result then has the choices of the stages before.

    The caller may also ask for a choice with less memory because a prediction was wrong, or once more because
    other work slowed its first trials. If this choice is taken, earlier trials may have needed more memory
    than later steps.

    batch: the routed batch.
    choices: the numbers of chunks to try, with one restore pair, each once.
    most_rounds: largest number of timed rounds of a stage.
    one_is_taken: whether the step of this batch will run with one of ``choices``, and with no other choice.
        The smallest step is then the smallest of these.

    The result has no entry for a choice that was not tried, or that ran out of memory in a trial on any rank.
    The result is empty if fewer than `MIN_TOKENS` tokens fit into the memory of the first stage.

    Raises OutOfMemoryError on every rank if all choices of the first stage run out of memory.
    """
    peaks = dict(zip(choices, own_peaks(batch, choices), strict=True))
    peaks_of_largest = dict(zip(choices, predicted_peaks(batch, choices), strict=True))
    allowed = smallest_peak(batch, choices if one_is_taken else None)
    all_need_as_much = largest_ratio(batch, max(peaks.values()), allowed) <= ALIKE
    if batch.modules.options.budget is not None or all_need_as_much:
        return measure_in_little_memory(batch, choices, most_rounds, one_is_taken)
    by_memory = sorted(choices, key=lambda choice: peaks_of_largest[choice])
    remaining = by_memory
    most_choices = STAGE
    parts: list[TrialsOfPart] = []
    while True:
        stage = _choices_of_stage(batch, remaining, peaks, allowed, most_choices)
        share = share_of_tokens(batch, stage, allowed)
        try:
            part = _measure_part(batch, stage, share, allowed, most_rounds)
        except torch.OutOfMemoryError:
            if not parts:
                raise
            part = None
        if part is None:  # too few tokens fit, or every choice of this stage ran out of memory
            return times_of_whole(parts)
        parts.append(part)
        times = times_of_whole(parts)
        fastest = min(part.times, key=lambda choice: times[choice].step)
        remaining = [fastest, *remaining[remaining.index(fastest) + 1 :]]
        remaining = [
            choice
            for choice in remaining
            if choice not in times or times[choice].step <= NEAR * times[fastest].step
        ]
        least_of_step = smallest_peak(batch, [fastest])
        needs_least = fastest == stage[0]
        if len(remaining) == 1:
            return times
        if needs_least and largest_ratio(batch, least_of_step, allowed) <= ALIKE:
            return times
        # A search may ask for a choice with still less memory next, if the fastest choice is clearly faster
        # than all others. Later steps may run with that choice. So the trials until then take no more memory.
        less_may_follow = fastest == by_memory[0] and not one_is_taken
        others = [choice for choice in times if choice != fastest]
        is_clear = bool(others) and all(times[choice].is_slower_than(times[fastest]) for choice in others)
        if less_may_follow and (is_clear or len(stage) <= 2 or most_choices == 2):
            return times
        # If the choice that needs the least memory seems to be the fastest, it is compared with the next
        # choice on more tokens: on few tokens, errors of measured seconds are large. Usually more tokens fit,
        # because the stage has only two choices, also if the allowed memory stays the same.
        most_choices = 2 if needs_least else STAGE
        if not less_may_follow:
            allowed = least_of_step


def _choices_of_stage(
    batch: TrialBatch,
    remaining: Sequence[Choice],
    peaks: Mapping[Choice, float],
    allowed: float,
    most_choices: int = STAGE,
) -> Sequence[Choice]:
    """Returns the choices that the next stage of trials tries: usually the first of ``remaining``.

    Collective. A trial is a timed run of both passes. ``remaining`` begins with the choices that need the
    least memory on the rank that needs the most.

    There are two exceptions:

    - If all choices in ``remaining`` need at most 8 % more memory than those of the stage, on every rank, the
      stage tries all of them.
    - If fewer than `MIN_TOKENS` tokens would fit into the ``allowed`` memory in some trial of the stage,
      the stage tries only the first two choices, which need less memory.

    batch: the routed batch.
    remaining: the choices (numbers of chunks, and how backward gets the rows and the hidden activation) that
        may still be the fastest, sorted by memory.
    peaks: predicted peak of each choice with the whole batch, in bytes on this rank.
    allowed: bytes that the trials of the next stage may take on this rank.
    most_choices: usual number of choices of the stage.
    """
    stage = remaining[:most_choices]
    most_of_all = max(peaks[choice] for choice in remaining)
    most_of_stage = max(peaks[choice] for choice in stage)
    if largest_ratio(batch, most_of_all, most_of_stage) <= ALIKE:
        return remaining
    if share_of_tokens(batch, stage, allowed) * batch.counts.max_tokens >= MIN_TOKENS:
        return stage
    return remaining[:2]


def measure_in_little_memory(
    batch: TrialBatch,
    choices: Sequence[Choice],
    most_rounds: int = MOST_ROUNDS,
    one_is_taken: bool = False,
) -> dict[Choice, PassTimes]:
    """Measures choices by trials on the first tokens of the batch. Returns the seconds of all tokens.

    A trial is a timed run of both passes. Trials run on the first tokens of the batch, as many as fit into
    the allowed memory. The seconds of the whole batch are computed from the seconds of these tokens
    (`times_of_whole`). A trial must not need more memory than the layer's later steps, so the allowed memory
    is

    - without a memory budget: the lowest predicted peak over all numbers of chunks that the layer may still
      choose, not only those in ``choices``, because the layer may take the number with this peak. If
      ``one_is_taken``, the allowed memory is the lowest peak over ``choices``;
    - with a memory budget: the budget, because a step may need all of it.

    If the memory is enough for all tokens, trials run on the whole batch. The result is a dict {choice:
    seconds}. Collective.

    batch: the routed batch.
    choices: the numbers of chunks (micro-batches) and restore pairs to try, each once. A restore pair says
        how backward gets the rows and the hidden activation.
    most_rounds: largest number of timed rounds.
    one_is_taken: whether the step of this batch will run with one of ``choices``, and with no other choice.

    The result has no entry for a choice that ran out of memory in a trial on any rank. The result is empty if
    fewer than `MIN_TOKENS` tokens fit.

    Raises OutOfMemoryError on every rank if all choices run out of memory.
    """
    budget = batch.modules.options.budget
    if budget is not None and max(predicted_peaks(batch, choices)) <= budget:
        return measure_trials(batch, choices, most_rounds)
    if budget is not None:
        allowed = budget / ALIKE
    elif one_is_taken:
        allowed = min(own_peaks(batch, choices))
    else:
        allowed = smallest_peak(batch)
    share = share_of_tokens(batch, choices, allowed)
    part = _measure_part(batch, choices, share, allowed, most_rounds)
    return {} if part is None else times_of_whole([part])


@dataclass(frozen=True)
class TrialsOfPart:
    """Measured seconds of trials that ran only on the first tokens of a batch.

    A trial is a timed run of both passes.

    share: the number of tokens of a trial, divided by the number of tokens of the whole batch.
    times: the seconds that these tokens took with each choice (numbers of chunks, and how backward gets the
        rows and the hidden activation).
    """

    share: float
    times: Mapping[Choice, PassTimes]


def _measure_part(
    batch: TrialBatch, choices: Sequence[Choice], share: float, allowed: float, most_rounds: int
) -> TrialsOfPart | None:
    """Runs trials on the first tokens of the batch, and returns their seconds. Collective.

    A trial is a timed run of both passes. Returns None if trials would have to run on fewer than `MIN_TOKENS`
    tokens.

    batch: the routed batch of all tokens.
    choices: the numbers of chunks and restore pairs to try, each once. A restore pair says how backward gets
        the rows and the hidden activation.
    share: the fraction of the batch's tokens on which trials run. Fewer tokens are used if these tokens need
        more than ``allowed`` bytes on any rank.
    allowed: bytes that trials may take on this rank: the lowest predicted peak of a step, over all choices
        that the layer may still take.
    most_rounds: largest number of timed rounds.
    """
    part = _part_with_memory(batch, choices, share, allowed)
    if part is None:
        return None
    share, tokens = part
    return TrialsOfPart(share, measure_trials(tokens, choices, most_rounds))


def _part_with_memory(
    batch: TrialBatch, choices: Sequence[Choice], share: float, allowed: float
) -> tuple[float, TrialBatch] | None:
    """Returns the part of a batch on which trials run in the allowed memory: its first tokens. Collective.

    A trial is a timed run of both passes. The result is (fraction of the tokens, batch of these tokens). It
    is None if fewer than `MIN_TOKENS` tokens fit, or if any rank lacks the memory to cut them off.

    The first tokens may be routed less evenly than the whole batch. Half of the tokens then need more than
    half of the memory. So the peak is predicted from the row counts of these first tokens. If the peak is
    above the allowed memory on any rank, fewer tokens are taken, at most `SHRINKS` times. If the peak is then
    still above the allowed memory, the result is None, as if too few tokens fitted.

    batch: the routed batch of all tokens.
    choices: the numbers of chunks and restore pairs that will be tried on these tokens. A restore pair says
        how backward gets the rows and the hidden activation.
    share: the fraction of the tokens to try first. It would fit if the peak were proportional to the number
        of tokens. If it is 1, the whole batch is returned.
    allowed: bytes that trials may take on this rank: the lowest predicted peak of a step, over all choices
        that the layer may still take.
    """
    if share * batch.counts.max_tokens < MIN_TOKENS:
        return None
    if share == 1.0:
        return share, batch
    free = allowed - batch.inputs.x_TM.nbytes
    for _ in range(1 + SHRINKS):
        part = _first_tokens(batch, share)
        if part is None:
            return None
        fraction = _fraction_on_every_rank(batch, part, choices, free)
        if fraction == 1.0:
            return share, part
        share *= fraction
        if share * batch.counts.max_tokens < MIN_TOKENS:
            return None
    return None


def _first_tokens(batch: TrialBatch, share: float) -> TrialBatch | None:
    """Calls `first_tokens`. Raises MemoryError if this rank has too little memory to exchange row counts.

    The error has another type than OutOfMemoryError, because it may be raised on this rank only. Callers
    assume that all ranks raise an OutOfMemoryError together, and go on after it.
    """
    try:
        return first_tokens(batch, share)
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"too little memory for the tokens on which trials run: {error}") from error


def has_enough_tokens(batch: TrialBatch, choices: Sequence[Choice]) -> bool:
    """Returns whether trials of all choices can run on enough tokens (`MIN_TOKENS`). Collective.

    A trial is a timed run of both passes. A trial may use only as much memory as a step with the choice that
    needs the least memory. With another choice, the whole batch may need more memory, so the trial runs on a
    part of the batch. If this part is too small for some choice, the result is False. The caller should then
    not search by trials: only choices with many chunks could be tried, and faster choices would be missed.

    batch: the routed batch.
    choices: all choices that may be taken. They have the same restore pair: how backward gets the rows and
        the hidden activation.
    """
    allowed = min(own_peaks(batch, choices))
    return share_of_tokens(batch, choices, allowed) * batch.counts.max_tokens >= MIN_TOKENS


def with_enough_memory(batch: TrialBatch, measured: Mapping[Choice, PassTimes]) -> dict[Choice, PassTimes]:
    """Removes the fastest choices, as long as some rank lacks memory for them. Collective.

    Returns the other choices, each with its seconds.

    A trial (a timed run of both passes) on a part of the batch does not show whether the memory is enough for
    the whole batch. So the memory of a step with the fastest choice is allocated and freed again. If that
    fails on any rank, the choice is removed, and the next fastest choice is tested. The test ends at the
    first choice with enough memory. The slower choices stay in the result untested. If the caller takes one
    of them, it must test the memory first.

    batch: the routed batch of all tokens.
    measured: the seconds of each choice (numbers of chunks, and how backward gets the rows and the hidden
        activation).

    Raises OutOfMemoryError on every rank if no choice has enough memory.
    """
    ordered = sorted(measured, key=lambda choice: measured[choice].step)
    return {choice: measured[choice] for choice in from_first_with_enough_memory(batch, ordered)}


def from_first_with_enough_memory(batch: TrialBatch, ordered: Sequence[Choice]) -> Sequence[Choice]:
    """Removes choices from the start of a list, until every rank has memory for the first one left.

    Collective. The choices are tested in order: every rank allocates the memory of its own step with a
    choice, and frees it again. The test ends at the first choice for which every rank has enough memory. The
    result is this choice and all choices after it, which are not tested. Rank 0 warns once about the removed
    choices.

    batch: the routed batch of all tokens.
    ordered: the choices (numbers of chunks, and how backward gets the rows and the hidden activation), in the
        order in which they are tested.

    Raises OutOfMemoryError on every rank if no choice has enough memory.
    """
    own_output = batch.inputs.x_TM.nbytes
    without_room: list[Trial] = []
    for choice in ordered:
        trial = Trial(batch, choice)
        [peak] = own_peaks(batch, [choice])
        if trial.has_memory(TESTED * (peak - own_output)):
            break
        without_room.append(trial)
    warn_of_dropped(batch, without_room, len(ordered))
    return ordered[len(without_room) :]


def times_of_whole(parts: Sequence[TrialsOfPart]) -> dict[Choice, PassTimes]:
    """Computes the seconds of the whole batch with each choice, from trials on parts of the batch.

    A trial is a timed run of both passes. A choice is a number of chunks of each pass and a restore pair: how
    backward gets the rows and the hidden activation. If ``seconds`` are the measured seconds of a pass over
    the fraction s of the tokens, in n chunks:

        seconds of the whole batch = (seconds - chunk * n) / s + chunk * n

    ``chunk`` is the fixed cost of a chunk: the part of its seconds that does not depend on the number of rows
    (`seconds_of_chunk`). It is computed from the trials with this restore pair, on this part of the batch and
    on earlier parts.

    The machine may become faster or slower between the trials of two parts. So each part after the first
    tries one choice of an earlier part again. All earlier results are then multiplied by

        new result of this choice / its earlier result

    parts: the trials, in the order in which they ran.
    """
    times: dict[Choice, PassTimes] = {}
    for number, part in enumerate(parts, 1):
        chunks = {
            pair: _pass_seconds_of_chunk(parts[:number], pair)
            for pair in dict.fromkeys(choice.restore for choice in part.times)
        }
        of_whole = {
            choice: _of_whole(choice, timed, part.share, *chunks[choice.restore])
            for choice, timed in part.times.items()
        }
        again = next((choice for choice in of_whole if choice in times), None)
        if again is not None:
            factor = of_whole[again].step / times[again].step
            times = {choice: timed.scaled(factor) for choice, timed in times.items()}
        times |= of_whole
    return times


def _pass_seconds_of_chunk(parts: Sequence[TrialsOfPart], pair: Restore) -> tuple[float, float]:
    """Returns the fixed seconds of a chunk in forward and in backward. They do not depend on its rows.

    The fixed seconds are computed from trials (timed runs of both passes) with several numbers of chunks or
    tokens (`seconds_of_chunk`).

    parts: the trials.
    pair: the restore pair, which says how backward gets the rows and the hidden activation. Only trials with
        this pair are used.
    """
    trials = [
        (part.share, choice, timed)
        for part in parts
        for choice, timed in part.times.items()
        if choice.restore == pair
    ]
    # A choice that was far slower than another was timed only once. If other work has slowed this run, the
    # chunks seem to cost the additional seconds. So the fixed seconds are fitted twice: to all trials, and to
    # the trials that were timed more than once. The smaller result counts.
    timed_again = [trial for trial in trials if trial[2].runs > 1]
    fits = [trials, timed_again] if len(timed_again) > 1 else [trials]
    forward = min(
        seconds_of_chunk([(share, choice.forward, timed.forward) for share, choice, timed in some])
        for some in fits
    )
    backward = min(
        seconds_of_chunk([(share, choice.backward, timed.backward) for share, choice, timed in some])
        for some in fits
    )
    return forward, backward


def _of_whole(
    choice: Choice, timed: PassTimes, share: float, chunk_forward: float, chunk_backward: float
) -> PassTimes:
    """Computes the seconds of the whole batch with a choice, from its trial on a part of the batch.

    A trial is a timed run of both passes. The fixed seconds of the chunks are the same for any number of
    tokens; all other seconds are divided by ``share``.

    choice: the numbers of chunks and the restore pair of the trial: how backward gets the rows and the hidden
        activation.
    timed: the seconds of the trial.
    share: the number of tokens of the trial, divided by the number of tokens of the whole batch.
    chunk_forward, chunk_backward: the fixed seconds of a chunk, which do not depend on its number of rows, in
        each pass.
    """

    def of_whole(seconds: float, of_chunks: float) -> float:
        of_chunks = min(of_chunks, seconds)
        return (seconds - of_chunks) / share + of_chunks

    forward = of_whole(timed.forward, choice.forward * chunk_forward)
    backward = of_whole(timed.backward, choice.backward * chunk_backward)
    step = forward + backward
    # Noise is relative to a step's seconds. Its absolute size grows by 1 / share, like the work on tokens.
    # The step's seconds grow by a smaller factor, because the seconds that each chunk adds stay the same.
    noise = timed.noise * max(timed.step / share / step, 1.0) if step else timed.noise
    return PassTimes(forward, backward, step=step, runs=timed.runs, noise=noise)


def seconds_of_chunk(trials: Sequence[tuple[float, int, float]]) -> float:
    """Returns the seconds of a chunk that do not depend on its number of rows: kernel launches, host work.

    The result is found by a fit. A trial runs a pass in n chunks on the fraction s of the tokens. Three
    unknown numbers, none of them negative, are fitted to the seconds of the trials:

        seconds = s * rows + chunk * n + s * filling / n

        rows      seconds of the matrix products and messages of all tokens
        chunk     the result: fixed seconds of a chunk
        filling   seconds of messages during which nothing is computed, if the whole batch is one chunk

    With two trials ``filling`` is left out, because a fit needs at least as many trials as unknown numbers.
    If all trials have the same share and number of chunks, the result is 0.

    trials: (s, n, seconds) of each trial.
    """
    if len({(share, n) for share, n, _ in trials}) < 2:
        return 0.0
    share, n, seconds = np.array(trials, dtype=float).T
    terms = [n, share, share / n][: len(trials)]
    # Both sides are divided by the seconds, so that the fit minimizes relative errors: short trials count as
    # much as long ones.
    factors, _ = nnls(np.stack(terms, axis=1) / seconds[:, None], np.ones_like(seconds))
    return float(factors[0])


def smallest_peak(batch: TrialBatch, choices: Sequence[Choice] | None = None) -> float:
    """Returns the lowest predicted peak of the steps that the layer may choose, in bytes on this rank.

    The numbers of chunks are combined with every restore pair of the layer, because the pair that is taken in
    the end may need less memory than the pair of the trials. A restore pair says how backward gets the rows
    and the hidden activation.

    batch: the routed batch.
    choices: gives the numbers of chunks that may still be chosen. The restore pairs in it are not used. None
        stands for every number of chunks that the layer may choose.
    """
    if choices is None:
        degrees = [(n, n) for n in batch.degrees]
    else:
        degrees = [(choice.forward, choice.backward) for choice in choices]
    return min(own_peaks(batch, all_choices(degrees, batch.modules.pairs)))


def largest_ratio(batch: TrialBatch, needed: float, allowed: float) -> float:
    """Returns the largest ratio ``needed`` / ``allowed`` of any rank. Collective.

    Ranks with few tokens need less memory, but not in proportion: they also compute rows of other ranks. So
    the bytes of each rank are compared with the bytes that this rank may take, not with those of other ranks.

    batch: the routed batch.
    needed: bytes that something needs on this rank.
    allowed: bytes that it may take on this rank.
    """
    return -_smallest_of_ranks(batch, -needed / allowed)


def share_of_tokens(batch: TrialBatch, choices: Sequence[Choice], allowed: float) -> float:
    """Returns the fraction of the tokens on which trials can run within the allowed memory. Collective.

    A trial is a timed run of both passes. All ranks take the same fraction of their tokens: the smallest
    fraction that any rank has memory for. That rank may have fewer tokens than others: it also computes their
    rows, while a step with many chunks needs little memory there. Example: of two ranks with 1,200 and 8,192
    tokens, only the first needs more memory for n = 2 on a fifth of the tokens than for a step with n = 16.

    batch: the routed batch.
    choices: the numbers of chunks and restore pairs that will be tried on these tokens. A restore pair says
        how backward gets the rows and the hidden activation.
    allowed: bytes that trials may take on this rank: the lowest predicted peak of a step, over all choices
        that the layer may still take.
    """
    # The predicted peak of a later step includes the layer's output. But a model may free the output before
    # backward, and the step then needs less. A trial keeps its output, so it may take only the other bytes.
    free = allowed - batch.inputs.x_TM.nbytes
    return _fraction_on_every_rank(batch, batch, choices, free)


def _fraction_on_every_rank(
    batch: TrialBatch, part: TrialBatch, choices: Sequence[Choice], free: float
) -> float:
    """Returns the largest fraction of a part's tokens for which every rank has enough memory. Collective.

    batch: the routed batch of all tokens.
    part: the tokens of which the result is a fraction: ``batch`` itself, or its first tokens. With its first
        tokens, the memory must also be enough for the routing of the whole batch.
    choices: the numbers of chunks and restore pairs of the trials.
    free: bytes of a later step that are free for trials, on this rank.
    """
    peak = max(own_peaks(part, choices))
    routing = routing_bytes(batch)
    beside = 0 if part is batch else routing
    fraction = 1.0
    if beside + peak > ALIKE * free:
        fraction = fraction_of_tokens(peak, free, routing, max(own_gradients(part, choices)))
    return _smallest_of_ranks(batch, fraction)


def _smallest_of_ranks(batch: TrialBatch, number: float) -> float:
    """Returns the smallest number that any rank passes. Collective.

    batch: the routed batch, which has the ranks.
    number: a number of this rank.
    """
    device = batch.inputs.x_TM.device
    stage = "comparing the memory of trials on all ranks"
    return smallest(batch.modules.ranks, device, number, stage=stage)


def part_for_trial(batch: TrialBatch, choice: Choice) -> TrialBatch | None:
    """Returns the first tokens of a batch, on which a trial with this choice may run. Collective.

    The trial is a timed run of both passes. It may take no more memory than the lowest predicted peak of any
    step that the layer may choose (`smallest_peak`).

    batch: the routed batch.
    choice: the choice of the trial that will run on these tokens.

    Returns the whole batch if the layer has a memory budget, because every choice within the budget may run
    on the whole batch. Returns None if fewer than `MIN_TOKENS` tokens fit.
    """
    if batch.modules.options.budget is not None:
        return batch
    allowed = smallest_peak(batch)
    share = share_of_tokens(batch, [choice], allowed)
    part = _part_with_memory(batch, [choice], share, allowed)
    return None if part is None else part[1]


def first_tokens(batch: TrialBatch, share: float) -> TrialBatch | None:
    """Returns a routed batch with only the first tokens of each rank, and new row counts. Collective.

    Returns None on every rank if any rank has too little memory to cut off these tokens. The row counts are
    exchanged after the ranks know that all of them have cut their tokens off.

    batch: the routed batch of all tokens.
    share: the fraction of each rank's tokens to take, between 0 and 1, the same on every rank.
    """
    is_padded = batch.orders.padding is not None
    cut: TrialBatch | _FirstTokens | None = None
    with publishing_failures(batch.modules.ranks, "cutting off the tokens of a trial"):
        try:
            cut = first_padded_tokens(batch, share) if is_padded else _FirstTokens.of(batch, share)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    if not _smallest_of_ranks(batch, float(cut is not None)):
        return None
    assert cut is not None
    return cut if isinstance(cut, TrialBatch) else cut.with_counts(batch)


@dataclass(frozen=True, kw_only=True)
class _FirstTokens:
    """The first tokens of a batch on this rank, before the ranks exchange how many rows they send.

    inputs, orders: those of the batch, with these tokens only.
    counts_FE: rows for each expert, in each of F bins: equal parts of these tokens.
    once_FP: rows that are sent once for several experts of a rank (`SortedSlots.count_once`).
    """

    inputs: Inputs
    orders: SortedSlots
    counts_FE: Tensor
    once_FP: Tensor | None

    @classmethod
    def of(cls, batch: TrialBatch, share: float) -> _FirstTokens:
        """Cuts off the first tokens of this rank, and counts their rows. Not collective.

        batch: the routed batch of all tokens.
        share: the fraction of the tokens to take.
        """
        orders = batch.orders
        count = int(share * orders.tokens.count)
        token_of_slot = orders.tokens.of_slot
        num_rows = count
        if token_of_slot is not None:
            num_rows = int(torch.searchsorted(token_of_slot, count))
            token_of_slot = token_of_slot[:num_rows]
        keep_TK = None if orders.keep_TK is None else orders.keep_TK[:num_rows]
        tokens = Tokens(count, token_of_slot)
        orders = type(orders)(orders.modules, orders.expert_TK[:num_rows], keep_TK, tokens)
        num_bins = batch.counts.send.shape[0]
        return cls(
            inputs=first_inputs(batch.inputs, count, num_rows),
            orders=orders,
            counts_FE=orders.count(num_bins),
            once_FP=orders.count_once(num_bins),
        )

    def with_counts(self, batch: TrialBatch) -> TrialBatch:
        """Exchanges how many rows the ranks send, and returns a batch with these tokens. Collective.

        batch: the routed batch of all tokens.
        """
        modules = batch.modules
        x_TM = batch.inputs.x_TM
        exchange = CountsExchange(
            modules.grid,
            self.counts_FE,
            num_tokens=self.orders.tokens.count,
            fault=Fault.NONE,
            needs_grad=batch.counts.needs_grad,
            training=True,
            dtype=x_TM.dtype,
            traffic=modules.traffic,
            slots=requested_slots(modules, x_TM, batch.degrees) if modules.limits_rows else None,
            once_FP=self.once_FP,
            exchanges=(modules.dispatch, modules.combine),
            bypass_local=modules.stages.local,
            sorts_results=batch.counts.sorts_results,
        )
        # With ring slots, this rank's rows for a copy on this rank go through the all-to-all, too. Only rows
        # for the rank's own experts stay where they are.
        if self.orders.modules.copies is not None:
            exchange.num_staying = len(self.orders.modules.staying)
        counts = exchange.finish()
        return replace(batch, counts=counts, inputs=self.inputs, orders=self.orders, rows_for=None)
