"""Numbers as people read them, and long series made short."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median_low
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]

NONE = "–"
"""In place of a missing number."""

BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))

LARGEST = 1e300
"""A value beyond it counts as not finite: the arithmetic of axes would overflow."""


def format_number(value: float | None) -> str:
    """Four digits: 0.00123, 1.23, 123.4, 12,345, 1.23e+09."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e8 else f"{value:.4g}"


def format_seconds(value: float) -> str:
    """Example: 0.0123 -> "12.3 ms". Needs matplotlib."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter("s")(float(f"{value:.4g}")) if value else "0"


def format_bytes(value: float | None) -> str:
    """Example: 3 * 2**20 -> "3 MiB"."""
    if value is None:
        return NONE
    return next((f"{format_number(value / size)} {unit}" for size, unit in BYTES if value >= size), "0")


def format_share(value: float) -> str:
    """Example: 0.031 -> "3.1%"."""
    if 0 < value < 0.001:
        return "under 0.1%"
    return f"{value:.1%}" if 0 < value < 0.0995 else f"{value:.0%}"


def median(values: Iterable[float]) -> float | None:
    """The median of the finite values, the lower of two in the middle; None where there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return median_low(finite) if finite else None


class Bins(NamedTuple):
    """Neighbouring points as one: (B,) mean x; mean, least and greatest finite y, NaN where there is none."""

    x: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers


def bins_of(xs: ArrayLike, ys: ArrayLike, most: int) -> Bins:
    """At most ``most`` bins of equally many points each. xs, ys: (N,), N at least 1."""
    x, y = np.asarray(xs, float), nan_unless_finite(ys)
    starts = np.arange(0, len(x), -(-len(x) // most))
    num = np.add.reduceat(~np.isnan(y), starts, dtype=int)
    return Bins(
        x=np.add.reduceat(x, starts) / np.diff([*starts, len(x)]),
        mean=np.add.reduceat(np.nan_to_num(y), starts) / np.where(num, num, np.nan),
        low=np.fmin.reduceat(y, starts),
        high=np.fmax.reduceat(y, starts),
    )


def nan_unless_finite(ys: ArrayLike) -> Numbers:
    """The values, NaN in place of those that are not finite."""
    y = np.asarray(ys, float)
    return np.where(np.abs(y) <= LARGEST, y, np.nan)
