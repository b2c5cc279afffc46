"""Copies of busy experts among few ranks: a search over hosts whose exact time follows from sets of ranks.

`pmoe.planner.copies` plans copies for any number of ranks, and explains prices and times. With few ranks its
plan may be some percent above the best one, because each copy takes a large part of a rank's time. But then
every set R of ranks can be looked at. Rows whose hosts are all in R must be computed in R, so no plan with
these hosts takes less than

    time(R) = (rows of experts whose hosts are all in R + prices of the copies of R's ranks) / |R|

and one takes the largest of these times (Hall's theorem for rows that can be divided).

A set of ranks is an int with a bit for each rank: {0, 2} is 0b101. W is the number of ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

MOST_RANKS = 4
"""The most ranks for which hosts are searched: the work for one choice of hosts grows with W 2**W."""

MOST_CHOICES = 256
"""If there are at most so many choices of hosts, all of them are looked at."""

MOST_STEPS = 100
"""The most choices of hosts that are looked at otherwise, each one copy away from the best one so far."""

EXPERTS_OF_RANK = 3
"""Only so many experts of each rank, its busiest, get copies."""

Pairs = frozenset[tuple[int, int]]
"""Copies, as pairs (expert, rank)."""


class FewRanks:
    """A search for the best hosts.

    loads, owners, nodes: as in `pmoe.planner.copies.plan_copies`.
    per_rank: the most copies that a rank hosts.
    near, far: price of a copy on the node of its owner, and on another node.
    present: copies that are there already, whose price is 0.
    """

    num_ranks: int
    prices: list[list[int]]
    sets_with: list[tuple[int, list[int]]]
    own_rows: list[int]
    options: list[list[tuple[int, int]]]

    def __init__(
        self,
        loads: Sequence[int],
        owners: Sequence[int],
        nodes: Sequence[int],
        per_rank: int,
        near: int,
        far: int,
        present: Pairs,
    ) -> None:
        self.loads = loads
        self.owners = owners
        self.per_rank = per_rank
        self.present = present
        self.num_ranks = len(nodes)
        self.prices = [[near if own == other else far for other in nodes] for own in nodes]
        self.sets_with = [
            (1 << rank, [ranks for ranks in range(1 << self.num_ranks) if ranks >> rank & 1])
            for rank in range(self.num_ranks)
        ]
        self.own_rows = [0] * self.num_ranks
        experts_of: list[list[int]] = [[] for _ in nodes]
        for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert)):
            self.own_rows[owners[expert]] += loads[expert]
            if loads[expert] and len(experts_of[owners[expert]]) < EXPERTS_OF_RANK:
                experts_of[owners[expert]].append(expert)
        # For each rank the copies that it may host.
        self.options = [
            [(expert, rank) for experts in experts_of for expert in experts if owners[expert] != rank]
            for rank in range(self.num_ranks)
        ]

    def best(self, start: Pairs, enough: int) -> Pairs:
        """Returns the best copies that were found.

        start: the copies with which the search begins, if it does not look at all choices.
        enough: a time that is short enough to end the search.
        """
        sizes = range(self.per_rank + 1)
        if math.prod(sum(math.comb(len(pairs), k) for k in sizes) for pairs in self.options) <= MOST_CHOICES:
            of_ranks = [
                [chosen for k in sizes for chosen in itertools.combinations(pairs, k)]
                for pairs in self.options
            ]
            choices = (
                frozenset(itertools.chain.from_iterable(choice)) for choice in itertools.product(*of_ranks)
            )
            return min((start, *choices), key=self.smallest_time)
        ends = [self._climb(first, enough) for first in (start, Pairs(), self._fitting())]
        return min(ends, key=self.smallest_time)

    def _fitting(self) -> Pairs:
        """Returns the present copies that fit on their ranks, the busiest experts first."""
        return frozenset(
            pair
            for options in self.options
            for pair in [option for option in options if option in self.present][: self.per_rank]
        )

    def _climb(self, start: Pairs, enough: int) -> Pairs:
        """Returns the copies that changes of one copy lead to, each of which saves time.

        start, enough: as in `best`.
        """
        best = start
        time = self.smallest_time(start)
        steps = MOST_STEPS
        neighbours = self._neighbours(best)
        while time > enough and steps and (choice := next(neighbours, None)) is not None:
            steps -= 1
            new_time = self.smallest_time(choice)
            if new_time < time:
                best, time = choice, new_time
                neighbours = self._neighbours(best)
        return best

    def _neighbours(self, pairs: Pairs) -> Iterator[Pairs]:
        """Yields choices of hosts in which one copy is removed, added, or replaced by another."""
        for pair in sorted(pairs):
            yield pairs - {pair}
        for rank, options in enumerate(self.options):
            is_full = sum(host == rank for _, host in pairs) >= self.per_rank
            for pair in options:
                if pair in pairs:
                    continue
                if not is_full:
                    yield pairs | {pair}
                for other in sorted(pairs):
                    if not is_full or other[1] == rank:
                        yield pairs - {other} | {pair}

    def smallest_time(self, pairs: Pairs) -> int:
        """Returns the largest time of a rank, if rows are divided among these hosts in the best way."""
        work, _, _ = self._work(pairs)
        return max(-(-work[ranks] // ranks.bit_count()) for ranks in range(1, len(work)))

    def _work(self, pairs: Pairs) -> tuple[list[int], dict[int, int], list[int]]:
        """Returns the work that must be done in each set of ranks, the hosts of experts, and ranks' prices.

        The work counts rows, and prices as rows. Hosts are sets of ranks, only of experts with copies.
        """
        hosts: dict[int, int] = {}
        sent: dict[int, int] = {}
        prices = [0] * self.num_ranks
        for expert, rank in pairs:
            owner = self.owners[expert]
            hosts[expert] = hosts.get(expert, 1 << owner) | 1 << rank
            price = 0 if (expert, rank) in self.present else self.prices[owner][rank]
            prices[rank] += price
            sent[expert] = max(sent.get(expert, 0), price)
        work = [0] * (1 << self.num_ranks)
        for rank, rows in enumerate(self.own_rows):
            work[1 << rank] = rows
        for expert, ranks in hosts.items():
            owner = self.owners[expert]
            prices[owner] += sent[expert]
            work[1 << owner] -= self.loads[expert]
            work[ranks] += self.loads[expert]
        for rank, price in enumerate(prices):
            work[1 << rank] += price
        for bit, sets in self.sets_with:  # sums over subsets, one rank after another
            for ranks in sets:
                work[ranks] += work[ranks ^ bit]
        return work, hosts, prices

    def moves(self, pairs: Pairs) -> tuple[list[tuple[int, int, int]], int]:
        """Returns the rows of each copy, as (expert, rank, rows), and the largest time of a rank.

        Copies get rows one after another, each as many as leave the other rows a place: at most the least
        spare time of the sets of ranks that have the copy's rank but not all hosts of its expert. Copies
        without rows are left out.
        """
        time = self.smallest_time(pairs)
        work, hosts, _ = self._work(pairs)
        spare = [time * ranks.bit_count() - of_ranks for ranks, of_ranks in enumerate(work)]
        unmoved = {expert: self.loads[expert] for expert in hosts}
        moves = []
        for expert, rank in sorted(pairs, key=lambda pair: (pair[0], self.owners[pair[0]] != pair[1], pair)):
            sets = [ranks for ranks in self.sets_with[rank][1] if ranks & hosts[expert] != hosts[expert]]
            rows = min(unmoved[expert], *(spare[ranks] for ranks in sets))
            for ranks in sets:
                spare[ranks] -= rows
            unmoved[expert] -= rows
            if rows:
                moves.append((expert, rank, rows))
        return moves, time
