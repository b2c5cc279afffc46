"""Numbers as people read them, axes that end on round ones, and long series made short."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NONE = "–"
"""In place of a number that there is not."""


@dataclass(frozen=True)
class Unit:
    """What a chart's numbers are divided by, and what they are called then."""

    scale: float
    name: str


def time_unit(most: float) -> Unit:
    """Example: 0.004 s is best told in ms."""
    return next((unit for unit in SECONDS if most >= unit.scale), SECONDS[-1])


def byte_unit(most: float) -> Unit:
    return next((unit for unit in BYTES if most >= unit.scale), BYTES[-1])


SECONDS = (Unit(1.0, "s"), Unit(1e-3, "ms"), Unit(1e-6, "µs"))
BYTES = (Unit(2**40, "TiB"), Unit(2**30, "GiB"), Unit(2**20, "MiB"), Unit(2**10, "KiB"), Unit(1, "bytes"))


def told_seconds(value: float | None) -> str:
    return _with_unit(value, time_unit)


def told_bytes(value: float | None) -> str:
    return _with_unit(value, byte_unit)


def _with_unit(value: float | None, unit_of: Callable[[float], Unit]) -> str:
    if value is None or not math.isfinite(value):
        return NONE
    if not value:
        return "0"
    unit = unit_of(abs(value))
    return f"{told(value / unit.scale)} {unit.name}"


def told(value: float | None) -> str:
    """Three or four digits: 0.00123, 1.23, 123.4, 12,345, 1.23e+09."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size >= 1e8 or 0 < size < 1e-3:
        return f"{value:.3g}"
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    digits = 1 if size >= 100 else 2 if size >= 10 else 3 if size >= 0.1 else 4
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")


def told_ticks(values: Sequence[float], *, as_shares: bool = False) -> list[str]:
    """Of an axis: as many digits as tell neighbours apart. Example: (0.95, 1) -> "0.95", "1.00"."""
    scale, sign = (100, "%") if as_shares else (1, "")
    if len(values) < 2:
        return [told_share(value) if as_shares else told(value) for value in values]
    step, most = abs(values[1] - values[0]) * scale, max(map(abs, values)) * scale
    digits = max(0, math.ceil(-math.log10(step) - 1e-9))
    if most >= 1e8 or digits > 6:
        digits = max(0, math.floor(math.log10(most)) - math.floor(math.log10(step) + 1e-9))
        return [f"{value * scale:.{digits}e}{sign}" for value in values]
    return [f"{value * scale:,.{digits}f}{sign}" for value in values]


def told_steps(steps: Sequence[float]) -> list[str]:
    """Of an axis: 40,000 and 80,000 are 40k and 80k."""
    most = max(map(abs, steps), default=0.0)
    for scale, letter in ((1e6, "M"), (1e3, "k")):
        if most >= 10 * scale and all(step % scale == 0 for step in steps):
            return [f"{step / scale:,.0f}{letter}" if step else "0" for step in steps]
    return [f"{step:,.0f}" for step in steps]


def told_share(value: float | None) -> str:
    if value is None:
        return NONE
    if 0 < value < 0.001:
        return "under 0.1%"
    return f"{value:.1%}" if 0 < value < 0.0995 else f"{value:.0%}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between low and high, at most ``most`` + 1 of them.

    Example: (0, 1) -> 0, 0.2, 0.4, 0.6, 0.8, 1.
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


@dataclass(frozen=True)
class Bin:
    """Neighbouring points as one: where it is, and the mean, least and greatest of its finite values; NaN
    where none is."""

    x: float
    mean: float
    low: float
    high: float


def thinned(xs: Sequence[float], ys: Sequence[float], most: int) -> list[Bin]:
    """At most ``most`` points of as many neighbours each as there are to be."""
    width = max(1, -(-len(xs) // most))
    return [_bin(xs[i : i + width], ys[i : i + width]) for i in range(0, len(xs), width)]


def _bin(xs: Sequence[float], ys: Sequence[float]) -> Bin:
    finite = [y for y in ys if math.isfinite(y)]
    x = sum(xs) / len(xs)
    if not finite:
        return Bin(x, math.nan, math.nan, math.nan)
    return Bin(x, sum(finite) / len(finite), min(finite), max(finite))


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """The mean of the finite values at most ``reach`` places away; NaN where a value is not finite."""
    sums, counts = [0.0], [0]
    for value in values:
        is_finite = math.isfinite(value)
        sums.append(sums[-1] + (value if is_finite else 0.0))
        counts.append(counts[-1] + is_finite)
    out = []
    for i, value in enumerate(values):
        near = min(reach, i, len(values) - 1 - i)  # as many on both sides, or ends would lean
        first, end = i - near, i + near + 1
        mean = (sums[end] - sums[first]) / max(counts[end] - counts[first], 1)
        out.append(mean if math.isfinite(value) else math.nan)
    return out


def median(values: Sequence[float]) -> float | None:
    """Of the finite ones; the lower of two in the middle. None where there is none."""
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[(len(finite) - 1) // 2] if finite else None
