"""Weight gradients beside all-to-alls: Lancet's schedule pass (section 4), and a list schedule that beats it.

A weight gradient here is every instruction that no all-to-all waits for. Where it stands is free; where it
stands beside an all-to-all, the compute lane need not wait.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from graphlib import TopologicalSorter

from pmoe.graph.instructions import Instruction

Listing = Sequence[Instruction]


def weight_gradients(instructions: Listing) -> set[str]:
    """The names of those that reach no all-to-all."""
    needed: set[str] = set()
    for each in reversed(instructions):
        if each.communicates or each.name in needed:
            needed.update(each.waits)
    return {each.name for each in instructions if each.name not in needed and not each.communicates}


def labels(instructions: Listing) -> dict[str, set[str]]:
    """Section 4.1: for each all-to-all the weight gradients that it can hide behind. No directed path leads
    from one to the other, and what they wait for, but for weight gradients, stands before the all-to-all."""
    free = weight_gradients(instructions)
    place = {each.name: at for at, each in enumerate(instructions)}
    # Of each weight gradient the last instruction that must have been, itself and others of its kind aside.
    after: dict[str, int] = {}
    behind: dict[str, set[str]] = {}  # the all-to-alls from which a path leads to it
    for each in instructions:
        found = set[str]().union(*(behind.get(name, ()) for name in each.waits))
        behind[each.name] = found | {each.name} if each.communicates else found
        if each.name in free:
            known = [after[name] if name in free else place[name] for name in each.waits]
            after[each.name] = max(known, default=-1)
    return {
        each.name: {name for name in free if each.name not in behind[name] and after[name] < place[each.name]}
        for each in instructions
        if each.communicates
    }


def assign(instructions: Listing) -> dict[str, str]:
    """Algorithm 1: by weight gradient its all-to-all. Greedily the one whose seconds fit best, until the
    all-to-all is hidden."""
    seconds = {each.name: each.seconds for each in instructions}
    assigned: dict[str, str] = {}
    for name, candidates in labels(instructions).items():
        left = seconds[name]
        pool = {each for each in candidates if seconds[each] > 0} - assigned.keys()
        while left > 0 and pool:
            best = min(sorted(pool), key=lambda each: abs(left - seconds[each]))
            left -= seconds[best]
            pool.discard(best)
            assigned[best] = name
    return assigned


def placed(instructions: Listing, assigned: Mapping[str, str]) -> list[Instruction]:
    """The sequence with each weight gradient right behind its all-to-all, and before it those of its kind
    that it waits for; others stay behind what they stood behind."""
    by_name = {each.name: each for each in instructions}
    free = weight_gradients(instructions)
    behind: dict[str, list[str]] = {}
    for name, communication in assigned.items():
        behind.setdefault(communication, []).append(name)
    done: dict[str, Instruction] = {}

    def take(name: str) -> None:
        if name in done:
            return
        for needed in by_name[name].waits:
            if needed in free:
                take(needed)
        done[name] = by_name[name]

    for each in instructions:
        if each.name in assigned:
            continue
        if each.name in free and any(name in assigned and name not in done for name in each.waits):
            continue  # it follows what it waits for
        take(each.name)
        for name in behind.get(each.name, ()):
            take(name)
    for each in instructions:
        take(each.name)
    return list(done.values())


# ---- a list schedule: always what can run now, weight gradients where nothing else can


def listed(
    instructions: Listing,
    *,
    limit: float = float("inf"),
    kept: Collection[str] = (),
    given: Mapping[str, int] | None = None,
) -> list[Instruction]:
    """A sequence for two lanes. All-to-alls keep their order, the same on every rank; the compute lane takes
    the first instruction that can run, in the order of the sequence, and, where all wait for an all-to-all,
    the weight gradient that fits the time best. Where results fill ``limit`` bytes, weight gradients that
    free memory come first. kept, given: as in `peak_bytes`."""
    return _List(instructions, limit, kept, given or {}).run()


class _List:
    def __init__(
        self, instructions: Listing, limit: float, kept: Collection[str], given: Mapping[str, int]
    ) -> None:
        self.by_name = {each.name: each for each in instructions}
        assert len(self.by_name) == len(instructions), "names must be distinct"
        self.place = {each.name: at for at, each in enumerate(instructions)}
        self.free = weight_gradients(instructions)
        self.sorter = TopologicalSorter({each.name: each.waits for each in instructions})
        self.ready = set[str]()
        self.uses = Counter(name for each in instructions for name in set(each.holds))
        self.uses.update(kept)
        self.num_bytes = {**given, **{each.name: each.num_bytes for each in instructions}}
        self.limit, self.held = limit, sum(given.values())
        self.messages = [each.name for each in reversed(instructions) if each.communicates]
        self.now = self.link_free = 0.0
        self.end: dict[str, float] = {}
        self.chain: list[tuple[int, str]] = []  # ready, by place
        self.later: list[tuple[float, int, str]] = []  # waiting for an all-to-all, by its end
        self.pool: set[str] = set()  # weight gradients that can run
        self.order: list[Instruction] = []

    def run(self) -> list[Instruction]:
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
        """Everything else waits: a weight gradient that fits, or time passes."""
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
        return max((self.end[each] for each in self.by_name[name].waits), default=0.0)

    def _message_begins(self) -> float:
        """When the next all-to-all has what it sends; infinity while that is not known."""
        if not self.messages or self.messages[-1] not in self.ready:
            return float("inf")
        return self._begin(self.messages[-1])

    def _offer(self, place: int, name: str) -> None:
        if name in self.free:
            self.pool.add(name)
        else:
            heapq.heappush(self.chain, (place, name))

    def _release(self) -> None:
        """Offers what waits for nothing more."""
        for name in self.sorter.get_ready():
            self.ready.add(name)
            begin, place = self._begin(name), self.place[name]
            if self.by_name[name].communicates:
                continue  # in their order, see `run`
            if begin <= self.now:
                self._offer(place, name)
            else:
                heapq.heappush(self.later, (begin, place, name))

    def _take(self, name: str) -> None:
        each = self.by_name[name]
        self.order.append(each)
        self.pool.discard(name)
        if each.communicates:
            self.link_free = self.end[name] = max(self.now, self.link_free) + each.seconds
        else:
            self.now += each.seconds
            self.end[name] = self.now
        self.held += each.num_bytes - self._freed(name)
        self.uses.subtract(set(each.holds))
        self.sorter.done(name)
        self._release()

    def _freed(self, name: str) -> int:
        """Bytes that nobody needs once this has run."""
        holds = set(self.by_name[name].holds)
        return sum(self.num_bytes.get(each, 0) for each in holds if self.uses[each] == 1)

    def _freeing(self) -> bool:
        return any(self._freed(name) > self.by_name[name].num_bytes for name in self.pool)
