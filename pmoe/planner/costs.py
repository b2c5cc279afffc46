"""Costs of tasks as straight lines, seconds = alpha + beta * size, which are fitted to measurements.

The size of a product (a matrix multiplication) is its number of rows or of multiply-adds. The size of a
message, or of a copy between device and host, is its number of bytes. alpha is the time of a task of size 0.

The second half of the file has the costs of layers with sharded experts, by FSMoE's equations. Letters
(FSMoE's): r chunks; a2a one of the layer's two all-to-alls, ag all-gather, rs reduce-scatter, exp experts;
t_gar seconds of the all-reduce of other layers' gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class LineCost:
    """A cost as a straight line: seconds = max(0, alpha_seconds + beta_seconds * size).

    alpha_seconds: fixed seconds of a task, also if its size is 0.
    beta_seconds: seconds for each unit of size, such as a byte or a multiply-add.
    """

    alpha_seconds: float
    beta_seconds: float

    def __call__(self, size: float) -> float:
        return max(0.0, self.alpha_seconds + self.beta_seconds * size)

    def shared(self, size: float) -> LineCost:
        """Returns this cost as a line over the fraction (0 to 1) of a given amount of work.

        size: size of the whole amount, in the unit of this line.

        Example: alpha 1, beta 2, size 10 -> alpha 1, beta 20: half of the work takes 1 + 20 / 2 = 11 s.
        """
        return LineCost(self.alpha_seconds, self.beta_seconds * size)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A line fitted to measurements, and how well the line describes them.

    line: the fitted line.
    r_squared: coefficient of determination, from 0 to 1. 1 means that all measurements lie on the line.
    num_sizes: number of distinct sizes that were measured.
    """

    line: LineCost
    r_squared: float
    num_sizes: int

    def __call__(self, size: float) -> float:
        return self.line(size)


FREE = Fit(line=LineCost(0.0, 0.0), r_squared=1.0, num_sizes=0)
"""Cost of work that does not take place, such as messages of a single rank: 0 seconds for any size."""


def fit(samples: Iterable[tuple[float, float]], *, relative: bool = False) -> Fit:
    """Returns the line with alpha >= 0 and beta >= 0 that fits measurements best, by least squares.

    If a size was measured several times, only the median of its seconds is used, so that one slow run does
    not move the line. Suppose that the best line without the two conditions has a negative alpha: the result
    is then the best line through the origin. If the best line has a negative beta, the result is the best
    horizontal line.

        r_squared = max(0, 1 - sum (seconds - line(size))^2 / sum (seconds - mean)^2)

    If all seconds are equal, the formula divides by 0, and r_squared is 1.

    samples: (size, seconds) of each measurement.
    relative: whether to minimize errors relative to the seconds. Small sizes, which determine alpha, then
        count as much as large sizes.

    Example: sizes 0, 1, 2 and seconds 1, 3, 4 -> alpha 7/6, beta 3/2, r_squared 27/28.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in samples:
        by_size.setdefault(size, []).append(seconds)
    points = {size: statistics.median(seconds) for size, seconds in by_size.items()}
    line = _nearest(points, relative)
    return Fit(line=line, r_squared=_r_squared(line, points), num_sizes=len(points))


def from_zero(samples: Mapping[float, float]) -> Fit:
    """Returns the line through (0, 0) and the measurement of the largest size.

    samples: measured seconds by size.
    """
    largest = max(samples)
    line = LineCost(0.0, samples[largest] / largest)
    return Fit(line=line, r_squared=_r_squared(line, samples), num_sizes=len(samples))


# ---- helpers


def _nearest(points: Mapping[float, float], relative: bool) -> LineCost:
    """Returns the line that is nearest to points, by least squares with alpha >= 0 and beta >= 0.

    points: seconds by size.
    relative: whether to minimize errors relative to the seconds.

    Sizes and seconds are divided by their largest values first. Otherwise the system of equations would be
    ill-conditioned: it has sizes such as 1e9 beside a constant column of 1.
    """
    from scipy.optimize import nnls  # not needed to import pmoe

    largest, longest = max(points), max(points.values())
    if not longest:
        return LineCost(0.0, 0.0)
    rows = [(longest / y if relative and y else 1.0, x / largest, y / longest) for x, y in points.items()]
    (alpha, beta), _ = nnls([[w, w * x] for w, x, _ in rows], [w * y for w, _, y in rows])
    return LineCost(float(alpha) * longest, float(beta) * longest / largest)


def _r_squared(line: LineCost, points: Mapping[float, float]) -> float:
    """Returns the coefficient of determination of a line, from 0 to 1. `fit` has the formula.

    points: seconds by size, which the line describes.
    """
    mean = statistics.fmean(points.values())
    about_mean = math.fsum((seconds - mean) ** 2 for seconds in points.values())
    errors = math.fsum((seconds - line(size)) ** 2 for size, seconds in points.items())
    if len(set(points.values())) == 1 or not about_mean:
        return 1.0
    return min(1.0, max(0.0, 1 - errors / about_mean))


# ---- costs of the stages of a layer with sharded experts, in one pass (FSMoE, Eq. 1)


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Costs of the stages of one pass of a layer with sharded experts (FSMoE, Eq. 1).

    Experts are sharded if the ranks of a node split each expert's hidden columns. Each field gives the
    seconds of a stage for one chunk, as a line. The line's argument is the fraction of the rank's rows that
    the chunk has: 1 / r if the pass has r equal chunks.

    a2a: one of the two all-to-alls, dispatch or combine. Both cost the same, unless ``combine`` is given.
    ag: the all-gather of rows among the ranks of a node, before the experts.
    rs: the reduce-scatter of results among the ranks of a node, after the experts.
    exp: the experts' products.

    The paper's formulas leave out the following costs. The simulation of the layer's own schedule includes
    them:

    combine: the all-to-all that sends results back; None if it costs as much as ``a2a``.
    order: copying tokens to the rows that are sent, before dispatch.
    restore: summing the rows of each token, after combine.
    rearrange: copying kept tensors from the chunks of forward to the chunks of backward, if backward has
        another number of chunks.
    again: costs of (the all-to-all, the all-gather) with which backward sends T_DI (the experts' inputs)
        again, if it does; None if they cost as much as ``a2a`` and ``ag``.
    copies: a message with weights or gradients of copies of busy experts. The line's argument is the number
        of experts in the message.
    """

    a2a: LineCost
    ag: LineCost
    rs: LineCost
    exp: LineCost
    combine: LineCost | None = None
    order: LineCost = FREE.line
    restore: LineCost = FREE.line
    rearrange: LineCost = FREE.line
    again: tuple[LineCost, LineCost] | None = None
    copies: LineCost = FREE.line

    def chunk(self, r: float) -> tuple[float, float, float, float]:
        """Returns the seconds of each stage (a2a, ag, rs, exp) for one chunk, if the pass has r chunks.

        The seconds of a stage are alpha + beta / r.
        """
        lines = (self.a2a, self.ag, self.rs, self.exp)
        a2a, ag, rs, exp = (line.alpha_seconds + line.beta_seconds / r for line in lines)
        return a2a, ag, rs, exp

    def backward(self) -> LayerCosts:
        """Returns the costs of the backward pass: experts take twice as long as in forward.

        Section 4.4 of FSMoE says to double alpha, beta and the size of the products. Taken literally, experts
        would take four times as long. The paper's Table 2 measures twice as long, so only alpha and beta are
        doubled.
        """
        return replace(self, exp=LineCost(2 * self.exp.alpha_seconds, 2 * self.exp.beta_seconds))


class DegreeSeconds(NamedTuple):
    """Seconds of a backward pass in ``degree`` chunks while other layers' gradients are all-reduced.

        seconds = max(alone, beside + t_gar)

    t_gar is the seconds of the all-reduce itself.

    degree: number of chunks.
    alone: seconds of the pass without an all-reduce.
    beside: seconds of the pass in which the all-reduce cannot run. Some tasks must end before the all-reduce
        starts, and others start only after it. They form chains of tasks that run one after another, with the
        all-reduce as one link. ``beside`` is the length of the longest chain without the all-reduce.

    Example: alone 10 s, beside 6 s -> an all-reduce of 3 s is hidden (10 s); with 5 s the pass takes 11 s.
    """

    degree: int
    alone: float
    beside: float

    def seconds(self, t_gar: float) -> float:
        """Returns the seconds of the pass if an all-reduce of ``t_gar`` seconds runs during the pass."""
        return max(self.alone, self.beside + t_gar)


# ---- an MoE layer and the dense layers up to the next one (Sections 5.1, 5.2)


@dataclass(frozen=True, kw_only=True)
class GeneralizedLayer:
    """Backward pass of one MoE layer and of the dense layers between it and the next MoE layer.

    FSMoE calls the MoE layer and these dense layers together a generalized layer (Section 5.1). All-reduces
    of gradients are spread over the backward passes of a model's generalized layers.

    degrees: seconds of the MoE part for each number of chunks, from `simulated_degrees`.
    dense_seconds: seconds of the dense part. An all-reduce may run at the same time.
    gradient_bytes: bytes of the gradients that this layer computes. They can be all-reduced after the layer's
        backward pass has ended.
    """

    degrees: tuple[DegreeSeconds, ...]
    dense_seconds: float
    gradient_bytes: int

    def best(self, t_gar: float) -> DegreeSeconds:
        """Returns the element of ``degrees`` whose MoE part takes the fewest seconds beside an all-reduce.

        If several elements are equally fast, the element with fewest chunks is returned. The paper's
        Algorithm 1 computes the same minimum, for FSMoE's Eq. 5.

        t_gar: seconds of the all-reduce.
        """
        return min(self.degrees, key=lambda option: (option.seconds(t_gar), option.degree))

    @property
    def hidden_seconds(self) -> float:
        """Seconds of the longest all-reduce that can run beside the MoE part without making it slower.

        The MoE part has the number of chunks that is fastest without an all-reduce. If several numbers of
        chunks are equally fast, the number that hides the longest all-reduce is used. FSMoE calls the result
        t_olp,moe.
        """
        shortest = self.best(0.0).alone
        return max(option.alone - option.beside for option in self.degrees if option.alone <= shortest)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The gradient bytes that are all-reduced during one layer's backward pass, and the number of chunks.

    The gradients belong to other layers, whose backward pass has ended. The layer is a `GeneralizedLayer`: it
    has an MoE part and a dense part.

    moe_bytes: bytes of gradients that are all-reduced beside the MoE part.
    dense_bytes: bytes of gradients that are all-reduced beside the dense part.
    t_gar: seconds of the all-reduce of moe_bytes.
    degree: the number of chunks with which the MoE part is fastest beside that all-reduce.
    """

    moe_bytes: int
    dense_bytes: int
    t_gar: float
    degree: int


def all_reduce_seconds(all_reduce: LineCost, num_bytes: int) -> float:
    """Returns the seconds of an all-reduce; 0 for 0 bytes, because no message is sent.

    FSMoE calls the result t_ar (Section 5.1).

    all_reduce: seconds of an all-reduce by bytes, as a line.
    num_bytes: bytes of the reduced tensor.
    """
    return all_reduce(num_bytes) if num_bytes else 0.0


def bytes_within(all_reduce: LineCost, seconds: float) -> int:
    """Returns the most bytes that an all-reduce can reduce in ``seconds``, rounded down.

    all_reduce: seconds of an all-reduce by bytes, as a line. If its alpha, the fixed time, is longer than
        ``seconds``, the result is 0.
    seconds: the time that is available.
    """
    seconds_left = seconds - all_reduce.alpha_seconds
    if seconds_left <= 0:
        return 0
    max_bytes = seconds_left / all_reduce.beta_seconds if all_reduce.beta_seconds else 2.0**53
    num_bytes = int(min(max_bytes, 2.0**53))
    while num_bytes and all_reduce(num_bytes) > seconds:  # the division may have rounded up
        num_bytes -= 1
    return num_bytes
