"""The axioms of the PTX memory model, and every execution of a small program under them.

PTX ISA, "Memory Consistency Model": scopes, morally strong operations, release and acquire patterns,
causality order, proxies. A program is a list of events; each read may observe any write of its place, and
writes of a place may come in any order. The executions that no axiom forbids are what hardware may do.

    flag, data = write("flag", thread=0, sem="release"), read("data", thread=1)

Letters: R read, W write, F fence of a proxy, B barrier.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Sem = Literal["weak", "relaxed", "acquire", "release"]
Scope = Literal["cta", "gpu", "sys"]


@dataclass(frozen=True, kw_only=True)
class Thread:
    """Blocks are numbered over all devices."""

    name: str
    block: int
    gpu: int


@dataclass(frozen=True, kw_only=True)
class Event:
    """kind: see above. place: of memory; of a barrier its name: all events of the name meet. by: the part of
    the program that the event belongs to, as a read and a write of one atomic addition do."""

    kind: Literal["R", "W", "F", "B"]
    thread: Thread
    place: str = ""
    sem: Sem = "weak"
    scope: Scope = "cta"
    proxy: Literal["generic", "async"] = "generic"
    by: str = ""

    @property
    def is_strong(self) -> bool:
        return self.kind in "RW" and self.sem != "weak"

    def includes(self, other: Event) -> bool:
        """Whether the other's thread is in the scope."""
        mine, its = self.thread, other.thread
        return {"cta": mine.block == its.block, "gpu": mine.gpu == its.gpu, "sys": True}[self.scope]


Pairs = frozenset[tuple[int, int]]


def then(*relations: Pairs) -> Pairs:
    """One behind the other."""
    found = relations[0]
    for relation in relations[1:]:
        by_first: dict[int, list[int]] = {}
        for a, b in relation:
            by_first.setdefault(a, []).append(b)
        found = frozenset((a, c) for a, b in found for c in by_first.get(b, ()))
    return found


def closure(relation: Pairs) -> Pairs:
    """One or more times."""
    found = relation
    while True:
        more = found | then(found, relation)
        if more == found:
            return found
        found = more


class Program:
    """Threads' events in their order; of one thread they stand in program order."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = tuple(events)
        self.numbers = range(len(self.events))
        self.identity: Pairs = frozenset((i, i) for i in self.numbers)

    def pairs(self, holds: object) -> Pairs:
        test = holds
        assert callable(test)
        return frozenset(
            (i, j)
            for i, a in enumerate(self.events)
            for j, b in enumerate(self.events)
            if i != j and test(a, b)
        )

    def of(self, kind: str, place: str | None = None) -> list[int]:
        return [
            i for i, e in enumerate(self.events) if e.kind == kind and (place is None or e.place == place)
        ]

    @cached_property
    def po(self) -> Pairs:
        return frozenset(
            (i, j) for i, j in itertools.combinations(self.numbers, 2)
            if self.events[i].thread == self.events[j].thread
        )  # fmt: skip

    @cached_property
    def same_place(self) -> Pairs:
        return self.pairs(lambda a, b: a.kind in "RW" and b.kind in "RW" and a.place == b.place)

    @cached_property
    def rmw(self) -> Pairs:
        return frozenset(
            (i, j) for i, j in self.po
            if self.events[i].by and self.events[i].by == self.events[j].by
            and (self.events[i].kind, self.events[j].kind) == ("R", "W")
        )  # fmt: skip

    @cached_property
    def morally_strong(self) -> Pairs:
        def holds(a: Event, b: Event) -> bool:
            ordered = a.thread == b.thread or (
                a.is_strong and b.is_strong and a.includes(b) and b.includes(a)
            )
            return ordered and a.proxy == b.proxy and a.place == b.place

        return self.pairs(holds)

    @cached_property
    def barriers(self) -> Pairs:
        return self.pairs(lambda a, b: a.kind == b.kind == "B" and a.place == b.place)

    @cached_property
    def releases(self) -> Pairs:
        """A release, and itself or a later strong write of the thread to the same place."""
        first = [i for i in self.of("W") if self.events[i].sem == "release"]
        later = then(frozenset((i, i) for i in first), self.po & self.same_place)
        return frozenset((i, i) for i in first) | frozenset(
            (i, j) for i, j in later if self.events[j].kind == "W" and self.events[j].is_strong
        )

    @cached_property
    def acquires(self) -> Pairs:
        """A strong read, and itself or a later acquire of the thread of the same place."""
        last = [i for i in self.of("R") if self.events[i].sem == "acquire"]
        earlier = then(self.po & self.same_place, frozenset((i, i) for i in last))
        return frozenset((i, i) for i in last) | frozenset(
            (i, j) for i, j in earlier if self.events[i].kind == "R" and self.events[i].is_strong
        )

    def executions(self) -> Iterator[Execution]:
        """All that the axioms allow. A read that observes None has seen what was there before."""
        places = sorted({e.place for e in self.events if e.kind in "RW"})
        orders = [list(itertools.permutations(self.of("W", place))) for place in places]
        reads = self.of("R")
        sources = [[None, *self.of("W", self.events[i].place)] for i in reads]
        for order in itertools.product(*orders):
            co = frozenset(pair for each in order for pair in itertools.combinations(each, 2))
            for chosen in itertools.product(*sources):
                found = Execution(self, dict(zip(reads, chosen, strict=True)), co)
                if found.is_allowed:
                    yield found


class Execution:
    """observed: by read, the write or None. co: which write of a place is overwritten by which."""

    def __init__(self, program: Program, observed: dict[int, int | None], co: Pairs) -> None:
        self.program, self.observed, self.co = program, observed, co
        self.rf: Pairs = frozenset((w, r) for r, w in observed.items() if w is not None)
        later = then(frozenset((r, w) for w, r in self.rf), co)
        of_first = frozenset(
            (r, w) for r, seen in observed.items() if seen is None
            for w in program.of("W", program.events[r].place)
        )  # fmt: skip
        self.fr = frozenset((r, w) for r, w in later | of_first if r != w)

    @cached_property
    def is_allowed(self) -> bool:
        p = self.program
        writes = frozenset((i, j) for i in p.of("W") for j in p.of("W"))
        wrong_order = (self.cause & writes & p.same_place) - self.co
        strong_writes = p.morally_strong & writes & p.same_place
        torn = then(p.morally_strong & self.fr, p.morally_strong & self.co) & p.rmw
        against = then(self.rf | self.fr, self.cause) & p.identity
        assert strong_writes <= self.co | frozenset((j, i) for i, j in self.co)
        return not (wrong_order or torn or against)

    @cached_property
    def observation(self) -> Pairs:
        return (self.program.morally_strong & self.rf) | self.program.rmw

    @cached_property
    def base(self) -> Pairs:
        """Base causality order."""
        p = self.program
        pattern = then(p.releases, closure(self.observation), p.acquires)
        meets = (p.morally_strong & pattern) | p.barriers
        own = p.po | p.identity
        return closure(then(own, meets, own)) | p.po

    @cached_property
    def cause(self) -> Pairs:
        """Causality order: of accesses by different proxies, with a fence of the asynchronous one between
        them, in the block of the asynchronous access."""
        p = self.program
        plain = frozenset(i for i in p.numbers if p.events[i].proxy == "generic")
        bulk = p.same_place & frozenset(
            (i, j) for i in p.numbers for j in p.numbers if i not in plain and j not in plain
            and p.events[i].thread.block == p.events[j].thread.block
        )  # fmt: skip
        fences = frozenset((i, i) for i in p.of("F"))
        to_bulk = frozenset(
            (f, m) for f, m in then(fences, self.base)
            if m not in plain and p.events[f].thread.block == p.events[m].thread.block
        )  # fmt: skip
        from_bulk = frozenset(
            (m, f) for m, f in then(self.base, fences)
            if m not in plain and p.events[f].thread.block == p.events[m].thread.block
        )  # fmt: skip
        generic = frozenset((i, j) for i, j in self.base if i in plain and j in plain)
        kept = generic | (self.base & bulk)
        kept |= frozenset((i, j) for i, j in then(self.base, to_bulk) if i in plain)
        kept |= frozenset((i, j) for i, j in then(from_bulk, self.base) if j in plain)
        kept |= then(from_bulk, self.base, to_bulk)
        kept &= p.same_place
        return kept | then(self.observation, kept)
