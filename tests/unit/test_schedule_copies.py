"""Schedules of layers whose ranks host copies of busy experts: where weights and their gradients travel."""

import pytest

from pmoe.schedule.restore import ALL_PAIRS, KEEP, Restore
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, Lane, Schedule, Stages

KEPT = Stages(local=True, remote=True, copies="keep")
AGAIN = Stages(local=True, remote=True, copies="communicate")
PLAIN = Stages(local=True, remote=True)
RELAYED = Stages(local=True, remote=True, copies="communicate", relays_copies=True)
FROZEN = Stages(local=True, remote=True, copies="keep", frozen_copies=True)
STAYING = Stages(local=True, remote=True, copies="keep", local_copies=True)
NEW = {
    Kind.COPY_WEIGHTS,
    Kind.RELAY_WEIGHTS,
    Kind.COPY_WGRAD,
    Kind.RELAY_GRADIENTS,
    Kind.COPY_GRADIENTS,
    Kind.ADD_GRADIENTS,
}


def names(schedule: Schedule, lane: Lane) -> str:
    return " ".join(task.name for task in schedule.tasks if task.lane is lane)


def waits(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    return {task.name: task.waits for task in schedule.tasks}


def both_ways(n: int, stages: Stages, restore: Restore | None) -> tuple[Schedule, Schedule]:
    """The schedules of both passes; None is for buffers of their own."""
    if restore is None:
        return forward_schedule(n, stages), backward_schedule(n, stages)
    return (
        rotating("forward", n, stages, restore=restore),
        rotating("backward", n, stages, restore=restore),
    )


def test_weights_travel_first_and_only_the_experts_of_received_rows_wait_for_them() -> None:
    schedule = forward_schedule(2, KEPT)
    assert names(schedule, Lane.COMMUNICATE) == "V P S0 S1 R0 R1"
    assert names(schedule, Lane.COMPUTE) == "G0 G1 L0 C0 C1 L1 O0 O1"
    assert [name for name, of in waits(schedule).items() if "V" in of] == ["C0", "C1"]


def test_gradients_of_copies_go_home_beside_the_last_gradients_of_parameters() -> None:
    schedule = backward_schedule(2, KEPT)
    assert names(schedule, Lane.COMMUNICATE) == "S0 S1 R0 R1 VG P"
    assert names(schedule, Lane.COMPUTE) == "G0 G1 L0 LW0 L1 LW1 C0 KW0 C1 KW1 W0 W1 VA O0 O1"
    assert waits(schedule)["VG"] == ("KW1",)
    assert waits(schedule)["VA"] == ("VG", "W1")


def test_rows_that_stay_for_copies_have_tasks_of_their_own_which_wait_for_the_weights() -> None:
    forward, backward = both_ways(3, STAYING, None)
    assert names(forward, Lane.COMPUTE) == "G0 G1 G2 L0 L2 C0 C1 C2 L1 L3 O0 O1 O2"
    assert [name for name, of in waits(forward).items() if "V" in of] == ["L2", "C0", "C1", "C2", "L3"]
    assert waits(forward)["O1"] == ("L0", "L2", "R1")
    assert names(backward, Lane.COMPUTE) == (
        "G0 G1 G2 L0 LW0 L2 LKW2 L3 LKW3 C0 KW0 C1 KW1 W0 C2 KW2 W1 W2 L1 LW1 VA O0 O1 O2"
    )
    assert waits(backward)["KW0"] == ("C0", "LKW3")  # the gradients of copies are added in list order
    assert waits(backward)["VG"] == ("KW2",)
    assert waits(backward)["VA"] == ("VG", "LW1")
    forward, backward = both_ways(1, STAYING, None)
    assert names(forward, Lane.COMPUTE) == "G0 L0 L1 C0 O0"
    assert names(backward, Lane.COMPUTE) == "G0 L0 LW0 L1 LKW1 C0 KW0 W0 VA O0"


def test_rows_that_stay_for_frozen_copies_have_no_gradients_of_parameters() -> None:
    frozen = Stages(local=True, remote=True, copies="keep", local_copies=True, frozen_copies=True)
    backward = backward_schedule(2, frozen)
    assert names(backward, Lane.COMPUTE) == "G0 G1 L0 LW0 L2 L3 C0 C1 W0 W1 L1 LW1 O0 O1"


@pytest.mark.parametrize("restore", [None, KEEP, Restore("communicate", "recompute")], ids=str)
def test_copies_from_an_earlier_call_are_not_sent_but_their_gradients_are(restore: Restore | None) -> None:
    stages = Stages(local=True, remote=True, copies="present", relays_copies=True)
    forward, backward = both_ways(2, stages, restore)
    kinds = {task.kind for schedule in (forward, backward) for task in schedule.tasks}
    assert kinds & NEW == NEW - {Kind.COPY_WEIGHTS, Kind.RELAY_WEIGHTS}
    assert any(name.startswith("KW") for name in waits(backward)["VGR"])


def test_ring_slots_change_nothing_of_the_order_of_copies() -> None:
    forward, backward = both_ways(2, AGAIN, Restore("communicate", "recompute"))
    assert names(forward, Lane.COMMUNICATE).startswith("V S0")
    assert names(backward, Lane.COMMUNICATE) == "V SI1 S1 SI0 S0 R1 R0 VG P"
    compute = names(backward, Lane.COMPUTE).split()
    assert compute.index("KW0") + 1 == compute.index("W0")
    assert compute.index("VA") == compute.index("LW0") + 1
    assert [name for name, of in waits(backward).items() if "V" in of] == ["M1", "C1", "M0", "C0"]


def test_parts_are_passed_on_behind_the_first_dispatch_and_gradients_before_they_go_home() -> None:
    forward, backward = both_ways(2, RELAYED, None)
    assert names(forward, Lane.COMMUNICATE) == "V P S0 VR S1 R0 R1"
    assert waits(forward)["VR"] == ("V",)
    assert [name for name, of in waits(forward).items() if "VR" in of] == ["C0", "C1"]
    assert names(backward, Lane.COMMUNICATE) == "V S0 VR S1 R0 R1 VGR P VG"
    assert waits(backward)["VG"] == ("KW1", "VGR")
    assert waits(backward)["VA"] == ("VG", "W1")


@pytest.mark.parametrize("restore", [None, *ALL_PAIRS], ids=str)
def test_frozen_experts_have_copies_without_gradients(restore: Restore | None) -> None:
    forward, backward = both_ways(3, FROZEN, restore)
    assert [task.name for task in forward.tasks if task.kind in NEW] == ["V"]
    assert not backward.kinds & NEW


@pytest.mark.parametrize("restore", [None, *ALL_PAIRS], ids=str)
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("copies", [KEPT, AGAIN], ids=["keep", "communicate"])
def test_copies_add_tasks_and_move_no_other(n: int, copies: Stages, restore: Restore | None) -> None:
    for with_copies, without in zip(both_ways(n, copies, restore), both_ways(n, PLAIN, restore), strict=True):
        others = [task.name for task in with_copies.tasks if task.kind not in NEW]
        assert others == [task.name for task in without.tasks]
        assert dict(with_copies.slots) == dict(without.slots)
        added = [task.name for task in with_copies.tasks if task.kind in NEW]
        if with_copies.direction == "forward":
            assert added == ["V"]
        else:
            chunks = range(n) if restore is None else range(n - 1, -1, -1)
            again = ["V"] * (copies.copies == "communicate")
            assert added == [*again, *(f"KW{i}" for i in chunks), "VG", "VA"]
            last_sum = [task for task in with_copies.tasks if "dw" in task.writes][-1]
            assert last_sum.kind is Kind.ADD_GRADIENTS


def test_the_schedules_are_those_of_a_layer_with_sharded_experts_too() -> None:
    stages = Stages(local=False, remote=True, sharded=True, copies="keep")
    forward, backward = both_ways(3, stages, KEEP)
    assert [name for name, of in waits(forward).items() if "V" in of] == ["C0", "C1", "C2"]
    assert names(backward, Lane.COMMUNICATE).split()[-2] == "VG"


def test_copies_are_refused_where_no_rows_travel() -> None:
    with pytest.raises(ValueError, match=r"copies \('keep'\) must be None where no rows travel"):
        Stages(local=True, remote=False, copies="keep")
