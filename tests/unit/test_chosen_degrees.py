"""The n that the planner predicts to be fastest, beside steps that were measured on a quiet machine.

The machine had 2 CPU ranks of one thread each, a modelled link and 4096 tokens a rank, for MoELayer(512,
2048, 8). All numbers are those of the stored results overlap_modelled_auto.json and reuse_modelled_auto.json
of 2026-11-21. A product takes 19 ps for each multiply-add, and 0.093 ms for 512 x 512 elements of its weight
(the experts' tasks took 2.98 ms in addition to their rows: 8 products of 4 times as many elements).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pmoe.choose.solve import layer_costs, with_chunk_cost
from pmoe.planner.cost_model import Interference
from pmoe.planner.costs import Fit, LayerCosts, LineCost
from pmoe.planner.degree import DEGREES, Choice
from pmoe.planner.degree_search import ScheduleOptions, best_degree, pass_seconds
from pmoe.planner.layer_seconds import step_seconds
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.planner.profile import FORMAT, Operations, Profile, Versions, alphas
from pmoe.schedule.restore import KEEP, STRATEGIES, Restore
from pmoe.schedule.tasks import PassDirection

TOKENS = 4096
SIZES = sizes_from_options(512, 2048, 8, num_ranks=2, dtype=torch.float32, device_type="cpu")
PRODUCT = LineCost(9.3e-5, 1.9e-11)
MESSAGE = LineCost(2.5e-4, 2.02e-8)

STEP_MS = {1: 641, 2: 582, 4: 592, 8: 619, 16: 676}
"""Measured milliseconds of a step by n, with memory_reuse=False."""
PAIR_MS = {
    KEEP: {2: 582, 4: 585, 8: 644},
    STRATEGIES["S4"]: {2: 653, 4: 674, 8: 755},
}


def lines(product: LineCost, message: LineCost) -> Operations:
    fits = [Fit(line=line, r_squared=1.0, num_sizes=3) for line in (product, message, LineCost(0.0, 0.0))]
    return Operations(
        num_across=2,
        num_inside=1,
        gemm=fits[0],
        all_to_all=fits[1],
        all_gather=fits[2],
        reduce_scatter=fits[2],
        all_reduce=fits[2],
        seconds=0.0,
    )


def solver_ms(stays: float, device_type: str = "cpu") -> dict[int, float]:
    """Returns the milliseconds of a step for each n, as pipeline="solve" predicts them.

    stays: fraction of the rows that stay on their rank.
    """
    forward = layer_costs(SIZES, lines(PRODUCT, MESSAGE), TOKENS, device_type)
    ways = [ScheduleOptions(direction=direction, stays=stays) for direction in ("forward", "backward")]
    costs = [forward, forward.backward()]
    return {
        n: 1e3 * sum(pass_seconds(each, n, way) for each, way in zip(costs, ways, strict=True))
        for n in DEGREES
    }


def regret(predicted: dict[int, float], measured: dict[int, int]) -> float:
    """Returns how much slower the predicted n was than the fastest n, as a fraction of measured times."""
    return measured[min(measured, key=predicted.__getitem__)] / min(measured.values()) - 1


def test_the_solver_takes_the_n_that_was_fastest_and_knows_what_others_cost() -> None:
    predicted = solver_ms(SIZES.stays)
    assert SIZES.stays == 0.5 and regret(predicted, STEP_MS) == 0
    for n, milliseconds in STEP_MS.items():
        assert predicted[n] == pytest.approx(milliseconds, rel=0.1)


def test_weights_read_in_every_chunk_and_rows_that_stay_are_both_needed_for_that() -> None:
    """Without either of the two terms, the predicted n is too large: its step takes 6 % longer."""
    assert regret(solver_ms(0.0, device_type="cuda"), STEP_MS) > 0.05
    assert solver_ms(0.5, device_type="cuda")[16] < 0.9 * solver_ms(0.5)[16]


@pytest.mark.parametrize("pair", PAIR_MS, ids=str)
def test_the_simulator_of_a_budget_knows_what_more_chunks_cost(pair: Restore) -> None:
    profile = Profile(
        device="stored",
        device_type="cpu",
        num_ranks=2,
        backend="gloo",
        dtype="float32",
        versions=Versions(torch="2.13.0", cuda=None, file=FORMAT),
        compute=PRODUCT,
        message=MESSAGE,
        copy_out=LineCost(0.0, 1e-10),
        copy_in=LineCost(0.0, 1e-10),
        interference=Interference(),
        seconds=0.0,
        when="",
    )
    measured = PAIR_MS[pair]
    predicted = {
        n: 1e3 * step_seconds(SIZES, profile, TOKENS, Choice(forward=n, backward=n, restore=pair))
        for n in measured
    }
    assert regret(predicted, measured) == 0
    assert predicted[8] / predicted[2] == pytest.approx(measured[8] / measured[2], rel=0.05)


def test_alpha_is_that_of_the_measured_weight_or_more() -> None:
    assert alphas(512 * 512, "cpu") == alphas(1, "cpu") == alphas(1e12, "cuda") == 1
    assert alphas(8 * 512 * 2048, "cpu") == 32


def test_rows_that_stay_are_computed_while_others_travel() -> None:
    """Messages take 3 s each way, experts 2 s. In one chunk, if all rows travel, a step takes 3 + 2 + 3 s.

    If half of them stay, it takes 3 + 1 + 3 s: the second that the other half takes is hidden.
    """
    sent, multiplied = TOKENS / 2 * 512 * 4, TOKENS * 512 * 2048 * 2
    operations = lines(LineCost(0.0, 2 / multiplied), LineCost(0.0, 3 / sent))
    costs = layer_costs(SIZES, operations, TOKENS, "cpu")
    assert pass_seconds(costs, 1, ScheduleOptions(direction="forward")) == pytest.approx(8)
    half = ScheduleOptions(direction="forward", stays=0.5)
    assert pass_seconds(costs, 1, half) == pytest.approx(7)
    assert best_degree(costs, half) > 1


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("chunk_ms", [0.0, 0.4, 3.0])
def test_what_a_chunk_costs_is_found_from_two_trials(direction: PassDirection, chunk_ms: float) -> None:
    """Costs that contain a fixed cost of a chunk predict a difference between 8 chunks and 1.

    From this difference, costs without the fixed cost must get it back.
    """
    line, way = LineCost(0.0, 1e-9), ScheduleOptions(direction=direction, stays=0.5)
    free = LayerCosts(a2a=line.shared(2e6), ag=line.shared(0.0), rs=line.shared(0.0), exp=line.shared(4e7))
    paid = replace(free, exp=LineCost(chunk_ms / 1e3, 0.04))
    measured = pass_seconds(paid, 8, way) - pass_seconds(paid, 1, way)
    found = with_chunk_cost(free, way, measured)
    assert found.exp.alpha_seconds == pytest.approx(chunk_ms / 1e3, abs=1e-7)
    assert with_chunk_cost(free, way, measured - 1.0) == free  # faster than the model: nothing is taken off
