"""The granularity search (MPipeMoE, Algorithm 1): which degrees are fastest for B tokens, learnt by trials.

A trial costs whole training steps and B changes from step to step, so few B can be measured. The paper's
hypothesis, n never falls as B grows, lets two measurements answer for every B between them. Three layers
answer, the cheapest first: a hash table of every B asked so far, ranges of B, trials.

B tokens of a batch. What is searched for is a pair of degrees, where the paper's n is one number.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from sortedcontainers import SortedDict

CANDIDATES = (1, 2, 4, 8, 16)
"""What n is tried where the caller names no candidates."""

FORMAT = 1
"""Version of the saved table; another one is refused."""


@dataclass(frozen=True, order=True)
class Degrees:
    """Micro-batches of the forward and of the backward pass.

    Ordered by (forward, backward): where neither falls as B grows, the pair does not fall either.
    Raises ValueError for a degree below 1.
    """

    forward: int
    backward: int

    def __post_init__(self) -> None:
        if min(self.forward, self.backward) < 1:
            raise ValueError(f"degrees ({self.forward}, {self.backward}) must be at least 1")


class Range(NamedTuple):
    """Both ends were measured and belong to the range."""

    lower: int
    upper: int
    value: Degrees


class RangeSet:
    """Disjoint ranges of B with the degrees that are fastest there.

    Only the measured points are stored, sorted by B; a range is a longest run of neighbouring points of equal
    value, from its first to its last. Where the hypothesis holds, these are Algorithm 1's ranges: a point
    between two of value n has value n too, so all points of n are one run, and from its least to its greatest
    B is what merging (min(B, lower), max(B, upper)) ends with, in whatever order the points came.

    Where it does not hold, Algorithm 1's merged range would reach over another value's. Here the point in
    between cuts the run: ranges stay disjoint, a value may own several, and what was measured last stands.
    ``contradictions`` counts such measurements: one whose value is not between those of its neighbours, and
    one that replaces another value at the same B. It is 0 as long as what was measured is monotone.

    Example: 100 -> 2, 400 -> 2, 900 -> 4 gives (100..400: 2), (900..900: 4); find(300) is 2, find(500) None.
    Then 200 -> 4 gives (100: 2), (200: 4), (400: 2), (900: 4) and one contradiction.
    """

    def __init__(self) -> None:
        self.points = SortedDict()  # measured B -> Degrees
        self.contradictions = 0

    def find(self, B: int) -> Degrees | None:
        """The value of the range that holds B, in O(log k) for k measured points; None between ranges."""
        exact: Degrees | None = self.points.get(B)
        if exact is not None:
            return exact
        below, above = self._neighbours(B)
        return below if below == above else None

    def insert(self, B: int, value: Degrees) -> None:
        """``value`` was measured to be the fastest at B. Raises ValueError for a negative B."""
        if B < 0:
            raise ValueError(f"B ({B}) must be at least 0")
        before = self.points.get(B)
        if before == value:
            return
        if before is not None:
            self.contradictions += 1
        else:
            below, above = self._neighbours(B)
            if (below is not None and below > value) or (above is not None and above < value):
                self.contradictions += 1
        self.points[B] = value

    def ranges(self) -> list[Range]:
        """Every range, by rising B."""
        runs = [list(run) for _, run in groupby(self.points.items(), key=lambda point: point[1])]
        return [Range(run[0][0], run[-1][0], run[0][1]) for run in runs]

    def _neighbours(self, B: int) -> tuple[Degrees | None, Degrees | None]:
        """The values measured next below and next above B, which itself was not measured."""
        at = self.points.bisect_left(B)
        below = self.points.peekitem(at - 1)[1] if at > 0 else None
        above = self.points.peekitem(at)[1] if at < len(self.points) else None
        return below, above


class GranularitySearch:
    """Algorithm 1: ``search.lookup(B) or search.search(B, trial)``.

    ``measure(B, degrees)`` gives the seconds of one step, for searches that name no trial. It belongs to this
    process: copies and pickles carry what was learnt, but no ``measure``.

    On several ranks every rank holds its own search. They answer alike where all record the same seconds (see
    ``agree``) and start from the same table.
    """

    def __init__(self, measure: Callable[[int, Degrees], float] | None = None) -> None:
        self.measure = measure
        self.ranges = RangeSet()
        self.cache_table: dict[int, Degrees] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "measure": None}

    def lookup(self, B: int) -> Degrees | None:
        """What is known for B; None where a search is due."""
        found = self.cache_table.get(B)
        if found is None:
            found = self.ranges.find(B)
            if found is not None:
                self.cache_table[B] = found
        return found

    def record(self, B: int, seconds: Mapping[Degrees, float]) -> Degrees:
        """Learns and returns the fastest degrees at B; of equal ones, those with fewer chunks.

        Infinite seconds mark degrees that cannot run. Raises ValueError for NaN or negative seconds, and
        where no degrees are left.
        """
        for degrees, value in seconds.items():
            if not value >= 0:
                raise ValueError(f"seconds of {degrees} at B = {B} ({value}) must be at least 0")
        fastest = min(
            (degrees for degrees, value in seconds.items() if value < math.inf),
            key=lambda degrees: (seconds[degrees], degrees.forward + degrees.backward, degrees),
            default=None,
        )
        if fastest is None:
            raise ValueError(f"no degrees ran at B = {B}: {dict(seconds)}")
        before = self.ranges.contradictions
        self.ranges.insert(B, fastest)
        if self.ranges.contradictions > before:  # it cuts a range or moves its end: cached answers may fall
            find = self.ranges.find
            self.cache_table = {b: known for b, known in self.cache_table.items() if find(b) == known}
        self.cache_table[B] = fastest
        return fastest

    def search(
        self,
        B: int,
        trial: Callable[[Degrees], float] | None = None,
        candidates: Iterable[Degrees | int] = CANDIDATES,
        repeats: int = 3,
        agree: Callable[[list[float]], list[float]] | None = None,
    ) -> Degrees:
        """Tries every candidate at B, records and returns the fastest (the paper's searchBestGran).

        ``trial(degrees)`` runs one step and returns its seconds. Candidates take turns, so that a machine
        that slows down slows all alike: one untimed step each, then ``repeats`` rounds. ``agree`` gets the
        median of each candidate, in their order, and returns what all ranks share: the slowest rank's. An
        int n stands for Degrees(n, n).

        Raises ValueError without a trial, without candidates, for repeats below 1, and where ``agree``
        returns another number of seconds.
        """
        if trial is None:
            if self.measure is None:
                raise ValueError("search needs a trial, as the granularity search has no measure")
            measure = self.measure

            def trial(degrees: Degrees) -> float:
                return measure(B, degrees)

        if repeats < 1:
            raise ValueError(f"repeats ({repeats}) must be at least 1")
        tried = list(dict.fromkeys(Degrees(one, one) if isinstance(one, int) else one for one in candidates))
        if not tried:
            raise ValueError("candidates must not be empty")
        for degrees in tried:
            trial(degrees)
        rounds = [[trial(degrees) for degrees in tried] for _ in range(repeats)]
        medians = [statistics.median(taken) for taken in zip(*rounds, strict=True)]
        agreed = medians if agree is None else agree(medians)
        if len(agreed) != len(tried):
            raise ValueError(f"agree returned {len(agreed)} seconds for {len(tried)} candidates")
        return self.record(B, dict(zip(tried, agreed, strict=True)))

    def take(self, other: GranularitySearch) -> None:
        """Knows from now on what ``other`` knows, and nothing else."""
        self.ranges, self.cache_table = other.ranges, other.cache_table

    def save(self, path: str | Path, key: Mapping[str, Any]) -> None:
        """Writes what was measured as JSON, all of the file or nothing.

        ``key`` says where the numbers hold (device, ranks, sizes): anything that JSON can hold.
        """
        table = {
            "format": FORMAT,
            "key": dict(key),
            "contradictions": self.ranges.contradictions,
            "points": [[B, value.forward, value.backward] for B, value in self.ranges.points.items()],
        }
        text = json.dumps(table, allow_nan=False) + "\n"
        path = Path(path)
        # A name of its own beside the target: several ranks may save at once, and a rename stays on one disk.
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with draft.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(
        cls,
        path: str | Path,
        key: Mapping[str, Any],
        measure: Callable[[int, Degrees], float] | None = None,
    ) -> GranularitySearch:
        """A search that knows what was saved at ``path``.

        Raises ValueError, naming the path, for a file that is no such table, of another format or another
        key; OSError where it cannot be read.
        """
        data = Path(path).read_bytes()
        try:
            table = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a granularity table: {error}") from error
        if not isinstance(table, dict):
            raise ValueError(
                f"{path} is not a granularity table: found {type(table).__name__}, not an object"
            )
        expected = {"format": FORMAT, "key": json.loads(json.dumps(dict(key)))}
        for name, value in expected.items():
            if table.get(name) != value:
                raise ValueError(f"{path}: found {name} {table.get(name)!r}, expected {value!r}")
        loaded = cls(measure)
        try:
            for B, forward, backward in table["points"]:
                loaded.ranges.insert(_count(B), Degrees(_count(forward), _count(backward)))
            loaded.ranges.contradictions = _count(table["contradictions"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a granularity table: {error!r}") from error
        return loaded


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} must be an int of at least 0")
    return value
