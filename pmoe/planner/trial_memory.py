"""Limits the memory of trials, and predicts the most memory of a step that runs them.

A trial is a timed run of both passes, inside a step that chooses n or the restore pair. n is the number of
chunks (micro-batches). The restore pair says how backward gets the experts' inputs and hidden activations.
A trial must need no more memory than the layer's later steps. So it runs on all tokens of the batch, or only
on the first ones:

    a later step                     |= output =|============= free bytes =============|
    a trial on all tokens            |======= at most 1.08 * free bytes ========|
    a trial on the first tokens      |= routing of all tokens =|= trial =|, together at most as much

The output is the layer's. A trial keeps it until its end, but a model may free it before the backward pass.
So only the other bytes of a later step are free for trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from pmoe.planner.layer_sizes import CallRows, LayerSizes
from pmoe.planner.memory import PredictedMemory, bytes_before_rows, peak_of_passes

ALIKE = 1.08
"""Factor up to which two amounts of memory count as about equal.

So trials may need up to this many times the free bytes.
"""

ROOM = 0.8
"""Fraction of the free bytes, without gradients, that a trial on the first tokens is planned to take.

The rest is for the routing, and for first tokens that are routed less evenly than the whole batch.
"""


def fraction_of_tokens(peak: float, free: float, routing: float, gradients: float) -> float:
    """Returns the fraction of a batch's tokens on which a trial can run.

    The gradients of parameters do not depend on the number of tokens; all other memory is
    assumed to be proportional to this number. The result is 0 if no token fits.

    peak: the predicted peak in bytes of a trial with all tokens of this batch, which may itself be the first
        tokens of a larger batch.
    free: bytes of a later step that are free for trials.
    routing: bytes that the call holds beside a trial on a part of its tokens.
    gradients: bytes of the gradients of parameters, at most ``peak``.

    Example: of 1000 free bytes, 100 for gradients and 0.8 * 900 = 720 for the rest. A trial whose peak with
    all tokens is 1540 bytes, of which 100 are gradients, can run on 720 / 1440 = 0.5 of the tokens.
    """
    most = min(gradients + ROOM * (free - gradients), ALIKE * free - routing)
    return min(max(most - gradients, 0.0) / (peak - gradients), 1.0)


def searching_peak(
    memory: PredictedMemory,
    sizes: LayerSizes,
    call: CallRows,
    tried: Iterable[PredictedMemory] | None = None,
    budget: int | None = None,
) -> int:
    """Returns the most bytes of a step that runs trials and takes one choice: an upper bound on this rank.

    The step runs trials before its own passes, and a trial may need more memory than these. The bound holds
    if later steps with about as many tokens take the same choice. There are two exceptions: the n that is
    taken needs less memory than an earlier trial took, because

    - a profile had predicted that this n is slow, and the trials contradicted the profile;
    - other work slowed the first trials of this n, and it was measured once more.

    memory: the prediction for the choice that is taken.
    sizes: sizes of the layer.
    call: numbers of rows of the call.
    tried: the predictions for all choices that may be tried. A trial needs at most the largest of their
        peaks. None if they are unknown.
    budget: the layer's memory budget in bytes; None without a budget. With a budget, every choice within it
        may be tried on all tokens.
    """
    most_tried = math.inf if tried is None else max(map(peak_of_passes, tried))
    if budget is not None:
        return max(memory.peak, math.ceil(min(most_tried, budget)))
    free = peak_of_passes(memory) - call.tokens * sizes.d_model * sizes.element_size
    in_trial = min(most_tried + bytes_before_rows(sizes, call), ALIKE * free)
    return max(memory.peak, math.ceil(in_trial))
