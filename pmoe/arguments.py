"""Checks of arguments: TypeError or ValueError with the argument's name, its value and the rule."""

from __future__ import annotations

import math
import numbers
import re

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40} | {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def check_number(**values: object) -> None:
    """TypeError unless each is a number; a bool is none."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} ({value!r}) must be a number")


def check_int(**values: object) -> None:
    """TypeError unless each is an int; a bool is none."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} ({value!r}) must be an int")


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


def parse_bytes(name: str, value: int | str) -> int:
    """Bytes of 2000, "2GiB" or "1.5 GB".

    TypeError for another type, ValueError for another text and for less than one byte.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{name} ({value!r}) must be a number of bytes or a string such as '2GiB'")
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(
            f"{name} ({value!r}) must be a number of bytes or a string such as '2GiB' or '500 MB'"
        )
    number = int(float(found[1]) * UNITS[found[2].upper()])
    if number < 1:
        raise ValueError(f"{name} ({value!r}) must be at least one byte")
    return number
