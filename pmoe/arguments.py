"""Checks of arguments: TypeError or ValueError with the argument's name, its value and the rule."""

from __future__ import annotations

import math
import numbers
from typing import Any, TypeGuard

MOST = 2**31 - 1
"""Of a number of micro-batches: more is a mistake."""


def check_number(**values: object) -> None:
    """TypeError unless each is a number; a bool is none."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} ({value!r}) must be a number")


def is_int(value: object) -> TypeGuard[int]:
    """Whether it is an integer of any library, numpy's say; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def plain_int(value: Any) -> Any:
    """An integer of any library as an int; any other value as it is."""
    return int(value) if is_int(value) else value


def check_int(**values: object) -> None:
    """TypeError unless each is an integer."""
    for name, value in values.items():
        if not is_int(value):
            raise TypeError(f"{name} ({value!r}) must be an int")


def check_flag(name: str, flag: object, *, or_none: bool = False) -> None:
    """TypeError unless it is True or False, or None where that is allowed."""
    if not isinstance(flag, bool) and not (or_none and flag is None):
        allowed = "None, True or False" if or_none else "True or False"
        raise TypeError(f"{name} ({flag!r}) must be {allowed}")


def check_count(**counts: int) -> None:
    """TypeError unless each is an int, ValueError unless at least 1."""
    for name, count in counts.items():
        check_int(**{name: count})
        if count < 1:
            raise ValueError(f"{name} ({count}) must be at least 1")


def check_not_negative(**values: float) -> None:
    """TypeError unless each is a number, ValueError unless finite and at least 0."""
    for name, value in values.items():
        check_number(**{name: value})
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} ({value}) must be a finite number of at least 0")


def check_positive(**values: float | None) -> None:
    """TypeError unless each is None or a number, ValueError unless finite and above 0."""
    for name, value in values.items():
        if value is None:
            continue
        check_number(**{name: value})
        if not 0 < value < math.inf:
            raise ValueError(f"{name} ({value}) must be None or a positive number")


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(allowed)}")
