"""Lets weight gradients run during all-to-alls: by Lancet's schedule pass, or by a list schedule.

Lancet's pass is that of section 4 of the paper.

    as traced    compute      | dX2 | dW2 |            | dX1 | dW1 |
                 communicate              | all-to-all |
    moved        compute      | dX2 | dW2 |      | dX1 | dW1 |
                 communicate        | all-to-all |

dX is the gradient of a layer's input, which the next all-to-all may need. dW is the gradient of the layer's
weights, which no all-to-all needs. In "moved", dW2 runs while rows are sent.

In this file, a weight gradient is any instruction (operator call) whose result no all-to-all needs, not even
indirectly. It may run at any time after the instructions whose results it reads. If it runs while all other
computation waits for an all-to-all, the pass does not get longer.

Some instructions do nothing but select one of the results of another instruction. They always come directly
after it, because all of its results stay in memory until then, also those that nothing reads.

The list schedule (`listed`) usually gives faster orders than Lancet's pass (`assign`, `placed`).
`pmoe.graph.run` predicts the seconds of both orders, and takes the faster one that fits into memory.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from graphlib import TopologicalSorter

from pmoe.graph.buckets import Bucket, UnsentBuckets, send_seconds
from pmoe.graph.instructions import Instruction

Listing = Sequence[Instruction]
"""Type of the instructions of a pass, in order."""


def weight_gradients(instructions: Listing) -> set[str]:
    """Returns the names of the instructions whose results no all-to-all needs, not even indirectly.

    These instructions can run while rows are sent. Most of them compute gradients of weights.
    """
    needed: set[str] = set()
    for instruction in reversed(instructions):
        if instruction.communicates or instruction.name in needed:
            needed.update(instruction.waits)
    return {
        instruction.name
        for instruction in instructions
        if instruction.name not in needed and not instruction.communicates
    }


def labels(instructions: Listing) -> dict[str, set[str]]:
    """Returns, for each all-to-all, the names of the weight gradients that can run beside it.

    A weight gradient is any instruction whose result no all-to-all needs. It can run beside an all-to-all if
    both conditions hold (Lancet, section 4.1):

    - It does not need the result of this all-to-all, not even indirectly.
    - The instructions whose results it reads come before the all-to-all. Weight gradients among them may also
      come after it, because they can be moved, too.

    instructions: the pass, in order.
    """
    free = weight_gradients(instructions)
    place_of = {instruction.name: at for at, instruction in enumerate(instructions)}
    # For each weight gradient, the place of the last instruction that it waits for, directly or through other
    # weight gradients, which can be moved with it.
    after: dict[str, int] = {}
    behind: dict[str, set[str]] = {}  # for each instruction, the all-to-alls from which a path leads to it
    for instruction in instructions:
        reached = set[str]().union(*(behind.get(name, ()) for name in instruction.waits))
        behind[instruction.name] = reached | {instruction.name} if instruction.communicates else reached
        if instruction.name in free:
            places = [after[name] if name in free else place_of[name] for name in instruction.waits]
            after[instruction.name] = max(places, default=-1)
    return {
        instruction.name: {
            name
            for name in free
            if instruction.name not in behind[name] and after[name] < place_of[instruction.name]
        }
        for instruction in instructions
        if instruction.communicates
    }


def assign(instructions: Listing) -> dict[str, str]:
    """Assigns weight gradients to all-to-alls beside which they run (Lancet, Algorithm 1).

    A weight gradient is any instruction whose result no all-to-all needs. The all-to-alls choose one after
    the other, in the order of the pass. Each has a time to fill: at first its own seconds. It takes the
    weight gradient whose seconds are closest to the time to fill, and subtracts these seconds. It repeats
    this until the time is filled, or no weight gradient is left.

    instructions: the pass, in order.

    Returns {name of an assigned weight gradient: name of its all-to-all}.
    """
    seconds = {instruction.name: instruction.seconds for instruction in instructions}
    assigned: dict[str, str] = {}
    for name, candidates in labels(instructions).items():
        seconds_left = seconds[name]
        pool = {candidate for candidate in candidates if seconds[candidate] > 0} - assigned.keys()
        while seconds_left > 0 and pool:
            best = min(sorted(pool), key=lambda candidate: abs(seconds_left - seconds[candidate]))
            seconds_left -= seconds[best]
            pool.discard(best)
            assigned[best] = name
    return assigned


def placed(instructions: Listing, assigned: Mapping[str, str]) -> list[Instruction]:
    """Returns the instructions with each assigned weight gradient directly after its all-to-all.

    A weight gradient is any instruction whose result no all-to-all needs.

    instructions: the pass, in order.
    assigned: {name of a weight gradient that is moved: name of its all-to-all}.

    Weight gradients whose results a moved one reads are put directly before it. Those that read its result
    come after it. All other instructions keep their order.
    """
    by_name = {instruction.name: instruction for instruction in instructions}
    free = weight_gradients(instructions)
    selected: dict[str, list[str]] = {}
    for instruction in instructions:
        if instruction.selects:
            (source,) = instruction.waits
            selected.setdefault(source, []).append(instruction.name)
    behind: dict[str, list[str]] = {}
    for name, communication in assigned.items():
        behind.setdefault(communication, []).append(name)
    order: dict[str, Instruction] = {}

    def take(name: str) -> None:
        """Adds an instruction to the result, after the weight gradients whose results it reads.

        Instructions that only select one of its results are added directly after it.

        name: the name of the instruction. If it was added before, nothing is done.
        """
        if name in order:
            return
        for needed in by_name[name].waits:
            if needed in free:
                take(needed)
        order.setdefault(name, by_name[name])
        for result in selected.get(name, ()):
            take(result)

    for instruction in instructions:
        if instruction.name in assigned:
            continue
        if instruction.name in free and any(
            name in assigned and name not in order for name in instruction.waits
        ):
            continue  # added later, because it waits for an assigned weight gradient that has not run
        take(instruction.name)
        for name in behind.get(instruction.name, ()):
            take(name)
    for instruction in instructions:
        take(instruction.name)
    return list(order.values())


# ---- a list schedule: runs instructions as soon as they are ready, weight gradients if no other is ready


def listed(
    instructions: Listing,
    *,
    limit: float = float("inf"),
    kept: Collection[str] = (),
    input_bytes: Mapping[str, int] | None = None,
    reductions: Sequence[Bucket] = (),
    one_by_one: bool = False,
) -> list[Instruction]:
    """Returns the instructions in the order of a list schedule, which is found by simulating both lanes.

    A lane is a queue of instructions. All-to-alls run on the communicate lane, all other instructions on the
    compute lane. All-to-alls keep their order, because it must be the same on every rank.

    A weight gradient is any instruction whose result no all-to-all needs. The compute lane runs the first
    ready instruction that is not a weight gradient. If there is none, the lane has a gap until an all-to-all
    ends. In the gap it runs the weight gradient whose seconds are closest to the length of the gap.

    instructions: the pass, in order.
    limit: a number of bytes. While more bytes are allocated, weight gradients that free memory run first.
    kept: names of results and inputs that the graph returns, so that their memory is not freed.
    input_bytes: {name of an input of the graph: its bytes}.
    reductions: which gradients are reduced over ranks together, and for how long, in the order in which they
        are sent. The names are those of the instructions that compute the gradients. While the link is idle,
        weight gradients that a reduction needs run before all other computation, those of the next reduction
        first.
    one_by_one: whether the link counts as busy for a gradient's share of its reduction as soon as the
        gradient is computed. If False, the link is idle until all gradients of a reduction are computed, so
        more weight gradients run early. Neither is always faster.
    """
    return _List(instructions, limit, kept, input_bytes or {}, reductions, one_by_one).run()


class _List:
    """The simulation behind `listed`, and its state.

        by_name      {name of an instruction: the instruction}
        place        the position of each instruction in the pass that `listed` was called with
        free         names of the weight gradients: instructions whose results no all-to-all needs
        sorter       counts how many of its inputs each instruction still waits for
        ready        names of instructions whose inputs have all been scheduled
        uses         {name of a result or input of the graph: number of instructions that still have to read
                     its memory; one more if the graph returns it}
        num_bytes    {name of a result or input of the graph: its bytes}
        limit        a number of bytes; while more are allocated, weight gradients that free memory run first
        live_bytes   bytes that are allocated now
        unsent       the reductions that have not begun yet, each of the results of some instructions
        share        with ``one_by_one``: {name of a weight gradient: its share of the seconds of a reduction}
        bucket_of    {name of a weight gradient that a reduction needs: number of the first such reduction}
        messages     names of the all-to-alls that are not scheduled yet, the next one last
        now          time until which the compute lane is scheduled, in seconds
        link_free    time at which the communicate lane becomes free, in seconds
        end          time at which each scheduled instruction ends, in seconds
        order        the instructions that are scheduled so far, in the scheduled order

    Ready instructions that compute are in one of three collections:

        chain   can begin, and are no weight gradients
        later   wait for an all-to-all that still runs
        pool    can begin, and are weight gradients
    """

    def __init__(
        self,
        instructions: Listing,
        limit: float,
        kept: Collection[str],
        input_bytes: Mapping[str, int],
        reductions: Sequence[Bucket],
        one_by_one: bool,
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
        self.live_bytes = sum(input_bytes.values())
        self.messages = [
            instruction.name for instruction in reversed(instructions) if instruction.communicates
        ]
        self.unsent = UnsentBuckets([] if one_by_one else reductions)
        self.share: dict[str, float] = {}
        for bucket in reductions if one_by_one else []:
            for name, seconds in bucket.items():
                self.share[name] = self.share.get(name, 0.0) + seconds
        self.bucket_of: dict[str, int] = {}
        for number, bucket in reversed(list(enumerate(reductions))):
            turn = 0 if one_by_one else number
            self.bucket_of.update(dict.fromkeys(self.free.intersection(bucket), turn))
        for instruction in reversed(instructions):
            if instruction.name in self.bucket_of:
                number = self.bucket_of[instruction.name]
                for name in self.free.intersection(instruction.waits):
                    self.bucket_of[name] = min(number, self.bucket_of.get(name, number))
        self.now = 0.0
        self.link_free = 0.0
        self.end: dict[str, float] = {}
        self.chain: list[tuple[int, str]] = []  # a heap by place
        self.later: list[tuple[float, int, str]] = []  # a heap by the time at which they can begin
        self.pool: set[str] = set()
        self.order: list[Instruction] = []  # the result

    def run(self) -> list[Instruction]:
        """Schedules all instructions, one after the other. Returns them in the scheduled order."""
        self.sorter.prepare()
        self._release()
        while len(self.order) < len(self.by_name):
            while self.later and self.later[0][0] <= self.now:
                self._offer(*heapq.heappop(self.later)[1:])
            if self._message_begins() <= self.now:
                self._take(self.messages.pop())
            elif self.live_bytes > self.limit and self._freeing():
                self._take(max(sorted(self.pool), key=self._freed))
            elif self.link_free <= self.now and not self.pool.isdisjoint(self.bucket_of):
                reduced = self.pool.intersection(self.bucket_of)
                self._take(min(reduced, key=lambda name: (self.bucket_of[name], self.place[name])))
            elif self.chain:
                self._take(heapq.heappop(self.chain)[1])
            else:
                self._fill()
        return self.order

    def _fill(self) -> None:
        """Fills a gap, in which all computation waits for an all-to-all, with a weight gradient.

        A weight gradient is an instruction whose result no all-to-all needs. The one whose seconds are
        closest to the length of the gap is scheduled. One that takes more than twice the gap is left out: it
        would delay other instructions by more than the gap. If no weight gradient is short enough, nothing
        runs in the gap.
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
        """Returns the time, in seconds, at which all inputs of an instruction are computed."""
        return max((self.end[needed] for needed in self.by_name[name].waits), default=0.0)

    def _message_begins(self) -> float:
        """Returns the time, in seconds, at which the rows that the next all-to-all sends are computed.

        The result is infinity in two cases: no all-to-all is left, or an instruction that computes these rows
        has not been scheduled.
        """
        if not self.messages or self.messages[-1] not in self.ready:
            return float("inf")
        return self._begin(self.messages[-1])

    def _offer(self, place: int, name: str) -> None:
        """Puts an instruction that can begin now into ``pool`` (weight gradients) or ``chain`` (others).

        A weight gradient is any instruction whose result no all-to-all needs.

        place: the instruction's position in the pass that `listed` was called with.
        name: the instruction's name.
        """
        if name in self.free:
            self.pool.add(name)
        else:
            heapq.heappush(self.chain, (place, name))

    def _release(self) -> None:
        """Sorts instructions that have become ready into the collections from which `run` takes them.

        An instruction reads the results of other instructions. It is ready if all of these have been
        scheduled. It can begin when all of these have ended, which may be later than ``now``.

        - An instruction that only selects one of the results of another instruction is scheduled at once.
        - Computation that can begin now goes to ``pool`` if it is a weight gradient, otherwise to ``chain``.
        - Computation that cannot begin yet goes to ``later``.
        - An all-to-all goes to none of these collections, because it is in ``messages`` from the start.
        """
        for name in self.sorter.get_ready():
            if self.by_name[name].selects:
                self._take(name)
                continue
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
        """Schedules an instruction. Advances the time of its lane by the instruction's seconds.

        There is one lane (queue) for all-to-alls, and one for computation. Memory that no later instruction
        reads counts as freed.

        name: the name of the instruction.
        """
        instruction = self.by_name[name]
        self.order.append(instruction)
        self.pool.discard(name)
        if instruction.communicates:
            self.link_free = self.end[name] = max(self.now, self.link_free) + instruction.seconds
        else:
            self.now += instruction.seconds
            self.end[name] = self.now
        sent = self.share.get(name, 0.0) + send_seconds(self.unsent.add(name))
        if sent:
            self.link_free = max(self.now, self.link_free) + sent
        self.live_bytes += instruction.num_bytes - self._freed(name)
        self.uses.subtract(set(instruction.holds))
        self.sorter.done(name)
        self._release()

    def _freed(self, name: str) -> int:
        """Returns the bytes that are freed after an instruction: those that no later instruction reads."""
        holds = set(self.by_name[name].holds)
        return sum(self.num_bytes.get(result, 0) for result in holds if self.uses[result] == 1)

    def _freeing(self) -> bool:
        """Returns whether any weight gradient that can begin now frees more bytes than it allocates.

        A weight gradient is an instruction whose result no all-to-all needs.
        """
        return any(self._freed(name) > self.by_name[name].num_bytes for name in self.pool)
