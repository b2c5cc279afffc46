"""The benchmark of reductions beside compiled graphs computes exposed times and their bound."""

from __future__ import annotations

import pytest

from bench.bench_lancet_reductions import NOT_REDUCED, PLANNED, Steps, predicted, row_of
from bench.timing import Timing
from pmoe.graph.instructions import COMMUNICATE, Instruction

TIMES = {PLANNED: Timing((10.0, 12.0, 30.0)), PLANNED + NOT_REDUCED: Timing((9.0, 6.0, 28.0))}


def row(plain_backward: float) -> dict[str, float]:
    """A backward pass of 6 s in which the link carries 50 bytes, at 10 bytes a second."""
    steps = {
        PLANNED: Steps([6.0] * 3, [9.0] * 3, [50] * 3),
        PLANNED + NOT_REDUCED: Steps([plain_backward] * 3, [0.5, 1.5, 9.0], [20] * 3),
    }
    return row_of(PLANNED, TIMES, steps, [3.0, 4.5], rate=10.0)


def test_the_reduction_is_compared_within_a_round_and_all_to_alls_are_those_of_steps_without_it() -> None:
    result = row(4.0)
    assert result["exposed reduction ms"] == 2000.0  # of 1, 6 and 2 s; the medians differ by 3 s
    assert result["exposed all-to-all ms"] == 1500.0
    assert result["together ms"] == 3500.0
    assert result["idle link ms"] == 1000.0
    assert result["first bucket %"] == 50.0
    assert result["half of them %"] == 75.0


@pytest.mark.parametrize(("plain_backward", "bound_ms"), [(4.0, 1000.0), (5.5, 0.0)])
def test_what_the_link_carries_beyond_the_time_of_the_pass_is_the_bound(
    plain_backward: float, bound_ms: float
) -> None:
    assert row(plain_backward)["its bound ms"] == bound_ms


def test_the_plan_predicts_messages_and_reductions_apart() -> None:
    passed = [
        Instruction(name="dx", seconds=1.0),
        Instruction(name="S", waits=("dx",), seconds=2.0, lane=COMMUNICATE),
        Instruction(
            name="gradient of w", waits=("dx",), seconds=3.0, lane=COMMUNICATE, hands_over=True
        ),
    ]  # fmt: skip
    assert predicted(passed) == {
        "backward ms": 6000.0, "exposed ms": 5000.0, "all-to-alls ms": 2000.0, "reductions ms": 3000.0
    }  # fmt: skip
