"""Numbers of rows in buckets, so that few numbers are measured, agreed on or looked up."""

from __future__ import annotations


def bucket(rows: int) -> int:
    """The least power of two that is not below ``rows``.

    Example: 1000 -> 1024, 1024 -> 1024, 0 -> 1.
    """
    return 1 << max(rows - 1, 0).bit_length()
