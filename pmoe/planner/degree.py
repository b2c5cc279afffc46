"""The pipeline degree n: how many micro-batches a layer's tokens are cut into."""

from __future__ import annotations

FINEST = 8
"""Row counts travel in this many bins while n is still open; n divides it."""

LEAST_ROWS = 1024
"""Below this many rows a chunk, smaller products cost more than finer overlap hides
(bench/bench_overlap.py: n = 2 to 4 is best at 4096 rows a rank)."""


def check_pipeline(pipeline: bool | int) -> None:
    """Raises TypeError unless a bool or an int, ValueError for an int below 1."""
    if not isinstance(pipeline, int):
        raise TypeError(f"pipeline ({pipeline!r}) must be False, True or an int")
    if not isinstance(pipeline, bool) and pipeline < 1:
        raise ValueError(f"pipeline ({pipeline}) must be False, True or an int of at least 1")


def fixed_degree(pipeline: bool | int) -> int | None:
    """n where the argument alone decides it, None where it depends on the batch."""
    if pipeline is True:
        return None
    return 1 if pipeline is False else int(pipeline)


def adaptive_degree(max_rows: int, num_ranks: int) -> int:
    """The n for pipeline=True, from numbers that all ranks share: max_rows is the largest T * K of a rank.

    The largest of 8, 4, 2, 1 that leaves LEAST_ROWS a chunk; 1 where nothing travels.
    """
    if num_ranks == 1:
        return 1
    return max(n for n in (1, 2, 4, FINEST) if n == 1 or max_rows >= n * LEAST_ROWS)
