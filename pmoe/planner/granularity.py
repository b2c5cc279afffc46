"""The granularity search (MPipeMoE, Algorithm 1): which degrees are fastest for B tokens, learnt by trials.

A trial costs whole training steps and B changes from step to step, so few B can be measured. The paper's
hypothesis, n never falls as B grows, lets two measurements answer for every B between them. Ranges of B are
asked first: `GranularityTable`. Else trials run, in `pmoe.choose.search.search` (searchBestGran).

B tokens of a batch. What is searched for is a pair of degrees, where the paper's n is one number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sortedcontainers import SortedDict


@dataclass(frozen=True, order=True)
class PassDegrees:
    """Micro-batches of the forward and of the backward pass.

    Ordered by (forward, backward): where neither falls as B grows, the pair does not fall either.
    Raises ValueError for a degree below 1.
    """

    forward: int
    backward: int

    def __post_init__(self) -> None:
        if min(self.forward, self.backward) < 1:
            raise ValueError(f"degrees ({self.forward}, {self.backward}) must be at least 1")


class GranularityTable:
    """Algorithm 1's memory: disjoint ranges of B with the degrees that trials found fastest there.

    Only the measured points are stored, sorted by B; a range is a longest run of neighbouring points of equal
    value. Where the hypothesis holds, these are what Algorithm 1's merging ends with, in whatever order the
    points came. Where it does not, a merged range would reach over another value's: here the point in between
    cuts the run, and what was measured last stands.

    Every rank holds its own table. They answer alike where all record the same seconds.

    Example: 100 -> 2, 400 -> 2, 900 -> 4 gives (100..400: 2), (900..900: 4); of 300 it is 2, of 500 None.
    Then 200 -> 4 gives (100: 2), (200: 4), (400: 2), (900: 4).
    """

    points: Any

    def __init__(self) -> None:
        self.points = SortedDict()  # measured B -> PassDegrees

    def lookup(self, B: int) -> PassDegrees | None:
        """The value of the range that holds B, in O(log k) for k measured points; None: a search is due."""
        exact: PassDegrees | None = self.points.get(B)
        if exact is not None:
            return exact
        at = self.points.bisect_left(B)
        if not 0 < at < len(self.points):
            return None
        below: PassDegrees
        below, above = self.points.values()[at - 1 : at + 1]
        return below if below == above else None

    def record(self, B: int, seconds: Mapping[PassDegrees, float]) -> PassDegrees:
        """Learns and returns the fastest degrees at B; of equal ones, those with fewer chunks."""
        fastest = min(seconds, key=lambda each: (seconds[each], each.forward + each.backward, each))
        self.points[B] = fastest
        return fastest

    def to_fields(self) -> dict[str, Any]:
        """Everything that was measured, as JSON can hold it: points as [B, forward, backward]."""
        return {"points": [[B, value.forward, value.backward] for B, value in self.points.items()]}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> GranularityTable:
        """The inverse of `to_fields`. Raises ValueError for fields that are no such table."""
        table = cls()
        try:
            for B, forward, backward in fields["points"]:
                table.points[_count(B)] = PassDegrees(_count(forward), _count(backward))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no granularity table: {error!r}") from error
        return table


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} must be an int of at least 0")
    return value
