"""Copies of busy experts in the simulated seconds of a step: messages of weights and gradients, and KW."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pmoe.planner.copies import CopyPlan
from pmoe.planner.copy_work import NO_COPIES, CopyWork
from pmoe.planner.cost_model import Interference, eq10_seconds
from pmoe.planner.costs import LayerCosts, LineCost
from pmoe.planner.degree import Choice
from pmoe.planner.degree_search import ScheduleOptions, best_degree, pass_seconds
from pmoe.planner.layer_seconds import simulated_step, step_seconds
from pmoe.planner.layer_sizes import LayerSizes, sizes_from_options
from pmoe.schedule.restore import KEEP, STRATEGIES, Restore
from tests.unit.test_profile import MADE

PROFILE = replace(
    MADE, compute=LineCost(0.0, 1e-10), message=LineCost(1e-4, 1e-9), interference=Interference()
)
TOKENS = 512
ONE = CopyPlan(hosts={0: ((0, 60), (1, 40))}, before=100, after=100)
THREE = CopyPlan(hosts={0: ((0, 25), (1, 25), (2, 25), (3, 25))}, before=100, after=25)
TWO_OF_ONE_RANK = CopyPlan(hosts={0: ((0, 50), (1, 50)), 1: ((0, 50), (2, 50))}, before=200, after=100)


def work(
    plan: CopyPlan,
    nodes: Sequence[int] = (0,) * 4,
    *,
    is_sent: bool = True,
    stays: bool = False,
    learned: float = 1.0,
) -> CopyWork:
    return CopyWork.of(plan, nodes, is_sent=is_sent, stays=stays, learned=learned)


def test_the_busiest_rank_counts() -> None:
    assert work(ONE) == CopyWork(scattered=1, relayed=0, computed=0.5)
    # Each of three hosts gets a third of the expert from its owner, and two thirds from the others.
    assert work(THREE) == CopyWork(scattered=1, relayed=1, computed=1)
    # On two nodes, the owner sends the expert twice, and two hosts exchange their halves.
    assert work(THREE, (0, 0, 1, 1)) == CopyWork(scattered=2, relayed=0.5, computed=1)
    assert work(TWO_OF_ONE_RANK) == CopyWork(scattered=2, relayed=0, computed=0.5)
    assert work(CopyPlan(hosts={}, before=5, after=5)) == NO_COPIES


def test_similar_plans_have_equal_work() -> None:
    plans = [CopyPlan(hosts={0: ((0, 90 - rows), (1, rows))}, before=90, after=50) for rows in (28, 35, 45)]
    assert len({work(plan) for plan in plans}) == 1


def layer(copies: CopyWork = NO_COPIES) -> LayerSizes:
    sizes = sizes_from_options(64, 256, 8, num_ranks=4, dtype=torch.float32)
    return replace(sizes, copy_work=copies)


def seconds_of(copies: CopyWork, restore: Restore) -> dict[str, dict[str, float]]:
    """The seconds of every task of both passes, by name."""
    step = simulated_step(layer(copies), PROFILE, TOKENS, Choice(forward=2, backward=2, restore=restore))
    return {
        direction: {each.task.name: each.end - each.start for each in tasks}
        for direction, tasks in step.items()
    }


def test_weights_and_gradients_of_copies_are_messages_of_the_simulated_step() -> None:
    expert = 1e-4 + 1e-9 * layer().expert_bytes
    found = seconds_of(work(ONE), KEEP)
    assert found["forward"]["V"] == pytest.approx(expert)
    assert "V" not in found["backward"] and found["backward"]["VG"] == pytest.approx(expert)
    twice = seconds_of(work(TWO_OF_ONE_RANK), STRATEGIES["S4"])
    for direction in ("forward", "backward"):  # S4 sends weights again
        assert twice[direction]["V"] == pytest.approx(1e-4 + 2e-9 * layer().expert_bytes)
    relayed = seconds_of(work(THREE), KEEP)
    assert [relayed["forward"]["VR"], relayed["backward"]["VGR"]] == pytest.approx([expert] * 2)
    staying = seconds_of(work(ONE, stays=True), STRATEGIES["S4"])
    assert "V" in staying["forward"] and "V" not in staying["backward"]
    adapted = seconds_of(work(ONE, learned=0.25), KEEP)
    assert adapted["backward"]["VG"] == pytest.approx(1e-4 + 0.25e-9 * layer().expert_bytes)
    kept = seconds_of(work(ONE, is_sent=False, learned=0.0), STRATEGIES["S4"])
    assert not {"V", "VG", "KW0"} & {name for tasks in kept.values() for name in tasks}


def test_the_gradients_of_copies_are_a_part_of_those_of_all_received_rows() -> None:
    without = seconds_of(NO_COPIES, KEEP)["backward"]
    found = seconds_of(work(ONE), KEEP)["backward"]
    assert found["KW0"] == found["W0"] == pytest.approx(without["W0"] / 2)


def test_a_step_with_copies_takes_longer_where_nothing_hides_their_messages() -> None:
    choice = Choice(forward=1, backward=1, restore=KEEP)
    slow = replace(PROFILE, message=LineCost(0.0, 1e-6))
    expert = 1e-6 * layer().expert_bytes
    without, found = (step_seconds(layer(copies), slow, TOKENS, choice) for copies in (NO_COPIES, work(ONE)))
    assert without + expert < found <= without + 2.01 * expert


def test_the_cost_model_prices_copies_that_are_sent_again() -> None:
    slow = replace(
        PROFILE, message=LineCost(0.0, 1e-7), copy_out=LineCost(0.0, 0.0), copy_in=LineCost(0.0, 0.0)
    )
    expert = 1e-7 * layer().expert_bytes
    for pair, messages in (("S1", 2), ("S4", 3)):
        without, found = (
            eq10_seconds(layer(copies), slow, TOKENS, STRATEGIES[pair]) for copies in (NO_COPIES, work(ONE))
        )
        assert found - without == pytest.approx(messages * expert)


SLOW = LayerCosts(
    a2a=LineCost(0.1, 8.0),
    ag=LineCost(0.0, 0.0),
    rs=LineCost(0.0, 0.0),
    exp=LineCost(0.3, 16.0),
    copies=LineCost(0.0, 100.0),
)


@pytest.mark.parametrize("restore", [None, STRATEGIES["S4"]], ids=["own buffers", "S4"])
def test_the_solver_counts_the_messages_of_copies(restore: Restore | None) -> None:
    for direction, messages in (("forward", 1), ("backward", 1 if restore is None else 2)):
        alone, found = (
            pass_seconds(SLOW, 4, ScheduleOptions(direction=direction, restore=restore, copies=copies))
            for copies in (NO_COPIES, work(ONE))
        )
        assert 100 * messages < found <= alone + 100 * messages


def test_the_solver_takes_more_chunks_where_rows_that_stay_hide_no_message_of_rows() -> None:
    """Rows that stay are computed while the weights are sent. Only other chunks then hide the other rows."""
    best = [
        best_degree(
            SLOW, ScheduleOptions(direction="forward", stays=0.5, copies=copies), degrees=(1, 2, 4, 8)
        )
        for copies in (NO_COPIES, work(ONE))
    ]
    assert best == [2, 4]
