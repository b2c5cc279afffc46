"""The granularity search: remembers which degrees trials found fastest for a batch of B tokens.

It is MPipeMoE's Algorithm 1. A trial costs whole training steps, and B changes from step to step, so only
few B can be measured. The paper assumes that n never falls as B grows. Two measurements with the same n
then answer for every B between them. A layer looks B up in a `GranularityTable`, and runs trials only if no
range holds it (the paper's searchBestGran, here `pmoe.choose.search.search`).

B tokens of a batch. The paper searches for one n; here it is a pair of degrees, one for each pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sortedcontainers import SortedDict


@dataclass(frozen=True, order=True)
class PassDegrees:
    """Number of micro-batches of the forward pass and of the backward pass.

    Ordered by (forward, backward). If neither falls as B grows, the pair does not fall either. Raises
    ValueError for a degree below 1.
    """

    forward: int
    backward: int

    def __post_init__(self) -> None:
        if min(self.forward, self.backward) < 1:
            raise ValueError(f"degrees ({self.forward}, {self.backward}) must be at least 1")


class GranularityTable:
    """Measured degrees by number of tokens B, as disjoint ranges of B with one pair of degrees each.

    Only measured points are stored, sorted by B. A range is a longest run of neighbouring points with the
    same degrees. If the paper's assumption holds, these are the ranges that Algorithm 1's merging produces,
    in whichever order the points came. If it does not hold, a merged range would cover points that have
    other degrees. Here such a point splits the run, and the last measurement of a B counts.

    Every rank holds its own table. The tables agree if all ranks record the same seconds.

        record       100 -> 2    400 -> 2    900 -> 4
        ranges       100 .. 400: 2           900 .. 900: 4
        lookup       300 -> 2                500 -> None

    Then recording 200 -> 4 gives the ranges 100: 2, 200: 4, 400: 2 and 900: 4.
    """

    points: Any

    def __init__(self) -> None:
        self.points = SortedDict()  # measured B -> PassDegrees

    def lookup(self, B: int) -> PassDegrees | None:
        """Returns the degrees of the range that holds B, or None if a search is due.

        Takes O(log k) for k measured points.
        """
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
        """Stores and returns the fastest degrees at B; of equals those with fewer chunks.

        seconds: measured seconds of a step by degrees.
        """
        fastest = min(
            seconds, key=lambda degrees: (seconds[degrees], degrees.forward + degrees.backward, degrees)
        )
        self.points[B] = fastest
        return fastest

    def to_fields(self) -> dict[str, Any]:
        """Returns all measured points as JSON can hold them: [B, forward, backward] each."""
        return {"points": [[B, value.forward, value.backward] for B, value in self.points.items()]}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> GranularityTable:
        """Returns the table that `to_fields` wrote. Raises ValueError if the fields are not such a table."""
        table = cls()
        try:
            for B, forward, backward in fields["points"]:
                table.points[_count(B)] = PassDegrees(_count(forward), _count(backward))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no granularity table: {error!r}") from error
        return table


def _count(value: object) -> int:
    """Returns the value. Raises ValueError unless it is an int of at least 0."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} must be an int of at least 0")
    return value
