"""The division of a source's rows for an expert among the expert's hosts."""

import itertools
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

from pmoe.planner.copies import CopyPlan
from pmoe.planner.copy_rows import (
    GOLDEN,
    TOLERATED,
    WHOLE,
    RankNodes,
    near_first_parts,
    row_cuts,
    shares_of_source,
)


def split_rows(first: int, stop: int, shares: list[int], source: int) -> list[int]:
    """How many of a source's rows, from number ``first`` to ``stop``, each host gets."""
    cuts = row_cuts(shares)
    positions = [(row + source) * GOLDEN % 2**32 for row in range(first, stop)]
    return [sum(start <= position < end for position in positions) for start, end in itertools.pairwise(cuts)]


def test_hosts_get_their_fraction_of_every_part_of_every_source() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shares = [draw.randint(0, 1000) for _ in range(draw.randint(1, 6))]
        shares[0] += 1
        first = draw.randint(0, 1000)
        rows = draw.randint(0, 100)
        parts = split_rows(first, first + rows, shares, draw.randrange(10**6))
        assert sum(parts) == rows
        for part, share in zip(parts, shares, strict=True):
            assert abs(part - Fraction(rows * share, sum(shares))) < 3


@pytest.mark.parametrize("num_sources", [8, 64, 4096])
def test_errors_of_rounding_cancel_over_the_sources(num_sources: int) -> None:
    draw = random.Random(num_sources)
    shares = [17, 5, 5, 3]
    rows = [draw.randint(0, 3) for _ in range(num_sources)]
    parts = [split_rows(0, of_source, shares, source) for source, of_source in enumerate(rows)]
    for host, share in enumerate(shares):
        error = sum(part[host] for part in parts) - Fraction(sum(rows) * share, sum(shares))
        assert abs(error) <= 2 + num_sources**0.5 / 3


def test_the_rule_of_remainders() -> None:
    assert row_cuts([50, 50]) == [0, 2**31, 2**32]
    assert row_cuts([0, 4, 0]) == [0, 0, 2**32, 2**32]
    assert split_rows(0, 3, [50, 50], 0) == [2, 1]
    assert split_rows(0, 3, [50, 50], 1) == [1, 2]
    assert split_rows(0, 4, [0, 4, 0], 5) == [0, 4, 0]


def planned(*hosts: tuple[int, int]) -> CopyPlan:
    return CopyPlan(hosts={0: hosts}, before=0, after=0)


def one_node(num_ranks: int) -> RankNodes:
    return RankNodes((0,) * num_ranks)


def flows(
    hosts: Sequence[tuple[int, int]], rows: Sequence[int], near_first: int, nodes: RankNodes | None = None
) -> list[list[Fraction]]:
    """The rows that each source (first index) gives each host, without rounding."""
    given = []
    nodes = nodes or one_node(len(rows))
    for source, count in enumerate(rows):
        shares = shares_of_source(hosts, source, nodes, near_first)
        given.append([Fraction(count * share, sum(shares)) for share in shares])
    return given


def test_the_example_of_near_first() -> None:
    hosts = ((0, 24), (1, 16))
    assert flows(hosts, [20, 20], 0) == [[12, 8], [12, 8]]
    assert flows(hosts, [20, 20], WHOLE) == [[20, 0], [4, 16]]
    assert flows(hosts, [20, 20], WHOLE // 2) == [[16, 4], [8, 12]]


def test_rows_of_ranks_without_a_copy_go_to_the_hosts_that_need_more() -> None:
    # 4 ranks with 12 rows each. Ranks 1 and 3 keep theirs; rank 3 takes 24 more, and rank 0 keeps 6 of 12.
    assert flows(((0, 6), (1, 12), (3, 30)), [12] * 4, WHOLE) == [
        [6, 0, 6],
        [0, 12, 0],
        [0, 0, 12],
        [0, 0, 12],
    ]


def test_copies_without_planned_rows_leave_all_rows_to_the_owner() -> None:
    assert flows(((1, 0), (0, 0)), [3, 4], WHOLE) == [[3, 0], [4, 0]]
    assert flows(((0, 8), (1, 0)), [4, 4], WHOLE) == [[4, 0], [4, 0]]


def random_hosts(draw: random.Random, num_ranks: int, load: int) -> list[tuple[int, int]]:
    ranks = draw.sample(range(num_ranks), draw.randint(2, num_ranks))
    ends = sorted([0, load, *(draw.randint(0, load) for _ in ranks[1:])])
    return [(rank, stop - start) for rank, (start, stop) in zip(ranks, itertools.pairwise(ends), strict=True)]


@pytest.mark.parametrize("near_first", [0, 300, WHOLE])
def test_even_sources_give_every_host_its_share(near_first: int) -> None:
    draw = random.Random(near_first)
    for _ in range(100):
        num_ranks = draw.randint(2, 8)
        hosts = random_hosts(draw, num_ranks, num_ranks * draw.randint(1, 50))
        load = sum(rows for _, rows in hosts)
        given = flows(hosts, [load // num_ranks] * num_ranks, near_first)
        for at, (_, rows) in enumerate(hosts):
            assert sum(of_source[at] for of_source in given) == rows


def test_near_first_sends_no_row_that_its_own_rank_may_compute() -> None:
    draw = random.Random(1)
    for _ in range(100):
        num_ranks = draw.randint(2, 8)
        hosts = random_hosts(draw, num_ranks, num_ranks * 30)
        given = flows(hosts, [30] * num_ranks, WHOLE)
        for at, (rank, rows) in enumerate(hosts):
            assert given[rank][at] == min(rows, 30)


def random_nodes(draw: random.Random, num_ranks: int) -> RankNodes:
    num_nodes = draw.randint(2, 4)
    return RankNodes(tuple(sorted(draw.randrange(num_nodes) for _ in range(num_ranks))))


@pytest.mark.parametrize("near_first", [0, 300, WHOLE])
def test_even_sources_on_several_nodes_give_every_host_its_share(near_first: int) -> None:
    draw = random.Random(near_first)
    for _ in range(100):
        nodes = random_nodes(draw, draw.randint(3, 8))
        num_ranks = len(nodes.of_rank)
        hosts = random_hosts(draw, num_ranks, num_ranks * draw.randint(1, 50))
        load = sum(rows for _, rows in hosts)
        given = flows(hosts, [load // num_ranks] * num_ranks, near_first, nodes)
        for at, (_, rows) in enumerate(hosts):
            assert abs(sum(of_source[at] for of_source in given) - rows) < Fraction(load, 10**9)


def test_near_first_sends_no_row_to_another_node_that_its_own_node_needs() -> None:
    draw = random.Random(3)
    for _ in range(100):
        nodes = random_nodes(draw, draw.randint(3, 8))
        on = nodes.of_rank
        hosts = random_hosts(draw, len(on), len(on) * 30)
        given = flows(hosts, [30] * len(on), WHOLE, nodes)
        for node in set(on):
            hosts_there = [at for at, (rank, _) in enumerate(hosts) if on[rank] == node]
            goal = sum(hosts[at][1] for at in hosts_there)
            coming = [
                sum(of_source[at] for source, of_source in enumerate(given) if on[source] != node)
                for at in hosts_there
            ]
            assert abs(sum(coming) - max(goal - 30 * on.count(node), 0)) < Fraction(1, 10**6)
            for at, rows in zip(hosts_there, coming, strict=True):  # the same fraction on every host
                assert abs(rows * goal - sum(coming) * hosts[at][1]) <= Fraction(goal, 10**6)


def test_rows_stay_on_the_node_of_a_copy() -> None:
    # 2 nodes of 2 ranks with 12 rows each. Rank 2's copy gets 16 rows: all of them come from ranks 2 and 3.
    # Rank 1 keeps its rows for the owner's node, and ranks 2 and 3 send 4 rows each to rank 0.
    nodes = RankNodes((0, 0, 1, 1))
    given = flows(((0, 32), (2, 16)), [12] * 4, WHOLE, nodes)
    exact = [[12, 0], [12, 0], [4, 8], [4, 8]]
    for of_source, expected in zip(given, exact, strict=True):
        assert [round(float(rows), 6) for rows in of_source] == expected


@pytest.mark.parametrize("has_nodes", [False, True])
def test_no_rank_computes_more_than_the_tolerated_rows_too_many(has_nodes: bool) -> None:
    draw = random.Random(2)
    parts = []
    for _ in range(100 if has_nodes else 300):
        num_ranks = draw.randint(2, 8)
        nodes = random_nodes(draw, num_ranks) if has_nodes else one_node(num_ranks)
        spread = draw.choice([0, 1, 10, 100])
        rows = [100 + draw.randint(0, spread) for _ in range(num_ranks)]
        load = sum(rows)
        hosts = random_hosts(draw, num_ranks, load)
        deviation = max(abs(num_ranks * count - load) for count in rows)
        total = load + draw.randint(0, 1000)
        part = near_first_parts(planned(*hosts), [deviation], nodes, total)[0]
        parts.append(part)
        given = flows(hosts, rows, part, nodes)
        for at, (_, planned_rows) in enumerate(hosts):
            more = sum(of_source[at] for of_source in given) - planned_rows
            assert more <= Fraction(TOLERATED * total, 100 * num_ranks) + Fraction(1, 10**6)
    assert min(parts) < 100 and max(parts) == WHOLE


def test_even_sources_divide_all_rows_near_first() -> None:
    assert near_first_parts(planned((0, 24), (1, 16)), [0], one_node(2), 40) == {0: WHOLE}
    assert near_first_parts(planned((0, 20), (1, 20)), [0], one_node(2), 40) == {0: WHOLE}


def test_rows_of_one_source_alone_are_divided_nearly_by_shares() -> None:
    # Rank 0 has all 1,000 rows. If it kept them, nobody would compute less.
    [part] = near_first_parts(planned((0, 500), (1, 500)), [1000], one_node(2), 1000).values()
    assert part == WHOLE * TOLERATED // 100


def test_the_tolerated_rows_are_divided_among_the_experts_of_a_rank() -> None:
    two = CopyPlan(hosts={0: ((0, 50), (1, 50)), 1: ((0, 50), (1, 50))}, before=0, after=0)
    one_of_two = near_first_parts(two, [10, 10], one_node(2), 200)[0]
    assert one_of_two == near_first_parts(planned((0, 50), (1, 50)), [10], one_node(2), 100)[0]
