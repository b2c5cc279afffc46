"""Costs of tasks as straight lines: seconds = alpha + beta * size. The lines are fitted to measurements.

The size is a number of rows or multiply-adds for a product, and a number of bytes for a message or a copy.
alpha is the time that a task takes even if its size is 0.

Letters (FSMoE's): r chunks; a2a one of the layer's two all-to-alls, ag all-gather, rs reduce-scatter, exp
experts; t_gar seconds of the all-reduce of other layers' gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class LineCost:
    """A straight line: seconds = max(0, alpha_seconds + beta_seconds * size)."""

    alpha_seconds: float
    beta_seconds: float

    def __call__(self, size: float) -> float:
        return max(0.0, self.alpha_seconds + self.beta_seconds * size)

    def shared(self, size: float) -> LineCost:
        """Returns the seconds as a line over the fraction of an amount of work, whose whole is ``size``.

        Example: alpha 1, beta 2, size 10 -> alpha 1, beta 20: half of the work takes 1 + 20 / 2 = 11 s.
        """
        return LineCost(self.alpha_seconds, self.beta_seconds * size)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A line fitted to measurements, and how well it describes them.

    line: the line that `fit` or `from_zero` found.
    r_squared: from 0 to 1; see `fit`.
    num_sizes: number of distinct sizes that were measured.
    """

    line: LineCost
    r_squared: float
    num_sizes: int

    def __call__(self, size: float) -> float:
        return self.line(size)


FREE = Fit(line=LineCost(0.0, 0.0), r_squared=1.0, num_sizes=0)
"""Cost of work that does not take place: 0 seconds for any size."""


def fit(samples: Iterable[tuple[float, float]], *, relative: bool = False) -> Fit:
    """Returns the line with alpha >= 0 and beta >= 0 that is nearest to (size, seconds), by least squares.

    The median counts if a size was measured several times, so an interruption does not move the line. A
    line that would start below zero goes through the origin instead; a line that would fall is flat, at the
    mean.

        r_squared = max(0, 1 - sum (seconds - line(size))^2 / sum (seconds - mean)^2)

    It is 1 if all seconds are equal.

    relative: whether to minimize errors relative to the seconds. Small sizes, which determine alpha, then
        count as much as large ones.

    Example: sizes 0, 1, 2 and seconds 1, 3, 4 -> alpha 7/6, beta 3/2, r_squared 27/28.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in samples:
        by_size.setdefault(size, []).append(seconds)
    points = {size: statistics.median(seconds) for size, seconds in by_size.items()}
    line = _nearest(points, relative)
    return Fit(line=line, r_squared=_r_squared(line, points), num_sizes=len(points))


def from_zero(samples: Mapping[float, float]) -> Fit:
    """Returns the line through (0, 0) and the largest size.

    samples: seconds by size.
    """
    largest = max(samples)
    line = LineCost(0.0, samples[largest] / largest)
    return Fit(line=line, r_squared=_r_squared(line, samples), num_sizes=len(samples))


# ---- helpers


def _nearest(points: Mapping[float, float], relative: bool) -> LineCost:
    """Returns the nearest line by non-negative least squares.

    Sizes and seconds are divided by their maxima first: sizes of 1e9 beside a constant column of 1 would
    make the system ill-conditioned.
    """
    from scipy.optimize import nnls  # not needed to import pmoe

    largest, longest = max(points), max(points.values())
    if not longest:
        return LineCost(0.0, 0.0)
    rows = [(longest / y if relative and y else 1.0, x / largest, y / longest) for x, y in points.items()]
    (alpha, beta), _ = nnls([[w, w * x] for w, x, _ in rows], [w * y for w, _, y in rows])
    return LineCost(float(alpha) * longest, float(beta) * longest / largest)


def _r_squared(line: LineCost, points: Mapping[float, float]) -> float:
    """Returns the coefficient of determination, from 0 to 1; see `fit`."""
    mean = statistics.fmean(points.values())
    about_mean = math.fsum((seconds - mean) ** 2 for seconds in points.values())
    errors = math.fsum((seconds - line(size)) ** 2 for size, seconds in points.items())
    if len(set(points.values())) == 1 or not about_mean:
        return 1.0
    return min(1.0, max(0.0, 1 - errors / about_mean))


# ---- costs of the stages of a layer with sharded experts, in one pass (FSMoE, Eq. 1)


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Seconds of each stage of one pass, as lines over the fraction of the rank's rows that a chunk has.

    a2a: one of the two all-to-alls.
    ag: the all-gather inside the node.
    rs: the reduce-scatter inside the node.
    exp: the experts.
    """

    a2a: LineCost
    ag: LineCost
    rs: LineCost
    exp: LineCost

    def chunk(self, r: float) -> tuple[float, float, float, float]:
        """Returns the seconds (a2a, ag, rs, exp) of one of r chunks: alpha + beta / r each (Eq. 1)."""
        lines = (self.a2a, self.ag, self.rs, self.exp)
        a2a, ag, rs, exp = (line.alpha_seconds + line.beta_seconds / r for line in lines)
        return a2a, ag, rs, exp

    def backward(self) -> LayerCosts:
        """Returns the costs of the backward pass, given those of the forward pass: exp doubles (Section 4.4).

        The paper doubles alpha, beta and n. Read literally that is four times; its Table 2 measures twice.
        """
        return replace(self, exp=LineCost(2 * self.exp.alpha_seconds, 2 * self.exp.beta_seconds))


class DegreeSeconds(NamedTuple):
    """Seconds of a backward pass in ``degree`` chunks: max(alone, beside + t_gar).

    alone: seconds without gradients of other layers.
    beside: seconds of the longest path that includes the task of these gradients, without that task.
    """

    degree: int
    alone: float
    beside: float

    def seconds(self, t_gar: float) -> float:
        """Returns the seconds of the pass if it carries ``t_gar`` seconds of gradients."""
        return max(self.alone, self.beside + t_gar)


# ---- an MoE layer and the dense layers up to the next one (Sections 5.1, 5.2)


@dataclass(frozen=True, kw_only=True)
class GeneralizedLayer:
    """Backward pass of an MoE layer and of the dense part up to the next MoE layer.

    degrees: seconds of the MoE part for each degree; see `pmoe.planner.degree_search.simulated_degrees`.
    dense_seconds: seconds of the dense part. An all-reduce may run beside it.
    gradient_bytes: gradients that this layer makes. They are ready when its backward pass has ended.
    """

    degrees: tuple[DegreeSeconds, ...]
    dense_seconds: float
    gradient_bytes: int

    def best(self, t_gar: float) -> DegreeSeconds:
        """Returns the fastest degree for ``t_gar`` seconds of gradients; of equals the lowest.

        This is the value of Algorithm 1 that Eq. 5 uses.
        """
        return min(self.degrees, key=lambda option: (option.seconds(t_gar), option.degree))

    @property
    def hidden_seconds(self) -> float:
        """The largest t_gar that does not make the MoE part slower (t_olp,moe)."""
        shortest = self.best(0.0).alone
        return max(option.alone - option.beside for option in self.degrees if option.alone <= shortest)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The gradients of earlier layers that one layer carries, and the best degree of its MoE part then.

    moe_bytes: gradients that are all-reduced beside the MoE part.
    dense_bytes: gradients that are all-reduced beside the dense part.
    t_gar: seconds of the all-reduce of moe_bytes.
    degree: number of chunks of the MoE part.
    """

    moe_bytes: int
    dense_bytes: int
    t_gar: float
    degree: int


def all_reduce_seconds(all_reduce: LineCost, num_bytes: int) -> float:
    """Returns the seconds of an all-reduce (t_ar, Section 5.1); 0 for 0 bytes, because no message is sent."""
    return all_reduce(num_bytes) if num_bytes else 0.0


def bytes_within(all_reduce: LineCost, seconds: float) -> int:
    """Returns the most bytes that an all-reduce can send in ``seconds``; 0 if alpha alone takes longer.

    It is the inverse of t_ar, rounded down to whole bytes.
    """
    seconds_left = seconds - all_reduce.alpha_seconds
    if seconds_left <= 0:
        return 0
    max_bytes = seconds_left / all_reduce.beta_seconds if all_reduce.beta_seconds else 2.0**53
    num_bytes = int(min(max_bytes, 2.0**53))
    while num_bytes and all_reduce(num_bytes) > seconds:  # the division may have rounded up
        num_bytes -= 1
    return num_bytes
