"""Trials on a part of a batch, for a layer that reuses memory.

A chunk is a micro-batch, n the number of chunks. The chunks of such a layer take turns in a few buffers, the
ring slots. A ring slot has room for one chunk, so it needs n times as many bytes with one chunk as with n
chunks. A trial with few chunks could then take more memory than any later step of the layer.

So trials run on the first tokens of the batch: as many as fit into the memory of the layer's smallest step
(the step with the number of chunks for which the fewest bytes are predicted). The seconds of the whole batch
are computed from a formula that is fitted to the trials:

    seconds(n) = rows + filling / n + chunk * n

    rows      proportional to the tokens: matrix products and messages
    filling   proportional to the tokens: the messages of the first and the last chunk, during which no
              computation runs
    chunk     independent of the tokens: kernel launches, and work of the host for each chunk
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from pmoe.choose.trials import Trial, TrialBatch, measure_trials, predicted_peaks, warn_of_dropped
from pmoe.comm.counts import CountsExchange, Fault, Slots
from pmoe.ordering.sorted import Tokens
from pmoe.planner.degree import Choice, all_choices
from pmoe.planner.timed_rounds import MOST_ROUNDS, PassTimes

MIN_TOKENS = 256
"""Smallest number of tokens of a trial. Seconds of fewer tokens say nothing about the whole batch."""

ALIKE = 1.08
"""Trials run on the whole batch if they need at most this many times the memory of the smallest step."""

ROOM = 0.85
"""Fraction of the smallest step's memory that a trial may take. The call itself holds the rest (its routing).
"""


def measure_in_little_memory(
    batch: TrialBatch, choices: Sequence[Choice], most_rounds: int = MOST_ROUNDS
) -> dict[Choice, PassTimes]:
    """Returns the seconds that each choice takes for the whole batch, from trials in little memory.

    Trials run on the first tokens of the batch: as many as fit into the memory of the layer's smallest step,
    the one for which the fewest bytes are predicted. The seconds of the whole batch are then computed from
    the seconds of this part (`seconds_of_whole`). With a memory budget, trials run on the whole batch,
    because every choice within the budget may run on the whole batch anyway. Collective.

    batch: the routed batch.
    choices: the numbers of chunks (micro-batches) and restore pairs to try, each once.
    most_rounds: largest number of timed rounds.

    The result has no entry for a choice that ran out of memory in a trial on any rank, nor for one that is
    faster than all others but needs too much memory for the whole batch (`with_room`). The result is empty
    if fewer than `MIN_TOKENS` tokens fit. Raises OutOfMemoryError on every rank if no choice is left.
    """
    share = share_of_tokens(batch, choices)
    if share * batch.counts.max_tokens < MIN_TOKENS:
        return {}
    if share == 1.0:
        return measure_trials(batch, choices, most_rounds)
    return _scaled(measure_trials(first_tokens(batch, share), choices, most_rounds), share)


def has_enough_tokens(batch: TrialBatch, choices: Sequence[Choice]) -> bool:
    """Returns whether trials of these choices in little memory would have at least `MIN_TOKENS` tokens.

    Collective; every rank gets the same.

    batch: the routed batch.
    choices: the numbers of chunks and restore pairs that would be tried.
    """
    return share_of_tokens(batch, choices) * batch.counts.max_tokens >= MIN_TOKENS


def with_room(batch: TrialBatch, measured: Mapping[Choice, PassTimes]) -> dict[Choice, PassTimes]:
    """Drops the fastest choices until one is left for which every rank has enough memory. Collective.

    A trial on a part of the batch does not show whether the memory is enough for the whole batch. So the
    memory of the fastest choice is allocated and freed again. If that fails on any rank, the choice is
    dropped and the next one is tested. Choices that are slower than the first with enough memory are not
    tested and stay in the result, because they will not be taken.

    batch: the whole batch.
    measured: the seconds of the choices.

    Raises OutOfMemoryError on every rank if no choice is left.
    """
    ordered = sorted(measured, key=lambda choice: measured[choice].step)
    output = _output_bytes(batch)
    peaks = dict(zip(ordered, predicted_peaks(batch, ordered), strict=True))
    without_room: list[Trial] = []
    for choice in ordered:
        trial = Trial(batch, choice)
        if trial.has_room(ROOM * (peaks[choice] - output)):
            warn_of_dropped(batch, without_room, len(ordered))
            return {other: measured[other] for other in ordered[len(without_room) :]}
        without_room.append(trial)
    warn_of_dropped(batch, without_room, len(ordered))
    return {}


def _scaled(of_part: Mapping[Choice, PassTimes], share: float) -> dict[Choice, PassTimes]:
    """Returns the seconds of the whole batch with each choice, from trials on a part of it.

    The formula of `seconds_of_whole` is fitted once for each restore pair and pass, to the trials of all
    numbers of chunks with this pair.

    of_part: the seconds of the trials.
    share: the number of tokens in the trials, divided by the number of tokens of the whole batch.
    """
    scaled = {}
    for pair in dict.fromkeys(choice.restore for choice in of_part):
        of_pair = {choice: timed for choice, timed in of_part.items() if choice.restore == pair}
        forward = _of_whole([(choice.forward, timed.forward) for choice, timed in of_pair.items()], share)
        backward = _of_whole([(choice.backward, timed.backward) for choice, timed in of_pair.items()], share)
        for choice, timed in of_pair.items():
            passes = forward[choice.forward], backward[choice.backward]
            step = sum(passes)
            # Noise is relative to a step's seconds. Its absolute size grows by 1 / share, like the work on
            # tokens. The seconds grow less, because the part for each chunk stays.
            noise = timed.noise * max(timed.step / share / step, 1.0) if step else timed.noise
            scaled[choice] = PassTimes(*passes, step=step, runs=timed.runs, noise=noise)
    return scaled


def _of_whole(measured: Iterable[tuple[int, float]], share: float) -> dict[int, float]:
    """Returns the seconds of one pass over the whole batch by number of chunks, with `seconds_of_whole`.

    measured: (number of chunks, seconds) of each trial on the first tokens. If several trials have the same
        number of chunks, their mean is used.
    share: the number of tokens in the trials, divided by the number of tokens of the whole batch.
    """
    by_degree: dict[int, list[float]] = {}
    for n, seconds in measured:
        by_degree.setdefault(n, []).append(seconds)
    return seconds_of_whole({n: statistics.mean(times) for n, times in by_degree.items()}, share)


def share_of_tokens(batch: TrialBatch, choices: Sequence[Choice]) -> float:
    """Returns the fraction of the tokens with which trials need no more memory than the smallest step.

    The smallest step is the one with the number of chunks, of all that the layer may choose, for which the
    fewest bytes are predicted. With a memory budget the result is 1 (all tokens). Collective.

    batch: the routed batch.
    choices: the numbers of chunks and restore pairs that will be tried.
    """
    options = batch.modules.options
    if options.budget is not None:
        return 1.0
    pairs = tuple(dict.fromkeys(choice.restore for choice in choices))
    smallest = min(predicted_peaks(batch, all_choices([(n, n) for n in batch.degrees], pairs)))
    largest_tried = max(predicted_peaks(batch, choices))
    sizes = batch.sizes
    output = _output_bytes(batch)
    if largest_tried <= ALIKE * (smallest - output):
        return 1.0
    # The gradients of the experts' parameters do not shrink with the tokens.
    gradients = sizes.expert_parameters * sizes.element_size
    return max(ROOM * (smallest - output) - gradients, 0.0) / (largest_tried - gradients)


def _output_bytes(batch: TrialBatch) -> int:
    """Returns the bytes of the layer's output on the rank that has most tokens.

    A model may free the output before backward, so a step need not hold it. A trial does.
    """
    sizes = batch.sizes
    return batch.counts.max_tokens * sizes.d_model * sizes.element_size


def first_tokens(batch: TrialBatch, share: float) -> TrialBatch:
    """Returns a routed batch that has only the first tokens of each rank. Collective.

    batch: the routed batch of all tokens.
    share: the fraction of each rank's tokens to take, between 0 and 1, the same on every rank.
    """
    modules = batch.modules
    whole = batch.orders
    count = int(share * whole.tokens.count)
    token_of_slot = whole.tokens.of_slot
    num_rows = count
    if token_of_slot is not None:
        num_rows = int(torch.searchsorted(token_of_slot, count))
        token_of_slot = token_of_slot[:num_rows]
    keep_TK = None if whole.keep_TK is None else whole.keep_TK[:num_rows]
    orders = type(whole)(whole.modules, whole.expert_TK[:num_rows], keep_TK, Tokens(count, token_of_slot))
    num_bins = batch.counts.send.shape[0]
    exchange = CountsExchange(
        modules.grid,
        orders.count(num_bins),
        num_tokens=count,
        fault=Fault.NONE,
        needs_grad=batch.counts.needs_grad,
        training=True,
        dtype=batch.inputs.x_TM.dtype,
        traffic=modules.traffic,
        slots=_slots_of(batch),
        once_FP=orders.count_once(num_bins),
        exchanges=(modules.dispatch, modules.combine),
        bypass_local=modules.stages.local,
    )
    inputs = batch.inputs
    shared_weight = inputs.shared_weight_T
    part = replace(
        inputs,
        x_TM=_first(inputs.x_TM, count),
        weight_TK=_first(inputs.weight_TK, num_rows),
        shared_weight_T=None if shared_weight is None else _first(shared_weight, count),
    )
    return replace(batch, counts=exchange.finish(), inputs=part, orders=orders, rows_for=None)


def _slots_of(batch: TrialBatch) -> Slots | None:
    """Returns the number of rows that a chunk may have on each rank, or None if there is no limit.

    There is a limit if chunks take turns in a few buffers, the ring slots: a ring slot has room for a fixed
    number of rows. Chunks with a buffer each have no limit.
    """
    modules = batch.modules
    options = modules.options
    if not options.rotates:
        return None
    return Slots(
        slack=options.slack,
        top_k=options.top_k * modules.grid.esp.size,
        degrees=batch.degrees,
        own_rank=modules.ranks.rank if modules.stages.local else None,
    )


def _first(tensor: Tensor, count: int) -> Tensor:
    """Returns the first ``count`` rows of a tensor, detached, with the tensor's ``requires_grad``."""
    return tensor.detach()[:count].requires_grad_(tensor.requires_grad)


def seconds_of_whole(measured: Mapping[int, float], share: float) -> dict[int, float]:
    """Returns the seconds of a pass over the whole batch by number of chunks, from trials on first tokens.

    Fits seconds(n) = rows + chunk * n + filling / n to the trials. ``chunk * n`` (kernel launches) does not
    depend on the number of tokens. Everything else is proportional to it, also the difference between a trial
    and the formula. So with s = ``share``:

        seconds of the whole batch = (seconds of the trial - chunk * n) / s + chunk * n

    With two trials the term ``filling / n`` is left out, with one trial ``chunk * n`` too, because a fit
    needs at least as many trials as terms.

    measured: seconds of the pass in the trials, by number of chunks n.
    share: the number of tokens in the trials, divided by the number of tokens of the whole batch.
    """
    degrees = np.array(list(measured), dtype=float)
    seconds = np.array(list(measured.values()))
    terms = [np.ones_like(degrees), degrees, 1 / degrees][: len(measured)]
    # Divided by the seconds: the fit then minimizes relative errors, so short trials count as much as long.
    factors, _ = nnls(np.stack(terms, axis=1) / seconds[:, None], np.ones_like(seconds))
    by_chunk = factors[1] * degrees if len(terms) > 1 else np.zeros_like(degrees)
    whole = (seconds - by_chunk) / share + by_chunk
    # A line through few trials may be wrong, but the whole takes at least as long as its part.
    return {n: max(float(value), measured[n]) for n, value in zip(measured, whole, strict=True)}
