"""Divides the rows of an expert with copies among its hosts: the owner and the ranks with a copy.

The plan (`pmoe.planner.copies`) says how many rows each host computes. A source is a rank that has rows for
the expert. It knows how many rows it has itself and how many all ranks have together, but not how many each
other rank has. There are two ways to divide its rows:

    by shares   every source divides its rows in the proportion of the hosts' shares
    own first   a source that is a host computes its own rows, at most as many as its share. Other rows go to
                the hosts whose shares are larger, in the proportion of what these hosts still need

Own first sends fewer rows. Example: 2 ranks have 20 rows each for an expert, and the shares are (24, 16):

                rank 0 sends   rank 1 sends
    by shares   8              12
    own first   0              4

If sources have unequal numbers of rows, "by shares" still gives every host its share, but "own first" does
not. So the rows are divided in both ways: a fraction of them own first, and the rest by shares. The fraction
is so small that no rank computes more than `TOLERATED` percent of a rank's mean rows too many.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from pmoe.planner.copies import CopyPlan

GOLDEN = 0x9E3779B9
"""2**32 divided by the golden ratio: multiples of it modulo 2**32 are spread evenly (Fibonacci hashing)."""

WHOLE = 1024
"""The unit of fractions of an expert's rows: 1024 are all rows."""

TOLERATED = 2
"""The most rows that a rank may compute beyond its planned rows, in percent of the mean rows of a rank.

The reason is that ranks have unequal numbers of rows for an expert (`own_first_parts`).
"""


def row_cuts(shares: Sequence[int]) -> list[int]:
    """Returns the bounds that divide a source's rows for an expert among the expert's hosts.

    Every chunk of the source's batch is divided in the same proportions. Row i of the source with rank s gets
    a number u from 0 to 2**32 - 1:

        u = (i + s) * GOLDEN mod 2**32

    Host j gets the rows with cut(j) <= u < cut(j + 1). The interval of a host is proportional to its share:

        cut(j) = floor(2**32 * C_j / C)
        C_j    = shares[0] + ... + shares[j - 1]
        C      = the sum of all shares

    GOLDEN is chosen so that the numbers u of successive rows are spread evenly over all values. The same is
    true of the first rows of successive ranks. So errors of rounding cancel over the sources and over the
    chunks.

    shares: the share of each host (`shares_of_source`). Their sum must be positive.

    Example: shares (50, 50) -> [0, 2**31, 2**32]; rows 0, 1, 2 of rank 0 go to hosts 0, 1, 0.
    """
    total = sum(shares)
    return [(running << 32) // total for running in itertools.accumulate(shares, initial=0)]


def shares_of_source(
    hosts: Sequence[tuple[int, int]], source: int, num_ranks: int, own_first: int
) -> list[int]:
    """Returns the proportions in which a source divides its rows for an expert among the hosts.

    The result has a number for each host, in the order of ``hosts``. If all sources have equally many rows,
    the hosts get the rows that the plan says.

    hosts: pairs (rank, rows), from `CopyPlan.hosts`: how many rows of all ranks each host computes.
    source: the rank that has the rows.
    num_ranks: the number of ranks over which experts are distributed.
    own_first: the part of the rows that is divided own first, in 1024ths. The rest is divided by shares.

    Example: hosts ((0, 24), (1, 16)), 2 ranks, own_first 1024 -> the proportions (1, 0) for source 0, and (1,
    4) for source 1.
    """
    load = sum(rows for _, rows in hosts)
    if not load:  # copies that stayed from an earlier call: the owner computes rows that were not planned
        return [int(at == 0) for at in range(len(hosts))]
    # Numbers of rows are multiplied by the number of ranks: a source has ``load`` rows, a host gets ``goal``.
    goals = [rows * num_ranks for _, rows in hosts]
    lacking = [max(goal - load, 0) for goal in goals]
    total_lacking = max(sum(lacking), 1)
    own = [min(goal, load) * (rank == source) for (rank, _), goal in zip(hosts, goals, strict=True)]
    others = load - sum(own)
    return [
        own_first * (of_own * total_lacking + others * of_lacking)
        + (WHOLE - own_first) * rows * total_lacking
        for (_, rows), of_own, of_lacking in zip(hosts, own, lacking, strict=True)
    ]


def own_first_parts(plan: CopyPlan, deviations: Sequence[int], num_ranks: int, total: int) -> dict[int, int]:
    """Returns for each expert with copies the part of its rows that is divided own first, in 1024ths.

    If sources have unequal numbers of rows, own first gives a host at most so many rows too many:

        largest deviation of a source's rows from the mean * sum over sources of |f - g|

    f is the fraction of a source's rows that go to the host, and g the fraction for a source that is not a
    host. The part is chosen so that all experts together add at most `TOLERATED` percent of a rank's mean
    rows to a host.

    plan: the copies.
    deviations: (E,) for each of E experts, the largest difference between the expert's load and the rows of
        one source times the number of sources (`RankCounts.deviations`).
    num_ranks: the number of ranks over which experts are distributed.
    total: the rows of all experts.
    """
    experts_of_rank = Counter(rank for hosts in plan.hosts.values() for rank, _ in hosts)
    most_experts = max(experts_of_rank.values(), default=1)
    parts = {}
    for expert, hosts in plan.hosts.items():
        load = sum(rows for _, rows in hosts)
        goals = [rows * num_ranks for _, rows in hosts]
        own = [min(goal, load) for goal in goals]
        lacking = [goal - kept for goal, kept in zip(goals, own, strict=True)]
        total_lacking = max(sum(lacking), 1)
        # The sum over sources, times load * total_lacking.
        spread = max(
            kept * (total_lacking - lacks) + lacks * (sum(own) - kept)
            for kept, lacks in zip(own, lacking, strict=True)
        )
        most = 100 * most_experts * deviations[expert] * spread
        parts[expert] = (
            min(WHOLE, WHOLE * TOLERATED * total * load * total_lacking // most) if most else WHOLE
        )
    return parts
