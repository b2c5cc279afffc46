"""Moves weight gradients beside all-to-alls: Lancet's schedule pass (section 4), and a list schedule.

    as traced    compute      | dX2 | dW2 |            | dX1 | dW1 |
                 communicate              | all-to-all |
    moved        compute      | dX2 | dW2 |      | dX1 | dW1 |
                 communicate        | all-to-all |

In this file a weight gradient is every instruction that no all-to-all waits for. It may run at any time after
its inputs. Beside an all-to-all it costs no time, because the compute lane would wait there.

The list schedule (`listed`) beats Lancet's pass (`assign`, `placed`). `pmoe.graph.run` predicts both, and
takes the faster order that fits into memory.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from graphlib import TopologicalSorter

from pmoe.graph.instructions import Instruction

Listing = Sequence[Instruction]
"""The instructions of a pass, in order."""


def weight_gradients(instructions: Listing) -> set[str]:
    """Returns the names of the instructions from which no path leads to an all-to-all."""
    needed: set[str] = set()
    for each in reversed(instructions):
        if each.communicates or each.name in needed:
            needed.update(each.waits)
    return {each.name for each in instructions if each.name not in needed and not each.communicates}


def labels(instructions: Listing) -> dict[str, set[str]]:
    """Returns, for each all-to-all, the weight gradients that can run beside it (Lancet, section 4.1).

    They are independent of the all-to-all: no path leads from one to the other. All other instructions that
    they wait for stand before it.
    """
    free = weight_gradients(instructions)
    place_of = {each.name: at for at, each in enumerate(instructions)}
    # For each weight gradient, the place of the last instruction that it waits for, directly or through other
    # weight gradients, which can be moved with it.
    after: dict[str, int] = {}
    behind: dict[str, set[str]] = {}  # for each instruction, the all-to-alls from which a path leads to it
    for each in instructions:
        reached = set[str]().union(*(behind.get(name, ()) for name in each.waits))
        behind[each.name] = reached | {each.name} if each.communicates else reached
        if each.name in free:
            places = [after[name] if name in free else place_of[name] for name in each.waits]
            after[each.name] = max(places, default=-1)
    return {
        each.name: {
            name for name in free if each.name not in behind[name] and after[name] < place_of[each.name]
        }
        for each in instructions
        if each.communicates
    }


def assign(instructions: Listing) -> dict[str, str]:
    """Returns the all-to-all of each weight gradient that is moved (Lancet, Algorithm 1).

    All-to-alls choose in their order. Each takes the weight gradient whose seconds are closest to its own
    seconds that are not hidden yet, until it is hidden or none is left.
    """
    seconds = {each.name: each.seconds for each in instructions}
    assigned: dict[str, str] = {}
    for name, candidates in labels(instructions).items():
        seconds_left = seconds[name]
        pool = {each for each in candidates if seconds[each] > 0} - assigned.keys()
        while seconds_left > 0 and pool:
            best = min(sorted(pool), key=lambda each: abs(seconds_left - seconds[each]))
            seconds_left -= seconds[best]
            pool.discard(best)
            assigned[best] = name
    return assigned


def placed(instructions: Listing, assigned: Mapping[str, str]) -> list[Instruction]:
    """Returns the sequence with each assigned weight gradient right behind its all-to-all.

    assigned: as `assign` returns it.

    Weight gradients that it waits for move with it, in front of it. All others stay where they are, or follow
    the assigned one that they wait for.
    """
    by_name = {each.name: each for each in instructions}
    free = weight_gradients(instructions)
    behind: dict[str, list[str]] = {}
    for name, communication in assigned.items():
        behind.setdefault(communication, []).append(name)
    order: dict[str, Instruction] = {}

    def take(name: str) -> None:
        """Adds an instruction, after the weight gradients that it waits for."""
        if name in order:
            return
        for needed in by_name[name].waits:
            if needed in free:
                take(needed)
        order[name] = by_name[name]

    for each in instructions:
        if each.name in assigned:
            continue
        if each.name in free and any(name in assigned and name not in order for name in each.waits):
            continue  # it follows what it waits for
        take(each.name)
        for name in behind.get(each.name, ()):
            take(name)
    for each in instructions:
        take(each.name)
    return list(order.values())


# ---- a list schedule: runs whatever is ready, and weight gradients while nothing else is


def listed(
    instructions: Listing,
    *,
    limit: float = float("inf"),
    kept: Collection[str] = (),
    input_bytes: Mapping[str, int] | None = None,
) -> list[Instruction]:
    """Returns the instructions in an order that is found by simulating both lanes.

    limit: bytes. While more are held, weight gradients that free memory run first.
    kept, input_bytes: as in `peak_bytes`.

    All-to-alls keep their order, because it must be the same on every rank. The compute lane runs the first
    instruction of the sequence that is ready. If all of them wait for an all-to-all, it runs the weight
    gradient whose time fits the gap best.
    """
    return _List(instructions, limit, kept, input_bytes or {}).run()


class _List:
    """The state of the simulation behind `listed`.

        by_name      the instructions
        place        their places in the sequence
        free         names of the weight gradients
        sorter       counts what each instruction still waits for
        ready        names of instructions whose inputs have been scheduled
        uses         how many instructions still read each memory, the caller of the graph included
        num_bytes    bytes of each memory
        held         bytes that are held now
        messages     names of the all-to-alls that are left, the next one last
        now          time of the compute lane, in seconds
        link_free    when the communicate lane is free
        end          the end of each scheduled instruction

    Ready instructions that compute are in one of three places:

        chain   can begin
        later   wait for an all-to-all that runs
        pool    can begin, and are weight gradients
    """

    def __init__(
        self, instructions: Listing, limit: float, kept: Collection[str], input_bytes: Mapping[str, int]
    ) -> None:
        self.by_name = {instruction.name: instruction for instruction in instructions}
        assert len(self.by_name) == len(instructions), "names must be distinct"
        self.place = {instruction.name: at for at, instruction in enumerate(instructions)}
        self.free = weight_gradients(instructions)
        self.sorter = TopologicalSorter({instruction.name: instruction.waits for instruction in instructions})
        self.ready = set[str]()
        self.uses = Counter(name for instruction in instructions for name in set(instruction.holds))
        self.uses.update(kept)
        self.num_bytes = {
            **input_bytes,
            **{instruction.name: instruction.num_bytes for instruction in instructions},
        }
        self.limit = limit
        self.held = sum(input_bytes.values())
        self.messages = [
            instruction.name for instruction in reversed(instructions) if instruction.communicates
        ]
        self.now = 0.0
        self.link_free = 0.0
        self.end: dict[str, float] = {}
        self.chain: list[tuple[int, str]] = []  # a heap by place
        self.later: list[tuple[float, int, str]] = []  # a heap by the time at which they can begin
        self.pool: set[str] = set()
        self.order: list[Instruction] = []  # the result

    def run(self) -> list[Instruction]:
        """Schedules one instruction at a time, and returns all of them in that order."""
        self.sorter.prepare()
        self._release()
        while len(self.order) < len(self.by_name):
            while self.later and self.later[0][0] <= self.now:
                self._offer(*heapq.heappop(self.later)[1:])
            if self._message_begins() <= self.now:
                self._take(self.messages.pop())
            elif self.held > self.limit and self._freeing():
                self._take(max(sorted(self.pool), key=self._freed))
            elif self.chain:
                self._take(heapq.heappop(self.chain)[1])
            else:
                self._fill()
        return self.order

    def _fill(self) -> None:
        """Fills a gap, in which everything else waits for an all-to-all.

        Takes the weight gradient whose time is closest to the gap. One longer than twice the gap is not
        taken: it would delay the others by more than the gap. If none is left, time passes.
        """
        until = min(self.later[0][0] if self.later else float("inf"), self._message_begins())
        gap = until - self.now
        fitting = [name for name in self.pool if self.by_name[name].seconds <= 2 * gap]
        if fitting:
            self._take(
                min(fitting, key=lambda name: (abs(gap - self.by_name[name].seconds), self.place[name]))
            )
        else:
            self.now = until

    def _begin(self, name: str) -> float:
        """Returns when an instruction's inputs are complete."""
        return max((self.end[each] for each in self.by_name[name].waits), default=0.0)

    def _message_begins(self) -> float:
        """Returns when the next all-to-all has all rows that it sends; infinity while that is not known."""
        if not self.messages or self.messages[-1] not in self.ready:
            return float("inf")
        return self._begin(self.messages[-1])

    def _offer(self, place: int, name: str) -> None:
        """Puts an instruction that can begin now where `run` finds it."""
        if name in self.free:
            self.pool.add(name)
        else:
            heapq.heappush(self.chain, (place, name))

    def _release(self) -> None:
        """Puts instructions whose inputs have all been scheduled into ``chain``, ``later`` or ``pool``."""
        for name in self.sorter.get_ready():
            self.ready.add(name)
            begin = self._begin(name)
            place = self.place[name]
            if self.by_name[name].communicates:
                continue  # `run` takes them in the order of ``messages``
            if begin <= self.now:
                self._offer(place, name)
            else:
                heapq.heappush(self.later, (begin, place, name))

    def _take(self, name: str) -> None:
        """Schedules an instruction: moves the time of its lane, and frees memory that nobody reads again."""
        instruction = self.by_name[name]
        self.order.append(instruction)
        self.pool.discard(name)
        if instruction.communicates:
            self.link_free = self.end[name] = max(self.now, self.link_free) + instruction.seconds
        else:
            self.now += instruction.seconds
            self.end[name] = self.now
        self.held += instruction.num_bytes - self._freed(name)
        self.uses.subtract(set(instruction.holds))
        self.sorter.done(name)
        self._release()

    def _freed(self, name: str) -> int:
        """Returns the bytes of memory of which an instruction is the last reader."""
        holds = set(self.by_name[name].holds)
        return sum(self.num_bytes.get(each, 0) for each in holds if self.uses[each] == 1)

    def _freeing(self) -> bool:
        """Returns whether a weight gradient that can begin frees more bytes than it allocates."""
        return any(self._freed(name) > self.by_name[name].num_bytes for name in self.pool)
