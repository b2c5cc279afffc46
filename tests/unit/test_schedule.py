"""The schedules as literal tables: which task runs in which order, on which lane, and after what."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest

from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import (
    Kind,
    Lane,
    Schedule,
    Stages,
    Task,
    link,
    make_task,
    sequential,
)

# Each line: task, lane, what it waits for.
FORWARD = {
    (1, "local"): """
        L0 compute
        O0 compute L0
    """,
    (1, "remote"): """
        G0 compute
        P  communicate
        S0 communicate G0
        C0 compute S0 P
        R0 communicate C0
        O0 compute R0
    """,
    (1, "both"): """
        G0 compute
        P  communicate
        S0 communicate G0
        L0 compute
        C0 compute S0 P
        R0 communicate C0
        O0 compute L0 R0
    """,
    (2, "local"): """
        L0 compute
        L1 compute
        O0 compute L0
        O1 compute L1
    """,
    (2, "remote"): """
        G0 compute
        P  communicate
        S0 communicate G0
        G1 compute
        S1 communicate G1
        C0 compute S0 P
        R0 communicate C0
        C1 compute S1 P
        R1 communicate C1
        O0 compute R0
        O1 compute R1
    """,
    (2, "both"): """
        G0 compute
        P  communicate
        S0 communicate G0
        G1 compute
        S1 communicate G1
        L0 compute
        C0 compute S0 P
        R0 communicate C0
        C1 compute S1 P
        R1 communicate C1
        L1 compute
        O0 compute L0 R0
        O1 compute L1 R1
    """,
    (3, "both"): """
        G0 compute
        P  communicate
        S0 communicate G0
        G1 compute
        S1 communicate G1
        G2 compute
        S2 communicate G2
        L0 compute
        C0 compute S0 P
        R0 communicate C0
        C1 compute S1 P
        R1 communicate C1
        C2 compute S2 P
        R2 communicate C2
        L1 compute
        O0 compute L0 R0
        O1 compute L0 R1
        O2 compute L1 R2
    """,
    (2, "sharded"): """
        G0  compute
        P   communicate
        PG  intra-node P
        S0  communicate G0
        AG0 intra-node S0
        G1  compute
        S1  communicate G1
        AG1 intra-node S1
        X   compute
        C0  compute AG0 PG
        RS0 intra-node C0
        R0  communicate RS0
        C1  compute AG1 PG
        RS1 intra-node C1
        R1  communicate RS1
        O0  compute R0 X
        O1  compute R1 X
    """,
    (2, "hooked"): """
        G0  compute
        P   communicate
        PG  intra-node P
        S0  communicate G0
        G1  compute
        S1  communicate G1
        HA0 compute S0
        AG0 intra-node HA0
        HA1 compute S1
        AG1 intra-node HA1
        C0  compute AG0 PG
        RS0 intra-node C0
        C1  compute AG1 PG
        RS1 intra-node C1
        HB0 compute RS0
        R0  communicate HB0
        HB1 compute RS1
        R1  communicate HB1
        O0  compute R0
        O1  compute R1
    """,
}

BACKWARD = {
    (1, "local"): """
        L0  compute
        LW0 compute L0
        O0  compute L0
    """,
    (1, "remote"): """
        G0 compute
        S0 communicate G0
        C0 compute S0
        R0 communicate C0
        P  communicate C0
        W0 compute C0
        O0 compute R0
    """,
    (1, "both"): """
        G0  compute
        S0  communicate G0
        L0  compute
        LW0 compute L0
        C0  compute S0
        R0  communicate C0
        P   communicate C0
        W0  compute C0 LW0
        O0  compute L0 R0
    """,
    (2, "local"): """
        L0  compute
        LW0 compute L0
        L1  compute
        LW1 compute L1 LW0
        O0  compute L0
        O1  compute L1
    """,
    (2, "remote"): """
        G0 compute
        S0 communicate G0
        G1 compute
        S1 communicate G1
        C0 compute S0
        R0 communicate C0
        C1 compute S1
        R1 communicate C1
        W0 compute C0
        P  communicate C0 C1
        W1 compute C1 W0
        O0 compute R0
        O1 compute R1
    """,
    (2, "both"): """
        G0  compute
        S0  communicate G0
        G1  compute
        S1  communicate G1
        L0  compute
        LW0 compute L0
        L1  compute
        LW1 compute L1 LW0
        C0  compute S0
        R0  communicate C0
        C1  compute S1
        R1  communicate C1
        W0  compute C0 LW1
        P   communicate C0 C1
        W1  compute C1 W0
        O0  compute L0 R0
        O1  compute L1 R1
    """,
    (3, "both"): """
        G0  compute
        S0  communicate G0
        G1  compute
        S1  communicate G1
        G2  compute
        S2  communicate G2
        L0  compute
        LW0 compute L0
        L1  compute
        LW1 compute L1 LW0
        C0  compute S0
        R0  communicate C0
        C1  compute S1
        R1  communicate C1
        W0  compute C0 LW1
        C2  compute S2
        R2  communicate C2
        W1  compute C1 W0
        P   communicate C0 C1 C2
        W2  compute C2 W1
        O0  compute L0 R0
        O1  compute L0 R1
        O2  compute L1 R2
    """,
    (2, "sharded"): """
        G0  compute
        S0  communicate G0
        AG0 intra-node S0
        G1  compute
        S1  communicate G1
        AG1 intra-node S1
        X   compute
        XW  compute X
        C0  compute AG0
        RS0 intra-node C0
        R0  communicate RS0
        C1  compute AG1
        RS1 intra-node C1
        R1  communicate RS1
        W0  compute C0
        PG  intra-node C0 C1
        P   communicate PG
        W1  compute C1 W0
        O0  compute R0 X
        O1  compute R1 X
    """,
    (2, "with gradients"): """
        G0  compute
        S0  communicate G0
        AG0 intra-node S0
        G1  compute
        S1  communicate G1
        GAR communicate
        AG1 intra-node S1
        C0  compute AG0
        RS0 intra-node C0
        R0  communicate RS0
        C1  compute AG1
        RS1 intra-node C1
        R1  communicate RS1
        W0  compute C0
        PG  intra-node C0 C1
        P   communicate PG
        W1  compute C1 W0
        O0  compute R0
        O1  compute R1
    """,
}

ROWS = {
    "local": {"local": True, "remote": False},
    "remote": {"local": False, "remote": True},
    "both": {"local": True, "remote": True},
    "sharded": {"local": False, "remote": True, "sharded": True, "shared": True},
    "with gradients": {"local": False, "remote": True, "sharded": True, "gradients": True},
    "hooked": {"local": False, "remote": True, "sharded": True, "hooked": True},
}
BUILD = {"forward": forward_schedule, "backward": backward_schedule}

# What a pass may read without having written it.
INPUTS = {
    "forward": ("T_I", "weight"),
    "backward": ("dT_O", "T_DI.", "T_DI_L.", "T_M.", "T_M_L.", "dw"),
}


def every_variant(direction: str) -> Iterator[tuple[int, str, Schedule]]:
    """Yields (n, rows, schedule) for all n up to 8 and all kinds of rows: those that stay and those that are
    sent.
    """
    for n, rows in itertools.product(range(1, 9), ROWS):
        yield n, rows, BUILD[direction](n, Stages(**ROWS[rows]))


def table(text: str) -> list[tuple[str, str, tuple[str, ...]]]:
    lines = [line.split() for line in text.strip().splitlines()]
    return [(name, lane, tuple(waits)) for name, lane, *waits in lines]


def rows_of(schedule: Schedule) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(task.name, task.lane.value, task.waits) for task in schedule.tasks]


def names(schedule: Schedule, lane: Lane | None = None) -> str:
    return " ".join(task.name for task in schedule.tasks if lane in (None, task.lane))


@pytest.mark.parametrize("n, rows", FORWARD)
def test_the_forward_schedule_is_this_table(n: int, rows: str) -> None:
    assert rows_of(forward_schedule(n, Stages(**ROWS[rows]))) == table(FORWARD[n, rows])


@pytest.mark.parametrize("n, rows", BACKWARD)
def test_the_backward_schedule_is_this_table(n: int, rows: str) -> None:
    assert rows_of(backward_schedule(n, Stages(**ROWS[rows]))) == table(BACKWARD[n, rows])


def test_everything_is_sent_before_anything_returns() -> None:
    schedule = forward_schedule(4, Stages(local=False, remote=True))
    assert names(schedule, Lane.COMMUNICATE) == "P S0 S1 S2 S3 R0 R1 R2 R3"


@pytest.mark.parametrize("direction", BUILD)
def test_every_task_is_named_once_and_waits_only_for_earlier_ones(direction: str) -> None:
    for _, _, schedule in every_variant(direction):
        seen: set[str] = set()
        for task in schedule.tasks:
            assert task.name not in seen
            assert set(task.waits) <= seen, task
            seen.add(task.name)


@pytest.mark.parametrize("direction", BUILD)
def test_every_buffer_is_written_before_it_is_read_and_its_writer_is_awaited(direction: str) -> None:
    result = "T_O" if direction == "forward" else "dT_I"
    for n, rows, schedule in every_variant(direction):
        writer: dict[str, str] = {}
        for task in schedule.tasks:
            for buffer in task.reads:
                if buffer in writer:
                    assert writer[buffer] in task.waits, (task, buffer)
                else:
                    assert buffer.startswith(INPUTS[direction]), (task, buffer)
            writer.update(dict.fromkeys(task.writes, task.name))
        assert {f"{result}.{i}" for i in range(n)} <= set(writer), rows


@pytest.mark.parametrize("direction", BUILD)
def test_the_next_chunk_is_sent_before_a_chunk_returns_and_a_chunk_returns_before_its_output(
    direction: str,
) -> None:
    for n, rows, schedule in every_variant(direction):
        position = {task.name: i for i, task in enumerate(schedule.tasks)}
        assert all(f"O{i}" in position for i in range(n))
        if rows == "local":
            assert names(schedule, Lane.COMMUNICATE) == ""
            continue
        for i in range(n):
            assert position[f"S{i}"] < position[f"C{i}"] < position[f"R{i}"] < position[f"O{i}"]
            if i + 1 < n:
                assert position[f"S{i + 1}"] < position[f"R{i}"]


@pytest.mark.parametrize("direction", BUILD)
def test_only_what_travels_is_on_the_communication_lane(direction: str) -> None:
    for _, _, schedule in every_variant(direction):
        for task in schedule.tasks:
            travels = task.kind in (Kind.WEIGHTS, Kind.DISPATCH, Kind.COMBINE, Kind.GRADIENTS)
            inside = task.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.SHARE_WEIGHTS)
            assert (task.lane is Lane.COMMUNICATE) == travels, task
            assert (task.lane is Lane.INTRA_NODE) == inside, task


@pytest.mark.parametrize("direction", BUILD)
def test_on_one_lane_the_same_tasks_wait_for_the_same(direction: str) -> None:
    for n, rows in itertools.product((1, 3), ("sharded", "hooked")):
        two = BUILD[direction](n, Stages(**ROWS[rows]))
        one = BUILD[direction](n, Stages(**ROWS[rows], one_lane=True))
        assert [(task.name, task.waits) for task in one.tasks] == [(t.name, t.waits) for t in two.tasks]
        assert {task.lane for task in one.tasks} == {Lane.COMPUTE, Lane.COMMUNICATE}


def test_all_are_gathered_before_any_is_summed_as_fsmoe_has_it() -> None:
    stages = Stages(local=False, remote=True, sharded=True, gradients=True)
    schedule = backward_schedule(3, stages)
    assert names(schedule, Lane.COMMUNICATE) == "S0 S1 S2 GAR R0 R1 R2 P"
    assert names(schedule, Lane.INTRA_NODE) == "AG0 AG1 AG2 RS0 RS1 RS2 PG"


def test_callbacks_of_a_chunk_run_before_the_experts_of_the_one_before() -> None:
    schedule = forward_schedule(3, Stages(local=False, remote=True, sharded=True, hooked=True))
    assert names(schedule, Lane.COMPUTE) == "G0 G1 G2 HA0 HA1 C0 HA2 C1 HB0 C2 HB1 HB2 O0 O1 O2"
    assert names(schedule, Lane.INTRA_NODE) == "PG AG0 AG1 RS0 AG2 RS1 RS2"


@pytest.mark.parametrize("direction", BUILD)
def test_a_sequential_schedule_is_the_same_tasks_in_one_chain(direction: str) -> None:
    for _, _, schedule in every_variant(direction):
        chained = sequential(schedule)
        assert names(chained) == names(schedule)
        assert chained.direction == direction
        for before, task, free in zip(chained.tasks, chained.tasks[1:], schedule.tasks[1:], strict=False):
            assert set(task.waits) == {*free.waits, before.name}


def test_a_sequential_schedule_is_this_table() -> None:
    assert rows_of(sequential(forward_schedule(1, Stages(local=True, remote=True)))) == table("""
        G0 compute
        P  communicate G0
        S0 communicate G0 P
        L0 compute S0
        C0 compute S0 P L0
        R0 communicate C0
        O0 compute L0 R0
    """)


def test_a_buffer_is_written_again_only_after_its_readers() -> None:
    def task(kind: Kind, reads: str, writes: str) -> Task:
        return Task(
            kind=kind, chunk=0, lane=Lane.COMPUTE, reads=tuple(reads.split()), writes=tuple(writes.split())
        )

    tasks = [
        task(Kind.DISPATCH, "", "slot"),
        task(Kind.COMPUTE, "slot", "out"),
        task(Kind.COMBINE, "slot out", ""),
        task(Kind.GATHER, "", "slot"),
        task(Kind.OUTPUT, "slot", ""),
    ]
    assert [(t.name, t.waits) for t in link(tasks)] == [
        ("S0", ()),
        ("C0", ("S0",)),
        ("R0", ("S0", "C0")),
        ("G0", ("S0", "C0", "R0")),
        ("O0", ("G0",)),
    ]


def test_a_buffer_is_not_read_where_its_slot_holds_another() -> None:
    tasks = [
        make_task(Kind.GATHER, 0, [], ["send.0"]),
        make_task(Kind.GATHER, 1, [], ["send.1"]),
        make_task(Kind.DISPATCH, 0, ["send.0"], ["T_DI.0"]),
    ]
    link(tasks, {"send.0": "send[0]", "send.1": "send[1]"})
    with pytest.raises(ValueError, match=r"task S0 reads send.0, but send\[0\] holds send.1"):
        link(tasks, {"send.0": "send[0]", "send.1": "send[0]"})


def test_a_schedule_prints_as_a_table() -> None:
    assert str(forward_schedule(1, Stages(local=True, remote=True))).splitlines() == [
        "task  lane         waits for  reads             writes",
        "G0    compute                 T_I.0             send.0",
        "P     communicate             weight            weight_DI",
        "S0    communicate  G0         send.0            T_DI.0",
        "L0    compute                 T_I_L.0 weight    T_DI_L.0 T_M_L.0 home_L.0",
        "C0    compute      S0 P       T_DI.0 weight_DI  T_M.0 T_DO.0",
        "R0    communicate  C0         T_DO.0            home.0",
        "O0    compute      L0 R0      home_L.0 home.0   T_O.0",
    ]


@pytest.mark.parametrize("build", BUILD.values())
def test_bad_arguments_are_refused_by_name_and_value(build: type) -> None:
    with pytest.raises(ValueError, match=r"n \(0\) must be at least 1"):
        build(0, Stages(local=True, remote=True))
    with pytest.raises(ValueError, match=r"n \(-3\) must be at least 1"):
        build(-3, Stages(local=True, remote=True))
    with pytest.raises(ValueError, match=r"local \(False\) or remote \(False\)"):
        build(2, Stages(local=False, remote=False))


# ---- waits between lanes


def ended_before(schedule: Schedule, waits: Callable[[Task], Iterable[str]]) -> dict[str, set[str]]:
    """Returns, for each task, the tasks that have surely ended when it starts.

    Lanes run their tasks in order, and wait for the tasks that ``waits`` returns.
    """
    ended: dict[str, set[str]] = {}
    last: dict[Lane, str] = {}
    for task in schedule.tasks:
        names = [*waits(task), *([last[task.lane]] if task.lane in last else [])]
        ended[task.name] = set().union(*({name} | ended[name] for name in names))
        last[task.lane] = task.name
    return ended


def many_schedules() -> Iterator[Schedule]:
    both = (False, True)
    for direction, n, local, remote in itertools.product(("forward", "backward"), (1, 2, 4, 5), both, both):
        if not (local or remote):
            continue
        for sharded, shared in itertools.product((False, remote), both):
            stages = Stages(local=local and not sharded, remote=remote, sharded=sharded, shared=shared)
            build = forward_schedule if direction == "forward" else backward_schedule
            yield build(n, stages)
            for restore in ALL_PAIRS:
                yield rotating(direction, n, stages, restore=restore, rearranged=n == 4)


def test_lanes_wait_for_a_least_set_of_tasks_with_the_same_partial_order() -> None:
    num_waits = num_lane_waits = 0
    for schedule in many_schedules():
        lane_of = {task.name: task.lane for task in schedule.tasks}
        order = ended_before(schedule, lambda task: task.waits)
        assert ended_before(schedule, lambda task: schedule.lane_waits[task.name]) == order  # noqa: B023
        assert schedule.awaited == {name for names in schedule.lane_waits.values() for name in names}
        for task in schedule.tasks:
            across = [name for name in task.waits if lane_of[name] is not task.lane]
            kept = schedule.lane_waits[task.name]
            assert set(kept) <= set(across)
            num_waits += len(across)
            num_lane_waits += len(kept)
    assert num_lane_waits < 0.7 * num_waits


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_wait_between_lanes_can_be_left_out(direction: str) -> None:
    schedule = rotating(direction, 3, Stages(local=True, remote=True), restore=STRATEGIES["S1"])
    order = ended_before(schedule, lambda task: task.waits)
    for without in schedule.awaited:
        for task in schedule.tasks:
            if without in schedule.lane_waits[task.name]:
                left = {**schedule.lane_waits}
                left[task.name] = tuple(name for name in left[task.name] if name != without)
                assert ended_before(schedule, lambda task: left[task.name]) != order  # noqa: B023


# ---- copies that one launch makes


def test_joint_copies_of_s4_are_those_of_both_all_to_alls_and_of_rows_that_stay() -> None:
    schedule = rotating("backward", 4, Stages(local=True, remote=True), restore=STRATEGIES["S4"])
    joint = {name: [task.name for task in tasks] for name, tasks in schedule.joint_copies.items()}
    assert joint == {"GI3": ["G3"], "GI2": ["G2", "LM3"], "GI1": ["G1", "LM2"], "GI0": ["G0", "LM1"]}


def test_joint_copies_write_memory_that_no_task_uses_any_more() -> None:
    """Every earlier task that uses a slot of the copies has ended when the first of them is made."""
    num_joint = 0
    for schedule in many_schedules():
        ended = ended_before(schedule, lambda task: task.waits)
        place = {task.name: place for place, task in enumerate(schedule.tasks)}
        for first, tasks in schedule.joint_copies.items():
            for task in tasks:
                num_joint += 1
                names = (f"send.{task.chunk}",)
                if task.kind is Kind.LOCAL_RECOMPUTE:
                    names = (f"T_DI_L.{task.chunk}", f"dT_DO_L.{task.chunk}")
                slots = {schedule.slots[name] for name in names}
                for earlier in schedule.tasks[: place[task.name]]:
                    if slots.intersection(map(schedule.slots.get, earlier.reads + earlier.writes)):
                        assert earlier.name in ended[first], (first, task.name, earlier.name)
    assert num_joint > 100
