"""Trials on a part of a batch, for a layer that reuses memory.

Such a layer takes less memory the more chunks it makes: with ring slots (buffers in which chunks take turns),
one chunk of the whole batch needs n times the buffers of one of n chunks. A trial of few chunks would take
more memory than any later step. So trials run on the first tokens of the batch, as many as fit into the
memory of the layer's smallest step. The seconds of the whole batch follow from a line through the trials:

    seconds(n) = rows + filling / n + chunk * n

    rows      grows with the tokens: products and messages
    filling   grows with the tokens: the first chunk's message and the last one's, beside which nothing runs
    chunk     stays: launches, and work of the host for each chunk
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
"""Smallest number of tokens of a trial. Trials of fewer say nothing about the whole batch."""

ALIKE = 1.08
"""Largest ratio of the memory of trials on the whole batch to the memory of the smallest step."""

ROOM = 0.85
"""Part of the smallest step's memory that a trial may take. The call holds the rest, such as its routing."""


def measure_in_little_memory(
    batch: TrialBatch, choices: Sequence[Choice], most_rounds: int = MOST_ROUNDS
) -> dict[Choice, PassTimes]:
    """Returns the seconds of forward and backward with each choice, by trials. Collective.

    No trial takes more memory than the smallest step of the layer, unless the user gave a memory budget:
    every choice within the budget may then run on the whole batch.

    batch: the routed batch.
    choices: the numbers of chunks and restore pairs to try, each once.
    most_rounds: largest number of timed rounds.

    A choice for which a rank had too little memory is left out. All are left out if so few tokens fit into
    the memory that trials would say nothing. Raises OutOfMemoryError on every rank if some rank has too
    little memory for every choice.
    """
    share = share_of_tokens(batch, choices)
    if share * batch.counts.max_tokens < MIN_TOKENS:
        return {}
    if share == 1.0:
        return measure_trials(batch, choices, most_rounds)
    measured = _scaled(measure_trials(first_tokens(batch, share), choices, most_rounds), share)
    return _with_room(batch, measured)


def _with_room(batch: TrialBatch, measured: Mapping[Choice, PassTimes]) -> dict[Choice, PassTimes]:
    """Returns the measured choices without those for which a rank has too little memory. Collective.

    A trial on a part of the batch does not show whether a step on the whole batch has room. So the memory of
    the fastest choice is taken and given back; if it cannot be taken, that of the next one. Whether slower
    choices have room is not asked.

    batch: the whole batch.
    measured: the seconds of the choices.

    Raises OutOfMemoryError on every rank if no choice has room.
    """
    ordered = sorted(measured, key=lambda choice: measured[choice].step)
    peaks = dict(zip(ordered, predicted_peaks(batch, ordered), strict=True))
    without_room: list[Trial] = []
    for choice in ordered:
        trial = Trial(batch, choice)
        if trial.has_room(peaks[choice]):
            warn_of_dropped(batch, without_room, len(ordered))
            return {other: measured[other] for other in ordered[len(without_room) :]}
        without_room.append(trial)
    warn_of_dropped(batch, without_room, len(ordered))
    return {}


def _scaled(of_part: Mapping[Choice, PassTimes], share: float) -> dict[Choice, PassTimes]:
    """Returns the seconds of the whole batch with each choice, from trials on a part of it.

    of_part: the seconds of the part. Choices with one restore pair share a line for each pass.
    share: the part of the tokens that the trials had.
    """
    scaled = {}
    for pair in dict.fromkeys(choice.restore for choice in of_part):
        of_pair = {choice: timed for choice, timed in of_part.items() if choice.restore == pair}
        forward = _of_whole([(choice.forward, timed.forward) for choice, timed in of_pair.items()], share)
        backward = _of_whole([(choice.backward, timed.backward) for choice, timed in of_pair.items()], share)
        for choice, timed in of_pair.items():
            passes = forward[choice.forward], backward[choice.backward]
            step = sum(passes)
            # The noise of a run grows as the part of the seconds does that grows with the tokens.
            noise = timed.noise * max(timed.step / share / step, 1.0) if step else timed.noise
            scaled[choice] = PassTimes(*passes, step=step, runs=timed.runs, noise=noise)
    return scaled


def _of_whole(measured: Iterable[tuple[int, float]], share: float) -> dict[int, float]:
    """Returns `seconds_of_whole` of pairs (number of chunks, seconds), by number of chunks.

    Several trials of one number count as their mean.
    """
    by_degree: dict[int, list[float]] = {}
    for n, seconds in measured:
        by_degree.setdefault(n, []).append(seconds)
    return seconds_of_whole({n: statistics.mean(times) for n, times in by_degree.items()}, share)


def share_of_tokens(batch: TrialBatch, choices: Sequence[Choice]) -> float:
    """Returns the part of the tokens with which all choices stay within the memory of the smallest step.

    Collective. The smallest step is that with the fewest bytes of all choices that the layer has. With a
    memory budget the result is 1: all tokens.
    """
    options = batch.modules.options
    if options.budget is not None:
        return 1.0
    pairs = tuple(dict.fromkeys(choice.restore for choice in choices))
    smallest = min(predicted_peaks(batch, all_choices([(n, n) for n in options.degrees], pairs)))
    largest_tried = max(predicted_peaks(batch, choices))
    sizes = batch.sizes
    # A model may free the layer's output before backward, so a step need not hold it. A trial does.
    output = batch.counts.max_tokens * sizes.d_model * sizes.element_size
    if largest_tried <= ALIKE * (smallest - output):
        return 1.0
    # The gradients of the experts' parameters do not shrink with the tokens.
    gradients = sizes.expert_parameters * sizes.element_size
    return max(ROOM * (smallest - output) - gradients, 0.0) / (largest_tried - gradients)


def first_tokens(batch: TrialBatch, share: float) -> TrialBatch:
    """Returns the routed batch of a share of each rank's tokens, the first ones. Collective.

    share: the part of the tokens, between 0 and 1, the same on every rank.
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
    return replace(batch, counts=exchange.finish(), inputs=part, orders=orders)


def _slots_of(batch: TrialBatch) -> Slots | None:
    """Returns the limits of rows that ring slots set for a batch; None if chunks share no buffers."""
    modules = batch.modules
    options = modules.options
    if not options.rotates:
        return None
    return Slots(
        slack=options.slack,
        top_k=options.top_k * modules.grid.esp.size,
        degrees=options.degrees,
        own_rank=modules.ranks.rank if modules.stages.local else None,
    )


def _first(tensor: Tensor, count: int) -> Tensor:
    """Returns the first rows of a tensor, without its autograd graph; a gradient is wanted as before."""
    return tensor.detach()[:count].requires_grad_(tensor.requires_grad)


def seconds_of_whole(measured: Mapping[int, float], share: float) -> dict[int, float]:
    """Returns the seconds of a pass of the whole batch by number of chunks, from trials on a part of it.

    measured: seconds of the pass for the part, by number of chunks n.
    share: the part of the tokens that the trials had.

    The line (see the module's docstring) has as many terms as there are trials for it, and what it leaves
    over grows with the tokens.
    """
    degrees = np.array(list(measured), dtype=float)
    seconds = np.array(list(measured.values()))
    terms = [np.ones_like(degrees), degrees, 1 / degrees][: len(measured)]
    # Divided by the seconds, so that the line is as near to short trials as to long ones, in proportion.
    factors, _ = nnls(np.stack(terms, axis=1) / seconds[:, None], np.ones_like(seconds))
    by_chunk = factors[1] * degrees if len(terms) > 1 else np.zeros_like(degrees)
    whole = (seconds - by_chunk) / share + by_chunk
    # A line through few trials may be wrong, but the whole takes at least as long as its part.
    return {n: max(float(value), measured[n]) for n, value in zip(measured, whole, strict=True)}
