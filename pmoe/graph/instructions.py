"""A graph as the passes see it: a sequence of instructions on two lanes, without tensors.

    compute      | attention, gate |        other work        | needs the rows |
    communicate                    | all-to-all of rows       |

An all-to-all is one instruction of the lane "communicate". The lane "compute" goes on beside it, in the order
of the sequence, until an instruction needs the result of the all-to-all (Lancet, section 5.3). Times are
predicted by `pmoe.planner.simulator.simulate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pmoe.planner.simulator import Simulated, simulate

COMPUTE, COMMUNICATE = "compute", "communicate"


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One operator call of a graph.

    name: its `label`.
    waits: names of the instructions whose results it takes.
    holds: names of the instructions and inputs of the graph whose memory it reads; instead of a view, the
        owner of the view's memory.
    seconds: its time, alone on its lane.
    lane: `COMPUTE` or `COMMUNICATE`.
    num_bytes: memory that it allocates for its result.
    is_counts: whether it is an exchange of row counts.
    """

    name: str
    waits: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    seconds: float = 0.0
    lane: str = COMPUTE
    num_bytes: int = 0
    is_counts: bool = False

    @property
    def communicates(self) -> bool:
        """Whether it is an all-to-all."""
        return self.lane == COMMUNICATE

    @property
    def ends_stage(self) -> bool:
        """Whether it ends a stage of a pipeline (`pmoe.graph.ranges.stages`): an all-to-all of rows does."""
        return self.communicates and not self.is_counts


def timeline(instructions: Iterable[Instruction]) -> list[Simulated[Instruction]]:
    """Returns each instruction with its predicted start and end, in seconds."""
    return simulate(instructions, lambda each: each.seconds)


def total_seconds(instructions: Iterable[Instruction]) -> float:
    """Returns the predicted end of the last instruction; 0 for none."""
    return max((each.end for each in timeline(instructions)), default=0.0)


def exposed_seconds(instructions: Sequence[Instruction]) -> float:
    """Returns the seconds in which nothing is computed, until the last instruction of either lane ends."""
    busy = sum(each.seconds for each in instructions if not each.communicates)
    return total_seconds(instructions) - busy


def users_of(instructions: Iterable[Instruction]) -> dict[str, list[str]]:
    """Returns, for each instruction, the names of those that wait for it."""
    users: dict[str, list[str]] = {}
    for instruction in instructions:
        users.setdefault(instruction.name, [])
        for name in instruction.waits:
            users[name].append(instruction.name)
    return users


def peak_bytes(
    instructions: Sequence[Instruction], kept: Iterable[str], input_bytes: Mapping[str, int]
) -> int:
    """Returns the largest number of bytes that live at one time, if instructions run in this order.

    A result lives until the last instruction that holds it has ended.

    kept: names of results and inputs that live to the end, because the graph returns them.
    input_bytes: bytes of the graph's inputs, by name.
    """
    last_use = {
        name: index
        for index, instruction in enumerate(instructions)
        for name in (instruction.name, *instruction.holds)
    }
    last_use.update(dict.fromkeys(kept, len(instructions)))
    live_bytes = dict(input_bytes)
    num_bytes = peak = sum(live_bytes.values())
    for index, instruction in enumerate(instructions):
        live_bytes[instruction.name] = instruction.num_bytes
        num_bytes += instruction.num_bytes
        peak = max(peak, num_bytes)
        num_bytes -= sum(
            live_bytes.pop(name, 0)
            for name in {instruction.name, *instruction.holds}
            if last_use[name] <= index
        )
    return peak
