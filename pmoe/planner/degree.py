"""The pipeline degree n: the number of chunks (micro-batches) into which a layer's tokens are cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pmoe.schedule.restore import Restore

DEGREES = (1, 2, 4, 8, 16)
"""Numbers of chunks that pipeline=True chooses from. Each number divides the next."""

MAX_DEGREE = 16
"""The largest number of chunks that FSMoE's solver considers."""

SOLVER_DEGREES = tuple(range(1, MAX_DEGREE + 1))
"""Numbers of chunks that pipeline="solve" chooses from. Forward and backward may have different ones."""

MOST_CHUNKS = 1024
"""The largest number of chunks that a user may choose.

A layer counts rows, makes a plan and sends messages for each chunk, also if the chunk has no rows. A much
larger number would exhaust memory, or seem to hang.
"""

MAX_COMMON = 256
"""Largest number of equal parts into which a batch is cut to suit the chunks of both passes.

The number of parts is the least common multiple of the two passes' numbers of chunks.
"""

TRIED = (1, 8)
"""Two numbers of chunks that pipeline="solve" measures by trials.

The difference of the two measured times gives the fixed cost of a chunk. The first call of a layer counts its
rows in so many equal parts of the batch that both 1 and 8 chunks can be made of whole parts.
"""

SolveName = Literal["solve"]
SOLVE: SolveName = "solve"
"""Value of the argument ``pipeline`` with which FSMoE's solver chooses the numbers of chunks."""


def check_pipeline(pipeline: bool | int | str) -> None:
    """Checks a layer's argument ``pipeline``: the number of chunks n, or how the layer chooses n.

    Raises TypeError unless ``pipeline`` is a bool, an int or "solve". Raises ValueError for an int below 1 or
    above `MOST_CHUNKS`.
    """
    if isinstance(pipeline, str) and pipeline == SOLVE:
        return
    if not isinstance(pipeline, int):
        raise TypeError(f'pipeline ({pipeline!r}) must be False, True or an int, or "{SOLVE}"')
    if not isinstance(pipeline, bool) and not 1 <= pipeline <= MOST_CHUNKS:
        raise ValueError(
            f"pipeline ({pipeline}) must be False, True or an int of at least 1, at most {MOST_CHUNKS}: it "
            "is the number of chunks, each with messages of its own; pass True, and the layer chooses it"
        )


def check_backward(pipeline: bool | int | str, pipeline_backward: int | None) -> None:
    """Checks a layer's argument ``pipeline_backward``, the number of chunks of the backward pass.

    pipeline: the layer's argument for the forward pass: its number of chunks, or how the layer chooses it.
    pipeline_backward: the number of chunks of the backward pass; None if it has as many as the forward pass.

    Rows are counted in equal ranges of tokens (bins), and the chunks of both passes consist of whole bins. So
    if neither number of chunks divides the other, the number of bins is their least common multiple. There
    may be at most `MAX_COMMON` bins.

    Raises TypeError unless ``pipeline_backward`` is None or an int. Raises ValueError if the numbers of
    chunks need too many bins, or if ``pipeline`` is True or "solve": the layer then chooses both numbers.
    """
    if pipeline_backward is None:
        return
    if not isinstance(pipeline_backward, int) or isinstance(pipeline_backward, bool):
        raise TypeError(f"pipeline_backward ({pipeline_backward!r}) must be None or an int")
    if pipeline is True or isinstance(pipeline, str):
        raise ValueError(
            f"pipeline_backward ({pipeline_backward}) must be None if pipeline is {pipeline}, "
            "which chooses both degrees"
        )
    n = int(pipeline) or 1
    if not 1 <= pipeline_backward <= MOST_CHUNKS:
        raise ValueError(
            f"pipeline_backward ({pipeline_backward}) must be an int of at least 1, at most {MOST_CHUNKS}: "
            "it is the number of chunks of the backward pass; pass None for as many as in the forward pass"
        )
    bins = math.lcm(n, pipeline_backward)
    if bins > max(n, pipeline_backward, MAX_COMMON):
        raise ValueError(
            f"pipeline_backward ({pipeline_backward}) must divide pipeline ({n}), be a multiple of it, or "
            f"have a least common multiple with it of at most {MAX_COMMON}, not {bins}"
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The two choices for a call of a layer: the numbers of chunks, and the restore pair.

    forward, backward: number of chunks of each pass.
    restore: what happens to the experts' inputs (T_DI) and hidden activations (T_M) between the passes: each
        is kept, offloaded, or made again.
    """

    forward: int
    backward: int
    restore: Restore

    @property
    def degrees(self) -> tuple[int, ...]:
        """The numbers of chunks of both passes: one number if they are equal."""
        return (self.forward, self.backward) if self.rearranged else (self.forward,)

    @property
    def rearranged(self) -> bool:
        """Whether the backward pass has a different number of chunks than the forward pass."""
        return self.forward != self.backward


def solver_pairs(
    most_bins: int, *, same_chunks: bool = False, whole_chunks: bool = False
) -> tuple[tuple[int, int], ...]:
    """Returns the pairs (n, m) that pipeline="solve" chooses from: n chunks in forward, m in backward.

    Pairs are sorted by n + m, the number of chunks of both passes together.

    Rows are counted in bins, equal parts of the batch, and the chunks of both passes consist of whole bins.
    So the least common multiple of n and m may be at most ``most_bins``. Pairs with n = m are always allowed.

    most_bins: the largest number of bins.
    same_chunks: whether m must equal n.
    whole_chunks: whether each chunk of backward must consist of whole chunks of forward, so that m divides n.
    """

    def is_allowed(n: int, m: int) -> bool:
        if same_chunks or (whole_chunks and n % m):
            return n == m
        return n == m or math.lcm(n, m) <= most_bins

    pairs = ((n, m) for n in SOLVER_DEGREES for m in SOLVER_DEGREES if is_allowed(n, m))
    return tuple(sorted(pairs, key=lambda pair: (sum(pair), pair)))


def all_choices(degrees: Iterable[tuple[int, int]], pairs: Sequence[Restore]) -> list[Choice]:
    """Returns a choice for every combination of numbers of chunks and restore pair.

    degrees: (chunks of forward, chunks of backward) of each option.
    pairs: restore pairs. A pair says what is kept, offloaded or made again between the passes.
    """
    return [Choice(forward=n, backward=m, restore=pair) for n, m in degrees for pair in pairs]
