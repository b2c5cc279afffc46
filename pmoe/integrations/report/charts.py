"""Charts as inline SVG with labels in HTML: marks stretch with the page's width, text stays as it is.

A chart's marks lie in a box of SIZE x SIZE units that fills whatever room there is; labels stand beside it,
placed in percent. Colours are CSS variables, which differ on light and dark screens.
"""

from __future__ import annotations

import base64
import html
import itertools
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pmoe.integrations.report.numbers import (
    Bin,
    smooth,
    thinned,
    ticks,
    told,
    told_share,
    told_steps,
    told_ticks,
)

SIZE = 1000

MOST_POINTS = 400
"""Of a line: about as many as a wide screen shows apart."""

MOST_COLUMNS = 120
"""Of a heat map."""

LABEL_HEIGHT = 18
"""Pixels that one label beside a chart needs."""

COLOURS = 8

LARGEST = 1e300
"""Beyond it a value counts as not finite: the arithmetic of axes would overflow."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series. colour: 0 to COLOURS - 1. smoothed: the values stand faint behind their running mean."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    smoothed: bool = False
    fills: bool = False


@dataclass(frozen=True, kw_only=True)
class Band:
    """What lies between two series."""

    name: str
    xs: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]
    colour: int = 0


@dataclass(frozen=True)
class _Axes:
    """From numbers to the box: x to the right, y upwards."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at_x(self, value: float) -> float:
        return _share(value, self.x) * SIZE

    def at_y(self, value: float) -> float:
        return (1 - _share(value, self.y)) * SIZE


def _share(value: float, ends: tuple[float, float]) -> float:
    low, high = ends
    return (value - low) / (high - low) if high > low else 0.5


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str = "",
    bands: Sequence[Band] = (),
    least: float | None = None,
    x_label: str = "step",
    is_share: bool = False,
    note: str = "",
) -> str:
    """Values over steps. least: what the axis begins with at most. is_share: 1 is 100 %.

    Values that are not finite leave gaps, marked at the top; a few very large ones are cut off, and the note
    below says so.
    """
    lines = [replace(line, ys=[y if abs(y) <= LARGEST else math.nan for y in line.ys]) for line in lines]
    drawn = [(line, thinned(line.xs, line.ys, MOST_POINTS)) for line in lines]
    every = [bin for _, bins in drawn for bin in bins]
    values = [v for bin in every for v in (bin.low, bin.high) if math.isfinite(v)]
    values += [v for band in bands for v in (*band.lows, *band.highs) if math.isfinite(v)]
    xs = [x for line in lines for x in line.xs] or [x for band in bands for x in band.xs]
    if not values:
        return _frame(title, unit, "", f"<p class=none>No finite value in {len(xs)} points.</p>", note)
    low, high, cut = _range(values, least)
    y_ticks = ticks(low, high)
    axes = _Axes((min(xs), max(xs)), (low, high))
    marks = [_path("band", band.colour, _outline(axes, _thin_band(band)), band.name) for band in bands]
    for line, bins in drawn:
        marks += _line_marks(axes, line, bins)
    bad = [x for line in lines for x, y in zip(line.xs, line.ys, strict=True) if not math.isfinite(y)]
    for x in sorted({round(axes.at_x(each)) for each in bad}):
        marks.append(f'<path class="bad" d="M{x} 0V40"/>')
    told_below = [note] if note else []
    if cut is not None:
        told_below.append(f"Cut off above: values up to {told_share(cut) if is_share else told(cut)}.")
    if bad:
        told_below.append(
            f"{len(bad):,} value{'s' * (len(bad) > 1)} not finite, the first at {x_label} {told(min(bad))}."
        )
    names = [(line.name, f"c{line.colour}") for line in lines if line.name]
    names += [(band.name, f"c{band.colour} pale") for band in bands if band.name]
    legend = _legend(names) if len(names) > 1 or bands else ""
    y_labels = told_ticks(y_ticks, as_shares=is_share)
    plot = _plot(
        axes, marks, y_ticks, y_labels, x_label, alt=f"{title}: {', '.join(n for n, _ in names) or 'a line'}"
    )
    return _frame(title, unit, legend, plot, " ".join(told_below))


def _thin_band(band: Band) -> Band:
    """No narrower anywhere than the band itself."""
    lows, highs = (thinned(band.xs, ys, MOST_POINTS) for ys in (band.lows, band.highs))
    return replace(
        band, xs=[bin.x for bin in lows], lows=[bin.low for bin in lows], highs=[bin.high for bin in highs]
    )


def _range(values: Sequence[float], least: float | None) -> tuple[float, float, float | None]:
    """Ends of an axis, and the greatest value where it lies above them."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    if least is not None:
        low = min(low, least)
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    cut = None
    if high > usual + 2 * (usual - low) and usual > low and len(ordered) >= 40:
        cut, high = high, usual + 0.5 * (usual - low)
    pad = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
    return low if least is not None and low == least else low - pad, high + pad, cut


def _line_marks(axes: _Axes, line: Line, bins: Sequence[Bin]) -> list[str]:
    means = [bin.mean for bin in bins]
    xs = [bin.x for bin in bins]
    marks = []
    if any(bin.high > bin.low for bin in bins):
        around = Band(
            name="",
            xs=xs,
            lows=[bin.low for bin in bins],
            highs=[bin.high for bin in bins],
            colour=line.colour,
        )
        marks.append(_path("band", line.colour, _outline(axes, around), ""))
    if line.fills:
        floor = Band(name="", xs=xs, lows=[axes.y[0]] * len(xs), highs=means, colour=line.colour)
        marks.append(_path("fill", line.colour, _outline(axes, floor), ""))
    if line.smoothed and len(means) >= 20:
        marks += _track(axes, "line faint", line, xs, means)
        means = smooth(means, max(2, len(means) // 60))
    return marks + _track(axes, "line", line, xs, means)


def _path(kind: str, colour: int, way: str, name: str) -> str:
    title = f"<title>{html.escape(name)}</title>" if name else ""
    return f'<path class="{kind} c{colour}" d="{way}">{title}</path>' if way else ""


def _pieces(xs: Sequence[float], ys: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Runs of points whose values are finite."""
    runs = itertools.groupby(zip(xs, ys, strict=True), key=lambda point: math.isfinite(point[1]))
    return [list(points) for is_finite, points in runs if is_finite]


def _track(axes: _Axes, kind: str, line: Line, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    """Through the points; a point alone is a dot: a line of no length, whose round ends show."""
    ways, dots = [], []
    for piece in _pieces(xs, ys):
        first, *rest = [f"{axes.at_x(x):.1f} {axes.at_y(y):.1f}" for x, y in piece]
        if rest:
            ways.append(f"M{first}L{' '.join(rest)}")
        else:
            dots.append(f"M{first}h0")
    found = [(kind, ways), (f"{kind} dot", dots)]
    return [_path(kind, line.colour, "".join(way), line.name) for kind, way in found if way]


def _outline(axes: _Axes, band: Band) -> str:
    """Around the area between lows and highs, piece by piece."""
    ways = []
    low_of = dict(zip(band.xs, band.lows, strict=True))
    for piece in _pieces(band.xs, band.highs):
        there = [f"{axes.at_x(x):.1f} {axes.at_y(y):.1f}" for x, y in piece]
        back = [f"{axes.at_x(x):.1f} {axes.at_y(low_of[x]):.1f}" for x, _ in reversed(piece)]
        ways.append("M" + "L".join([*there, *back]) + "Z")
    return "".join(ways)


# ---- heat maps


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A picture of numbers: one row a name from the top, one column a step. cells[row][column]: 1 is even, 0
    is nothing, None is unknown. y_label: what the rows are."""

    steps: Sequence[float]
    cells: Sequence[Sequence[float | None]]
    y_label: str
    names: Sequence[str] = field(default_factory=tuple)


def heat_map(title: str, heat: Heat, note: str = "") -> str:
    """Colours from blue (less than even) over none (even) to red (more), on a scale of doublings."""
    num_rows, num_columns = len(heat.cells), len(heat.steps)
    source = f"data:image/png;base64,{base64.b64encode(_png(heat.cells)).decode()}"
    marks = [
        f'<image class="cells" href="{source}" width="{SIZE}" height="{SIZE}" preserveAspectRatio="none">'
        f"<title>{num_rows} {html.escape(heat.y_label)}s, {num_columns} steps</title></image>"
    ]
    height = min(max(num_rows * 9, 150), 300)
    every = -(-num_rows // (height // LABEL_HEIGHT))
    labels = [
        ((i + 0.5) / num_rows * 100, heat.names[i] if heat.names else str(i))
        for i in range(0, num_rows, every)
    ]
    first, last = heat.steps[0], heat.steps[-1]
    half = (last - first) / max(num_columns - 1, 1) / 2  # a column is as wide as the steps around it
    axes = _Axes((first - half, last + half), (0, 1))
    alt = f"{title}: {num_rows} {heat.y_label}s over {num_columns} steps"
    plot = _box(axes, marks, labels, "step", alt=alt, height=height, y_label=heat.y_label, framed=True)
    return _frame(title, "", "", plot, note)


def heat_legend(what: str) -> str:
    """What the colours mean. what: such as "rows of the even share"."""
    stops = "".join(
        f'<span class="stop" style="background:rgba({r},{g},{b},{a / 255:.2f})"></span>'
        for r, g, b, a in (_colour(2.0**e) for e in (-2, -1, 0, 1, 2))
    )
    r, g, b, a = _colour(0.0)
    nothing = f'<span class="stop" style="background:rgba({r},{g},{b},{a / 255:.2f})"></span>'
    return f'<p class="scale">{html.escape(what)}: {nothing} none &nbsp; ¼ {stops} 4 times or more</p>'


LEVELS = 32
"""Shades on either side of even."""

UNKNOWN = 2 * LEVELS + 2
NOTHING = 2 * LEVELS + 1


def _level(ratio: float | None) -> int:
    """Index of the palette: LEVELS is even, each octave is half the way to an end."""
    if ratio is None or not math.isfinite(ratio):
        return UNKNOWN
    if ratio <= 0:
        return NOTHING
    return round(LEVELS * (1 + max(-1.0, min(1.0, math.log2(ratio) / 2))))


def _colour(ratio: float) -> tuple[int, int, int, int]:
    return PALETTE[_level(ratio)]


def _shades() -> list[tuple[int, int, int, int]]:
    """Red, green, blue and how opaque: where all is even the page shows through, be it light or dark."""
    cold = [(35, 110, 200, round(235 * (1 - i / LEVELS))) for i in range(LEVELS)]
    warm = [(214, 69, 40, round(240 * i / LEVELS)) for i in range(LEVELS + 1)]
    return [*cold, *warm, (150, 55, 200, 255), (128, 128, 128, 90)]


PALETTE = _shades()


def _png(cells: Sequence[Sequence[float | None]]) -> bytes:
    """A pixel a cell, by palette."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    lines = b"".join(b"\0" + bytes(map(_level, row)) for row in cells)
    header = struct.pack(">IIBBBBB", len(cells[0]), len(cells), 8, 3, 0, 0, 0)
    colours = b"".join(bytes(shade[:3]) for shade in PALETTE)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            chunk(b"PLTE", colours),
            chunk(b"tRNS", bytes(shade[3] for shade in PALETTE)),
            chunk(b"IDAT", zlib.compress(lines, 9)),
            chunk(b"IEND", b""),
        ]
    )


# ---- bars


def bar_chart(
    title: str,
    rows: Sequence[tuple[str, Sequence[float]]],
    parts: Sequence[str],
    *,
    unit: str,
    note: str = "",
) -> str:
    """One bar a row, its parts beside each other, its sum at the end."""
    most = max((sum(values) for _, values in rows), default=0.0) or 1.0
    lines = []
    for name, values in rows:
        ends = [0.0, *itertools.accumulate(values)]
        marks = "".join(
            f'<rect class="part c{i}" x="{start / most * SIZE:.1f}" height="{SIZE}" '
            f'width="{(end - start) / most * SIZE:.1f}">'
            f"<title>{html.escape(part)}: {told(end - start)} {unit}</title></rect>"
            for i, (part, start, end) in enumerate(zip(parts, ends, ends[1:], strict=False))
        )
        svg = _svg(marks, f"{name}: {told(ends[-1])} {unit}", framed=False)
        lines.append(
            f'<div class="bar"><span class="name">{html.escape(name)}</span><div class="room">{svg}</div>'
            f'<span class="sum">{told(ends[-1])}</span></div>'
        )
    legend = _legend([(part, f"c{i}") for i, part in enumerate(parts)])
    return _frame(title, unit, legend, f'<div class="bars">{"".join(lines)}</div>', note)


# ---- what all charts have in common


def _frame(title: str, unit: str, legend: str, plot: str, note: str) -> str:
    in_unit = f' <span class="unit">{html.escape(unit)}</span>' if unit else ""
    below = f'<p class="note">{html.escape(note)}</p>' if note else ""
    heading = f"<figcaption><b>{html.escape(title)}</b>{in_unit}{legend}</figcaption>"
    return f'<figure class="chart">{heading}{plot}{below}</figure>'


def _legend(names: Iterable[tuple[str, str]]) -> str:
    keys = "".join(f'<span class="key {kind}">{html.escape(name)}</span>' for name, kind in names)
    return f'<span class="legend">{keys}</span>'


def _plot(
    axes: _Axes,
    marks: Sequence[str],
    y_ticks: Sequence[float],
    y_labels: Sequence[str],
    x_label: str,
    alt: str,
) -> str:
    grid = "".join(f'<path class="rule" d="M0 {axes.at_y(each):.1f}H{SIZE}"/>' for each in y_ticks)
    labels = [(axes.at_y(at) / SIZE * 100, text) for at, text in zip(y_ticks, y_labels, strict=True)]
    return _box(axes, [grid, *marks], labels, x_label, alt=alt)


def _box(
    axes: _Axes,
    marks: Sequence[str],
    y_labels: Sequence[tuple[float, str]],
    x_label: str,
    *,
    alt: str,
    height: int = 210,
    y_label: str = "",
    framed: bool = False,
) -> str:
    """The box with labels at percent from the top, and steps below it."""
    width = max((len(text) for _, text in y_labels), default=1)
    beside = "".join(f'<span style="top:{at:.1f}%">{html.escape(text)}</span>' for at, text in y_labels)
    x_ticks = [each for each in ticks(*axes.x) if each == int(each)] or [round(axes.x[0])]
    below = "".join(
        _x_tick(axes.at_x(each) / SIZE * 100, text, is_less=i % 2 == 1)
        for i, (each, text) in enumerate(zip(x_ticks, told_steps(x_ticks), strict=True))
    )
    upright = f'<div class="upright"><span>{html.escape(y_label)}</span></div>' if y_label else "<div></div>"
    return (
        f'<div class="plot" style="--ylabels:{width}ch;--high:{height}px">{upright}'
        f'<div class="beside">{beside}</div><div class="room">{_svg("".join(marks), alt, framed)}</div>'
        f'<div class="below">{below}</div><div class="xname">{html.escape(x_label)}</div></div>'
    )


def _x_tick(at: float, text: str, *, is_less: bool) -> str:
    """is_less: not shown where there is little room. A number at the right end stands out but little."""
    kinds = ["less"] * is_less + ["end"] * (at > 94)
    return f'<span class="{" ".join(kinds)}" style="left:{at:.1f}%">{text}</span>'


def _svg(marks: str, alt: str, framed: bool) -> str:
    frame = f'<rect class="frame" width="{SIZE}" height="{SIZE}"/>' if framed else ""
    return (
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(alt)}">{marks}{frame}</svg>'
    )


def _colours(light: Sequence[str], dark: Sequence[str]) -> str:
    def names(values: Sequence[str]) -> str:
        return ":root { " + "; ".join(f"--c{i}: {value}" for i, value in enumerate(values)) + " }"

    rules = "\n".join(f".c{i} {{ --own: var(--c{i}) }}" for i in range(COLOURS))
    return f"{names(light)}\n@media (prefers-color-scheme: dark) {{ {names(dark)} }}\n{rules}\n"


STYLE = (
    _colours(
        ("#2f6db5", "#d1512d", "#23823a", "#a8821a", "#8a3f8f", "#178a92", "#6b7280", "#b03060"),
        ("#6aa5e8", "#f08560", "#62bf7a", "#d8b84a", "#c88ad0", "#58c3ca", "#a3acb5", "#ee86a8"),
    )
    + """
.chart { margin: 0; padding: .8rem .9rem .7rem; background: var(--panel); border-radius: .6rem; min-width: 0 }
.chart figcaption { color: var(--ink); font-size: .95rem; margin-bottom: .7rem }
.unit { color: var(--soft) } .unit::before { content: "· " }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; font-size: .85rem; margin-top: .2rem }
.key { color: var(--soft); overflow-wrap: anywhere }
.key::before { content: ""; display: inline-block; width: .8em; height: .8em; border-radius: .2em }
.key::before { background: var(--own); margin-right: .4em; vertical-align: -.06em }
.key.pale::before { opacity: .35 }
.plot { display: grid; grid-template-columns: auto var(--ylabels) 1fr; column-gap: .5rem; font-size: .8rem }
.plot, .bars { font-variant-numeric: tabular-nums; color: var(--soft) }
.plot .room, .beside, .upright { height: var(--high) } .room { min-width: 0 }
svg { display: block; width: 100%; height: 100%; overflow: hidden }
.beside { position: relative }
.beside span { position: absolute; right: 0; transform: translateY(-50%); white-space: nowrap }
.beside span { line-height: 1.2 }
.upright { position: relative; width: 1.1em }
.upright span { position: absolute; top: 50%; left: .5em; white-space: nowrap }
.upright span { transform: translate(-50%, -50%) rotate(-90deg) }
.below { grid-column: 3; position: relative; height: 1.5em; margin-top: .25rem }
.below span { position: absolute; transform: translateX(-50%); white-space: nowrap }
.below .end { transform: translateX(min(-50%, .7rem - 100%)) } /* the panel has room for as much */
.xname { grid-column: 3; text-align: center }
path, .frame { fill: none; vector-effect: non-scaling-stroke }
.rule { stroke: var(--rule); stroke-width: 1 } .frame { stroke: var(--rule); stroke-width: 1 }
.line { stroke: var(--own); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round }
.dot { stroke-width: 7 } .faint { opacity: .35; stroke-width: 1 } .band { fill: var(--own); opacity: .2 }
.fill { fill: var(--own); opacity: .3 } .part { fill: var(--own) }
.bad { stroke: #d03030; stroke-width: 2 }
.cells { image-rendering: pixelated }
.note, .none { color: var(--soft); font-size: .85rem; margin: .5rem 0 0 }
.bar { display: grid; grid-template-columns: minmax(4rem, 24%) 1fr auto; gap: .6rem; align-items: center }
.bar { font-size: .85rem; margin: .3rem 0 } .bar .room { height: 1rem } .bar .name { overflow-wrap: anywhere }
.bar .sum { min-width: 4ch; text-align: right; color: var(--ink) }
.scale { color: var(--soft); font-size: .85rem; margin: .2rem 0 .6rem }
.stop { display: inline-block; width: 1.6em; height: .8em; vertical-align: -.05em }
.stop { outline: 1px solid var(--rule) }
@media (max-width: 36rem) {
  .below .less { display: none }
  .bar { grid-template-columns: 1fr auto; gap: .1rem .6rem } .bar .name { grid-column: 1 / -1 }
}
"""
)
