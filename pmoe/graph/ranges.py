"""Which ranges of instructions are cut, and in how many parts: Lancet's dynamic programme (section 5.1).

T(n) = min over i < n and k of T(i) + P(i + 1, n, k): the first n groups of instructions end at T(n) where the
last range begins behind group i. P is the time of the range as a pipeline of its stages (section 5.3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pmoe.graph.instructions import COMMUNICATE, COMPUTE, Instruction, total_seconds, users_of

T = TypeVar("T")

GROUPS_A_LAYER = 5
"""Groups of instructions between two layers (the paper's, section 7)."""
LONGEST = 2 * GROUPS_A_LAYER
"""Groups of a range at most."""


@dataclass(frozen=True)
class Range:
    """The instructions from ``first`` to ``last``, by name, in k parts. lag: as in `turns`."""

    first: str
    last: str
    k: int
    lag: int


@dataclass(frozen=True)
class PartCosts:
    """By an instruction's name, for one k: seconds of each of its parts, and of joining them where somebody
    outside a range needs the whole."""

    part: Mapping[str, float]
    join: Mapping[str, float]


@dataclass(frozen=True)
class Cuttable:
    """A forward pass. ends: for each place before an instruction, and the end, whether a range may end there.
    can: for each instruction, whether it can be cut."""

    instructions: Sequence[Instruction]
    ends: Sequence[bool]
    can: Sequence[bool]


def stages(body: Iterable[T], ends_stage: Callable[[T], bool]) -> list[list[T]]:
    """Runs of instructions that compute, each with the all-to-alls of rows that send what it made. An
    exchange of counts ends none: the first part's rows would wait for the gates of all parts."""
    found, ended = list[list[T]](), True
    for each in body:
        ends = ends_stage(each)
        if not found or (ended and not ends):
            found.append([])
        found[-1].append(each)
        ended = ends
    return found


def turns(num_stages: int, k: int, lag: int) -> list[tuple[int, int]]:
    """(stage, part) in the order in which they run. The two stages of a layer, up to its dispatch and up to
    its way home, take turns: the second is ``lag`` parts behind, with k after all parts of the first (the
    paper's order). Layers follow each other: a rank that can only cut layers has the same messages.

    Example: (2, 3, 1) -> (0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2).
    """
    every = itertools.product(range(num_stages), range(k))
    return sorted(every, key=lambda each: (each[0] // 2, each[0] % 2 * lag + each[1], each[0]))


def lags(k: int) -> list[int]:
    """Those that are tried: one part behind, ways home leave early; k behind, no dispatch waits for them."""
    return sorted({1, k})


def pipelined(body: Sequence[Instruction], k: int, lag: int, costs: PartCosts) -> list[Instruction]:
    """A range as its pipeline: stages and parts in the order of `turns`, each part's all-to-all as soon as
    what it sends is computed."""
    tasks, by_stage, run_of = list[Instruction](), list[list[Any]](), dict[str, str]()
    for stage in stages(body, lambda each: each.ends_stage):
        runs = []
        for ends, found in itertools.groupby(stage, key=lambda each: each.ends_stage):
            run = list(found)
            waits = sorted({run_of[name] for each in run for name in each.waits if name in run_of})
            name, lane = f"{run[0].name} to {run[-1].name}", COMMUNICATE if ends else COMPUTE
            run_of.update(dict.fromkeys((each.name for each in run), name))
            runs.append((name, waits, sum(costs.part.get(each.name, 0.0) for each in run), lane))
        by_stage.append(runs)
    for at, part in turns(len(by_stage), k, lag):
        for name, waits, seconds, lane in by_stage[at]:
            ready = tuple(f"{each}, part {part}" for each in waits)
            tasks.append(Instruction(name=f"{name}, part {part}", waits=ready, seconds=seconds, lane=lane))
    return tasks


def pipeline_seconds(
    body: Sequence[Instruction], k: int, lag: int, costs: PartCosts, users: Mapping[str, Sequence[str]]
) -> float:
    """P: the end of the pipeline, and of what joins its results."""
    if k == 1:
        return total_seconds(alone(body, costs))
    inside = {each.name for each in body}
    joined = (name for name in inside if not inside.issuperset(users[name]))
    return total_seconds(pipelined(body, k, lag, costs)) + sum(costs.join.get(name, 0.0) for name in joined)


def alone(body: Sequence[Instruction], costs: PartCosts) -> list[Instruction]:
    """The instructions as if nothing were before them, with the seconds of one part."""
    inside = {each.name for each in body}
    return [
        replace(
            each,
            seconds=costs.part.get(each.name, 0.0),
            waits=tuple(name for name in each.waits if name in inside),
        )
        for each in body
    ]


def solve(graph: Cuttable, costs: Mapping[int, PartCosts]) -> tuple[float, list[Range]]:
    """(seconds predicted, the ranges that are cut). costs: by k, 1 among them."""
    instructions = graph.instructions
    users, ends = users_of(instructions), _groups(graph, costs[1].part)
    best, chosen = [0.0] + [math.inf] * (len(ends) - 1), [(0, 1, 1)] * len(ends)
    for n in range(1, len(ends)):
        for i in range(max(0, n - LONGEST), n):
            first, last = ends[i], ends[n]
            body = instructions[first:last]
            is_cuttable = all(graph.can[first:last]) and any(each.communicates for each in body)
            tried = [(k, lag) for k in costs for lag in lags(k)] if is_cuttable else [(1, 1)]
            for k, lag in tried:
                if k > 1 and not all(each.name in costs[k].part for each in body):
                    continue
                seconds = best[i] + pipeline_seconds(body, k, lag, costs[k], users)
                if seconds < best[n] - 1e-9:
                    best[n], chosen[n] = seconds, (i, k, lag)
    found, n = [], len(ends) - 1
    while n:
        i, k, lag = chosen[n]
        if k > 1:
            found.append(Range(instructions[ends[i]].name, instructions[ends[n] - 1].name, k, lag))
        n = i
    return best[-1], found[::-1]


def _groups(graph: Cuttable, seconds: Mapping[str, float]) -> list[int]:
    """Where groups begin, and the end: some of the places that are allowed, groups of about equal time."""
    instructions = graph.instructions
    layers = max(sum(each.communicates for each in instructions) // 3, 1)  # counts, rows, rows
    alone = sum(each.seconds for each in instructions if not each.communicates)
    target, ends, now = alone / (layers * GROUPS_A_LAYER), [0], 0.0
    for at, each in enumerate(instructions):
        if at and graph.ends[at] and now >= target:
            ends.append(at)
            now = 0.0
        now += 0.0 if each.communicates else seconds.get(each.name, 0.0)
    return [*ends, len(instructions)]


def whole_ranges(graph: Cuttable, k: int) -> list[Range]:
    """Everything that can be cut, in k parts: what costs of parts are measured on."""
    instructions, found = graph.instructions, list[Range]()
    for can, stretch in itertools.groupby(range(len(instructions)), graph.can.__getitem__):
        inside = list(stretch)
        ends = [at for at in (*inside, inside[-1] + 1) if can and graph.ends[at]]
        if ends and any(each.communicates for each in instructions[ends[0] : ends[-1]]):
            found.append(Range(instructions[ends[0]].name, instructions[ends[-1] - 1].name, k, k))
    return found
