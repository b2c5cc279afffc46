"""What pmoe says by itself: warnings, once a process, and lines about what it measures and chooses."""

from __future__ import annotations

import logging
import sys
import warnings

import torch.distributed as dist


class _OnStderr(logging.Handler):
    """For programs that configure no logging: rank 0's lines, as they come."""

    def emit(self, record: logging.LogRecord) -> None:
        first = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
        if first and not logging.getLogger().handlers:
            print(f"pmoe: {record.getMessage()}", file=sys.stderr, flush=True)


log: logging.Logger = logging.getLogger("pmoe")
"""Shown by default, on stderr. `logging.getLogger("pmoe").setLevel(logging.WARNING)` turns it off."""
log.addHandler(_OnStderr())
if log.level == logging.NOTSET:
    log.setLevel(logging.INFO)

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
