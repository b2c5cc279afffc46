"""What the stages of a layer with sharded experts cost in one pass (FSMoE, Eq. 1), and a pass by its degree.

Letters: r chunks; a2a, ag, rs, exp: all-to-all (each of two), all-gather, reduce-scatter, experts; t_gar
seconds of other layers' gradients.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import NamedTuple

from pmoe.arguments import check_not_negative
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
