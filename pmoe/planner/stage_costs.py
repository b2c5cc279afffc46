"""What the stages of a layer with sharded experts cost in one pass (FSMoE, Eq. 1), a pass by its degree, and
the layer as the partition of gradients sees it (Sections 5.1, 5.2).

Letters: r chunks; a2a, ag, rs, exp: all-to-all (each of two), all-gather, reduce-scatter, experts; t_gar
seconds of other layers' gradients.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import NamedTuple

from pmoe.arguments import check_int, check_not_negative
from pmoe.planner.costs import LineCost


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Work of a stage in one pass: ``size`` on ``line``. A chunk of r takes alpha + size / r * beta (Eq. 1).

    Raises ValueError for a number that is negative or not finite; `pmoe.planner.costs.fit` fits no such line.
    """

    line: LineCost
    size: float

    def __post_init__(self) -> None:
        check_not_negative(**vars(self.line), size=self.size)

    def twice(self) -> StageWork:
        """The same work two times in each chunk."""
        line = LineCost(2 * self.line.alpha_seconds, 2 * self.line.beta_seconds)
        return StageWork(line=line, size=self.size)


class ChunkSeconds(NamedTuple):
    """Seconds of one chunk on each stage."""

    a2a: float
    ag: float
    rs: float
    exp: float


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """The work of one pass of a layer; a2a is one of its two all-to-alls."""

    a2a: StageWork
    ag: StageWork
    rs: StageWork
    exp: StageWork

    def chunk(self, r: float) -> ChunkSeconds:
        """Eq. 1: seconds of a chunk of r."""
        return ChunkSeconds(*(alpha + whole / r for alpha, whole in self._pairs))

    def backward(self) -> LayerCosts:
        """The backward pass of a layer whose forward pass this is: experts take twice as long (Section 4.4).

        They make the gradients of their inputs and those of their weights. The paper doubles alpha, beta and
        n, which read literally is four times; its Table 2 measures twice, so alpha and beta double here.
        """
        return LayerCosts(a2a=self.a2a, ag=self.ag, rs=self.rs, exp=self.exp.twice())

    @functools.cached_property
    def _pairs(self) -> tuple[tuple[float, float], ...]:
        works = (getattr(self, field.name) for field in fields(self))
        return tuple((w.line.alpha_seconds, w.line.beta_seconds * w.size) for w in works)


class DegreeSeconds(NamedTuple):
    """A backward pass in ``degree`` chunks that carries t_gar takes max(alone, beside + t_gar) seconds.

    alone: without gradients. beside: the longest path through the gradients' task, less that task.
    """

    degree: int
    alone: float
    beside: float

    def seconds(self, t_gar: float) -> float:
        return max(self.alone, self.beside + t_gar)


# ---- a layer and the dense part up to the next one


@dataclass(frozen=True, kw_only=True)
class GeneralizedLayer:
    """An MoE layer and the dense part up to the next one (Section 5.2), in the backward pass.

    degrees: its MoE part's seconds by degree, see `pmoe.planner.degree_search.simulated_degrees`.
    dense_seconds: of the dense part, that an all-reduce may run beside.
    gradient_bytes: made in this layer, and there when its backward pass has ended.

    Raises ValueError for no degrees and for a negative number, TypeError for bytes that are no int.
    """

    degrees: tuple[DegreeSeconds, ...]
    dense_seconds: float
    gradient_bytes: int

    def __post_init__(self) -> None:
        if not self.degrees:
            raise ValueError("degrees (none) must hold at least one")
        check_int(gradient_bytes=self.gradient_bytes)
        check_not_negative(dense_seconds=self.dense_seconds, gradient_bytes=self.gradient_bytes)

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
    """t_ar (Section 5.1); nothing is sent, and takes no time, where there are no bytes."""
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
