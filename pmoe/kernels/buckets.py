"""Numbers of rows in buckets, so that kernels are measured, and heaps are made, for few numbers."""

from __future__ import annotations


def bucket(rows: int) -> int:
    """The least power of two that is not below ``rows``.

    Example: 1000 -> 1024, 1024 -> 1024, 0 -> 1.
    """
    return 1 << max(rows - 1, 0).bit_length()
