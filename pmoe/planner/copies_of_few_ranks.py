"""Plans copies of busy experts among few ranks: searches the possible hosts, and computes exact times.

A host of an expert is a rank that computes rows of it: the owner of its parameters, or a rank with a copy.
Time is counted in rows: one unit is the time in which a rank computes one row. The price of a copy is the
time to send it.

`pmoe.planner.copies` plans copies for any number of ranks. With few ranks, the time of that plan may be some
percent above the best possible time, because each copy takes a large part of a rank's time. But with few
ranks, all sets of ranks can be examined. Suppose that the hosts of every expert are chosen, and that R is a
set of ranks. If all hosts of an expert are in R, the ranks of R must compute all rows of the expert. So no
division of the rows among the hosts takes less time than

    time(R) = (rows of experts whose hosts are all in R + prices that the ranks of R pay) / |R|

The best division takes exactly the largest time(R) of all sets R, rounded up (Hall's theorem). Example: two
ranks; rank 0 owns an expert with 90 rows, of which rank 1 has a copy; the price is 4 rows for each rank. Then
time({0}) = time({1}) = 4, and time({0, 1}) = (90 + 8) / 2 = 49, so the best division takes 49.

A set of ranks is an int with a bit for each rank: {0, 2} is 0b101. W is the number of ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from pmoe.planner.copy_groups import messages_between_nodes

MOST_RANKS = 4
"""The largest number of ranks W for which hosts are searched.

To examine one choice of hosts takes W 2**W operations.
"""

MOST_CHOICES = 256
"""If there are at most this many ways to choose the hosts of all experts, all ways are examined."""

MOST_STEPS = 100
"""The most choices of hosts that one run of a local search examines (`FewRanks._climb`)."""

EXPERTS_OF_RANK = 3
"""The most experts of one rank that may get copies. They are the experts of the rank with most rows."""

Pairs = frozenset[tuple[int, int]]
"""Copies, as pairs (expert, rank)."""


class FewRanks:
    """A search for the copies of busy experts that make the largest time of a rank as small as possible.

    The time of a rank is counted in rows: the rows that it computes, plus the prices of copies.

    loads: rows of each expert, from all ranks together.
    owners: rank of each expert's parameters.
    nodes: node of each rank.
    per_rank: the most copies that a rank hosts.
    near, far: prices in rows (`pmoe.planner.copies.CopyLimits`): of any new copy, and of an expert that is
        sent to another node.
    present: copies that ranks have from an earlier call, as pairs (expert, rank). Their price is 0.

    Attributes:
        num_ranks: number of ranks.
        sets_with: for each rank, the set of only this rank, and a list of all sets that contain the rank.
        own_rows: for each rank, the rows of all experts that it owns.
        options: for each rank, the copies that it may host, as pairs (expert, rank).
    """

    num_ranks: int
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
        self.nodes = nodes
        self.near = near
        self.far = far
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
        # The copies that each rank may host.
        self.options = [
            [(expert, rank) for experts in experts_of for expert in experts if owners[expert] != rank]
            for rank in range(self.num_ranks)
        ]

    def best(self, start: Pairs, enough: int) -> Pairs:
        """Returns the best copies that were tried: with these, the largest time of a rank is smallest.

        If there are few possible choices of copies, all are tried (`MOST_CHOICES`). Otherwise local searches
        start from three choices: ``start``, no copies, and copies of earlier calls.

        start: copies that another search found, as pairs (expert, rank). The result is never worse.
        enough: a local search ends when the largest time of a rank is at most this number of rows.
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
        """Returns copies that ranks have from earlier calls, at most ``per_rank`` on each rank.

        If a rank has more copies, those of the busiest experts are taken.
        """
        return frozenset(
            pair
            for options in self.options
            for pair in [option for option in options if option in self.present][: self.per_rank]
        )

    def _climb(self, start: Pairs, enough: int) -> Pairs:
        """Improves a choice of copies by a local search, and returns the improved choice.

        The search tries changes: one copy is removed, added, or replaced by another. It keeps a change that
        makes the largest time of a rank smaller. The search ends when no change helps, when `MOST_STEPS`
        changes were tried, or when the largest time is at most ``enough``.

        start: the copies to begin with, as pairs (expert, rank).
        enough: a time, in rows, at which the search may end.
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
        """Yields all choices of copies that arise if a single copy is removed, added or replaced.

        pairs: the given choice: copies as pairs (expert, rank).
        """
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
        """Returns the largest time of a rank, in rows, with the best division of rows among the hosts.

        pairs: the copies, as pairs (expert, rank). An expert's hosts are its owner and the ranks of its
            copies.
        """
        work, _ = self._work(pairs)
        return max(-(-work[ranks] // ranks.bit_count()) for ranks in range(1, len(work)))

    def _work(self, pairs: Pairs) -> tuple[list[int], dict[int, int]]:
        """Returns (work of each set of ranks, hosts of each copied expert).

        A set of ranks is an int: its bit r is set if rank r is in the set. This int is the set's index in the
        list of work. The work of a set is counted in rows. It is the work that no rank outside the set can
        take over: the rows of experts whose hosts are all in the set, and the prices of copies that the set's
        ranks pay. The hosts of an expert are a set of ranks, too.

        pairs: the copies, as pairs (expert, rank).
        """
        hosts: dict[int, int] = {}
        sent: dict[int, bool] = {}
        copies = [0] * self.num_ranks
        for expert, rank in pairs:
            owner = self.owners[expert]
            hosts[expert] = hosts.get(expert, 1 << owner) | 1 << rank
            is_new = (expert, rank) not in self.present
            copies[rank] += is_new
            sent[expert] = is_new or sent.get(expert, False)
        work = [0] * (1 << self.num_ranks)
        for rank, rows in enumerate(self.own_rows):
            work[1 << rank] = rows
        for expert, ranks in hosts.items():
            owner = self.owners[expert]
            copies[owner] += sent[expert]
            work[1 << owner] -= self.loads[expert]
            work[ranks] += self.loads[expert]
        of_all = self.far * messages_between_nodes(pairs - self.present, self.owners, self.nodes)
        for rank, count in enumerate(copies):
            work[1 << rank] += max(self.near * count, of_all)
        for bit, sets in self.sets_with:  # sums over subsets, one rank after another
            for ranks in sets:
                work[ranks] += work[ranks ^ bit]
        return work, hosts

    def moves(self, pairs: Pairs) -> tuple[list[tuple[int, int, int]], int]:
        """Divides rows among copies, and returns the copies' rows and the largest time of a rank.

        Copies get rows one after another. Each copy gets as many rows as possible without making the largest
        time of a rank longer. Rows of a copy are additional work for each set of ranks that contains the
        copy's rank but not all hosts of the expert. (A set with all hosts must compute these rows anyway.) So
        the copy gets at most as many rows as each of these sets still has time for. Copies without rows are
        left out.

        pairs: the copies, as pairs (expert, rank).

        Returns: ([(expert, rank, rows) of each copy], the largest time in rows).
        """
        time = self.smallest_time(pairs)
        work, hosts = self._work(pairs)
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
