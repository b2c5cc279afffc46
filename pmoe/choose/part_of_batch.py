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

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from pmoe.choose.trials import TrialBatch, measure_trials, predicted_peaks
from pmoe.comm.counts import CountsExchange, Fault, Slots
from pmoe.ordering.sorted import Tokens
from pmoe.planner.degree import Choice, all_choices
from pmoe.schedule.restore import Restore

MIN_TOKENS = 256
"""Smallest number of tokens of a trial. Trials of fewer say nothing about the whole batch."""

ALIKE = 1.08
"""Largest ratio of the memory of trials on the whole batch to the memory of the smallest step."""

ROOM = 0.85
"""Part of the smallest step's memory that a trial may take. The call holds the rest, such as its routing."""


def measure_in_little_memory(
    batch: TrialBatch, choices: Sequence[Choice]
) -> list[tuple[float, float]] | None:
    """Returns the seconds of forward and backward with each choice, by trials. Collective.

    No trial takes more memory than the smallest step of the layer, unless the user gave a memory budget:
    every choice within the budget may then run on the whole batch.

    batch: the routed batch.
    choices: the numbers of chunks and restore pairs to try.

    Returns None if so few tokens fit into the memory that trials would say nothing. Raises OutOfMemoryError
    on every rank if some rank has too little memory for every choice.
    """
    share = share_of_tokens(batch, choices)
    if share * batch.counts.max_tokens < MIN_TOKENS:
        return None
    if share == 1.0:
        return measure_trials(batch, choices)
    seconds = measure_trials(first_tokens(batch, share), choices)
    forward = _scaled([choice.forward for choice in choices], choices, [pair[0] for pair in seconds], share)
    backward = _scaled([choice.backward for choice in choices], choices, [pair[1] for pair in seconds], share)
    return list(zip(forward, backward, strict=True))


def _scaled(
    degrees: Sequence[int], choices: Sequence[Choice], seconds: Sequence[float], share: float
) -> list[float]:
    """Returns the seconds of one pass of the whole batch with each choice, from trials on a part of it.

    degrees: number of chunks of the pass with each choice.
    choices: the choices. Those with one restore pair share a line.
    seconds: seconds of the pass with each choice; infinite if the choice was dropped.
    share: the part of the tokens that the trials had.
    """
    by_pair: dict[Restore, dict[int, list[float]]] = {}
    for n, choice, measured in zip(degrees, choices, seconds, strict=True):
        if measured < math.inf:
            by_pair.setdefault(choice.restore, {}).setdefault(n, []).append(measured)
    whole = {
        pair: seconds_of_whole({n: statistics.mean(times) for n, times in by_degree.items()}, share)
        for pair, by_degree in by_pair.items()
    }
    return [
        whole[choice.restore][n] if measured < math.inf else math.inf
        for n, choice, measured in zip(degrees, choices, seconds, strict=True)
    ]


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
    return {n: max(float(value), 0.0) for n, value in zip(measured, whole, strict=True)}
