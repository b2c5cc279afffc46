"""Texts: tables that pmoe prints, numbers of bytes that users write, suggestions for mistyped words."""

from __future__ import annotations

import numbers
import re
from collections.abc import Container, Iterable, Sequence
from difflib import get_close_matches
from itertools import zip_longest

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
"""Number of bytes of each unit that `parse_bytes` accepts, by the unit's name in capital letters."""


def table(rows: Iterable[Sequence[str]], left: Container[int] = (0,)) -> str:
    """Returns rows of cells as a text with aligned columns, one line for each row.

    Two spaces separate columns. Lines have no spaces at their end.

    rows: the cells of each row, the header first. Missing cells at the end of a row are empty.
    left: indices of the columns that are aligned to the left; the others are aligned to the right.

    Example: [["name", "ms"], ["a", "12.5"]] -> "name    ms" and "a     12.5".
    """
    aligned = []
    for i, column in enumerate(zip_longest(*rows, fillvalue="")):
        width = max(map(len, column))
        aligned.append([cell.ljust(width) if i in left else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def parse_bytes(name: str, value: int | str) -> int:
    """Returns a number of bytes, which is an int or a text such as "2000", "2GiB" or "1.5 GB".

    name: the argument's name, for errors.

    Raises TypeError for another type, ValueError for another text, and for less than one byte.
    """
    rule = f"{name} ({value!r}) must be a number of bytes or a string such as '2GiB' or '500 MB'"
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, str)):
        raise TypeError(rule)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(rule)
    number = float(match[1]) * UNITS[match[2].upper()]
    if not 1 <= number < 2**63:
        raise ValueError(f"{name} ({value!r}) must be at least one byte and less than 2**63")
    return int(number)


def meant(word: str, known: Iterable[str]) -> str:
    """Returns a text that suggests a known word for a mistyped one; "" if no known word is similar.

    Example: "memroy" -> ": did you mean memory?".
    """
    matches = get_close_matches(word, list(known), n=1)
    return f": did you mean {matches[0]}?" if matches else ""
