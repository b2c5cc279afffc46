"""Task costs as straight lines: seconds = alpha + beta * size, fitted to measurements.

Size is rows or multiply-adds for what computes and bytes for what travels; alpha is what a task costs
whatever its size.

Letters: r chunks; a2a, ag, rs, exp: all-to-all (each of two), all-gather, reduce-scatter, experts; t_gar
seconds of other layers' gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class LineCost:
    """seconds = alpha_seconds + beta_seconds * size, and at least 0."""

    alpha_seconds: float
    beta_seconds: float

    def __call__(self, size: float) -> float:
        return max(0.0, self.alpha_seconds + self.beta_seconds * size)

    def shared(self, size: float) -> LineCost:
        """The same by the share of work of this size. Example: alpha 1, beta 2, of 10 -> alpha 1, beta 20."""
        return LineCost(self.alpha_seconds, self.beta_seconds * size)


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


def fit(samples: Iterable[tuple[float, float]], *, relative: bool = False) -> Fit:
    """The line with alpha and beta of at least 0 that is nearest to (size, seconds), by least squares.

    relative: of the errors over the seconds: small sizes, which tell alpha, then count as large ones do.

    Where a size comes several times, the median of its seconds counts: interruptions move no line. A line
    that would begin below zero goes through the origin, one that would fall is flat, at the mean.

    r squared is 1 - (sum of squared errors) / (sum of squares about the mean), of the line that is returned,
    at least 0. A flat line describes seconds that do not vary in full: 1.

    Example: sizes 0, 1, 2 and seconds 1, 3, 4 -> alpha 7/6, beta 3/2, r squared 27/28.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in samples:
        by_size.setdefault(size, []).append(seconds)
    points = {size: statistics.median(seconds) for size, seconds in by_size.items()}
    line = _nearest(points, relative)
    return Fit(line=line, r_squared=_r_squared(line, points), num_sizes=len(points))


def from_zero(samples: Mapping[float, float]) -> Fit:
    """The line from zero through the largest of some sizes, by seconds."""
    largest = max(samples)
    line = LineCost(0.0, samples[largest] / largest)
    return Fit(line=line, r_squared=_r_squared(line, samples), num_sizes=len(samples))


# ---- helpers


def _nearest(points: Mapping[float, float], relative: bool) -> LineCost:
    """In units of the largest size and of the longest seconds, so that both columns are of like size."""
    from scipy.optimize import nnls  # not needed to import pmoe

    largest, longest = max(points), max(points.values())
    if not longest:
        return LineCost(0.0, 0.0)
    rows = [(longest / y if relative and y else 1.0, x / largest, y / longest) for x, y in points.items()]
    (alpha, beta), _ = nnls([[w, w * x] for w, x, _ in rows], [w * y for w, _, y in rows])
    return LineCost(float(alpha) * longest, float(beta) * longest / largest)


def _r_squared(line: LineCost, points: Mapping[float, float]) -> float:
    mean = statistics.fmean(points.values())
    about_mean = math.fsum((seconds - mean) ** 2 for seconds in points.values())
    errors = math.fsum((seconds - line(size)) ** 2 for size, seconds in points.items())
    if len(set(points.values())) == 1 or not about_mean:
        return 1.0
    return min(1.0, max(0.0, 1 - errors / about_mean))


# ---- what the stages of a layer with sharded experts cost in one pass (FSMoE, Eq. 1)


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Seconds of one pass of a layer, by the share of its rows; a2a is one of its two all-to-alls."""

    a2a: LineCost
    ag: LineCost
    rs: LineCost
    exp: LineCost

    def chunk(self, r: float) -> tuple[float, float, float, float]:
        """Eq. 1: seconds of a chunk of r: a2a, ag, rs, exp."""
        lines = (self.a2a, self.ag, self.rs, self.exp)
        a2a, ag, rs, exp = (each.alpha_seconds + each.beta_seconds / r for each in lines)
        return a2a, ag, rs, exp

    def backward(self) -> LayerCosts:
        """The backward pass of a layer whose forward pass this is: experts take twice as long (Section 4.4).

        The paper doubles alpha, beta and n, which read literally is four times; its Table 2 measures twice.
        """
        return replace(self, exp=LineCost(2 * self.exp.alpha_seconds, 2 * self.exp.beta_seconds))


class DegreeSeconds(NamedTuple):
    """A backward pass in ``degree`` chunks that carries t_gar takes max(alone, beside + t_gar) seconds.

    alone: without gradients. beside: the longest path through the gradients' task, less that task.
    """

    degree: int
    alone: float
    beside: float

    def seconds(self, t_gar: float) -> float:
        return max(self.alone, self.beside + t_gar)


# ---- a layer and the dense part up to the next one (Sections 5.1, 5.2)


@dataclass(frozen=True, kw_only=True)
class GeneralizedLayer:
    """An MoE layer and the dense part up to the next one, in the backward pass.

    degrees: its MoE part's seconds by degree, see `pmoe.planner.degree_search.simulated_degrees`.
    dense_seconds: of the dense part, that an all-reduce may run beside.
    gradient_bytes: made in this layer, and there when its backward pass has ended.
    """

    degrees: tuple[DegreeSeconds, ...]
    dense_seconds: float
    gradient_bytes: int

    def best(self, t_gar: float) -> DegreeSeconds:
        """The fastest degree that carries t_gar; of equals the lower: what Algorithm 1 is asked in Eq. 5."""
        return min(self.degrees, key=lambda each: (each.seconds(t_gar), each.degree))

    @property
    def hidden_seconds(self) -> float:
        """t_olp,moe: the longest t_gar that costs the MoE part nothing."""
        shortest = self.best(0.0).alone
        return max(each.alone - each.beside for each in self.degrees if each.alone <= shortest)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one layer carries of earlier layers' gradients, and the degree of its MoE part that fits."""

    moe_bytes: int
    dense_bytes: int
    t_gar: float
    degree: int


def all_reduce_seconds(all_reduce: LineCost, num_bytes: int) -> float:
    """t_ar (Section 5.1); no bytes are no message."""
    return all_reduce(num_bytes) if num_bytes else 0.0


def bytes_within(all_reduce: LineCost, seconds: float) -> int:
    """The inverse of t_ar, in whole bytes: the most that take no longer; 0 where alpha alone does."""
    left = seconds - all_reduce.alpha_seconds
    if left <= 0:
        return 0
    max_bytes = left / all_reduce.beta_seconds if all_reduce.beta_seconds else 2.0**53
    found = int(min(max_bytes, 2.0**53))
    while found and all_reduce(found) > seconds:  # the quotient may be rounded up
        found -= 1
    return found
