"""The output of a command: text, or one JSON object; and functions that format numbers for the text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pmoe.schedule.restore import Restore


class Output(NamedTuple):
    """The result of a command in two forms.

    fields: the JSON object that --json prints.
    lines: the lines of text that are printed without --json.
    """

    fields: Mapping[str, Any]
    lines: Iterable[str]


def plural(number: int, name: str) -> str:
    """Returns a number with a noun, in the plural unless the number is 1.

    Example: 1, "rank" -> "1 rank"; 2, "rank" -> "2 ranks".
    """
    return f"{number} {name}{'s' * (number != 1)}"


def mib(num_bytes: int) -> str:
    """Returns a number of bytes as text in MiB, without the unit.

    Example: 3 * 2**19 -> "1.50".
    """
    return f"{num_bytes / 2**20:,.2f}"


def ms(seconds: float) -> str:
    """Returns a time as text in milliseconds, without the unit.

    seconds: the time. From 0.1 seconds on, the text has one decimal, otherwise three.

    Example: 0.00125 -> "1.250"; 0.125 -> "125.0".
    """
    return f"{seconds * 1e3:,.{3 if seconds < 0.1 else 1}f}"


def pair_name(pair: Restore) -> str:
    """Returns a restore pair as text, with its name in the MPipeMoE paper if it has one.

    Example: "communicate/recompute S4".
    """
    return f"{pair} {pair.strategy or ''}".rstrip()


def by_key(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns the cells of a table with one column for each key. Its first row is the header.

    rows: mappings with the same keys. The last word of a key decides how its values are shown: seconds in ms,
        bytes in MiB, a relative change in percent.

    Example: [{"n": 2, "even_bytes": 2**20}] -> [["n", "even MiB"], ["2", "1.00"]].
    """
    shown = {"seconds": ms, "bytes": mib, "change": "{:+.1%}".format}

    def cell(name: str, value: Any) -> str:
        if value is None or isinstance(value, bool):
            return {None: "", True: "yes", False: "no"}[value]
        plain = "{:.2f}".format if isinstance(value, float) else str
        return shown.get(name.rpartition("_")[2], plain)(value)

    head = [name.replace("seconds", "ms").replace("bytes", "MiB").replace("_", " ") for name in rows[0]]
    return [head, *([cell(name, value) for name, value in row.items()] for row in rows)]
