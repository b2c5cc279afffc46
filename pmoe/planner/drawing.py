"""HTML pages, made by jinja2 from `page.html`, and matplotlib figures for them.

A page is a single file that loads nothing else. Its pictures take their colours from the page's CSS
variables, so they suit both light and dark screens.
"""

from __future__ import annotations

import functools
import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pmoe.planner.timeline import PICTURES, TEXT_SIZE
from pmoe.schedule.restore import ALL_PAIRS

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure

THEME: Mapping[str, tuple[str, str]] = PICTURES["theme"]
"""CSS variables of a page: name -> (colour on light screens, colour on dark screens).

c0 to c8 are the colours of series in a plot.
"""

SERIES = [name for name in THEME if name.startswith("c")]
LIGHT = {name: light for name, (light, _) in THEME.items()}
"""Colours of a page on light screens, by name of the CSS variable.

Figures are drawn in these colours; `inline_svg` then replaces each colour by its variable.
"""

_ordered = map(str, sorted(ALL_PAIRS, key=lambda pair: pair.strategy or "others"))
PAIRS = {pair: LIGHT[name] for pair, name in zip(_ordered, SERIES, strict=True)}
"""The colour of each restore pair, the same in every picture. Keys are texts such as "keep/recompute".

A restore pair says how backward gets the experts' inputs and hidden activations back. The pairs S1 to S4 have
the first colours.
"""


def part(kind: str, *args: Any, **options: Any) -> str:
    """Returns the HTML of one part of a page, such as a table.

    kind: name of a macro in `page.html`. That file documents the arguments of each macro.
    args, options: arguments of the macro.

    Example: part("table", header=["n", "ms"], rows=[["1", "2.5"]]).
    """
    markup: str = getattr(template().module, kind)(*args, **options)
    return markup


@functools.cache
def template(name: str = "planner/page.html") -> Template:
    """Returns the jinja2 template of a page, read from a file of pmoe.

    name: path of the file, relative to the folder pmoe/.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pmoe", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals.update(theme=THEME, title="", lead="", parts=[])
    return environment.get_template(name)


# ---- pictures


@dataclass(frozen=True, kw_only=True)
class Point:
    """One marker of `scatter_figure`: a choice of n and the restore pair, with its memory and time.

    group: text in the legend, usually the restore pair. Points of one group have one colour and are joined by
        a line.
    label: one or two letters on the marker.
    mib: memory in MiB.
    milliseconds: time of a step.
    chosen: whether this is the choice that was taken, which is drawn larger.
    """

    group: str
    label: str
    mib: float
    milliseconds: float
    chosen: bool = False


def scatter_figure(points: Sequence[Point], title: str, budget: int | None = None) -> Figure:
    """Returns a scatter plot of a step's time (upwards) over memory (to the right). Needs matplotlib.

    The points of each group are joined by a line.

    points: the markers.
    title: text above the plot.
    budget: bytes, drawn as a vertical line; None draws no line.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    axis = figure.subplots()
    colours = {entry.group: PAIRS.get(entry.group.split()[0], "#000000") for entry in points}
    for group, colour in colours.items():
        x, y = zip(
            *((entry.mib, entry.milliseconds) for entry in points if entry.group == group), strict=True
        )
        axis.plot(x, y, "-", color=colour, lw=1, alpha=0.6, zorder=1)
        axis.scatter([], [], s=130, color=colour, label=group)
    # Each marker has a layer of its own, so that a later marker also covers the labels of earlier markers.
    on_marker: Any = {"ha": "center", "va": "center", "size": TEXT_SIZE, "color": LIGHT["paper"]}
    for layer, point in enumerate(sorted(points, key=lambda point: point.chosen), start=2):
        edge, size = (LIGHT["ink"], 480) if point.chosen else (LIGHT["paper"], 330)
        at = (point.mib, point.milliseconds)
        colour = colours[point.group]
        axis.scatter(*at, s=size, color=colour, edgecolor=edge, lw=1 + 2 * point.chosen, zorder=layer)
        axis.text(*at, point.label, zorder=layer, **on_marker)
    if budget is not None:
        axis.axvline(budget / 2**20, color="black", lw=1.2, ls="--")
    axis.set_xlabel("memory, MiB", size=TEXT_SIZE)
    axis.set_ylabel("time of a step, ms", size=TEXT_SIZE)
    axis.tick_params(labelsize=TEXT_SIZE)
    axis.margins(0.06)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.set_title(title, loc="left", size=TEXT_SIZE)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=TEXT_SIZE)
    return figure


# ---- figures on a page

VARIABLES = {colour: f"var(--{name})" for name, (colour, _) in THEME.items()} | {"#000000": "var(--ink)"}
"""Maps each colour of a figure to the CSS variable that replaces the colour on a page."""

ATTRIBUTE = re.compile(r' (id|style|d)="([^"]*)"')
"""Finds the attributes of an SVG element that `_on_a_page` changes."""
REFERRED_TO = re.compile(r"[hmp][0-9a-f]{10}")
"""Ids that other elements of the figure refer to, such as those of markers and fill patterns."""
NUMBERED = re.compile(r"[\w.]+_\d+")
"""Ids that matplotlib has made from a name and a running number, such as "axes_1"."""


def inline_svg(figure: Figure, label: str) -> str:
    """Returns a figure as an SVG element for an HTML page, with text that a browser can select.

    Colours of `THEME`, and black, become CSS variables, so that the page can change them for dark screens.
    The ``gid`` of a matplotlib artist becomes the CSS class of its SVG element.

    figure: a matplotlib figure.
    label: text for screen readers.
    """
    from matplotlib import rc_context

    file = io.StringIO()
    size = " ".join(f"{inches * 72:g}" for inches in figure.get_size_inches())
    # With this salt, ids differ between the figures of a page, but are the same each time the page is made.
    style: Any = {"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": f"{label} {size}"}
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(style):
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    drawn = re.search(r'(<g id="figure_1">.*)</svg>', file.getvalue(), re.DOTALL)
    assert drawn is not None
    body = ATTRIBUTE.sub(_on_a_page, drawn[1])
    return f'<svg viewBox="0 0 {size}" role="img" aria-label="{html.escape(label)}">{body}</svg>'


def _on_a_page(attribute: re.Match[str]) -> str:
    """Returns an SVG attribute, changed from matplotlib's form to the form that a page needs.

    An id to which other elements refer stays. An id that matplotlib numbered is removed. Any other id becomes
    a class. Numbers in paths are cut to two decimals. In styles, names of fonts are removed, and colours
    become CSS variables.

    attribute: a match of `ATTRIBUTE`, which finds ids, styles and paths.
    """
    name, value = attribute.groups()
    if name == "id":
        if REFERRED_TO.fullmatch(value):
            return attribute[0]
        return "" if NUMBERED.fullmatch(value) else f' class="{value}"'
    if name == "d":
        value = re.sub(r"(\.\d\d)\d+", r"\1", " ".join(value.split()))
    else:
        value = re.sub(r"font: [^;]*?([\d.]+px)[^;]*", r"font-size: \1", value)  # before matplotlib 3.11
        value = re.sub(r"font-family: [^;]*;? ?", "", value)
        value = re.sub(r"#[0-9a-f]{6}", lambda colour: VARIABLES.get(colour[0], colour[0]), value)
    return f' {name}="{value}"'
