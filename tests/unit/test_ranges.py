"""Lancet's dynamic programme against all ways to divide a small pass."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from pmoe.graph.instructions import COMMUNICATE, COMPUTE, Instruction, total_seconds, users_of
from pmoe.graph.ranges import (
    Cuttable,
    PartCosts,
    Range,
    lags,
    pipeline_seconds,
    pipelined,
    solve,
    turns,
    whole_ranges,
)

KINDS = "c m c m c c"  # gate, all-to-all, experts, all-to-all, and what follows


def chain(
    seed: int, kinds: str = KINDS, launch: float = 0.05
) -> tuple[list[Instruction], dict[int, PartCosts]]:
    draw, found = random.Random(seed), list[Instruction]()
    for at, kind in enumerate(kinds.split()):
        found.append(
            Instruction(
                name=f"{kind}{at}",
                waits=(found[-1].name,) if found else (),
                seconds=draw.uniform(0.9, 1.1),
                lane=COMMUNICATE if kind == "m" else COMPUTE,
            )
        )
    costs = {
        k: PartCosts(
            {each.name: each.seconds / k + launch * (k > 1) for each in found},
            {each.name: launch * (k > 1) for each in found},
        )
        for k in (1, 2, 4)
    }
    return found, costs


def everything(graph: Cuttable, costs: dict[int, PartCosts]) -> float:
    """Returns the fewest seconds of any way to divide a graph into ranges, each run as a pipeline of any k.

    k is the number of parts of the batch: 1 or any that is allowed. All ways are tried.
    """
    instructions, best = graph.instructions, math.inf
    users, inner = users_of(instructions), [at for at in range(1, len(instructions)) if graph.ends[at]]
    for count in range(len(inner) + 1):
        for cuts in itertools.combinations(inner, count):
            places, total = [0, *cuts, len(instructions)], 0.0
            for begin, end in itertools.pairwise(places):
                body = instructions[begin:end]
                may = all(graph.can[begin:end]) and any(each.communicates for each in body)
                ks = costs if may else [1]
                total += min(pipeline_seconds(body, k, lag, costs[k], users) for k in ks for lag in lags(k))
            best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("launch", [0.0, 0.05, 2.0])
def test_the_ranges_are_the_best_of_all(seed: int, launch: float) -> None:
    instructions, costs = chain(seed, launch=launch)
    can = [True] * len(instructions)
    can[0] = seed % 2 == 0
    graph = Cuttable(instructions, [True] * (len(instructions) + 1), can)
    seconds, ranges = solve(graph, costs)
    assert seconds == pytest.approx(everything(graph, costs))
    assert bool(ranges) == (launch < 1)


def test_no_range_ends_where_it_may_not() -> None:
    instructions, costs = chain(1, launch=0.0)
    ends = [True, True, False, False, True, False, True]
    seconds, ranges = solve(Cuttable(instructions, ends, [True] * 6), costs)
    names = [each.name for each in instructions]
    for each in ranges:
        assert ends[names.index(each.first)] and ends[names.index(each.last) + 1]
    assert seconds == pytest.approx(everything(Cuttable(instructions, ends, [True] * 6), costs))


def test_a_pipeline_is_that_of_figure_9() -> None:
    """The stages run one part after another. A part's stage waits for its own last stage, and its all-to-all
    is issued before the next part computes.
    """
    instructions, costs = chain(0)
    tasks = pipelined(instructions[:3], 2, 2, costs[2])
    assert [each.name for each in tasks] == [
        "c0 to c0, part 0", "m1 to m1, part 0", "c0 to c0, part 1", "m1 to m1, part 1", "c2 to c2, part 0",
        "c2 to c2, part 1",
    ]  # fmt: skip
    assert [each.waits for each in tasks] == [
        (), ("c0 to c0, part 0",), (), ("c0 to c0, part 1",), ("m1 to m1, part 0",), ("m1 to m1, part 1",),
    ]  # fmt: skip


def test_rows_of_the_first_part_do_not_wait_for_the_gates_of_all() -> None:
    """The first half of the rows is sent while the second gate computes.

    This needs the exchange of counts to be in the first stage.
    """
    gate, rows, experts = (Instruction(name=name, seconds=2.0) for name in ("gate", "rows", "experts"))
    counts = Instruction(name="counts", waits=("gate",), lane=COMMUNICATE, is_counts=True)
    rows = replace(rows, waits=("counts",), lane=COMMUNICATE)
    body = [gate, counts, rows, replace(experts, waits=("rows",))]
    halves = PartCosts({each.name: each.seconds / 2 for each in body}, {})
    assert [each.name for each in pipelined(body, 2, 2, halves)][:2] == [
        "gate to counts, part 0",
        "rows to rows, part 0",
    ]
    assert total_seconds(pipelined(body, 2, 2, halves)) == 4.0


def test_a_ways_home_of_an_early_part_need_not_wait_for_the_dispatches_of_all() -> None:
    """3 parts have gates of 3 s, experts of 1 s and all-to-alls of 2 s.

    If experts run one part behind the gates, the first results are sent back while the last gate computes.
    """
    sizes = {"gate": 3.0, "rows": 2.0, "experts": 1.0, "home": 2.0}
    body, waits = list[Instruction](), tuple[str, ...]()
    for name, seconds in sizes.items():
        lane = COMMUNICATE if name in ("rows", "home") else COMPUTE
        body.append(Instruction(name=name, waits=waits, seconds=seconds, lane=lane))
        waits = (name,)
    thirds = PartCosts(sizes, {})
    assert turns(2, 3, 1) == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]
    assert turns(4, 2, 2) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    ends = {lag: total_seconds(pipelined(body, 3, lag, thirds)) for lag in (1, 3)}
    assert ends == {1: 16.0, 3: 17.0}


def test_costs_of_parts_are_measured_on_all_that_can_be_cut() -> None:
    instructions, _ = chain(0, "c c m c m c c c m c")
    can = [True] * 10
    can[6] = False  # the second c behind the second m
    ends = [True] * 11
    ends[6] = False
    found = whole_ranges(Cuttable(instructions, ends, can), 3)
    assert found == [Range("c0", "m4", 3, 3), Range("c7", "c9", 3, 3)]
