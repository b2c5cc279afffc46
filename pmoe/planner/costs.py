"""Task costs as straight lines: seconds = alpha + beta * size, fitted to measurements.

Size is rows or multiply-adds for what computes and bytes for what travels; alpha is what a task costs
whatever its size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LineCost:
    """seconds = alpha_seconds + beta_seconds * size."""

    alpha_seconds: float
    beta_seconds: float

    def __call__(self, size: float) -> float:
        return max(0.0, self.alpha_seconds + self.beta_seconds * size)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A line through measurements of ``num_sizes`` sizes, and how well it tells them: see `least_squares`."""

    line: LineCost
    r_squared: float
    num_sizes: int

    def __call__(self, size: float) -> float:
        return self.line(size)


FREE = Fit(line=LineCost(0.0, 0.0), r_squared=1.0, num_sizes=0)
"""Of work that there is none of, whatever the size."""


def fit(samples: Sequence[tuple[float, float]]) -> Fit:
    """`least_squares` of (size, seconds)."""
    sizes, seconds = [size for size, _ in samples], [seconds for _, seconds in samples]
    line, r_squared = least_squares(sizes, seconds)
    return Fit(line=line, r_squared=r_squared, num_sizes=len(set(sizes)))


def least_squares(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[LineCost, float]:
    """The line with the least sum of squared errors among those with alpha and beta of at least zero, and its
    r squared.

    That is the ordinary line of least squares wherever its alpha and beta are not negative. Where noise makes
    alpha negative, the line goes through the origin (beta = sum(size * seconds) / sum(size^2)); where it
    makes beta negative, the line is flat, at the mean. Clamping alpha alone would make every size too dear.

    r squared is 1 - (sum of squared errors) / (sum of squares about the mean), of the line that is returned,
    at least 0. Seconds that do not vary are told in full by a flat line: 1.

    Raises ValueError with fewer than two distinct sizes, unlike lengths, or a number that is negative or not
    finite.
    Example: sizes 0, 1, 2 and seconds 1, 3, 4 -> alpha 7/6, beta 3/2, r squared 27/28.
    """
    if len(sizes) != len(seconds):
        raise ValueError(f"sizes ({len(sizes)} of them) must be as many as seconds ({len(seconds)})")
    for name, values in (("sizes", sizes), ("seconds", seconds)):
        for value in values:
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} ({value} among them) must be finite and at least 0")
    if len(set(sizes)) < 2:
        raise ValueError(f"sizes ({sorted(set(sizes))}) must have two distinct values for a line")
    line = _nearest(sizes, seconds)
    return line, _r_squared(line, sizes, seconds)


def fit_line(samples: Iterable[tuple[float, float]]) -> LineCost:
    """Through the median seconds at each size, least squares: samples are (size, seconds).

    Raises ValueError with fewer than two distinct sizes.
    Example: (0, 1e-5), (1e6, 1.1e-4) -> alpha 1e-5, beta 1e-10.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in samples:
        by_size.setdefault(size, []).append(seconds)
    if len(by_size) < 2:
        raise ValueError(f"a line needs two distinct sizes, not {sorted(by_size)}")
    points = [(size, statistics.median(seconds)) for size, seconds in by_size.items()]
    slope, intercept = statistics.linear_regression(
        [size for size, _ in points], [seconds for _, seconds in points]
    )
    return LineCost(intercept, slope)


# ---- helpers


def _nearest(sizes: Sequence[float], seconds: Sequence[float]) -> LineCost:
    """With two unknowns of at least zero, the best line with one of them zero is the best of all wherever the
    best without that rule breaks it."""
    slope, intercept = statistics.linear_regression(sizes, seconds)
    if slope < 0:
        return LineCost(statistics.fmean(seconds), 0.0)
    if intercept < 0:
        products = math.fsum(size * each for size, each in zip(sizes, seconds, strict=True))
        return LineCost(0.0, products / math.fsum(size * size for size in sizes))
    return LineCost(intercept, slope)


def _r_squared(line: LineCost, sizes: Sequence[float], seconds: Sequence[float]) -> float:
    mean = statistics.fmean(seconds)
    about_mean = math.fsum((each - mean) ** 2 for each in seconds)
    errors = math.fsum((each - line(size)) ** 2 for size, each in zip(sizes, seconds, strict=True))
    if min(seconds) == max(seconds) or not about_mean:
        return 1.0
    return min(1.0, max(0.0, 1 - errors / about_mean))
