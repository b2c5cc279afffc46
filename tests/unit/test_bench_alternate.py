"""Layers without ring slots dispatch all chunks first: no alternating order, as Fig. 7a's, is ever faster.

The benchmark that says so is `bench/bench_alternate.py`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import pytest

from bench.bench_alternate import (
    ALTERNATING,
    ALTERNATING_GATHERS,
    FIRST,
    LINKS,
    ORDERS,
    Case,
    case,
    of_all_ranks,
    running,
    schedule_in,
    simulated_rows,
)
from pmoe.planner import memory
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.planner.memory import PredictedMemory
from pmoe.planner.rows_per_pass import PassRows
from pmoe.planner.simulator import makespan, simulate
from pmoe.schedule import separate_buffers
from pmoe.schedule.buffer_sizes import ChunkRows
from pmoe.schedule.restore import KEEP
from pmoe.schedule.tasks import Kind, Lane, PassDirection, Schedule, Stages

BOTH = Stages(local=True, remote=True)
STAGES = {
    "both": BOTH,
    "all travel": Stages(local=False, remote=True),
    "sharded": Stages(local=False, remote=True, sharded=True, shared=True, gradients=True),
    "one lane": Stages(local=False, remote=True, sharded=True, one_lane=True),
}
DIRECTIONS: tuple[PassDirection, ...] = ("forward", "backward")
BUILDERS = {"forward": separate_buffers.forward_schedule, "backward": separate_buffers.backward_schedule}


def on(schedule: Schedule, lane: Lane) -> str:
    return " ".join(task.name for task in schedule.tasks if task.lane is lane)


# ---- the orders


@pytest.mark.parametrize(
    ("direction", "order", "link"),
    [
        ("forward", FIRST, "P S0 S1 S2 S3 R0 R1 R2 R3"),
        ("forward", ALTERNATING, "P S0 S1 R0 S2 R1 S3 R2 R3"),
        ("backward", FIRST, "S0 S1 S2 S3 R0 R1 R2 R3 P"),
        ("backward", ALTERNATING, "S0 S1 R0 S2 R1 S3 R2 R3 P"),
    ],
)
def test_the_order_of_the_link_is_the_stated_one(direction: PassDirection, order: str, link: str) -> None:
    assert on(schedule_in(order, direction, 4, BOTH), Lane.COMMUNICATE) == link


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_layers_own_schedule_dispatches_all_chunks_first(direction: PassDirection) -> None:
    """docs/papers.md (Fig. 7) says so. If the layer alternates one day, that page must change, too."""
    for stages in STAGES.values():
        kinds = [task.kind for task in BUILDERS[direction](6, stages).tasks]
        last_dispatch = max(at for at, kind in enumerate(kinds) if kind is Kind.DISPATCH)
        assert last_dispatch < kinds.index(Kind.COMBINE)


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_alternating_schedule_has_the_same_tasks(direction: PassDirection, stages: Stages) -> None:
    for n in (1, 2, 3, 8):
        first = BUILDERS[direction](n, stages)
        for order in ORDERS[1:]:
            other = schedule_in(order, direction, n, stages)
            assert (other == first) is (n <= 2)
            assert {task.name: set(task.waits) for task in other.tasks} == {
                task.name: set(task.waits) for task in first.tasks
            }
            work = [
                {(task.name, task.lane, task.reads, task.writes) for task in s.tasks} for s in (first, other)
            ]
            assert work[0] == work[1]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_alternating_schedule_changes_only_the_order_of_links(direction: PassDirection) -> None:
    first, other = (schedule_in(order, direction, 8, BOTH) for order in (FIRST, ALTERNATING))
    assert on(first, Lane.COMPUTE) == on(other, Lane.COMPUTE)
    gathers = schedule_in(ALTERNATING_GATHERS, direction, 4, BOTH)
    assert " C0 G2 C1 G3 " in on(gathers, Lane.COMPUTE)
    assert on(gathers, Lane.COMMUNICATE) == on(schedule_in(ALTERNATING, direction, 4, BOTH), Lane.COMMUNICATE)


def test_the_engine_runs_the_order_inside_of_the_block() -> None:
    with running(ALTERNATING):
        assert separate_buffers.forward_schedule(4, BOTH) == schedule_in(ALTERNATING, "forward", 4, BOTH)
    assert separate_buffers.forward_schedule is BUILDERS["forward"]


# ---- what they take


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_costs_make_alternating_faster(direction: PassDirection, stages: Stages) -> None:
    """Tasks of 300 passes take random seconds, other ones for each kind and each chunk."""
    generator = random.Random(direction)
    slower = 0
    for _ in range(300):
        n = generator.randint(3, 16)
        first = BUILDERS[direction](n, stages)
        kinds = {kind: 10 ** generator.uniform(-1, 1) for kind in sorted(first.kinds)}
        seconds = {task.name: kinds[task.kind] * generator.uniform(0.2, 2) for task in first.tasks}
        ends = {
            order: makespan(
                simulate(
                    schedule_in(order, direction, n, stages).tasks,
                    lambda task, seconds=seconds: seconds[task.name],
                )
            )
            for order in (FIRST, ALTERNATING)
        }
        assert ends[ALTERNATING] >= ends[FIRST] * (1 - 1e-9)
        slower += ends[ALTERNATING] > ends[FIRST] * 1.01
    assert slower > 30


def test_alternating_is_never_faster_for_all_ranks_of_the_grid() -> None:
    rows = simulated_rows(seeds=2)
    assert {row["link"] for row in rows} == set(LINKS)
    for row in rows:
        assert row["min"] >= 1 - 1e-9, row


def test_where_the_link_is_as_slow_as_computing_alternating_takes_a_third_longer() -> None:
    """Example: S of chunk 2 waits for R of chunk 0, and so for C of chunk 0, while the link idles."""
    one = case("forward", 8, 1.0, None)
    assert one.pass_seconds(ALTERNATING) / one.pass_seconds(FIRST) == pytest.approx(1.35, abs=0.02)


def test_a_collective_of_all_ranks_waits_for_the_slowest() -> None:
    """n = 1, two ranks, one of which computes 3 s for each s of the other: both end together."""
    rows = [[[0.5, 0.5], [0.5, 0.5]]]
    even = Case(direction="forward", rows=rows, link=1.0, slowness=(1.0, 1.0), fixed=0.0)
    slow = Case(direction="forward", rows=rows, link=1.0, slowness=(3.0, 1.0), fixed=0.0)
    tasks = simulate(of_all_ranks(schedule_in(FIRST, "forward", 1, BOTH), 2), slow.seconds)
    starts = {item.task.name: item.start for item in tasks}
    ends = {item.task.name: item.end for item in tasks}
    assert starts["R0@-1"] == ends["C0@0"] > ends["C0@1"]
    assert slow.pass_seconds(FIRST) > even.pass_seconds(FIRST)
    assert even.pass_seconds(FIRST) == pytest.approx(0.01 + 0.5 + 0.5 + 0.5 + 0.02)


# ---- what they hold


def predicted(order: str, n: int) -> PredictedMemory:
    """Returns the bytes of a layer whose schedules have the given order, on 2 ranks with even rows."""
    each = (64,) * n
    none = (False,) * n
    extent = ChunkRows(send=each, received=each, local=each, home=(128,) * n, regrouped=none)
    rows = PassRows(extent=extent, received=64 * n, local=64 * n, sent=64 * n, exact=True)
    sizes = replace(sizes_from_options(16, 32, 8, num_ranks=2), rotates=False)

    def build(direction: PassDirection) -> mock.Mock:
        return mock.Mock(side_effect=lambda n, stages: schedule_in(order, direction, n, stages))

    builders = {f"{direction}_schedule": build(direction) for direction in DIRECTIONS}
    with mock.patch.multiple(memory, **builders):
        result = memory.predict(sizes, sizes.call(128 * n), rows, rows, KEEP)
    assert all(builder.called for builder in builders.values())
    return result


@pytest.mark.parametrize("order", ORDERS[1:])
def test_alternating_holds_as_many_bytes(order: str) -> None:
    """All buffers of all-to-alls are made when a pass begins, and freed when it ends."""
    for n in (3, 8):
        assert predicted(order, n) == predicted(FIRST, n)
