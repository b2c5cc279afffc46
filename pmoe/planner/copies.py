"""Plans copies of busy experts: which ranks get them, and how many rows each copy computes.

Under skewed routing the rank of a busy expert computes more rows than other ranks, and all ranks wait for it.
For one call, other ranks may get copies of the expert's weights and compute a part of its rows. The plan is
computed with integers from numbers that all ranks have, so all ranks make the same plan.

A host of an expert is a rank that computes rows of it: the owner of its parameters, or a rank with a copy.

Time is counted in rows: one unit is the time in which a rank computes one row. The price of a copy is the
number of rows that a rank could compute while the copy is sent. The predicted time of a rank is

    time(rank) = rows that it computes + max(near * c, far * m)

    near = price of a copy, for its owner and for the rank that hosts it (`CopyLimits`)
    far  = price of an expert that is sent to another node, for all ranks
    c    = copies that the rank hosts + its own experts that have copies
    m    = most experts that any rank sends to other nodes, or receives from other nodes

m is an estimate (`pmoe.planner.copy_groups.messages_between_nodes`). Copies that ranks have from an earlier
call count neither in c nor in m. In c, an owner counts an expert once, however many copies it has, because
the hosts pass the weights on to each other (`pmoe.planner.copy_groups`). Messages between nodes cost all
ranks time: the link between nodes is the slowest, and the rows of a rank that sends no weights over this link
wait for the ranks that do. Messages inside nodes have a link of their own.

So copies go to other nodes only if this brings a clear gain over copies inside nodes. A rank then sends at
most one expert to another node, and receives at most one, unless a plan without this limit is faster.

At the end, some hosts give rows back to owners (`_give_rows_back`). An owner computes while it sends a copy,
but a host that has few rows of its own must wait for the copy.

The plan makes the largest time of any rank small. Example: 4 ranks of one node with one expert each, whose
loads (rows of all ranks) are (70, 10, 10, 10). ``near`` is 1, and a rank may host one copy. Times are (rows
of the rank's own expert) + (rows of the copy) + (price):

    rank            0                1             2             3
    before          70               10            10            10
    after           25 + 0 + 1       10 + 15 + 1   10 + 15 + 1   10 + 15 + 1

Letters: E experts of all ranks, W ranks.
"""

from __future__ import annotations

import enum
import functools
import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from pmoe.arguments import check_int
from pmoe.planner.copies_of_few_ranks import MOST_RANKS, FewRanks
from pmoe.planner.copy_groups import messages_between_nodes

FAR_FROM_BOUND = 5
"""A plan counts as bad if its time is more than this many percent above the lower bound of any plan's time.

The first plan uses the copies that ranks have from earlier calls. If the first plan is bad, a plan without
these copies is tried too.
"""

CLOSE_TO_BOUND = 1
"""A plan for few ranks is good enough if its time is at most this many percent above the lower bound.

If it is not good enough, the exact search of `pmoe.planner.copies_of_few_ranks` looks for a better plan.
"""

FINE = 128
COARSE = 48
"""Precision of a plan's time: the mean time of the ranks, divided by FINE or COARSE.

The search ends when the difference between its best time and the longest time that it has excluded is at most
this quotient. FINE is used for few ranks, COARSE for many ranks, to save time.
"""


@dataclass(frozen=True, kw_only=True)
class CopyLimits:
    """The largest number of copies of experts that a rank may host, and the price of a copy in rows.

    The price is the number of rows that a rank could compute while the copy is sent.

    per_rank: the most copies that a rank hosts.
    near: price in rows of any new copy. The owner and the rank with the copy pay it.
    far: price in rows of an expert that is sent to another node than its owner's. All ranks pay it.

    Raises TypeError unless all three are ints. Raises ValueError if a number is negative, or if ``far`` is
    below ``near``.
    """

    per_rank: int
    near: int = 0
    far: int = 0

    def __post_init__(self) -> None:
        check_int(0, per_rank=self.per_rank, near=self.near, far=self.far)
        if self.far < self.near:
            raise ValueError(f"far ({self.far}) must be at least near ({self.near})")


@dataclass(frozen=True, kw_only=True)
class CopyPlan:
    """A plan of copies: the ranks that compute the rows of busy experts.

    hosts: for each expert that has copies, pairs (rank, number of rows that the rank computes): first the
        owner, then each rank with a copy. The rows of an expert add up to its load. Experts without copies
        are not in the dict: only their owners compute their rows.
    before, after: the largest predicted time of a rank without and with the copies, in rows.
    """

    hosts: Mapping[int, tuple[tuple[int, int], ...]]
    before: int
    after: int

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """All copies, as pairs (expert, rank)."""
        return frozenset((expert, rank) for expert, hosts in self.hosts.items() for rank, _ in hosts[1:])

    def rows_of_ranks(self, loads: Sequence[int], owners: Sequence[int], num_ranks: int) -> list[int]:
        """Returns the number of rows that each rank computes with the copies of this plan.

        loads: (E,) rows of each expert, from all ranks together, as `plan_copies` got them.
        owners: (E,) rank of each expert's parameters.
        num_ranks: number of ranks.
        """
        rows = [0] * num_ranks
        for expert, (load, owner) in enumerate(zip(loads, owners, strict=True)):
            for rank, part in self.hosts.get(expert, ((owner, load),)):
                rows[rank] += part
        return rows


def copies_within(per_rank: int, copy_bytes: int, free_bytes: int | None = None) -> int:
    """Returns how many copies of experts a rank may host within a given number of bytes.

    per_rank: the most copies that may be hosted.
    copy_bytes: bytes of a copy, including its gradients and messages.
    free_bytes: bytes for all copies together; None if the bytes are not limited.

    Example: per_rank 4, copies of 100 bytes, 250 bytes -> 2.
    """
    if free_bytes is None or not copy_bytes:
        return per_rank
    return min(per_rank, max(free_bytes, 0) // copy_bytes)


def plan_copies(
    loads: Sequence[int],
    owners: Sequence[int],
    nodes: Sequence[int],
    limits: CopyLimits,
    present: Collection[tuple[int, int]] = (),
) -> CopyPlan:
    """Returns a plan of copies that makes the largest predicted time of a rank small.

    The time of a rank is the number of rows that it computes, plus the prices of copies (`CopyLimits`). A
    search tries target times: a target is a time that no rank may exceed. A rank that needs longer than the
    target gives rows away to ranks that have time left, the rows of its busiest experts first. If one copy is
    enough for all rows that the rank must still give away, they go to the rank that has just enough time
    left. Otherwise the rank with most time left takes as many rows as it has time for.

    With several nodes, plans of three kinds are compared (`Reach`): copies stay on the nodes of their owners,
    or each rank may also send one expert to another node, or copies go anywhere.

    The plan depends only on the arguments. Memory and time of the search grow with E, with W and with the
    number of copies, but not with E times W.

    Args:
        loads: (E,) rows of each of E experts, from all ranks together.
        owners: (E,) rank of each expert's parameters.
        nodes: (W,) node of each of W ranks.
        limits: how many copies a rank may host, and what they cost.
        present: copies that ranks have from an earlier call, as pairs (expert, rank), from `CopyPlan.pairs`.
            Their price is 0. If the plan does not use one of these copies, its rank gives the copy up.

    Example: loads (70, 10, 10, 10), owners (0, 1, 2, 3), nodes (0, 0, 0, 0), one copy a rank, prices 1 ->
    hosts {0: ((0, 25), (3, 15), (2, 15), (1, 15))}, before 70, after 26.
    """
    times = [0] * len(nodes)
    for load, owner in zip(loads, owners, strict=True):
        times[owner] += load
    largest = max(times, default=0)
    if not limits.per_rank or largest * len(nodes) == sum(times):
        return CopyPlan(hosts={}, before=largest, after=largest)
    places = _places(tuple(owners), tuple(nodes))
    search = _Search(loads, owners, nodes, limits, present, times, places)
    moves, after = search.best(largest)
    # A rank may host only so many copies. Present copies may leave no place for a better copy.
    if present and 100 * after > (100 + FAR_FROM_BOUND) * search.bound:
        afresh = _Search(loads, owners, nodes, limits, (), times, places).best(largest)
        if afresh[1] < after:
            moves, after = afresh
    if len(nodes) <= MOST_RANKS and 100 * after > (100 + CLOSE_TO_BOUND) * search.bound:
        few_ranks = FewRanks(
            loads, owners, nodes, limits.per_rank, limits.near, limits.far, frozenset(present)
        )
        pairs = frozenset((expert, rank) for expert, rank, _ in moves)
        moves, after = few_ranks.moves(few_ranks.best(pairs, search.bound))
    rows: dict[int, dict[int, int]] = {}
    for expert, rank, part in moves:
        owner = owners[expert]
        of_expert = rows.get(expert)
        if of_expert is None:
            of_expert = rows[expert] = {owner: loads[expert]}
        of_expert[owner] -= part
        of_expert[rank] = of_expert.get(rank, 0) + part
    new = {(expert, rank) for expert, rank, _ in moves}.difference(present)
    stays_inside = all(nodes[rank] == nodes[owners[expert]] for expert, rank in new)
    if limits.near and stays_inside:
        _give_rows_back(rows, loads, owners, times, new, limits.near)
    hosts = {expert: tuple(rows[expert].items()) for expert in sorted(rows)}
    return CopyPlan(hosts=hosts, before=largest, after=after)


def _give_rows_back(
    rows: dict[int, dict[int, int]],
    loads: Sequence[int],
    owners: Sequence[int],
    times: Sequence[int],
    new: Collection[tuple[int, int]],
    near: int,
) -> None:
    """Moves a few rows from hosts back to owners, because an owner computes while it sends a copy.

    The search counts the price of a copy for the host and for the owner. But only the host may have to wait:
    for the weights before it computes rows with the copy, and for the gradients after these rows. While it
    waits, it computes rows of its own experts. The share 1 / W of these rows is not sent, and about half of
    this share is computed during the wait. So

        wait     = price - rows of the host's own experts / (2 W)
        surplus  = min(wait, time of the host with its wait - time of the owner)
        back     = surplus / (G + 1)    rows that the host gives back to the owner

    G is the number of copies of all experts of the owner. If all G hosts have the same surplus, the owner and
    the hosts then end at the same time. Because of the minimum, no rank's time becomes longer than the search
    said. A host with several copies divides its surplus evenly among them.

    rows: for each expert with copies, the rows that each host computes, the owner first. The numbers are
        changed.
    loads: (E,) rows of each of E experts, from all ranks together.
    owners: (E,) rank of each expert's parameters.
    times: (W,) rows of all experts that each rank owns, before any are moved.
    new: the copies that ranks do not have from an earlier call, as pairs (expert, rank).
    near: price of each of these copies, in rows.

    Example: 2 ranks, loads (1000, 0), price 60 -> the search divides the rows (500, 500). The host has no own
    rows, so it waits as long as 60 rows take. With G = 1 it gives 60 / 2 = 30 rows back: (530, 470).
    """
    num_ranks = len(times)
    own_rows = list(times)
    computed = list(times)
    hosted = [0] * num_ranks
    sent = [0] * num_ranks
    for expert, hosts in rows.items():
        owner = owners[expert]
        own_rows[owner] -= loads[expert] - hosts[owner]
        computed[owner] -= loads[expert]
        sent[owner] += len(hosts) - 1
        hosted[owner] -= 1  # the owner is in ``hosts``, too
        for rank, part in hosts.items():
            computed[rank] += part
            hosted[rank] += 1
    paid = [0] * num_ranks
    for _, rank in new:
        paid[rank] += near
    for expert, hosts in rows.items():
        owner = owners[expert]
        of_owner = computed[owner] + paid[owner]
        for rank, part in hosts.items():
            wait = paid[rank] - own_rows[rank] // (2 * num_ranks)
            surplus = min(wait, computed[rank] + wait - of_owner)
            if surplus > 0 and rank != owner:
                back = min(surplus // (hosted[rank] * (sent[owner] + 1)), part - 1)
                hosts[rank] -= back
                hosts[owner] += back


Moves = list[tuple[int, int, int]]
"""Copies as triples: the expert, the rank that gets the copy, and the rows that the copy computes."""


class Reach(enum.Enum):
    """The places where copies of an expert may be made: on its own node, or also on other nodes.

    NODE: copies stay on the nodes of their owners.
    ONE_EXPERT: first, nodes with too many rows send experts to other nodes. Each rank sends at most one
        expert, to one node, and hosts at most one copy from another node. Then copies are made inside nodes.
    ANYWHERE: copies are made inside nodes. If ranks still have too many rows, copies go to ranks of any node.
    """

    NODE = 0
    ONE_EXPERT = 1
    ANYWHERE = 2


@dataclass(frozen=True)
class _Way:
    """Options of an attempt to find copies. No options are best for all loads, so a search tries several.

    own_node_first: whether copies with the reach `Reach.ANYWHERE` are first made inside nodes. If False, the
        nodes of the ranks do not matter.
    passes_on: whether a busy rank may give the last few rows that it must give away to the next busy rank,
        which then gives away more of its own rows. If False, these few rows may use up the only copy that a
        rank with much time left may still host.
    least_first: the order in which busy ranks give rows away. True: ranks that exceed the target time least
        come first. False: ranks that exceed it most come first.
    """

    own_node_first: bool
    passes_on: bool
    least_first: bool


WAYS = tuple(
    _Way(own_node_first, passes_on, least_first)
    for own_node_first in (True, False)
    for passes_on in (True, False)
    for least_first in (False, True)
)
"""All combinations of a search's options, in the order in which they are tried.

The second half has ``own_node_first`` False. It is tried only for copies that may go anywhere.
"""

_Options = tuple[Reach, int, _Way, Sequence[tuple[int, int]]]
"""The arguments ``reach``, ``price``, ``way`` and ``present`` of an attempt (`_Attempt`)."""

BESIDE = 4
"""If ``far`` is at least BESIDE times ``near``, copies inside nodes are free if others go between nodes.

Both links work at the same time. A rank seldom sends and hosts more than BESIDE copies inside its node, so
these copies have arrived before a copy between nodes has.
"""

EFFORT = 64
"""A search among W ranks tries EFFORT / W combinations of options for each target time, or at least one."""


@dataclass(frozen=True)
class _Places:
    """The ranks of each node, and the experts of each rank and of each node.

    ranks_of: for each node, its ranks, in rising order.
    experts_of: (W,) for each rank, the experts that it owns, in rising order.
    experts_of_node: for each node, the experts that its ranks own, in falling order.
    """

    ranks_of: Mapping[int, Sequence[int]]
    experts_of: Sequence[Sequence[int]]
    experts_of_node: Mapping[int, Sequence[int]]


@functools.lru_cache(maxsize=16)
def _places(owners: tuple[int, ...], nodes: tuple[int, ...]) -> _Places:
    """Returns the ranks of each node, and the experts of each rank and of each node.

    The result is cached, because it does not depend on the loads of a call.

    owners: (E,) rank of each expert's parameters.
    nodes: (W,) node of each rank.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    experts_of: list[list[int]] = [[] for _ in nodes]
    for expert, owner in enumerate(owners):
        experts_of[owner].append(expert)
    experts_of_node: dict[int, list[int]] = {node: [] for node in ranks_of}
    for expert, owner in reversed([*enumerate(owners)]):
        experts_of_node[nodes[owner]].append(expert)
    return _Places(ranks_of, experts_of, experts_of_node)


class _Search:
    """One search for copies that make the largest time of a rank as small as possible.

    loads, owners, nodes, limits, present: the arguments of `plan_copies`.
    times: (W,) time of each of W ranks without copies: the rows of all experts that the rank owns.
    places: the ranks of each node, and the experts of each rank.

    Attributes:
        is_coarse: whether the search has the precision `COARSE`, because there are many ranks.
        mean: the mean of ``times``, rounded up.
        ranks: all ranks, the busiest first. Attempts sort ranks by the time that they have left. A list that
            is nearly sorted already is sorted fast.
        ranks_of: the ranks of each node, the busiest first.
        bound: a lower bound of the time with copies.
    """

    def __init__(
        self,
        loads: Sequence[int],
        owners: Sequence[int],
        nodes: Sequence[int],
        limits: CopyLimits,
        present: Collection[tuple[int, int]],
        times: list[int],
        places: _Places,
    ) -> None:
        self.loads = loads
        self.owners = owners
        self.nodes = nodes
        self.limits = limits
        self.times = times
        self.places = places
        self.present = sorted(pair for pair in present if owners[pair[0]] != pair[1])
        self.is_coarse = EFFORT // len(times) <= 1
        self.mean = -(-sum(times) // len(times))
        self.ranks = sorted(range(len(times)), key=times.__getitem__, reverse=True)
        self.ranks_of: dict[int, list[int]] = {node: [] for node in places.ranks_of}
        for rank in self.ranks:
            self.ranks_of[nodes[rank]].append(rank)
        self.bound = self._bound()

    def best(self, largest: int) -> tuple[Moves, int]:
        """Returns the best copies that the search found, and the largest time of a rank with these copies.

        largest: the largest time of a rank without copies, in rows.
        """
        near, far = self.limits.near, self.limits.far
        if len(self.ranks_of) == 1:
            return self._best_within(Reach.ANYWHERE, near, self.bound, largest)
        low = self.mean
        if not self.present:
            low = max(
                -(-sum(self.times[rank] for rank in ranks) // len(ranks)) for ranks in self.ranks_of.values()
            )
            low = max(low, self.bound)
        between = self.mean + far * (not self.present)
        beside = near * (far < BESIDE * near)
        # (the least time that copies within this reach can bring, the reach, the price of a copy, the first
        # target of the search)
        searches = [
            (low, Reach.NODE, near, low),
            (max(between, self._bound_of_one_expert()), Reach.ONE_EXPERT, beside, self.mean),
            (between, Reach.ANYWHERE, beside, self.mean),
        ]
        # Copies inside nodes come first unless other copies may bring a clear gain.
        clear = self.mean // COARSE
        searches.sort(key=lambda search: search[0] - clear * (search[1] is Reach.NODE))
        best: tuple[Moves, int] = ([], largest)
        for least, reach, price, target in searches:
            gain = best[1] - least
            if gain <= 0 or (best[0] and gain <= clear):
                continue
            # A reach whose bound is longer than that of `Reach.ANYWHERE` seldom brings a gain. To save time,
            # one attempt is made first, with the longest target that would be a gain. If the attempt fails,
            # this reach is not searched.
            if self.is_coarse and best[0] and least > between:
                longest = best[1] - 1 - far * (reach is Reach.ONE_EXPERT)
                if self._attempt(longest, self._options(reach, price)).misplaced:
                    continue
            moves, time = self._best_within(reach, price, target, largest)
            if reach is not Reach.NODE or self.present:  # the search did not count messages between nodes
                time = self.largest_time(moves)
            if time < best[1]:
                best = (moves, time)
        return best

    def largest_time(self, moves: Moves) -> int:
        """Returns the largest time of a rank with these copies, in rows.

        moves: the copies, with the rows that they compute.
        """
        owners = self.owners
        times = list(self.times)
        for expert, rank, rows in moves:
            times[owners[expert]] -= rows
            times[rank] += rows
        new = {(expert, rank) for expert, rank, _ in moves}.difference(self.present)
        copies = [0] * len(times)
        for _, rank in new:
            copies[rank] += 1
        for expert in {expert for expert, _ in new}:
            copies[owners[expert]] += 1
        near = self.limits.near
        of_all = self.limits.far * messages_between_nodes(new, owners, self.nodes)
        prices = [max(near * count, of_all) for count in range(max(copies) + 1)]
        return max([time + prices[count] for time, count in zip(times, copies, strict=True)])

    def _best_within(self, reach: Reach, price: int, low: int, largest: int) -> tuple[Moves, int]:
        """Returns the best copies within ``reach``, and the largest time of a rank with these copies.

        A target is a time, in rows, that no rank may exceed. The search tries targets between a lower bound
        and the time without copies. A target fails if, even with copies, some ranks have more rows than the
        target allows. The next target is then longer by about the number of these surplus rows divided by the
        number of ranks, but at most half-way to the best time so far. After a success, the next target is
        half-way between the bound and this time. The search ends when the shortest target that succeeded is
        close to the longest target that failed.

        reach: the ranks on which copies may be made.
        price: price of each copy, for its owner and for the rank that hosts it.
        low: a lower bound of the time, in rows: the first target, or nearly so.
        largest: the largest time of a rank without copies, in rows.
        """
        num_ranks = len(self.times)
        options = self._options(reach, price)
        is_coarse = self.is_coarse
        step = max(1, sum(self.times) // (num_ranks * (COARSE if is_coarse else FINE)))
        best: tuple[Moves, int] = ([], largest)
        target = low + is_coarse * step // 2  # a plan seldom reaches the bound itself
        stride = step
        while low < best[1]:
            attempt = self._attempt(target, options)
            if attempt.misplaced:
                low = target + 1
            else:
                best = (attempt.moves, target - min(attempt.room))
            if best[1] - low < step or (is_coarse and best[1] - low == step):
                break
            target = (low + best[1]) // 2
            if attempt.misplaced:
                target = min(low + max(stride, attempt.misplaced // num_ranks), target)
                stride *= 2
        return best

    def _options(self, reach: Reach, price: int) -> Sequence[_Options]:
        """Returns the combinations of options with which each target time is tried, in this order.

        A combination is a tuple (reach, price, way, present copies). Reach and price are the same in all of
        them. The way says how busy ranks give rows away (`_Way`). The present copies, those of an earlier
        call, are used or left out. There are fewer combinations if there are many ranks (`EFFORT`).

        reach: the ranks on which copies may be made.
        price: price of each copy, for its owner and for the rank that hosts it.
        """
        ways = WAYS if reach is Reach.ANYWHERE and len(self.ranks_of) > 1 else WAYS[: len(WAYS) // 2]
        # Each way is also tried without the present copies, which may take the places of better copies.
        uses = (self.present, []) if self.present else ([],)
        # With `Reach.ONE_EXPERT`, at least two combinations of options are tried, also for many ranks.
        number = max(1 + (reach is Reach.ONE_EXPERT), EFFORT // len(self.times))
        return [(reach, price, way, use) for way in ways[:number] for use in uses][:number]

    def _bound(self) -> int:
        """Returns a lower bound of the slowest rank's time, in rows: no plan of copies can be faster.

        Suppose that no rank needs longer than ``target``. ``time`` is the time that a rank needs for its own
        experts without copies. ``near`` is the lowest price of a copy. The rank that sends a copy and the
        rank that hosts it both pay the price.

        - A rank whose time is longer than the target must send at least one copy. So it must give away at
          least (time + near - target) rows.
        - A rank that takes rows hosts at least one copy. So it can take at most (target - time - near) rows.

        If all ranks together must give away more rows than they can take, no plan reaches the target. The
        result is the smallest target that this rule does not exclude.
        """
        near = 0 if self.present else self.limits.near
        ascending = [self.times[rank] for rank in reversed(self.ranks)]
        sums = list(itertools.accumulate(ascending, initial=0))
        num_ranks = len(ascending)
        low = self.mean
        # The target mean + near is never excluded. With this target, an idle rank can take (mean - time)
        # rows, and a busy rank must give away (time - mean) rows. Both sums over all ranks are equal.
        high = min(ascending[-1], low + near)
        while low < high:
            target = (low + high) // 2
            num_calm = bisect_right(ascending, target)
            num_idle = bisect_left(ascending, target - near)
            excess = sums[-1] - sums[num_calm] + (near - target) * (num_ranks - num_calm)
            if excess > (target - near) * num_idle - sums[num_idle]:
                low = target + 1
            else:
                high = target
        return low

    def _bound_of_one_expert(self) -> int:
        """Returns a lower bound of the time with `Reach.ONE_EXPERT`; 0 with copies of earlier calls.

        A rank sends at most one expert to another node, and this expert to only one node. So the rows of the
        busiest rank are computed by its own node and by at most one other node. There is no such bound with
        copies of earlier calls, because these may be on any node.
        """
        if self.present:
            return 0
        own = self.nodes[self.ranks[0]]
        largest_other = max([len(ranks) for node, ranks in self.ranks_of.items() if node != own])
        return self.limits.far + -(-self.times[self.ranks[0]] // (len(self.ranks_of[own]) + largest_other))

    def _attempt(self, target: int, options: Iterable[_Options]) -> _Attempt:
        """Returns the first attempt that reaches a target time; if none does, the attempt that comes nearest.

        The nearest attempt is the attempt that leaves fewest rows on ranks that exceed the target.

        target: the longest time, in rows, that a rank may need.
        options: the other arguments of each attempt (`_Attempt`).
        """
        attempts = (_Attempt(self, target, *each) for each in options)
        best = next(attempts)
        while best.misplaced and (attempt := next(attempts, None)) is not None:
            if attempt.misplaced < best.misplaced:
                best = attempt
        return best


class _Attempt:
    """One attempt to find copies with which no rank needs longer than ``target``.

    The time of a rank is counted in rows: the rows that it computes, plus the prices of copies.

    search: holds the loads, owners and limits of the problem.
    target: the longest time, in rows, that a rank may need.
    reach: the ranks on which copies may be made.
    price: price of each new copy, for its owner and for the rank that hosts it.
    way: the other options of the attempt.
    present: copies that ranks have from an earlier call, as pairs (expert, rank). They get rows before any
        new copy.

    Attributes:
        moves: the copies that were found, each with its number of rows.
        room: for each rank, the time that is left until ``target``, in rows; negative for ranks that need
            longer.
        misplaced: rows that are still on ranks that need longer; 0 if the attempt succeeded.
        slots: for each rank, how many more copies it may host.
        unmoved: for each expert, the rows that its owner still has and may give away.
        sent: maps an expert with copies to the price, in rows, that its owner pays for sending its weights.
        senders: the ranks that send an expert to another node, with the reach `Reach.ONE_EXPERT`.
        hosts: the ranks that host a copy from another node, with this reach.
        spare: for each node, the time that its ranks together have left, in rows; negative if they need
            longer than the target.
        pools: for each node that may host copies of other nodes' experts, the ranks that may host a copy, as
            ascending pairs (time left, rank).
    """

    def __init__(
        self,
        search: _Search,
        target: int,
        reach: Reach,
        price: int,
        way: _Way,
        present: Sequence[tuple[int, int]],
    ) -> None:
        self.search = search
        self.price = price
        self.moves: Moves = []
        self.room = [target - time for time in search.times]
        self.slots = [search.limits.per_rank] * len(self.room)
        self.sent: dict[int, int] = {}
        self.senders: set[int] = set()
        self.hosts: set[int] = set()
        self.unmoved = list(search.loads)
        self.spare: dict[int, int] = {}
        self.pools: dict[int, list[tuple[int, int]]] = {}
        if present:
            self._use_present(present)
        if reach is Reach.ONE_EXPERT:
            self._even_out_nodes()
        has_nodes = len(search.ranks_of) > 1
        if has_nodes and (reach is not Reach.ANYWHERE or way.own_node_first):
            for ranks in search.ranks_of.values():
                self._level(ranks, way)
        if reach is Reach.ONE_EXPERT and min(self.room) < 0:
            self._send_from_busy_ranks()
        if reach is Reach.ANYWHERE and (not has_nodes or min(self.room) < 0):
            self._level(search.ranks, way)
        self.misplaced = -sum([time for time in self.room if time < 0])

    def _use_present(self, present: Sequence[tuple[int, int]]) -> None:
        """Moves rows to copies of earlier calls, from owners that need longer than the target time.

        present: the copies of earlier calls, as pairs (expert, rank).
        """
        search = self.search
        for expert, rank in present:
            owner = search.owners[expert]
            rows = min(-self.room[owner], self.room[rank], self.unmoved[expert])
            if rows > 0 and self.slots[rank]:
                self.unmoved[expert] -= rows
                self.sent.setdefault(expert, 0)
                self.room[owner] += rows
                self.room[rank] -= rows
                self.slots[rank] -= 1
                self.moves.append((expert, rank, rows))

    def _even_out_nodes(self) -> None:
        """Sends experts of nodes that need longer than the target time to nodes with time left.

        The busiest experts of a node are sent. Each rank sends at most one of its experts.
        """
        search = self.search
        # A rank that needs longer than the target will also send a copy inside its node. Its price counts
        # twice: for this rank, and for the rank that hosts the copy.
        paid = 2 * self.price
        room = [time if time >= 0 else time - paid for time in self.room]
        self._find_hosts(
            {node: sum([room[rank] for rank in ranks]) for node, ranks in search.ranks_of.items()}
        )
        for surplus, node in sorted((rows, node) for node, rows in self.spare.items() if rows < 0):
            rows_left = -surplus
            experts = search.places.experts_of_node[node]
            for expert in sorted(experts, key=self.unmoved.__getitem__, reverse=True):
                if rows_left <= 0:
                    break
                if search.owners[expert] not in self.senders:
                    sent = self._send_far(expert, rows_left)
                    if not sent:  # no node has time left; then none has for an expert with fewer rows
                        break
                    rows_left -= sent

    def _send_from_busy_ranks(self) -> None:
        """Sends one expert of each rank that still needs longer than the target time to another node.

        Ranks that have sent an expert to another node already are left out.
        """
        room = self.room
        self._find_hosts(
            {node: sum([room[rank] for rank in ranks]) for node, ranks in self.search.ranks_of.items()}
        )
        for owner, rows in enumerate(room):
            if rows < 0 and owner not in self.senders:
                expert = max(self.search.places.experts_of[owner], key=self.unmoved.__getitem__)
                self._send_far(expert, -rows)

    def _find_hosts(self, spare: dict[int, int]) -> None:
        """Sets `spare`, and finds the ranks that may host a copy from another node (`pools`).

        spare: the time that all ranks of each node have left, in rows; negative if they need longer than the
            target.
        """
        room = self.room
        slots = self.slots
        hosts = self.hosts
        self.spare = spare
        self.pools = {
            node: sorted(
                [
                    (room[rank], rank)
                    for rank in self.search.ranks_of[node]
                    if slots[rank] and rank not in hosts
                ]
            )
            for node, rows in spare.items()
            if rows > self.price
        }

    def _send_far(self, expert: int, wanted: int) -> int:
        """Moves rows of an expert to the node with most time left; returns how much its owner's time falls.

        On this node, the rank with most time left takes rows first, then the rank with second most, and so
        on. The result is a number of rows: the rows that were moved, less the price that the owner pays.

        expert: the expert.
        wanted: by how much the owner's time should fall, in rows.
        """
        price = self.price
        unmoved = self.unmoved[expert]
        owner = self.search.owners[expert]
        open_nodes = [node for node, pool in self.pools.items() if pool]
        node = max(open_nodes, key=self.spare.__getitem__, default=-1)
        if node in (-1, self.search.nodes[owner]):
            return 0
        pool = self.pools[node]
        unpaid = price - self.sent.get(expert, 0)
        moved = 0
        while moved < wanted + unpaid and pool:
            free, rank = pool[-1]
            rows = min(wanted + unpaid - moved, unmoved - moved, free - price, self.spare[node] - price)
            if rows <= 0 or moved + rows <= unpaid:
                break
            pool.pop()
            moved += rows
            self.moves.append((expert, rank, rows))
            self.room[rank] -= rows + price
            self.slots[rank] -= 1
            self.hosts.add(rank)
            self.spare[node] -= rows + price
        if not moved:
            return 0
        self.sent[expert] = price
        self.senders.add(owner)
        self.room[owner] += moved - unpaid
        self.unmoved[expert] -= moved
        return moved - unpaid

    def _level(self, group: Sequence[int], way: _Way) -> None:
        """Moves rows, within a group of ranks, from ranks over the target time to ranks that have time left.

        group: the ranks.
        way: the options of the attempt.
        """
        room = self.room
        slots = self.slots
        price = self.price
        busy = [(room[rank], rank) for rank in group if room[rank] < 0]
        if not busy:
            return
        busy.sort(reverse=way.least_first)
        pool = [(room[rank], rank) for rank in group if room[rank] > price and slots[rank]]
        pool.sort()
        for at, (_, rank) in enumerate(busy, start=1):
            following = busy[at][1] if way.passes_on and at < len(busy) else -1
            self._give_away(rank, pool, following)

    def _give_away(self, owner: int, pool: list[tuple[int, int]], following: int) -> None:
        """Moves rows of a busy rank's experts to ranks with time left, until the rank meets the target time.

        The expert with most rows left gets the next copy. If some ranks have enough time left for all rows
        that must be moved, the copy goes to the one of these ranks that has the least time left. If no rank
        has enough time, the copy goes to the rank with the most time left, and takes as many rows as that
        rank has time for.

        owner: the busy rank.
        pool: ranks that have time left, as ascending pairs (time, rank). The list is updated.
        following: the next busy rank, which may host the last few rows of ``owner``; -1 if there is none, or
            if this is not allowed (`_Way.passes_on`). A rank with time left should not spend its last copy on
            few rows. So if the rank that would get the last rows of ``owner`` may host only one more copy,
            and would still have time left after it, then ``following`` hosts this copy instead. Later
            ``following`` gives away more of its own rows.
        """
        price = self.price
        room = self.room
        slots = self.slots
        sent = self.sent
        moves = self.moves
        rows_of = self.unmoved
        heap = [(-rows_of[expert], expert) for expert in self.search.places.experts_of[owner]]
        heapify(heap)  # the expert with most rows is on top
        busy = -room[owner]
        while busy > 0 and pool and heap:
            minus_unmoved, expert = heap[0]
            unmoved = -minus_unmoved
            unpaid = price - sent.get(expert, 0)
            if unmoved <= unpaid:  # not worth a copy
                rows_of[expert] = 0
                heappop(heap)
                continue
            wanted = busy + unpaid
            if wanted > unmoved:
                wanted = unmoved
            at = bisect_left(pool, (wanted + price,))
            if at == len(pool):
                free, rank = pool.pop()
            elif (  # the last copy that the rank may host would get few rows: the next busy rank takes them
                following >= 0
                and slots[following]
                and slots[pool[at][1]] == 1
                and wanted == busy + unpaid
                and pool[at][0] > wanted + price
            ):
                rank = following
                free = wanted + price
            else:
                free, rank = pool.pop(at)
            if unpaid:
                sent[expert] = price
                busy += unpaid
            rows = busy if busy < unmoved else unmoved
            if rows > free - price:
                rows = free - price
            moves.append((expert, rank, rows))
            rows_of[expert] -= rows
            busy -= rows
            room[rank] -= price + rows
            slots[rank] -= 1
            if room[rank] > price and slots[rank]:
                insort(pool, (room[rank], rank))
            if rows < unmoved:
                heapreplace(heap, (rows - unmoved, expert))
            else:
                heappop(heap)
        room[owner] = -busy
