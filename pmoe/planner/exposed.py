"""How much of a pass's communication is hidden behind its computation, and how much is waited for.

Reads spans only, recorded (`pmoe.engine.recording`) or simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pmoe.planner.timeline import TimedTask
from pmoe.schedule.tasks import Lane

Interval = tuple[float, float]

LINKS = (Lane.COMMUNICATE, Lane.INTRA_NODE)


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Seconds of one pass. seconds: from its first task to its last; communication: those in which anything
    travels; exposed: those of them in which the compute lane runs nothing.

    The exchange of row counts, which precedes a forward pass, is no part of it.
    """

    seconds: float
    communication: float
    exposed: float

    @property
    def hidden(self) -> float:
        """Seconds of communication beside computation."""
        return self.communication - self.exposed


def overlap(spans: Sequence[TimedTask]) -> Overlap:
    """What the spans of one pass say.

    Example: S from 0 to 3 s, C from 2 to 6 s, R from 5 to 8 s: 8 s, of which something travels in 6, and
    nothing is computed in 2 + 2 of these.
    """
    travelling = union((span.start, span.end) for span in spans if span.lane in LINKS)
    computing = union((span.start, span.end) for span in spans if span.lane == Lane.COMPUTE)
    start = min((span.start for span in spans), default=0.0)
    return Overlap(
        seconds=max((span.end for span in spans), default=0.0) - start,
        communication=total_length(travelling),
        # What travels or computes, without what computes: what travels alone.
        exposed=total_length(union([*travelling, *computing])) - total_length(computing),
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in intervals that do not touch, ascending."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def total_length(intervals: Iterable[Interval]) -> float:
    """Of intervals that do not overlap."""
    return sum((end - start for start, end in intervals), 0.0)
