"""Simulations from assumed rates: their assumptions (bench/stated.md) and their command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pmoe.papers.assumptions import section, wrapped
from pmoe.text import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def assumptions(name: str) -> Mapping[str, str]:
    """Returns a section of bench/stated.md: texts by name."""
    return section(Path(__file__).with_name("stated.md").read_text(encoding="utf-8"), name)


def by_key(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table whose columns are the keys."""
    cells = [
        [f"{cell:.2f}" if isinstance(cell, float) else f"{cell}" for cell in row.values()] for row in rows
    ]
    return table([[*rows[0]], *cells])


def run(name: str, lines: Callable[[], Iterable[str]], figure: Callable[[], Figure]) -> None:
    """Prints the result of a simulation, or its assumptions. Draws its picture if the user asks for it."""
    parser = argparse.ArgumentParser(description=f"{name}: simulated from stated rates")
    parser.add_argument("--assumptions", action="store_true", help="print what is assumed, simulate nothing")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="also draw the picture, as a PNG")
    args = parser.parse_args()
    if args.assumptions:
        print("\n".join(wrapped(assumptions(name))))
        return
    print("\n".join(lines()))
    print(f"\nassumed: python bench/{name}.py --assumptions")
    if args.draw is not None:
        figure().savefig(args.draw, dpi=130)
