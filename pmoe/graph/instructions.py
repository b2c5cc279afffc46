"""A graph as the passes see it: a sequence of instructions on two lanes, without tensors.

An all-to-all is one instruction of the lane "communicate"; the compute lane goes on beside it, in the order
of the sequence, until an instruction needs its result (Lancet, section 5.3;
`pmoe.planner.simulator.simulate`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pmoe.planner.simulator import Simulated, simulate

COMPUTE, COMMUNICATE = "compute", "communicate"


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """waits: names of the instructions whose results it takes. holds: of whose memory it reads, views looked
    through, the graph's inputs among them. seconds: alone on its lane. num_bytes: of memory that it makes.
    is_counts: whether it exchanges row counts, without which the computation around it cannot go on."""

    name: str
    waits: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    seconds: float = 0.0
    lane: str = COMPUTE
    num_bytes: int = 0
    is_counts: bool = False

    @property
    def communicates(self) -> bool:
        return self.lane == COMMUNICATE

    @property
    def ends_stage(self) -> bool:
        return self.communicates and not self.is_counts


def timeline(instructions: Iterable[Instruction]) -> list[Simulated[Instruction]]:
    """Start and end of each, in seconds."""
    return simulate(instructions, lambda each: each.seconds)


def total_seconds(instructions: Iterable[Instruction]) -> float:
    return max((each.end for each in timeline(instructions)), default=0.0)


def exposed_seconds(instructions: Sequence[Instruction]) -> float:
    """How long the compute lane waits, the end of the last all-to-all among what it waits for."""
    busy = sum(each.seconds for each in instructions if not each.communicates)
    return total_seconds(instructions) - busy


def users_of(instructions: Iterable[Instruction]) -> dict[str, list[str]]:
    """By name, who waits for it."""
    users: dict[str, list[str]] = {}
    for each in instructions:
        users.setdefault(each.name, [])
        for name in each.waits:
            users[name].append(each.name)
    return users


def peak_bytes(instructions: Sequence[Instruction], kept: Iterable[str], given: Mapping[str, int]) -> int:
    """The most bytes at one time: a result lives to the end of the last instruction that holds it, those of
    ``kept`` to the end of all. given: bytes of the graph's inputs, by name."""
    last = {name: at for at, each in enumerate(instructions) for name in (each.name, *each.holds)}
    last.update(dict.fromkeys(kept, len(instructions)))
    held = dict(given)
    now = peak = sum(held.values())
    for at, each in enumerate(instructions):
        held[each.name] = each.num_bytes
        now += each.num_bytes
        peak = max(peak, now)
        now -= sum(held.pop(name, 0) for name in {each.name, *each.holds} if last[name] <= at)
    return peak
