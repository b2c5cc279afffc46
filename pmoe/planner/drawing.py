"""Pages of one HTML file, made by jinja2 from `page.html`, and pictures whose colours follow the page.

Nothing is loaded from outside.
"""

from __future__ import annotations

import functools
import html
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pmoe.planner.timeline import ON_COLOUR

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure

THEME: Mapping[str, tuple[str, str]] = {
    "ink": ("#1d2125", "#e4e7ea"),
    "soft": ("#5c646c", "#a0a8b0"),
    "rule": ("#dfe3e6", "#343a40"),
    "paper": ("#ffffff", "#14171a"),
    "panel": ("#f6f7f8", "#1c2024"),
    "mark": ("#fff3c4", "#4b4212"),
    "bad": ("#d03030", "#e04848"),
    "c0": ("#2f6db5", "#6aa5e8"),
    "c1": ("#d1512d", "#f08560"),
    "c2": ("#23823a", "#62bf7a"),
    "c3": ("#a8821a", "#d8b84a"),
    "c4": ("#8a3f8f", "#c88ad0"),
    "c5": ("#178a92", "#58c3ca"),
    "c6": ("#6b7280", "#a3acb5"),
    "c7": ("#b03060", "#ee86a8"),
}
"""CSS variables of a page: on light screens, on dark ones. c0 to c7 are those of series."""

SERIES = [name for name in THEME if name.startswith("c")]


def page(title: str, parts: Sequence[str], lead: str = "") -> str:
    """The page as HTML.

    parts: each a paragraph's text, or made by `part`. lead: a line below the title.
    """
    return _template().render(title=title, lead=lead, parts=parts).strip() + "\n"


def part(kind: str, *args: Any, **options: Any) -> str:
    """A part of a page, as markup. kind: a macro of `page.html`, which documents its arguments.

    Example: part("table", header=["n", "ms"], rows=[["1", "2.5"]]).
    """
    made: str = getattr(_template().module, kind)(*args, **options)
    return made


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pmoe", "planner"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals.update(theme=THEME, title="", lead="", parts=[])
    return environment.get_template("page.html")


# ---- pictures


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way to run a layer. group: its colour and line in the legend; label: a letter or two inside."""

    group: str
    label: str
    num_bytes: float
    seconds: float
    chosen: bool = False


def scatter_figure(points: Sequence[Point], title: str, budget: int | None = None) -> Figure:
    """Bytes to the right, seconds upwards, one line a group through its points. Needs matplotlib."""
    from matplotlib import color_sequences
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axis = figure.subplots()
    colours = dict(
        zip(dict.fromkeys(point.group for point in points), itertools.cycle(color_sequences["tab10"]))
    )
    for group, colour in colours.items():
        x, y = zip(*(_place(point) for point in points if point.group == group), strict=True)
        axis.plot(x, y, "-", color=colour, lw=1, alpha=0.6, zorder=1)
        axis.scatter([], [], s=110, color=colour, label=group)
    # Every marker with its label lies over those before it.
    for layer, point in enumerate(sorted(points, key=lambda point: point.chosen), start=2):
        at, colour = _place(point), colours[point.group]
        edge, size = ("black", 240) if point.chosen else ("white", 130)
        axis.scatter(*at, s=size, color=colour, edgecolor=edge, lw=1 + point.chosen, zorder=layer)
        axis.text(*at, point.label, ha="center", va="center", fontsize=7, color=ON_COLOUR, zorder=layer)
    if budget is not None:
        axis.axvline(budget / 2**20, color="black", lw=0.9, ls="--")
        label = axis.annotate(
            "budget", (budget / 2**20, 1), (-4, 0), ("data", "axes fraction"), "offset points"
        )
        label.set(va="top", ha="right", fontsize=8)
    axis.set(xlabel="memory, MiB", ylabel="time of a step, ms")
    axis.margins(0.06)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.set_title(title, loc="left", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _place(point: Point) -> tuple[float, float]:
    return point.num_bytes / 2**20, point.seconds * 1e3


# ---- figures on a page

VARIABLES = {colour: f"var(--{name})" for name, (colour, _) in THEME.items()} | {"#000000": "var(--ink)"}

ATTRIBUTE = re.compile(r' (id|style|d)="([^"]*)"')
OF_A_CLIP_OR_MARKER = re.compile(r"[mp][0-9a-f]{10}")
NUMBERED = re.compile(r"[\w.]+_\d+")


def inline_svg(figure: Figure, label: str) -> str:
    """A figure as an element of an HTML page: text stays text, in the page's font.

    The colours of `THEME`, and black, become the page's CSS variables, so that dark pages have others. The
    ``gid`` of a mark becomes its class. label: what a screen reader says.
    """
    from matplotlib import rc_context

    file = io.StringIO()
    size = " ".join(f"{inches * 72:g}" for inches in figure.get_size_inches())
    # Ids differ between figures of a page, and are the same each time that the page is made.
    style: Any = {"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": f"{label} {size}"}
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(style):
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    drawn = re.search(r'(<g id="figure_1">.*)</svg>', file.getvalue(), re.DOTALL)
    assert drawn is not None
    body = ATTRIBUTE.sub(_on_a_page, drawn[1])
    return f'<svg viewBox="0 0 {size}" role="img" aria-label="{html.escape(label)}">{body}</svg>'


def _on_a_page(attribute: re.Match[str]) -> str:
    """An attribute without the font's name and numbered ids, in two decimals and the page's colours."""
    name, value = attribute.groups()
    if name == "id":
        if OF_A_CLIP_OR_MARKER.fullmatch(value):
            return attribute[0]
        return "" if NUMBERED.fullmatch(value) else f' class="{value}"'
    if name == "d":
        value = re.sub(r"(\.\d\d)\d+", r"\1", " ".join(value.split()))
    else:
        value = re.sub(r"font: [^;]*?([\d.]+px)[^;]*", r"font-size: \1", value)  # before matplotlib 3.11
        value = re.sub(r"font-family: [^;]*;? ?", "", value)
        value = re.sub(r"#[0-9a-f]{6}", lambda colour: VARIABLES.get(colour[0], colour[0]), value)
    return f' {name}="{value}"'
