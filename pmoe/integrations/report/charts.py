"""Charts of a report, drawn by matplotlib: lines over steps, and heat maps. Titles and legends are HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pmoe.integrations.run_folder import Curve
from pmoe.planner.drawing import LIGHT, SERIES, inline_svg, part

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = NDArray[np.float64]

NONE = "–"
"""Text in place of a missing number."""

BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))

LARGEST = 1e300
"""Values beyond it count as not finite, because the arithmetic of axes would overflow."""


def format_number(value: float) -> str:
    """Returns a number with about four digits: 0.00123, 1.23, 123.4, 12,345, 1.23e+09."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e8 else f"{value:.4g}"


def format_seconds(value: float) -> str:
    """Returns seconds with a prefix. Example: 0.0123 -> "12.3 ms". Needs matplotlib."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter("s")(float(f"{value:.4g}")) if value else "0"


def format_bytes(value: float | None) -> str:
    """Returns bytes with a unit. Example: 3 * 2**20 -> "3 MiB"."""
    if value is None:
        return NONE
    return next((f"{format_number(value / size)} {unit}" for size, unit in BYTES if value >= size), "0")


def format_share(value: float) -> str:
    """Returns a share in percent. Example: 0.031 -> "3.1%"."""
    if 0 < value < 0.001:
        return "under 0.1%"
    return f"{value:.1%}" if 0 < value < 0.0995 else f"{value:.0%}"


def median(values: Iterable[float]) -> float | None:
    """Returns the median of the finite values, the lower of two in the middle. None if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return median_low(finite) if finite else None


class Bins(NamedTuple):
    """Groups of neighbouring points of a line, B of them.

    x: (B,) mean x of the points.
    mean, low, high: (B,) mean, smallest and largest finite y; NaN if a bin has none.
    """

    x: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers


def bins_of(xs: ArrayLike, ys: ArrayLike, max_points: int) -> Bins:
    """Returns at most ``max_points`` bins, each of the same number of points (the last may have fewer).

    xs, ys: (N,), with N at least 1.
    """
    x, y = np.asarray(xs, float), nan_unless_finite(ys)
    starts = np.arange(0, len(x), -(-len(x) // max_points))
    num = np.add.reduceat(~np.isnan(y), starts, dtype=int)
    return Bins(
        x=np.add.reduceat(x, starts) / np.diff([*starts, len(x)]),
        mean=np.add.reduceat(np.nan_to_num(y), starts) / np.where(num, num, np.nan),
        low=np.fmin.reduceat(y, starts),
        high=np.fmax.reduceat(y, starts),
    )


def nan_unless_finite(ys: ArrayLike) -> Numbers:
    """Returns the values with NaN in place of those that are not finite."""
    y = np.asarray(ys, float)
    return np.where(np.abs(y) <= LARGEST, y, np.nan)


# ---- charts


COLUMN = (330, 200)
"""Width and height of a chart in CSS pixels: as wide as a phone, or as a column of the page."""

MAX_POINTS = 300
"""Largest number of points of a line. More could not be seen apart in a column."""

ROUND = (1, 2, 5, 10)
"""Steps between ticks: one of these numbers, times a power of 10."""


def axes_svg(label: str, size: tuple[int, int], draw: Callable[[Axes], None]) -> str:
    """Returns an SVG element with one pair of axes, on which ``draw`` draws. Steps run to the right.

    label: text for screen readers.
    size: width and height in CSS pixels.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    colours: Any = dict.fromkeys(("xtick.color", "ytick.color", "axes.labelcolor"), LIGHT["soft"])
    with rc_context(colours | {"grid.color": LIGHT["rule"]}, Path(__file__).with_name("charts.mplstyle")):
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        axis = figure.subplots()
        axis.margins(x=0.02)
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=ROUND))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
        axis.set_xlabel("step")
        draw(axis)
        return inline_svg(figure, label)


# ---- lines


def line_chart(
    title: str,
    curves: Mapping[str, Curve],
    *,
    unit: str = "",
    floor: float | None = None,
    show: Callable[[float], str] = format_number,
    note: str = "",
    max_points: int = MAX_POINTS,
    is_filled: bool = False,
) -> str:
    """Returns a chart of values over steps: one line for each name, until the colours are used up.

    A line goes through the means of neighbouring points. A band shows their smallest and largest value.
    Values that are not finite leave gaps, which are marked at the top. A few very large values may be cut
    off; the note says so.

    floor: a value that the axis must show.
    show: makes texts of values. The axis uses it too, if it is `format_seconds` or `format_share`.
    note: text below the chart.
    max_points: largest number of points of a line. Longer lines are drawn as bins.
    is_filled: fill the area between line and axis.
    """
    from matplotlib.ticker import EngFormatter, PercentFormatter

    bins_by_name = {name: bins_of(points.steps, points.values, max_points) for name, points in curves.items()}
    values = np.concatenate([ends for bins in bins_by_name.values() for ends in (bins.low, bins.high)])
    values = np.sort(values[~np.isnan(values)])
    if not len(values):
        nothing = f"No finite value in {len(next(iter(curves.values())).steps)} points."
        return part("chart", title, "", unit=unit, note=f"{nothing} {note}")
    low, high, cut = _range(values, floor)
    keys = list(zip(curves, SERIES, strict=False))
    gaps = {name: _gaps(curve) for name, curve in curves.items()}

    def draw(axis: Axes) -> None:
        axis.set_ylim(low, high)
        if show is format_seconds:
            axis.yaxis.set_major_formatter(EngFormatter("s"))
        if show is format_share:
            axis.yaxis.set_major_formatter(PercentFormatter(1))
        for name, colour in keys:
            _draw_line(axis, bins_by_name[name], gaps[name], LIGHT[colour], is_filled)

    notes = [note, "" if cut is None else f"Cut off above: values up to {show(cut)}.", _about_gaps(gaps)]
    return part(
        "chart",
        title,
        axes_svg(f"{title}: {', '.join(curves)}", COLUMN, draw),
        unit=unit,
        keys=keys if len(keys) > 1 else (),
        note=" ".join(notes),
    )


def _range(ordered: Any, floor: float | None) -> tuple[float, float, float | None]:
    """Returns (lower end, upper end, cut) of an axis for ascending values (N,).

    cut is the largest value if it lies above the upper end, else None. The upper end leaves out the largest
    values if they would squeeze the other 95 percent into the lower third.
    """
    low, high = float(ordered[0]), float(ordered[-1])
    if floor is not None:
        low = min(low, floor)
    usual = float(ordered[int(0.95 * (len(ordered) - 1))])
    cut = None
    if high > usual + 2 * (usual - low) and usual > low and len(ordered) >= 40:
        cut = high
        high = usual + 0.5 * (usual - low)
    pad = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
    return low if low == floor else low - pad, high + pad, cut


def _draw_line(axis: Axes, bins: Bins, gaps: Sequence[int], colour: str, is_filled: bool) -> None:
    """Draws one line with its band, its single points, and marks at its gaps."""
    x, mean = bins.x, bins.mean
    if np.any(bins.high > bins.low):
        axis.fill_between(x, bins.low, bins.high, color=colour, alpha=0.2, lw=0, gid="band")
    if is_filled:
        axis.fill_between(x, axis.get_ylim()[0], mean, color=colour, alpha=0.3, lw=0, gid="fill")
    axis.plot(x, mean, color=colour, gid="line")
    is_there = np.pad(~np.isnan(mean), 1)
    is_single = is_there[1:-1] & ~is_there[:-2] & ~is_there[2:]  # a line between two gaps would be invisible
    if is_single.any():
        axis.plot(x[is_single], mean[is_single], "o", ms=5, color=colour, gid="dot")
    if gaps:
        at = bins_of(gaps, gaps, MAX_POINTS).x
        axis.vlines(at, 0.93, 1, LIGHT["bad"], transform=axis.get_xaxis_transform(), gid="bad")


def _gaps(curve: Curve) -> list[int]:
    """Returns the steps whose values are not finite."""
    return [x for x, y in zip(curve.steps, nan_unless_finite(curve.values), strict=True) if np.isnan(y)]


def _about_gaps(gaps: Mapping[str, Sequence[int]]) -> str:
    """Returns a sentence about the values that are not finite, or ""."""
    steps = [step for steps_of_name in gaps.values() for step in steps_of_name]
    if not steps:
        return ""
    values = f"{len(steps):,} value{'s' * (len(steps) > 1)}"
    first = format_number(min(steps))
    return f"{values} not finite, the first at step {first}."


# ---- heat maps

OCTAVES = 2
"""Largest number of doublings that shades tell apart: ratios from 1/4 to 4."""

SHADES = ((0, "#236ec8eb"), (0.5, "#236ec800"), (0.5, "#d6452800"), (1, "#d64528f0"))
"""Colours of a ratio's logarithm from low to high. "Even" is transparent."""
NOTHING, UNKNOWN = "#9637c8", "#80808060"
"""Colours of the ratio 0 and of an unknown ratio."""


def shades(ratios: Any) -> Any:
    """Returns the colours (..., 4) of ratios (...): red, green, blue, opacity, each from 0 to 1.

    A ratio of 1 is an even share, 0 is no rows, NaN is unknown. Blue is less than even, red is more, on a
    scale of doublings. An even share is transparent, so that it fits a light page and a dark one.
    """
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    scale = LinearSegmentedColormap.from_list("load", SHADES).with_extremes(under=NOTHING, bad=UNKNOWN)
    ratios = np.asarray(ratios, float)
    with np.errstate(divide="ignore"):
        octaves = np.log2(ratios).clip(-OCTAVES, OCTAVES)
    return scale(Normalize(-OCTAVES, OCTAVES)(np.where(ratios == 0, -2 * OCTAVES, octaves)))


def heat_map(title: str, steps: Sequence[float], ratios: Any, y_label: str, note: str = "") -> str:
    """Returns a picture of ratios (rows, steps), the first row on top, in the colours of `shades`."""
    from matplotlib.ticker import MaxNLocator

    num_rows = len(ratios)
    half = (steps[-1] - steps[0]) / max(len(steps) - 1, 1) / 2 or 0.5  # as wide as the steps around it
    extent = (steps[0] - half, steps[-1] + half, num_rows - 0.5, -0.5)

    def draw(axis: Axes) -> None:
        axis.imshow(shades(ratios), aspect="auto", interpolation="none", extent=extent, gid="cells")
        axis.set_ylabel(y_label)
        axis.yaxis.set_major_locator(MaxNLocator(8, integer=True, steps=ROUND))
        axis.grid(False)

    label = f"{title}: {num_rows} {y_label}s over {len(steps)} steps"
    size = (COLUMN[0], min(max(num_rows * 9, 150), 300) + 40)
    return part("chart", title, axes_svg(label, size, draw), note=note)


def heat_legend(what: str) -> str:
    """Returns a legend of the colours of `shades`.

    what: title of the legend.
    """
    from matplotlib.colors import to_hex

    texts = {0: "none · ¼", 0.25: "", 0.5: "", 1: "", 2: "", 4: "4 times or more"}
    colours = [to_hex(shade, keep_alpha=True) for shade in shades(list(texts))]
    return part("scale", what, list(zip(texts.values(), colours, strict=True)))
