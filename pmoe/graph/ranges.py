"""Chooses which instructions are cut into parts of the batch: Lancet's dynamic programme (section 5.1).

A range is a run of consecutive instructions (operator calls) that is cut into k parts of the batch and runs
as a pipeline. Instructions are first joined to groups of about equal time. The best ranges follow from

    T(n) = min over i < n and k of T(i) + P(i + 1, n, k)

T(n) is the predicted time of the first n groups, T(0) = 0. P(i + 1, n, k) is the predicted time of the groups
i + 1 to n, if they are a range that runs in k parts. The range runs as a pipeline of its stages (section
5.3). With k = 1 it is not cut.
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
"""Number of groups into which the instructions are joined, for each MoELayer (Lancet, section 7)."""
LONGEST = 2 * GROUPS_A_LAYER
"""Largest number of groups of instructions in a range, the part of a graph that is cut."""


@dataclass(frozen=True)
class Range:
    """A run of consecutive instructions that is cut into k parts of the batch.

    first, last: names of the range's first and last instruction.
    k: number of parts.
    lag: the number of parts by which the second stage of a MoELayer (experts, combine) is behind its first
        stage (gate, dispatch). The second stage of part p runs after the first stage of part p + lag.
    """

    first: str
    last: str
    k: int
    lag: int


@dataclass(frozen=True)
class PartCosts:
    """Costs of the instructions of a graph if they are cut into k parts of the batch, for one k.

    The keys are the names of the instructions.

    part: seconds of the instruction for one part, on average over the parts.
    join: seconds for joining the parts of the instruction's result to one tensor. This is done if an
        instruction outside the range reads the result.
    """

    part: Mapping[str, float]
    join: Mapping[str, float]


@dataclass(frozen=True)
class Cuttable:
    """The instructions of a graph, and which of them can be computed part by part of the batch.

    A range is a run of consecutive instructions that are computed part by part.

    instructions: the instructions, in order.
    ends: for each instruction, whether a range may end directly before it. One more entry at the end is for
        the end of the graph.
    can: for each instruction, whether it can be computed part by part.
    """

    instructions: Sequence[Instruction]
    ends: Sequence[bool]
    can: Sequence[bool]


def stages(body: Iterable[T], ends_stage: Callable[[T], bool]) -> list[list[T]]:
    """Splits instructions into the stages of a pipeline. Each stage ends with its all-to-alls of rows.

    A stage is some computation followed by one or more all-to-alls. The last stage may have none.

    body: consecutive instructions that are cut into parts of the batch.
    ends_stage: function that returns True for an all-to-all of rows, and False for all other instructions. It
        returns False for an exchange of row counts: if this ended a stage too, the gates of all parts would
        run before the rows of the first part are sent.

    Returns the instructions of each stage.
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
    """Returns the order in which a pipeline runs the stages of each part of the batch: pairs (stage, part).

    A MoELayer has two stages: the first ends with its dispatch, the second with its combine. The two stages
    of a layer take turns: after the first stage of one part comes the second stage of an earlier part. All
    parts of a layer run before the next layer begins. On some ranks the graph can only be cut layer by layer.
    Those ranks get this order too, so all ranks send their messages in the same order.

    num_stages: number of stages of the pipeline, two for each layer.
    k: number of parts.
    lag: the second stage of part p of a layer runs after the first stage of part p + lag, or of the last part
        if there is no part p + lag. With lag = k all first stages run before the second stages, which is the
        paper's order.

    Example: (2, 3, 1) -> (0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2).
    """
    every = itertools.product(range(num_stages), range(k))
    return sorted(every, key=lambda turn: (turn[0] // 2, turn[0] % 2 * lag + turn[1], turn[0]))


def lags(k: int) -> list[int]:
    """Returns the values of ``lag`` that are tried for a pipeline over k parts of the batch.

    A MoELayer has two stages: gate and dispatch, then experts and combine. ``lag`` is the number of parts by
    which the second stage is behind the first (`turns`). Two values are tried:

        1   the second stage of part p follows the first stage of part p + 1, so combines start early
        k   all first stages run before any second stage, so no dispatch waits for a combine

    Which of them is faster depends on the costs.
    """
    return sorted({1, k})


def pipelined(body: Sequence[Instruction], k: int, lag: int, costs: PartCosts) -> list[Instruction]:
    """Returns the tasks of a range that runs as a pipeline over k parts of the batch, in their order.

    A range is a run of consecutive instructions. A task runs some of these instructions on one part of the
    batch. They follow each other, belong to one stage, and use one lane (computation or communication).
    Stages and parts run in the order of `turns`. A task waits only for tasks of its own part.

    body: the instructions of the range.
    k: number of parts.
    lag: in each MoELayer, the second stage (experts, combine) of part p runs after the first stage (gate,
        dispatch) of part p + lag (`turns`).
    costs: costs of the instructions in k parts.
    """
    tasks = list[Instruction]()
    by_stage = list[list[Any]]()
    run_of = dict[str, str]()
    for stage in stages(body, lambda instruction: instruction.ends_stage):
        runs = []
        for ends, group in itertools.groupby(stage, key=lambda instruction: instruction.ends_stage):
            run = list(group)
            waits = sorted(
                {run_of[name] for instruction in run for name in instruction.waits if name in run_of}
            )
            name = f"{run[0].name} to {run[-1].name}"
            lane = COMMUNICATE if ends else COMPUTE
            run_of.update(dict.fromkeys((instruction.name for instruction in run), name))
            runs.append(
                (name, waits, sum(costs.part.get(instruction.name, 0.0) for instruction in run), lane)
            )
        by_stage.append(runs)
    for at, part in turns(len(by_stage), k, lag):
        for name, waits, seconds, lane in by_stage[at]:
            ready = tuple(f"{needed}, part {part}" for needed in waits)
            tasks.append(Instruction(name=f"{name}, part {part}", waits=ready, seconds=seconds, lane=lane))
    return tasks


def pipeline_seconds(
    body: Sequence[Instruction], k: int, lag: int, costs: PartCosts, users: Mapping[str, Sequence[str]]
) -> float:
    """Returns the predicted seconds of a range in k parts (P of Lancet's dynamic programme).

    A range is a run of consecutive instructions. Its seconds are the time of a pipeline over the parts, plus
    the time for joining the parts of results that are read outside the range.

    body: the instructions of the range.
    k: number of parts; 1 leaves the range uncut.
    lag: in each MoELayer, the second stage (experts, combine) of part p runs after the first stage (gate,
        dispatch) of part p + lag (`turns`).
    costs: costs of the instructions in k parts.
    users: for each instruction of the graph, the names of the instructions that wait for it.
    """
    if k == 1:
        return total_seconds(alone(body, costs))
    inside = {instruction.name for instruction in body}
    joined = (name for name in inside if not inside.issuperset(users[name]))
    return total_seconds(pipelined(body, k, lag, costs)) + sum(costs.join.get(name, 0.0) for name in joined)


def alone(body: Sequence[Instruction], costs: PartCosts) -> list[Instruction]:
    """Returns the instructions of an uncut range, changed so that the time of the range can be predicted.

    A range is a run of consecutive instructions. In the result no instruction waits for an instruction
    outside the range, and each has the seconds from ``costs``.

    body: the instructions of the range.
    costs: the costs of the instructions in one part.
    """
    inside = {instruction.name for instruction in body}
    return [
        replace(
            instruction,
            seconds=costs.part.get(instruction.name, 0.0),
            waits=tuple(name for name in instruction.waits if name in inside),
        )
        for instruction in body
    ]


def solve(graph: Cuttable, costs: Mapping[int, PartCosts]) -> tuple[float, list[Range]]:
    """Returns the predicted seconds of the fastest cut of a graph, and its ranges in order.

    A range is a run of consecutive instructions that is cut into parts of the batch.

    graph: the instructions, and which of them may be computed part by part.
    costs: costs of the instructions, by number of parts. 1 part (uncut) must be among them.
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
            is_cuttable = all(graph.can[first:last]) and any(instruction.communicates for instruction in body)
            tried = [(k, lag) for k in costs for lag in lags(k)] if is_cuttable else [(1, 1)]
            for k, lag in tried:
                if k > 1 and not all(instruction.name in costs[k].part for instruction in body):
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
    """Joins consecutive instructions to groups of about equal time, so that fewer ranges must be compared.

    Returns the index at which each group begins, and the number of instructions as the last element. There
    should be G groups: `GROUPS_A_LAYER` times the number of MoELayers. So a group ends at the first allowed
    position at which it takes at least 1 / G of the seconds of all computation.

    graph: the instructions, and where a group may end.
    seconds: {name of an instruction: its seconds}.
    """
    instructions = graph.instructions
    # A layer has three all-to-alls: row counts, dispatch and combine.
    layers = max(sum(instruction.communicates for instruction in instructions) // 3, 1)
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
    """Returns the longest runs of instructions (ranges) that can be cut, each with k parts of the batch.

    The costs of parts are measured on these ranges. Each range holds at least one all-to-all.

    graph: the instructions, and which of them may be computed part by part.
    k: number of parts.
    """
    instructions = graph.instructions
    ranges = list[Range]()
    for is_cuttable, stretch in itertools.groupby(range(len(instructions)), graph.can.__getitem__):
        places = list(stretch)
        ends = [place for place in (*places, places[-1] + 1) if is_cuttable and graph.ends[place]]
        if ends and any(instruction.communicates for instruction in instructions[ends[0] : ends[-1]]):
            ranges.append(Range(instructions[ends[0]].name, instructions[ends[-1] - 1].name, k, k))
    return ranges
