"""Task costs as straight lines: seconds = alpha + beta * size, fitted to measurements.

Size is rows or multiply-adds for what computes and bytes for what travels; alpha is what a task costs
whatever its size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LineCost:
    """seconds = alpha_seconds + beta_seconds * size, and at least 0."""

    alpha_seconds: float
    beta_seconds: float

    def __call__(self, size: float) -> float:
        return max(0.0, self.alpha_seconds + self.beta_seconds * size)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A line through measurements of ``num_sizes`` sizes, and how well it describes them: see `fit`."""

    line: LineCost
    r_squared: float
    num_sizes: int

    def __call__(self, size: float) -> float:
        return self.line(size)


FREE = Fit(line=LineCost(0.0, 0.0), r_squared=1.0, num_sizes=0)
"""Of work that there is none of, whatever the size."""


def fit(samples: Iterable[tuple[float, float]]) -> Fit:
    """The line with alpha and beta of at least 0 that is nearest to (size, seconds), by least squares.

    Where a size comes several times, the median of its seconds counts: interruptions move no line. A line
    that would begin below zero goes through the origin, one that would fall is flat, at the mean.

    r squared is 1 - (sum of squared errors) / (sum of squares about the mean), of the line that is returned,
    at least 0. A flat line describes seconds that do not vary in full: 1.

    Raises ValueError with fewer than two distinct sizes, or a number that is negative or not finite.
    Example: sizes 0, 1, 2 and seconds 1, 3, 4 -> alpha 7/6, beta 3/2, r squared 27/28.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in samples:
        for name, value in (("sizes", size), ("seconds", seconds)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} ({value} among them) must be finite and at least 0")
        by_size.setdefault(size, []).append(seconds)
    if len(by_size) < 2:
        raise ValueError(f"sizes ({sorted(by_size)}) must have two distinct values for a line")
    points = {size: statistics.median(seconds) for size, seconds in by_size.items()}
    line = _nearest(points)
    return Fit(line=line, r_squared=_r_squared(line, points), num_sizes=len(points))


# ---- helpers


def _nearest(points: Mapping[float, float]) -> LineCost:
    """In units of the largest size and of the longest seconds, so that both columns are of like size."""
    from scipy.optimize import nnls  # not needed to import pmoe

    largest, longest = max(points), max(points.values())
    if not longest:
        return LineCost(0.0, 0.0)
    (alpha, beta), _ = nnls(
        [[1.0, size / largest] for size in points], [seconds / longest for seconds in points.values()]
    )
    return LineCost(float(alpha) * longest, float(beta) * longest / largest)


def _r_squared(line: LineCost, points: Mapping[float, float]) -> float:
    mean = statistics.fmean(points.values())
    about_mean = math.fsum((seconds - mean) ** 2 for seconds in points.values())
    errors = math.fsum((seconds - line(size)) ** 2 for size, seconds in points.items())
    if len(set(points.values())) == 1 or not about_mean:
        return 1.0
    return min(1.0, max(0.0, 1 - errors / about_mean))
