"""Charts for the report page, as SVG elements made with matplotlib: lines over steps, and heat maps.

Titles, legends and notes of charts are HTML and not part of the SVG.
"""

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
"""Text that stands for a missing number."""

BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))

LARGEST = 1e300
"""Largest absolute value that is drawn. Larger values count as not finite.

matplotlib's computations for the axes could overflow with them.
"""


def format_number(value: float) -> str:
    """Returns a number as text, with about four digits.

    Examples: "0.00123", "1.23", "123.4", "12,345", "1.23e+09", and "not finite".
    """
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e8 else f"{value:.4g}"


def format_seconds(value: float) -> str:
    """Returns a time as text with a unit such as ms. Needs matplotlib.

    value: seconds. Example: 0.0123 -> "12.3 ms".
    """
    from matplotlib.ticker import EngFormatter

    return EngFormatter("s")(float(f"{value:.4g}")) if value else "0"


def format_bytes(value: float | None) -> str:
    """Returns a number of bytes as text with a unit; `NONE` for None.

    Example: 3 * 2**20 -> "3 MiB".
    """
    if value is None:
        return NONE
    return next((f"{format_number(value / size)} {unit}" for size, unit in BYTES if value >= size), "0")


def format_share(value: float) -> str:
    """Returns a share as text in percent.

    value: from 0 to 1. Example: 0.031 -> "3.1%".
    """
    if 0 < value < 0.001:
        return "under 0.1%"
    return f"{value:.1%}" if 0 < value < 0.0995 else f"{value:.0%}"


def median(values: Iterable[float]) -> float | None:
    """Returns the median of the finite values, or None if no value is finite.

    If there are two middle values, the result is the lower one, so that it is always one of the values.
    """
    finite = [value for value in values if math.isfinite(value)]
    return median_low(finite) if finite else None


class Bins(NamedTuple):
    """The points of a line in B groups of neighbouring points. Each group is drawn as one point.

    x: (B,) mean x of the points of each group.
    mean, low, high: (B,) mean, smallest and largest finite y of each group; NaN for a group without finite
        values.
    """

    x: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers


def bins_of(xs: ArrayLike, ys: ArrayLike, max_points: int) -> Bins:
    """Groups the points of a line into at most ``max_points`` groups of neighbouring points.

    xs, ys: (N,), coordinates of the N points, at least one, by ascending x.

    All groups have the same number of points, except that the last one may have fewer.
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
    """Returns the values as an array, with NaN in place of values that are not finite or above `LARGEST`."""
    y = np.asarray(ys, float)
    return np.where(np.abs(y) <= LARGEST, y, np.nan)


# ---- charts


COLUMN = (330, 200)
"""Width and height of a chart in CSS pixels.

The width is that of a phone's screen, and of a column of the page on wider screens.
"""

MAX_POINTS = 300
"""Largest number of points of a line. More could not be told apart in a chart of this width."""

ROUND = (1, 2, 5, 10)
"""Allowed distances between ticks of an axis: one of these numbers times a power of 10."""


def axes_svg(label: str, size: tuple[int, int], draw: Callable[[Axes], None]) -> str:
    """Returns an SVG element with one chart; the x axis shows steps.

    label: description for screen readers.
    size: width and height in CSS pixels.
    draw: function that draws the content on the given axes.
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
    """Returns a chart as HTML: values over steps, with one line for each name.

    There are at most as many lines as the theme has colours; further lines are left out. A line goes through
    the averages of neighbouring points, and a band around it shows their smallest and largest values. Values
    that are not finite are left out and marked at the top of the chart. If a few values are so large that the
    others could not be told apart, the axis ends below them, and the note gives the largest value.

    title: title of the chart.
    curves: the values of each line, by name.
    unit: text beside the title, such as the unit of the values.
    floor: a value that the y axis must include; None for none.
    show: function that turns a value into text. If it is `format_seconds` or `format_share`, the numbers on
        the y axis also have its unit.
    note: text below the chart.
    max_points: largest number of points of a line. A longer line is drawn through the averages of
        neighbouring points.
    is_filled: whether to fill the area below each line.
    """
    from matplotlib.ticker import EngFormatter, PercentFormatter

    bins_by_name = {name: bins_of(points.steps, points.values, max_points) for name, points in curves.items()}
    values = np.concatenate([ends for bins in bins_by_name.values() for ends in (bins.low, bins.high)])
    values = np.sort(values[~np.isnan(values)])
    if not len(values):
        nothing = f"No finite value in {len(next(iter(curves.values())).steps)} points."
        return part("chart", title, "", unit=unit, note=f"{nothing} {note}")
    low, high, cut_value = _range(values, floor)
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

    notes = [
        note,
        "" if cut_value is None else f"Cut off above: values up to {show(cut_value)}.",
        _about_gaps(gaps),
    ]
    return part(
        "chart",
        title,
        axes_svg(f"{title}: {', '.join(curves)}", COLUMN, draw),
        unit=unit,
        keys=keys if len(keys) > 1 else (),
        note=" ".join(notes),
    )


def _range(ordered: Any, floor: float | None) -> tuple[float, float, float | None]:
    """Returns (lower end, upper end, cut value) for the y axis of a chart.

    ordered: (N,) the N finite values, ascending.
    floor: a value that the axis must include; None for none.

    A few very large values could press all other values together at the bottom of the chart. If the smallest
    95 percent of the values would lie in the lowest third of the axis, the axis is cut: it ends below the
    largest values. The cut value is then the largest value, otherwise None. With fewer than 40 values, the
    axis is never cut.
    """
    low, high = float(ordered[0]), float(ordered[-1])
    if floor is not None:
        low = min(low, floor)
    usual = float(ordered[int(0.95 * (len(ordered) - 1))])
    cut_value = None
    if high > usual + 2 * (usual - low) and usual > low and len(ordered) >= 40:
        cut_value = high
        high = usual + 0.5 * (usual - low)
    pad = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
    return low if low == floor else low - pad, high + pad, cut_value


def _draw_line(axis: Axes, bins: Bins, gaps: Sequence[int], colour: str, is_filled: bool) -> None:
    """Draws one line on the axes, with its band, and marks for values that are not finite.

    axis: the axes.
    bins: the points of the line, with the smallest and largest values for the band.
    gaps: the steps with values that are not finite.
    colour: colour of line and band.
    is_filled: whether to fill the area below the line.
    """
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
    """Returns the steps at which the value of a curve is not finite."""
    return [x for x, y in zip(curve.steps, nan_unless_finite(curve.values), strict=True) if np.isnan(y)]


def _about_gaps(gaps: Mapping[str, Sequence[int]]) -> str:
    """Returns a sentence about the values that are not finite: their number, and the step of the first.

    Returns "" if all values are finite.

    gaps: the steps with values that are not finite, by name of the chart's line.
    """
    steps = [step for steps_of_name in gaps.values() for step in steps_of_name]
    if not steps:
        return ""
    values = f"{len(steps):,} value{'s' * (len(steps) > 1)}"
    first = format_number(min(steps))
    return f"{values} not finite, the first at step {first}."


# ---- heat maps

OCTAVES = 2
"""Number of doublings, up and down, over which colours of a heat map differ.

With 2, ratios from 1/4 to 4 have different colours. Ratios beyond have the colours of these ends.
"""

SHADES = ((0, "#236ec8eb"), (0.5, "#236ec800"), (0.5, "#d6452800"), (1, "#d64528f0"))
"""Colours for the logarithm of a ratio, from low to high. The ratio 1, an even share, is transparent."""
NOTHING, UNKNOWN = "#9637c8", "#80808060"
"""NOTHING is the colour of the ratio 0, UNKNOWN the colour of a ratio that is not known."""


def shades(ratios: Any) -> Any:
    """Returns the colours of ratios in a heat map.

    ratios: array of any shape (...): rows of an expert / mean rows of an expert. 0 means that the expert has
        no rows, NaN that its rows are not known.

    The result has shape (..., 4): red, green, blue and opacity, from 0 to 1. Blue means less than an even
    share and red more, on a logarithmic scale. An even share is transparent, so that it looks right on a
    light and on a dark page.
    """
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    scale = LinearSegmentedColormap.from_list("load", SHADES).with_extremes(under=NOTHING, bad=UNKNOWN)
    ratios = np.asarray(ratios, float)
    with np.errstate(divide="ignore"):
        octaves = np.log2(ratios).clip(-OCTAVES, OCTAVES)
    return scale(Normalize(-OCTAVES, OCTAVES)(np.where(ratios == 0, -2 * OCTAVES, octaves)))


def heat_map(title: str, steps: Sequence[float], ratios: Any, y_label: str, note: str = "") -> str:
    """Returns a heat map as HTML, with the colours of `shades`.

    title: title of the chart.
    steps: the step of each column, ascending.
    ratios: (number of rows of the map, number of steps), each value divided by the mean of its column. The
        first row is on top.
    y_label: what a row stands for, such as "expert".
    note: text below the chart.
    """
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
    """Returns a legend, as HTML, for the colours of the heat maps.

    what: title of the legend.
    """
    from matplotlib.colors import to_hex

    texts = {0: "none · ¼", 0.25: "", 0.5: "", 1: "", 2: "", 4: "4 times or more"}
    colours = [to_hex(shade, keep_alpha=True) for shade in shades(list(texts))]
    return part("scale", what, list(zip(texts.values(), colours, strict=True)))
