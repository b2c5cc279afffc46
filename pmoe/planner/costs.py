"""Task costs as straight lines: seconds = alpha + beta * size, fitted to measurements.

Size is rows for what computes and bytes for what travels; alpha is what a task costs whatever its size.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class LineCost:
    """seconds = alpha_seconds + beta_seconds * size."""

    alpha_seconds: float
    beta_seconds: float

    def __call__(self, size: float) -> float:
        return max(0.0, self.alpha_seconds + self.beta_seconds * size)


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
