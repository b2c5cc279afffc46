"""The granularity search: remembers which numbers of chunks trials found fastest for a batch of B tokens.

The search is MPipeMoE's Algorithm 1, changed for machines on which equal runs take different times. A trial
costs whole training steps, and B changes from step to step, so only a few values of B can be measured. The
paper assumes that the best n never falls as B grows. So if two values of B have the same best n, every B
between them has the same best n, too. A layer looks B up in a `GranularityTable`. Only if the table has no
answer, the layer runs trials (the paper's searchBestGran, here `pmoe.choose.search.search`).

Five things differ from the paper's algorithm, because measured seconds are noisy:

    rounding    B is rounded to a few percent (`rounded`), so that similar batches share an entry
    ranges      a range of values of B stores every n that all measurements of the range tried and found at
                most CONTRADICTED standard errors slower than the fastest n, and how much slower each n was.
                The range uses the n for which the sum of these losses over all measurements is smallest.
                After only one measurement, it uses the smallest n within a standard error of the fastest.
    merging     two neighbouring ranges become one if some n is close to the fastest (CLOSE) in both
    hypothesis  two neighbouring ranges also become one if n would fall as B grows, against the paper's
                assumption, unless every n is over CONTRADICTED standard errors slower in one of the ranges
    margin      a measurement at one B holds for a range around B in which no other n can be faster

Letters: B tokens of a batch. The paper searches for one n, the number of chunks. This file searches for a
pair of numbers, one for each pass (`PassDegrees`). The paper's assumption is used for each pass by itself: a
pair does not fall if neither of its numbers falls.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedDict

if TYPE_CHECKING:
    from pmoe.planner.timed_rounds import PassTimes

BITS = 5
"""Number of significant binary digits to which B is rounded: neighbours differ by 3 to 6 percent."""

CLOSE = 0.7
"""A number of chunks is close to the fastest if it is at most this many standard errors slower."""

EQUALLY_FAST = 1.0
"""After one measurement, degrees count as equally fast up to this many standard errors.

If several degrees are equally fast, the degrees with the fewest chunks are taken. Every chunk has a fixed
cost, which noise can hide, so fewer chunks are usually the faster choice.
"""

CONTRADICTED = 4.0
"""Measurements overrule the search's hypothesis if they contradict it by more standard errors than this.

The hypothesis is that the best number of chunks never falls as the number of tokens grows.
"""

REACH = 1.25
"""A measurement at B tokens applies at most to batches from B / REACH to B * REACH tokens."""


def rounded(B: int) -> int:
    """Returns B, a number of tokens, rounded to `BITS` binary digits: similar batches share an entry.

    The function uses integers only, so that all ranks get the same result.

    Example: 4000 -> 3968, 4097 -> 4096. Numbers up to 32 are not changed.
    """
    step = 1 << max(B.bit_length() - BITS, 0)
    return (B + step // 2) // step * step


@dataclass(frozen=True, order=True)
class PassDegrees:
    """Number of micro-batches (chunks) of the forward pass and of the backward pass.

    Pairs are sorted by the number of the forward pass first. Raises ValueError for a number below 1.
    """

    forward: int
    backward: int

    def __post_init__(self) -> None:
        if min(self.forward, self.backward) < 1:
            raise ValueError(f"degrees ({self.forward}, {self.backward}) must be at least 1")

    def __str__(self) -> str:
        """Returns both numbers as a text: "2/4" for 2 chunks in forward and 4 in backward."""
        return f"{self.forward}/{self.backward}"

    @property
    def are_equal(self) -> bool:
        """Whether both passes have the same number."""
        return self.forward == self.backward

    def falls_to(self, other: PassDegrees) -> bool:
        """Whether ``other`` has, in at least one pass, fewer chunks than this pair."""
        return other.forward < self.forward or other.backward < self.backward


@dataclass(frozen=True)
class Excess:
    """A measure of how much slower some degrees were than the fastest degrees, in a `BatchRange`.

    Degrees are the numbers of chunks of both passes. For one measurement,

        excess = seconds / (seconds of the fastest degrees) - 1

    total: sum of the excess over the measurements of the range.
    worst: the largest (excess / standard error of the excess) of any measurement.
    """

    total: float
    worst: float


@dataclass(frozen=True)
class BatchRange:
    """A range of batch sizes B (numbers of tokens) that use the same degrees.

    Degrees are the numbers of chunks of both passes.

    lower, upper: the smallest and the largest B of the range.
    measured: number of values of B in the range that were measured.
    excess: maps degrees to how much slower they were than the fastest degrees. Degrees are left out if some
        measurement of the range did not try them, or found them slower by more than CONTRADICTED standard
        errors.
    """

    lower: int
    upper: int
    measured: int
    excess: Mapping[PassDegrees, Excess]

    @property
    def degrees(self) -> PassDegrees:
        """The degrees (numbers of chunks of both passes) for batches in this range.

        After one measurement: of all degrees that were at most `EQUALLY_FAST` standard errors slower than the
        fastest degrees, those with the fewest chunks. After several measurements: the degrees with the
        smallest `Excess.total`. They lost least in all measurements together. If totals are equal, the
        degrees with fewer chunks are taken.
        """

        def loss(degrees: PassDegrees) -> tuple[float, int, PassDegrees]:
            """Returns a sort key, which is smallest for the degrees to use: their loss, then their chunks."""
            excess = self.excess[degrees]
            is_equally_fast = self.measured == 1 and excess.worst <= EQUALLY_FAST
            return 0.0 if is_equally_fast else excess.total, degrees.forward + degrees.backward, degrees

        return min(self.excess, key=loss)

    def joined(self, other: BatchRange) -> BatchRange:
        """Returns one range that covers this range, ``other``, and all B (numbers of tokens) between them.

        In its ``excess`` the joined range has only the degrees (numbers of chunks) that are in ``excess`` of
        both ranges.
        """
        excess = {
            degrees: Excess(own.total + theirs.total, max(own.worst, theirs.worst))
            for degrees, own in self.excess.items()
            if (theirs := other.excess.get(degrees)) is not None
        }
        lower = min(self.lower, other.lower)
        return BatchRange(lower, max(self.upper, other.upper), self.measured + other.measured, excess)

    def joins(self, other: BatchRange) -> bool:
        """Returns whether this range and a neighbouring range can be merged into one.

        Two ranges can be merged if they have the same degrees (numbers of chunks). They can also be merged if
        there are degrees that in both ranges were at most `CLOSE` standard errors slower than the fastest
        degrees. If the range with more tokens has fewer chunks, the limit is `CONTRADICTED` instead of
        `CLOSE`, because the paper assumes that the number of chunks never falls as the number of tokens
        grows.
        """
        below, above = sorted((self, other), key=lambda batch_range: batch_range.lower)
        if below.degrees == above.degrees:
            return True
        limit = CONTRADICTED if below.degrees.falls_to(above.degrees) else CLOSE
        return any(excess.worst <= limit for excess in self.joined(other).excess.values())


class GranularityTable:
    """A table of the fastest numbers of chunks for batches of B tokens.

    The table has disjoint ranges of B in rising order. It also has answers for single B that were looked up
    or remembered since the last measurement. All B are rounded (`rounded`). There are only 16 rounded values
    between a number of tokens and its double, so the number of ranges is bounded.

    Every rank has a table of its own. The tables are equal if all ranks record the same seconds. In this
    example, the number after each arrow or colon is the number of chunks:

        record       96 -> 2    400 -> 2    896 -> 4
        ranges       96 .. 400: 2           896 .. 896: 4
        lookup       300 -> 2               512 -> None

    If 512 -> 2 and 640 -> 4 are recorded next, the ranges are 96 .. 512: 2 and 640 .. 896: 4.
    """

    ranges: Any
    answers: dict[int, PassDegrees]

    def __init__(self) -> None:
        self.ranges = SortedDict()  # lower B -> BatchRange
        self.answers = {}  # rounded B -> degrees, the paper's hash table

    def lookup(self, B: int) -> PassDegrees | None:
        """Returns the degrees (numbers of chunks) for a batch of B tokens; None if trials must find them.

        The first look-up of a rounded B takes O(log k) time for k ranges, later look-ups take O(1).
        """
        entry = rounded(B)
        if entry in self.answers:
            return self.answers[entry]
        below, _ = self.neighbours(entry)
        if below is None or below.upper < entry:
            return None
        self.answers[entry] = below.degrees
        return below.degrees

    def remember(self, B: int, degrees: PassDegrees) -> None:
        """Stores degrees (numbers of chunks) for batches of B tokens, without a measurement.

        The table forgets them at the next measurement, and does not write them to files.

        B: number of tokens.
        degrees: the numbers of chunks of both passes.
        """
        self.answers[rounded(B)] = degrees

    def neighbours(self, B: int) -> tuple[BatchRange | None, BatchRange | None]:
        """Returns (last range that begins at or below B, first range that begins above B).

        None stands for a range that does not exist. If B is in a range, that range is the first result.

        B: a number of tokens that the caller has rounded (`rounded`), or the end of a range.
        """
        above = self.ranges.bisect_right(B)
        ranges = self.ranges.values()
        return (
            ranges[above - 1] if above > 0 else None,
            ranges[above] if above < len(ranges) else None,
        )

    def record(self, B: int, times: Mapping[PassDegrees, PassTimes]) -> PassDegrees:
        """Stores measurements for a batch of B tokens. Returns the degrees (numbers of chunks) to use for B.

        They are the fastest degrees, with two exceptions. Degrees with fewer chunks are used if they are as
        fast within a standard error (`BatchRange.degrees`). And B may be merged into a range with other
        degrees that are equally fast within the noise of the measurements.

        B: number of tokens.
        times: measured times of a step by degrees.

        Raises ValueError if the table has an answer for B already.
        """
        entry = rounded(B)
        below, above = self.neighbours(entry)
        if below is not None and entry <= below.upper:
            raise ValueError(f"B ({B}) must not be in a range already ({below.lower} to {below.upper})")
        measured = _measured(entry, times)
        lower = measured.lower if below is None else max(measured.lower, below.upper + 1)
        upper = measured.upper if above is None else min(measured.upper, above.lower - 1)
        return self.insert(BatchRange(lower, upper, 1, measured.excess)).degrees

    def insert(self, new: BatchRange) -> BatchRange:
        """Adds a range, and merges it with its neighbours if possible. Returns the added or merged range.

        If it can be merged with both neighbours, the merger that makes steps less slow comes first.

        new: a range that overlaps no range of the table.
        """
        self.answers.clear()
        while True:
            mergers = [
                (new.joined(neighbour), neighbour)
                for neighbour in self.neighbours(new.lower)
                if neighbour is not None and new.joins(neighbour)
            ]
            if not mergers:
                self.ranges[new.lower] = new
                return new

            def loss(merger: tuple[BatchRange, BatchRange], alone: BatchRange = new) -> float:
                """Returns how much slower steps become if two ranges of batch sizes are merged.

                All batches of the merged range use the same degrees (numbers of chunks), which may not be
                the fastest for some of them. The result is a fraction, summed over all measurements.

                merger: (the merged range, the range of the table that is merged with ``alone``).
                alone: the range to add, before it is merged.
                """
                merged, neighbour = merger
                parts = sum(part.excess[part.degrees].total for part in (alone, neighbour))
                return merged.excess[merged.degrees].total - parts

            new, neighbour = min(mergers, key=loss)
            del self.ranges[neighbour.lower]

    def all_degrees(self) -> Iterator[PassDegrees]:
        """Yields the degrees (numbers of chunks of both passes) that have measurements, range by range.

        Degrees that several ranges have are yielded several times.
        """
        for batch_range in self.ranges.values():
            yield from batch_range.excess

    def to_fields(self) -> dict[str, Any]:
        """Returns all ranges of numbers of tokens as data for JSON.

        The data is {"ranges": [[lower, upper, measured, [[forward, backward, total, worst], ...]], ...]}: the
        fields of each `BatchRange`, and for each of its degrees the numbers of chunks and the `Excess`.
        """
        return {
            "ranges": [
                [
                    batch_range.lower,
                    batch_range.upper,
                    batch_range.measured,
                    [
                        [d.forward, d.backward, e.total, e.worst]
                        for d, e in sorted(batch_range.excess.items())
                    ],
                ]
                for batch_range in self.ranges.values()
            ]
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> GranularityTable:
        """Returns the table that `to_fields` wrote. Raises ValueError if the fields are not such a table."""
        table = cls()
        last = -1
        try:
            for lower, upper, measured, excess in fields["ranges"]:
                if not last < _count(lower) <= _count(upper) or _count(measured) < 1 or not excess:
                    raise ValueError(f"range {lower} to {upper} of {measured} B with {excess}")
                last = upper
                table.ranges[lower] = BatchRange(
                    lower,
                    upper,
                    measured,
                    {
                        PassDegrees(_count(forward), _count(backward)): Excess(_ratio(total), _ratio(worst))
                        for forward, backward, total, worst in excess
                    },
                )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no granularity table: {error!r}") from error
        return table

    @classmethod
    def from_points(cls, points: Mapping[int, set[PassDegrees]]) -> GranularityTable:
        """Returns a table made from an older file, which has only the fastest degrees at each measured B.

        Degrees are the numbers of chunks of both passes. Older files have no seconds.

        points: maps a rounded number of tokens B to its fastest degrees. If there are several, they count as
            equally fast.
        """
        table = cls()
        by_entry: dict[int, set[PassDegrees]] = {}
        for B, fastest in points.items():
            by_entry.setdefault(rounded(B), set()).update(fastest)
        for entry, fastest in sorted(by_entry.items()):
            table.insert(BatchRange(entry, entry, 1, {degrees: Excess(0.0, 0.0) for degrees in fastest}))
        return table


def points_of(fields: Mapping[str, Any]) -> dict[int, PassDegrees]:
    """Returns the fastest degrees (numbers of chunks) for each measured number of tokens of an old file.

    fields: the fields of a table of file version 1 or 2: {"points": [[B, forward, backward], ...]}.

    Raises ValueError if the fields are not such a table.
    """
    try:
        return {
            _count(B): PassDegrees(_count(forward), _count(backward))
            for B, forward, backward in fields["points"]
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no granularity table: {error!r}") from error


def _measured(B: int, times: Mapping[PassDegrees, PassTimes]) -> BatchRange:
    """Returns the range of batch sizes around B for which a measurement at B holds.

    Every task takes alpha + beta * B seconds. So if B grows by some factor, the seconds of a step do not
    fall, and grow by at most this factor. If degrees take x times the seconds of the fastest degrees at B,
    they can become the fastest only after B has changed by at least a factor of x. The best n (number of
    chunks) is assumed not to fall as B grows. So only degrees with more chunks limit the range upwards, and
    only degrees with fewer chunks limit it downwards. Each factor x is divided by 1 + the resolution of the
    measurements (`PassTimes.resolution`), and is at most REACH (1.25).

        B = 1000    n=2: 10 ms    n=4: 11 ms    n=1: 14 ms    -> 2 is the fastest from 800 to 1100 tokens

    The example has no noise. Downwards n=1 would allow a factor of 1.4, so REACH limits it:
    1000 / 1.25 = 800. Upwards n=4 allows 1.1.

    B: number of tokens of the batch.
    times: measured times of a step by degrees (numbers of chunks of both passes).
    """
    fastest = min(
        times, key=lambda degrees: (times[degrees].step, degrees.forward + degrees.backward, degrees)
    )
    excess = {}
    margin_down = margin_up = REACH
    for degrees, timed in times.items():
        slower = timed.step / times[fastest].step - 1
        error = timed.standard_error(times[fastest])
        if error > 0:
            worst = slower / error
        else:  # exact seconds: any difference counts
            worst = math.inf if slower > 0 else 0.0
        if worst <= CONTRADICTED:
            excess[degrees] = Excess(slower, worst)
        margin = max((1 + slower) / (1 + timed.resolution(times[fastest])), 1.0)
        if fastest.falls_to(degrees):
            margin_down = min(margin_down, margin)
        if degrees.falls_to(fastest):
            margin_up = min(margin_up, margin)
    return BatchRange(math.ceil(B / margin_down), math.floor(B * margin_up), 1, excess)


def _count(value: object) -> int:
    """Returns ``value`` if it is an int of at least 0. Raises ValueError otherwise."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} must be an int of at least 0")
    return value


def _ratio(value: object) -> float:
    """Returns ``value`` if it is a finite number of at least 0. Raises ValueError otherwise."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{value!r} must be a finite number of at least 0")
    return float(value)
