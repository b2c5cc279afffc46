"""Sizes in bytes as users write them: 2000, "2GiB", "500 MB"."""

from __future__ import annotations

import re

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40} | {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_bytes(name: str, value: int | str) -> int:
    """Bytes of 2000, "2GiB" or "1.5 GB". name: of the argument, for messages.

    Raises TypeError for another type, ValueError for another text and for less than one byte.
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
