"""Choice of the ranges that are cut, and of their parts: Lancet's dynamic programme (section 5.1).

    T(n) = min over i < n and k of T(i) + P(i + 1, n, k)

T(n) is the predicted end of the first n groups of instructions, whose last range begins behind group i.
P is the time of that range in k parts, as a pipeline of its stages (section 5.3); k = 1 is not cut.
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
"""Number of groups of instructions for each layer (the paper's, section 7)."""
LONGEST = 2 * GROUPS_A_LAYER
"""Largest number of groups in a range."""


@dataclass(frozen=True)
class Range:
    """A range: the instructions from ``first`` to ``last``, by name, in k parts. lag: as in `turns`."""

    first: str
    last: str
    k: int
    lag: int


@dataclass(frozen=True)
class PartCosts:
    """Costs of instructions in k parts, for one k, by the instruction's name.

    part: seconds of one part, on average.
    join: seconds of joining the parts, which a result that is needed outside the range costs.
    """

    part: Mapping[str, float]
    join: Mapping[str, float]


@dataclass(frozen=True)
class Cuttable:
    """A graph's instructions, with where they may be cut.

    ends: for each place before an instruction, and for the end of the graph, whether a range may end there.
    can: for each instruction, whether it can be cut into parts.
    """

    instructions: Sequence[Instruction]
    ends: Sequence[bool]
    can: Sequence[bool]


def stages(body: Iterable[T], ends_stage: Callable[[T], bool]) -> list[list[T]]:
    """Splits a range into stages: instructions that compute, and the all-to-alls of rows behind them.

    ends_stage: whether an instruction is an all-to-all of rows. An exchange of counts ends no stage: the
        first part's rows would wait until the gates of all parts are computed.
    """
    result = list[list[T]]()
    ended = True
    for instruction in body:
        ends = ends_stage(instruction)
        if not result or (ended and not ends):
            result.append([])
        result[-1].append(instruction)
        ended = ends
    return result


def turns(num_stages: int, k: int, lag: int) -> list[tuple[int, int]]:
    """Returns (stage, part) in the order in which they run.

    lag: by how many parts the second stage of a layer is behind the first. With k it is behind all parts of
        the first, which is the paper's order.

    A layer has two stages, up to its dispatch and up to its combine. They take turns; layers do not, so that
    a rank that can only cut single layers sends the same messages in the same order.
    Example: (2, 3, 1) -> (0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2).
    """
    every = itertools.product(range(num_stages), range(k))
    return sorted(every, key=lambda each: (each[0] // 2, each[0] % 2 * lag + each[1], each[0]))


def lags(k: int) -> list[int]:
    """Returns the lags that are tried, of which either may be faster.

    1: combines leave as early as they can. k: no dispatch waits for a combine.
    """
    return sorted({1, k})


def pipelined(body: Sequence[Instruction], k: int, lag: int, costs: PartCosts) -> list[Instruction]:
    """Returns a range as a pipeline: one task for each run of instructions on one lane, of each part.

    body: the range's instructions. lag: as in `turns`. costs: for this k.

    Stages and parts are in the order of `turns`. A part's all-to-all waits only for the rows that it sends.
    """
    tasks = list[Instruction]()
    by_stage = list[list[Any]]()
    run_of = dict[str, str]()
    for stage in stages(body, lambda each: each.ends_stage):
        runs = []
        for ends, group in itertools.groupby(stage, key=lambda each: each.ends_stage):
            run = list(group)
            waits = sorted({run_of[name] for each in run for name in each.waits if name in run_of})
            name = f"{run[0].name} to {run[-1].name}"
            lane = COMMUNICATE if ends else COMPUTE
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
    """Returns P, in seconds: the end of the pipeline, plus the joining of results that others need.

    users: for each instruction of the graph, the names of those that wait for it.
    """
    if k == 1:
        return total_seconds(alone(body, costs))
    inside = {each.name for each in body}
    joined = (name for name in inside if not inside.issuperset(users[name]))
    return total_seconds(pipelined(body, k, lag, costs)) + sum(costs.join.get(name, 0.0) for name in joined)


def alone(body: Sequence[Instruction], costs: PartCosts) -> list[Instruction]:
    """Returns the instructions without the waits for others before them, with the seconds of one part."""
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
    """Returns the predicted seconds of the graph, and the ranges that are cut, in order.

    costs: by k. k = 1 must be among them.
    """
    instructions = graph.instructions
    users = users_of(instructions)
    ends = _groups(graph, costs[1].part)
    best = [0.0] + [math.inf] * (len(ends) - 1)  # T(n)
    chosen = [(0, 1, 1)] * len(ends)  # the (i, k, lag) of T(n)
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
                if seconds < best[n] - 1e-9:  # differences by rounding do not count
                    best[n] = seconds
                    chosen[n] = (i, k, lag)
    ranges = []
    n = len(ends) - 1
    while n:
        i, k, lag = chosen[n]
        if k > 1:
            ranges.append(Range(instructions[ends[i]].name, instructions[ends[n] - 1].name, k, lag))
        n = i
    return best[-1], ranges[::-1]


def _groups(graph: Cuttable, seconds: Mapping[str, float]) -> list[int]:
    """Returns where groups begin, and the end of the graph. Groups take about equal times.

    seconds: of each instruction, by name. A group ends at the first allowed place at which it is as long as
        the whole computation over the number of groups, `GROUPS_A_LAYER` for each layer.
    """
    instructions = graph.instructions
    layers = max(sum(instruction.communicates for instruction in instructions) // 3, 1)  # counts, rows, rows
    compute_seconds = sum(instruction.seconds for instruction in instructions if not instruction.communicates)
    group_seconds = compute_seconds / (layers * GROUPS_A_LAYER)
    ends = [0]
    seconds_of_group = 0.0
    for index, instruction in enumerate(instructions):
        if index and graph.ends[index] and seconds_of_group >= group_seconds:
            ends.append(index)
            seconds_of_group = 0.0
        seconds_of_group += 0.0 if instruction.communicates else seconds.get(instruction.name, 0.0)
    return [*ends, len(instructions)]


def whole_ranges(graph: Cuttable, k: int) -> list[Range]:
    """Returns the longest ranges that can be cut, in k parts. The costs of parts are measured on them."""
    instructions = graph.instructions
    ranges = list[Range]()
    for is_cuttable, stretch in itertools.groupby(range(len(instructions)), graph.can.__getitem__):
        places = list(stretch)
        ends = [place for place in (*places, places[-1] + 1) if is_cuttable and graph.ends[place]]
        if ends and any(each.communicates for each in instructions[ends[0] : ends[-1]]):
            ranges.append(Range(instructions[ends[0]].name, instructions[ends[-1] - 1].name, k, k))
    return ranges
