"""Time over memory as a picture, and a page that holds pictures and tables without anything from outside."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

COLOURS = (
    "#bbbbbb",
    "#88ccee",
    "#4477aa",
    "#ddcc77",
    "#ee7733",
    "#cc3311",
    "#99ddaa",
    "#228833",
    "#aa4499",
    "#eecc22",
)
"""By group, in the order in which groups come."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way to run a layer. group: its colour and line in the legend; label: a letter or two inside."""

    group: str
    label: str
    num_bytes: float
    seconds: float
    chosen: bool = False


def scatter(
    path: str | Path | IO[bytes], points: Sequence[Point], title: str, budget: int | None = None
) -> None:
    """A PNG: bytes to the right, seconds upwards, one line a group through its points. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(10, 6), layout="constrained")
    groups = list(dict.fromkeys(point.group for point in points))
    layer = 2.0  # every marker with its label lies over those before it
    for i, group in enumerate(groups):
        own = [point for point in points if point.group == group]
        x, y = [point.num_bytes / 2**20 for point in own], [point.seconds * 1e3 for point in own]
        colour = COLOURS[i % len(COLOURS)]
        axis.plot(x, y, "-", color=colour, lw=1, alpha=0.6, zorder=1)
        axis.scatter([], [], s=110, color=colour, label=group)
        for point in sorted(own, key=lambda point: point.chosen):
            at = (point.num_bytes / 2**20, point.seconds * 1e3)
            layer += 1 + 1000 * point.chosen
            edge = "black" if point.chosen else "white"
            size = 240 if point.chosen else 130
            axis.scatter(*at, s=size, color=colour, edgecolor=edge, lw=1 + point.chosen, zorder=layer)
            axis.text(*at, point.label, ha="center", va="center", fontsize=7, zorder=layer)
    if budget is not None:
        axis.axvline(budget / 2**20, color="black", lw=0.9, ls="--")
        axis.annotate(
            "budget ",
            (budget / 2**20, 1),
            xycoords=("data", "axes fraction"),
            va="top",
            ha="right",
            fontsize=8,
        )
    axis.set_xlabel("memory, MiB")
    axis.set_ylabel("time of a step, ms")
    axis.margins(0.06)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.set_title(title, loc="left", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=130, format="png")
    plt.close(figure)


@dataclass(frozen=True, kw_only=True)
class Table:
    """header, rows of text; numbers of the rows to point out; how many first columns are words."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: Sequence[int] = ()
    words: int = 0


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG and what it shows."""

    png: bytes
    caption: str


@dataclass(frozen=True)
class Markup:
    """HTML as it is to stand on a page."""

    html: str


Part = str | Table | Picture | Markup


def page(title: str, content: Sequence[Part], style: str = "") -> str:
    """HTML of one file: text as paragraphs, tables, and pictures inside it. style: CSS that is added."""
    body = "\n".join(markup(each) for each in content)
    return PAGE.format(title=html.escape(title), style=STYLE + style, body=body)


def markup(part: Part) -> str:
    if isinstance(part, Markup):
        return part.html
    if isinstance(part, str):
        return f"<p>{html.escape(part)}</p>"
    if isinstance(part, Picture):
        data, caption = base64.b64encode(part.png).decode(), html.escape(part.caption)
        source = f"data:image/png;base64,{data}"
        return f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>'

    def line(cells: Sequence[str], tag: str, style: str = "") -> str:
        written = (
            f"<{tag}{' class=word' * (i < part.words)}>{html.escape(cell)}</{tag}>"
            for i, cell in enumerate(cells)
        )
        return f"<tr{style}>{''.join(written)}</tr>"

    rows = (line(row, "td", " class=marked" * (i in part.marked)) for i, row in enumerate(part.rows))
    table = f"<table><thead>{line(part.header, 'th')}</thead>\n<tbody>{''.join(rows)}</tbody></table>"
    return f"<div class=wide>{table}</div>"


STYLE = """
:root { color-scheme: light dark; --ink: #1d2125; --soft: #5c646c; --rule: #dfe3e6; --paper: #fff }
:root { --panel: #f6f7f8; --mark: #fff3c4 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ea; --soft: #a0a8b0; --rule: #343a40; --paper: #14171a }
  :root { --panel: #1c2024; --mark: #4b4212 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
body { max-width: 68rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word }
h1 { font-size: 1.4rem }
figure { margin: 1.5rem 0 } figcaption { color: var(--soft); font-size: .9rem } img { max-width: 100% }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid var(--rule) }
th { border-bottom-color: var(--soft) } .word { text-align: left }
.marked { background: var(--mark); font-weight: 600 }
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
