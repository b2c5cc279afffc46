"""What a command prints: one JSON object, or lines of text with numbers in their units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pmoe.schedule.restore import Restore


class Output(NamedTuple):
    """One result in two forms: fields, which --json prints as an object, and lines of text."""

    fields: Mapping[str, Any]
    lines: Iterable[str]


def plural(number: int, name: str) -> str:
    """Example: 1, "rank" -> "1 rank"; 2, "rank" -> "2 ranks"."""
    return f"{number} {name}{'s' * (number != 1)}"


def mib(num_bytes: int) -> str:
    """Example: 3 * 2**19 -> "1.50"."""
    return f"{num_bytes / 2**20:,.2f}"


def ms(seconds: float) -> str:
    """Example: 0.00125 -> "1.250"; 0.125 -> "125.0", for from 0.1 s on one decimal is enough."""
    return f"{seconds * 1e3:,.{3 if seconds < 0.1 else 1}f}"


def pair_name(pair: Restore) -> str:
    """Example: "communicate/recompute S4"; pairs that the paper does not name have no number."""
    return f"{pair} {pair.strategy or ''}".rstrip()
