"""Divides the rows of an expert with copies among its hosts: the owner and the ranks with a copy.

The plan (`pmoe.planner.copies`) gives each host a share: the number of rows that the host computes. A source
is a rank that has rows for the expert. A source knows how many rows it has itself and how many all ranks have
together, but not how many each other rank has. There are two ways to divide the rows of a source:

    by shares    every source divides its rows in the proportion of the hosts' shares
    near first   rows stay on their node if hosts there need them, and on their rank if the rank is a host

"Near first" sends fewer rows, above all between nodes. For each node it compares two numbers: the rows that
the node's hosts shall compute, and the rows that the node's ranks have. The smaller of the two is the number
of rows that stay on the node, an equal part from each of its ranks. A host takes rows of its own rank first.
If it needs more of the rows that stay, they come from the other ranks of the node. All remaining rows go to
nodes whose hosts need more, in proportion to the rows that are missing there. With a single node all rows
stay on it. Example: 2 ranks of one node have 20 rows each for an expert, and the shares are (24, 16):

                 rank 0 sends   rank 1 sends
    by shares    8              12
    near first   0              4

All hosts of a node get the same fraction of their rows from other nodes. So the rows that the hosts receive
over the link between nodes are as evenly distributed as the rows that the hosts compute.

If sources have unequal numbers of rows, "by shares" still gives every host its share, but "near first" does
not. So the rows are divided in both ways: a fraction of them near first, and the rest by shares. The fraction
is so small that no rank computes more than `TOLERATED` percent of a rank's mean rows too many.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pmoe.planner.copies import CopyPlan

GOLDEN = 0x9E3779B9
"""2**32 divided by the golden ratio: multiples of it modulo 2**32 are spread evenly (Fibonacci hashing)."""

WHOLE = 1024
"""The unit of fractions of an expert's rows: 1024 are all rows."""

TOLERATED = 2
"""The most rows that a rank may compute beyond its planned rows, in percent of the mean rows of a rank.

A rank computes more rows than planned if sources have unequal numbers of rows for an expert and divide them
near first (`near_first_parts`).
"""

UNIT = 2**40
"""The unit of fractions that must be rounded to ints, if rows of an expert travel between nodes.

2**40 stands for all rows of a source.
"""


def row_cuts(shares: Sequence[int]) -> list[int]:
    """Returns the bounds that divide a source's rows for an expert among the expert's hosts.

    Every chunk of the source's batch is divided in the same proportions. s is the rank of the source. i
    numbers the rows that the source has for this expert, from 0. Row i gets a number u from 0 to 2**32 - 1:

        u = (i + s) * GOLDEN mod 2**32

    Host j gets the rows with cut(j) <= u < cut(j + 1). The interval of a host is proportional to its share:

        cut(j) = floor(2**32 * C_j / C)
        C_j    = shares[0] + ... + shares[j - 1]
        C      = the sum of all shares

    GOLDEN is chosen so that the numbers u of successive rows are spread evenly over all values. Because s is
    added, the numbers u of row 0 of successive ranks are spread evenly, too. So errors of rounding cancel
    over the sources and over the chunks.

    shares: the share of each host (`shares_of_source`). Their sum must be positive.

    Example: shares (50, 50) -> [0, 2**31, 2**32]; rows 0, 1, 2 of rank 0 go to hosts 0, 1, 0.
    """
    total = sum(shares)
    return [(running << 32) // total for running in itertools.accumulate(shares, initial=0)]


@dataclass(frozen=True)
class RankNodes:
    """The node of each rank, and the number of ranks of each node.

    of_rank: (W,) the node of each of W ranks over which experts are distributed.
    """

    of_rank: tuple[int, ...]

    @functools.cached_property
    def sizes(self) -> Counter[int]:
        """The number of ranks of each node."""
        return Counter(self.of_rank)


class _NearFirst:
    """The rows of one expert, divided near first among the nodes of its hosts.

    The attributes count every row W times, for W ranks, so that an expert's load can be divided evenly among
    the sources without fractions: a source with load / W rows counts as ``load`` rows.

    hosts: pairs (rank, rows), from `CopyPlan.hosts`: how many rows of all ranks each host computes.
    nodes: the nodes of the ranks.

    Attributes:
        load: the rows of each source, if all sources have equally many.
        hosts_of: for each node whose hosts compute rows, these hosts, as pairs (rank, rows).
        goals: for each of these nodes, the rows that its hosts compute.
        supplies: for each of these nodes, the rows that all its ranks have.
        kept: for each of these nodes, the rows that stay on the node.
        lacking: the rows that all nodes together get from other nodes.
    """

    def __init__(self, hosts: Sequence[tuple[int, int]], nodes: RankNodes) -> None:
        of_rank = nodes.of_rank
        num_ranks = len(of_rank)
        load = 0
        hosts_of: dict[int, list[tuple[int, int]]] = {}
        for rank, rows in hosts:
            load += rows
            if rows:
                hosts_of.setdefault(of_rank[rank], []).append((rank, rows * num_ranks))
        self.load = load
        self.hosts_of = hosts_of
        self.goals: dict[int, int] = {}
        self.supplies: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        self.lacking = 0
        for node, of_node in hosts_of.items():
            goal = sum(rows for _, rows in of_node)
            supply = load * nodes.sizes[node]
            self.goals[node] = goal
            self.supplies[node] = supply
            self.kept[node] = min(goal, supply)
            self.lacking += max(goal - supply, 0)

    def inside(self, node: int) -> tuple[dict[int, int], dict[int, int]]:
        """Divides the rows that stay on a node among its hosts.

        node: the node.

        Returns: two dicts with an entry for each host of the node: (the host's own rows that it computes, the
            rows that it gets from other ranks of the node). The numbers have a unit that makes them ints: in
            this unit, each rank of the node has ``load * goals[node]`` rows that stay on the node.
        """
        supply = self.supplies[node]
        of_source = self.load * self.goals[node]
        own = {}
        lacking = {}
        for rank, rows in self.hosts_of[node]:
            own[rank] = min(rows * supply, of_source)
            lacking[rank] = rows * supply - own[rank]
        return own, lacking

    def between(self, node: int) -> tuple[int, int]:
        """Returns the factor f from which the share of each host of a node follows.

        A host of the node that computes r rows gets the part r * f of this expert's rows that travel between
        nodes. r is counted W times, as in the attributes. f is (rows that the node lacks) / (rows that the
        node's hosts compute) / (rows that all nodes lack).

        node: the node of the host.

        Returns: (numerator, denominator).
        """
        goal = self.goals[node]
        return goal - self.kept[node], goal * max(self.lacking, 1)


def shares_of_source(
    hosts: Sequence[tuple[int, int]], source: int, nodes: RankNodes, near_first: int
) -> list[int]:
    """Returns the proportions in which a source divides its rows for an expert among the hosts.

    The result has a number for each host, in the order of ``hosts``. If all sources have equally many rows,
    the hosts get the rows that the plan says.

    hosts: pairs (rank, rows), from `CopyPlan.hosts`: how many rows of all ranks each host computes.
    source: the rank that has the rows.
    nodes: the nodes of the ranks over which experts are distributed.
    near_first: the part of the rows that is divided near first, in 1024ths. The rest is divided by shares.

    Example: hosts ((0, 24), (1, 16)), 2 ranks of one node, near_first 1024 -> the proportions (1, 0) for
    source 0, and (1, 4) for source 1.
    """
    rows = _NearFirst(hosts, nodes)
    if not rows.load:  # copies stayed from an earlier call: the owner computes rows that were not planned
        return [int(at == 0) for at in range(len(hosts))]
    node = nodes.of_rank[source]
    staying = [0] * len(hosts)
    all_staying = 1
    if node in rows.kept:
        own, lacking = rows.inside(node)
        total_lacking = max(sum(lacking.values()), 1)
        of_source = rows.load * rows.goals[node]
        others = of_source - own.get(source, 0)
        staying = [
            (rank == source) * own[rank] * total_lacking + others * lacking[rank] if rank in own else 0
            for rank, _ in hosts
        ]
        all_staying = of_source * total_lacking
    by_shares = WHOLE - near_first
    if not rows.lacking:  # exact: no row travels between nodes
        return [
            near_first * rows.load * stays + by_shares * all_staying * share
            for stays, (_, share) in zip(staying, hosts, strict=True)
        ]
    supply = rows.load * nodes.sizes[node]
    kept = rows.kept.get(node, 0)
    shares = []
    for stays, (rank, share) in zip(staying, hosts, strict=True):
        near = UNIT * kept * stays // (supply * all_staying)
        far = 0
        if share:
            part, of_all = rows.between(nodes.of_rank[rank])
            part *= share * len(nodes.of_rank)
            far = UNIT * (supply - kept) * part // (supply * of_all)
        shares.append(near_first * (near + far) + by_shares * (UNIT * share // rows.load))
    return shares


def near_first_parts(
    plan: CopyPlan, deviations: Sequence[int], nodes: RankNodes, total: int
) -> dict[int, int]:
    """Returns for each expert with copies the part of its rows that is divided near first, in 1024ths.

    If sources have unequal numbers of rows, "near first" may give a host more rows than planned. The excess
    is at most

        (largest deviation of a source's rows from the mean) * (sum over sources of |f - g|)

    f is the fraction of a source's rows that go to the host. g is one number for all sources. The bound holds
    with any g. This function takes for g the fraction f of a source on a node without hosts. If no row
    travels between nodes, it takes the fraction f of a source that is not a host.

    The part is chosen so that the excess of any host, for all experts together, is at most `TOLERATED`
    percent of a rank's mean rows.

    plan: the copies.
    deviations: (E,) for each of E experts, the largest |load - W * rows of one source| of any of the W
        sources (`RankCounts.deviations`); 0 if all sources have equally many rows.
    nodes: the nodes of the ranks over which experts are distributed.
    total: the rows of all experts.
    """
    experts_of_rank = Counter(rank for hosts in plan.hosts.values() for rank, _ in hosts)
    most_experts = max(experts_of_rank.values(), default=1)
    parts = {}
    for expert, hosts in plan.hosts.items():
        rows = _NearFirst(hosts, nodes)
        spread = max((_spread(rows, node) for node in rows.kept), default=0)
        most = 100 * most_experts * deviations[expert] * spread
        parts[expert] = min(WHOLE, WHOLE * TOLERATED * total * UNIT // most) if most else WHOLE
    return parts


def _spread(rows: _NearFirst, node: int) -> int:
    """Returns `UNIT` times the sum over sources of |f - g|, for the host with the largest sum on a node.

    `near_first_parts` says what f and g are.

    rows: the rows of an expert.
    node: the node.
    """
    own, lacking = rows.inside(node)
    total_lacking = max(sum(lacking.values()), 1)
    total_own = sum(own.values())
    kept = rows.kept[node]
    kept_elsewhere = sum(rows.kept.values()) - kept
    supply = rows.supplies[node]
    inside_unit = supply * rows.load * rows.goals[node] * total_lacking
    part, of_all = rows.between(node)
    largest = 0
    for rank, goal in rows.hosts_of[node]:
        of_own = own[rank]
        lacks = lacking[rank]
        fraction = UNIT * lacks // total_lacking
        outside = UNIT * part * goal // of_all if rows.lacking else fraction
        of_hosts = of_own * (total_lacking - lacks) + lacks * (total_own - of_own)
        inside = UNIT * kept * of_hosts // inside_unit
        between = (kept * abs(fraction - outside) + outside * kept_elsewhere) // rows.load
        largest = max(largest, inside + between)
    return largest
