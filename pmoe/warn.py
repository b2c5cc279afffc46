"""Warnings that are given once a process."""

from __future__ import annotations

import warnings

GIVEN: set[str] = set()
"""How the warnings that were given begin. Clearing it gives them again."""


def warn_once(message: str, category: type[Warning] = UserWarning, *, for_each_reason: bool = False) -> None:
    """One warning a process for messages that begin the same, up to a colon.

    for_each_reason: one for every message, whose end is the reason.
    """
    start = message if for_each_reason else message.partition(":")[0]
    if start not in GIVEN:
        GIVEN.add(start)
        warnings.warn(f"pmoe: {message}", category, stacklevel=2)
