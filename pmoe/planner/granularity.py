"""The granularity search: remembers which numbers of chunks trials found fastest for a batch of B tokens.

It is MPipeMoE's Algorithm 1. A trial costs whole training steps, and B changes from step to step, so only a
few values of B can be measured. The paper assumes that the best n never falls as B grows. So if two values of
B have the same best n, every B between them has it too. A layer looks B up in a `GranularityTable`, and runs
trials only if the table has no answer (the paper's searchBestGran, here `pmoe.choose.search.search`).

Letters: B tokens of a batch, n number of chunks. The paper searches for one n. This file has a pair of
numbers, one for each pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sortedcontainers import SortedDict


@dataclass(frozen=True, order=True)
class PassDegrees:
    """Number of micro-batches (chunks) of the forward pass and of the backward pass.

    Pairs are ordered by forward, then by backward. Raises ValueError for a number below 1.
    """

    forward: int
    backward: int

    def __post_init__(self) -> None:
        if min(self.forward, self.backward) < 1:
            raise ValueError(f"degrees ({self.forward}, {self.backward}) must be at least 1")


class GranularityTable:
    """Table of the fastest numbers of chunks, by B, the number of tokens of a batch.

    Only measured values of B are stored, in rising order. Neighbouring values with the same fastest numbers
    of chunks form a range, and every B in the range is given these numbers.

        record       100 -> 2    400 -> 2    900 -> 4
        ranges       100 .. 400: 2           900 .. 900: 4
        lookup       300 -> 2                500 -> None

    Algorithm 1 of MPipeMoE merges ranges, because it assumes that the fastest n never falls as B grows. If
    the assumption holds, this table has the same ranges. If it does not hold, a measured value splits a
    range. For example, if 200 -> 4 is recorded next, the ranges are 100: 2, 200: 4, 400: 2 and 900: 4.

    If a B is measured again, the new result replaces the old one. Every rank has a table of its own. The
    tables are equal if all ranks record the same seconds.
    """

    points: Any

    def __init__(self) -> None:
        self.points = SortedDict()  # measured B -> PassDegrees

    def lookup(self, B: int) -> PassDegrees | None:
        """Returns the fastest numbers of chunks for a batch of B tokens; None if trials must find them.

        The answer is known for a measured B, and for a B between two measured neighbours with the same
        answer. Takes O(log k) time for k measured values of B.
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
        """Stores and returns the fastest numbers of chunks for a batch of B tokens, by measured seconds.

        If several are equally fast, those with fewer chunks are taken.

        seconds: maps the numbers of chunks of both passes to the measured seconds of a step.
        """
        fastest = min(
            seconds, key=lambda degrees: (seconds[degrees], degrees.forward + degrees.backward, degrees)
        )
        self.points[B] = fastest
        return fastest

    def to_fields(self) -> dict[str, Any]:
        """Returns all measured values as data for JSON: {"points": [[B, forward, backward], ...]}."""
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
    """Returns ``value`` if it is an int of at least 0. Raises ValueError otherwise."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} must be an int of at least 0")
    return value
