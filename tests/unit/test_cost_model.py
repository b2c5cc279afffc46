"""MPipeMoE's Table II and Eq. 7-10, and which restore pair is cheapest on which machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pmoe.planner.cost_model import (
    Interference,
    cheapest_pair,
    eq10_seconds,
    lane_seconds,
    slowest_lane,
    workload,
)
from pmoe.planner.costs import LineCost
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.profile import Profile, Versions
from pmoe.schedule.buffer_sizes import HiddenColumns
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES, Restore
from pmoe.schedule.tasks import Lane

S1, S2, S3, S4 = STRATEGIES.values()
SMALL: dict[str, Any] = {"b": 1, "M": 2, "H": 8}  # H = 4 M; units: 16 multiply-adds, 2 elements, 2 elements


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Work of each lane in a second while it runs alone: multiply-adds, elements sent, elements copied.

    An element has one byte.
    """

    compute: float
    communicate: float
    copy: float

    def profile(self, interference: Interference, num_ranks: int = 2) -> Profile:
        copy = LineCost(0.0, 1 / self.copy)
        return Profile(
            device="by hand",
            device_type="cpu",
            num_ranks=num_ranks,
            backend="none",
            dtype="int8",
            versions=Versions(torch="none", cuda=None, file=2),
            compute=LineCost(0.0, 1 / self.compute),
            message=LineCost(0.0, 1 / self.communicate),
            copy_out=copy,
            copy_in=copy,
            interference=interference,
            seconds=0.0,
            when="",
        )


def rates(*, unit: float = 1.0, communicate: float, copy: float) -> Rates:
    """Returns the rates at which a unit of work of the layer SMALL takes these seconds on each lane."""
    return Rates(compute=16 / unit, communicate=2 / communicate, copy=2 / copy)


EVEN = rates(communicate=1, copy=1)
ALONE = Interference()


def of_pass(
    restore: Restore, direction: Any, *, rates: Rates, interference: Interference = ALONE, **numbers: Any
) -> float:
    """Returns the seconds of one pass by Eq. 10."""
    profile = rates.profile(interference)
    return slowest_lane(lane_seconds(restore, direction, profile, element_size=1, **numbers), interference)


def cheapest(
    pairs: Sequence[Restore],
    *,
    b: int,
    M: int,
    H: int,
    rates: Rates,
    interference: Interference = ALONE,
    swiglu: bool = False,
    travelling: float = 1.0,
) -> tuple[Restore, dict[Restore, float]]:
    """Returns what `cheapest_pair` returns for a layer and a profile with these numbers.

    An element has one byte.
    """
    sizes = LayerSizes(
        d_model=M,
        num_experts=8,
        top_k=1,
        num_ranks=2 if travelling == 1 else round(1 / (1 - travelling)),
        columns=HiddenColumns(hidden=H * (1 + swiglu), scratch=H),
        element_size=1,
        weight_size=4,
        expert_parameters=0,
        gate_parameters=0,
        bypass_local=travelling < 1,
    )
    profile = rates.profile(interference, sizes.num_ranks)
    best, seconds = cheapest_pair(sizes, profile, b, pairs)
    assert seconds == {pair: eq10_seconds(sizes, profile, b, pair) for pair in pairs}
    return best, seconds


@pytest.mark.parametrize(
    "restore, forward, backward",
    [
        (KEEP, (2, 2, 0), (4, 2, 0)),
        (S1, (2, 2, 5), (4, 2, 5)),
        (S2, (2, 2, 4), (4, 3, 4)),
        (S3, (2, 2, 1), (5, 2, 1)),
        (S4, (2, 2, 0), (5, 3, 0)),
    ],
    ids=["none", "S1", "S2", "S3", "S4"],
)
def test_the_workloads_are_those_of_table_2(
    restore: Restore, forward: tuple[int, int, int], backward: tuple[int, int, int]
) -> None:
    assert workload(restore, "forward") == forward
    assert workload(restore, "backward") == backward


@pytest.mark.parametrize(
    "pair, forward, backward",
    [
        ("keep/offload", (2, 2, 4), (4, 2, 4)),
        ("keep/recompute", (2, 2, 0), (5, 2, 0)),
        ("offload/keep", (2, 2, 1), (4, 2, 1)),
        ("communicate/keep", (2, 2, 0), (4, 3, 0)),
    ],
)
def test_the_pairs_that_the_paper_does_not_name_follow_the_same_rule(
    pair: str, forward: tuple[int, int, int], backward: tuple[int, int, int]
) -> None:
    restore = {str(each): each for each in ALL_PAIRS}[pair]
    assert workload(restore, "forward") == forward
    assert workload(restore, "backward") == backward


def test_copies_of_the_hidden_activation_follow_its_width() -> None:
    assert workload(S1, "forward", hidden_per_model=2.5) == (2, 2, 3.5)
    assert workload(S2, "backward", hidden_per_model=1) == (4, 3, 1)
    assert workload(S3, "backward", hidden_per_model=2.5) == (5, 2, 1)


def test_swiglu_doubles_the_first_product_and_what_is_copied_of_it() -> None:
    assert workload(KEEP, "forward", swiglu=True) == (3, 2, 0)
    assert workload(KEEP, "backward", swiglu=True) == (6, 2, 0)
    assert workload(S1, "forward", swiglu=True, hidden_per_model=2) == (3, 2, 5)
    assert workload(S2, "backward", swiglu=True, hidden_per_model=2) == (6, 3, 4)
    assert workload(S4, "backward", swiglu=True) == (8, 3, 0)


def test_units_are_those_of_equations_7_to_9() -> None:
    unit = Rates(compute=1.0, communicate=1.0, copy=1.0).profile(ALONE)
    sizes = {"M": 5, "H": 7, "element_size": 1}
    hidden = 7 / 5  # columns of T_M over M
    assert lane_seconds(S4, "backward", unit, b=3, **sizes) == (5 * 105, 3 * 15, 0)
    assert lane_seconds(S2, "forward", unit, b=3, **sizes) == (2 * 105, 2 * 15, hidden * 15)
    assert lane_seconds(S1, "forward", unit, b=0, **sizes) == (0, 0, 0)


def test_the_slowest_lane_sets_the_time() -> None:
    for slow, seconds in [("compute", 40), ("communicate", 20), ("copy", 50)]:
        lanes = {"compute": 16.0, "communicate": 2.0, "copy": 2.0}
        lanes[slow] /= 10  # a unit takes 10 s there and 1 s elsewhere: S1 backward is [4, 2, 5]
        assert of_pass(S1, "backward", rates=Rates(**lanes), **SMALL) == pytest.approx(seconds)


def test_seconds_grow_with_rows() -> None:
    one = of_pass(S4, "backward", rates=EVEN, b=1, M=2, H=8)
    assert one == 5
    assert of_pass(S4, "backward", rates=EVEN, b=6, M=2, H=8) == 30
    assert of_pass(S4, "backward", rates=EVEN, b=0, M=2, H=8) == 0


def test_computation_has_a_volume_of_its_own() -> None:
    """The paper's alpha and beta leave H out.

    With them the width of experts could not change which pair wins.
    """
    rate = Rates(compute=16.0, communicate=1000.0, copy=1.0)
    narrow, _ = cheapest([S1, S4], b=1, M=2, H=8, rates=rate)  # a unit: 1 s computing, 2 s copying
    wide, _ = cheapest([S1, S4], b=1, M=200, H=800, rates=rate)  # a unit: 10,000 s and 200 s
    assert (narrow, wide) == (S4, S1)


def test_width_of_the_layer_is_what_is_copied() -> None:
    rate = Rates(compute=1e9, communicate=1e9, copy=1.0)
    assert of_pass(S1, "forward", b=3, M=2, H=5, rates=rate) == pytest.approx(3 * (2 + 5))
    assert of_pass(S1, "forward", b=3, M=2, H=5, rates=rate, swiglu=True) == pytest.approx(3 * (2 + 2 * 5))
    assert of_pass(S3, "forward", b=3, M=2, H=5, rates=rate) == pytest.approx(3 * 2)


SLOWED = Interference(
    mu_comp=0.91,
    mu_mem=0.82,
    mu_all=0.73,
    sigma_comm=0.94,
    sigma_mem=0.85,
    sigma_all=0.76,
    eta_comm=0.97,
    eta_comp=0.88,
    eta_all=0.79,
)


@pytest.mark.parametrize(
    "restore, travelling, slow, lane",
    [
        # all three lanes work at first. S1 backward is [4, 2, 5].
        (S1, 1.0, "compute", 4),
        (S1, 1.0, "communicate", 2),
        (S1, 1.0, "copy", 5),
        # nothing copied: S4 backward is [5, 3, 0].
        (S4, 1.0, "compute", 5),
        (S4, 1.0, "communicate", 3),
        # nothing travels
        (S1, 0.0, "compute", 4),
        (S1, 0.0, "copy", 5),
        # nothing but computing
        (S4, 0.0, "compute", 5),
    ],
)
def test_lanes_that_are_soon_done_slow_nobody(
    restore: Restore, travelling: float, slow: str, lane: float
) -> None:
    lanes = {"compute": 16e6, "communicate": 2e6, "copy": 2e6}
    lanes[slow] /= 1e6
    assert of_pass(
        restore, "backward", rates=Rates(**lanes), interference=SLOWED, travelling=travelling, **SMALL
    ) == pytest.approx(lane, rel=1e-5)


@pytest.mark.parametrize(
    "alone, expected",
    [
        # Lanes that end together run slowed all the while, as the paper's Eq. 10 has it.
        ((0.76, 0.73, 0.79), 1.0),
        ((0.94, 0.91, 0.0), 1.0),
        ((0.85, 0.0, 0.88), 1.0),
        ((0.0, 0.82, 0.97), 1.0),
        # Slowed for one second by all, for one by computing, and then alone.
        ((0.76 + 0.94, 0.73 + 0.91 + 3, 0.79), 1 + 1 + 3),
        # Slowed for one second by all, for one by copies, and then alone.
        ((0.76 + 0.85 + 2, 0.73, 0.79 + 0.88), 1 + 1 + 2),
        ((5.0, 0.0, 0.0), 5.0),
        ((0.0, 0.0, 0.0), 0.0),
    ],
)
def test_lanes_slow_each_other_while_they_are_busy(
    alone: tuple[float, float, float], expected: float
) -> None:
    assert slowest_lane(alone, SLOWED) == pytest.approx(expected, rel=1e-12)


def test_speeds_are_those_beside_the_lanes_that_are_busy() -> None:
    compute, link, node, out, back = Lane
    assert SLOWED.speeds(Lane) == {compute: 0.76, link: 0.73, node: 0.73, out: 0.79, back: 0.79}
    for links in ({link}, {node}, {link, node}):
        assert SLOWED.speeds({compute, *links}) == {compute: 0.94, link: 0.91, node: 0.91, out: 1, back: 1}
    for copies in ({out}, {back}, {out, back}):
        assert SLOWED.speeds({compute, *copies}) == {compute: 0.85, link: 1, node: 1, out: 0.88, back: 0.88}
        assert SLOWED.speeds({link, *copies}) == {compute: 1, link: 0.82, node: 0.82, out: 0.97, back: 0.97}
    for lane in Lane:
        assert set(SLOWED.speeds({lane}).values()) == {1.0}


def test_rows_that_stay_are_not_sent() -> None:
    rate = rates(unit=0.1, communicate=1, copy=0.1)
    assert of_pass(S4, "backward", rates=rate, travelling=0.75, **SMALL) == pytest.approx(2.25)
    assert of_pass(S4, "backward", rates=rate, travelling=0.0, **SMALL) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "communicate, copy, seconds, winner",
    [
        # Seconds a unit, against 1 s for a unit of compute. A step is a maximum for each direction.
        # compute-bound, fast copies: recomputing costs, moving does not
        (1.5, 0.1, [3 + 4, 3 + 4.5, 3 + 5, 3 + 5], "S1"),
        # compute-bound, copies as fast as the products: one unit fewer to copy decides
        (0.1, 0.5, [2.5 + 4, 2 + 4, 2 + 5, 2 + 5], "S2"),
        # compute-bound, slow copies: nothing is copied
        (0.1, 3.0, [15 + 15, 12 + 12, 3 + 5, 2 + 5], "S4"),
        # communication-bound, slow copies: T_DI is not sent again, T_M is too large to copy
        (4.0, 2.5, [12.5 + 12.5, 10 + 12, 8 + 8, 8 + 12], "S3"),
        # communication-bound, very slow copies
        (4.0, 30.0, [150 + 150, 120 + 120, 30 + 30, 8 + 12], "S4"),
    ],
)
def test_who_wins_depends_on_what_bounds_the_step(
    communicate: float, copy: float, seconds: list[float], winner: str
) -> None:
    best, all_seconds = cheapest([S4, S3, S2, S1], rates=rates(communicate=communicate, copy=copy), **SMALL)
    assert [all_seconds[restore] for restore in (S1, S2, S3, S4)] == pytest.approx(seconds, rel=1e-12)
    assert best.strategy == winner
    assert sorted(all_seconds.values())[1] > all_seconds[best] * 1.01  # no tie decides


def test_copies_that_slow_communication_make_s4_win_a_communication_bound_step() -> None:
    """Section V.G: with many ranks S4 is faster than S2, because copies over PCIe slow the all-to-all."""
    bound = rates(communicate=4, copy=1.6)
    best, seconds = cheapest([S1, S2, S3, S4], rates=bound, **SMALL)
    assert (best, seconds) == (S3, pytest.approx({S1: 16, S2: 20, S3: 16, S4: 20}))
    slowed = Interference(mu_mem=0.25, mu_all=0.25, eta_comm=0.25, eta_all=0.25)
    best, seconds = cheapest([S1, S2, S3, S4], rates=bound, interference=slowed, **SMALL)
    # S2's copies take 6.4 s alone, 25.6 s beside messages; then 1.6 s of messages are left, and 5.6 backward.
    assert (best, seconds) == (S4, pytest.approx({S1: 64, S2: 58.4, S3: 25.6, S4: 20}))


def test_of_pairs_that_are_equal_on_every_lane_the_first_wins() -> None:
    """T_DI is sent again on one rank by a local copy, which Eq. 10 does not count: as cheap as keeping it."""
    pairs = [Restore("keep", "recompute"), S4]
    for candidates in (pairs, pairs[::-1]):
        best, seconds = cheapest(candidates, rates=EVEN, travelling=0.0, **SMALL)
        assert list(seconds) == candidates and best == candidates[0]
        assert seconds[pairs[0]] == seconds[S4] == 7


def test_keeping_everything_is_never_slower_than_another_pair() -> None:
    best, seconds = cheapest(ALL_PAIRS, rates=EVEN, interference=SLOWED, **SMALL)
    assert best == KEEP
    assert list(seconds) == list(ALL_PAIRS)
    assert max(seconds.values()) == seconds[S1] > seconds[KEEP]


@pytest.mark.parametrize("name", ["mu_comp", "mu_mem", "sigma_comm", "sigma_all", "eta_comp", "eta_all"])
@pytest.mark.parametrize("speed", [0, -0.5, 1.01, math.nan])
def test_a_relative_speed_is_over_0_and_at_most_1(name: str, speed: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} \({speed}\) must be over 0 and at most 1$"):
        Interference(**{name: speed})
    assert getattr(Interference(**{name: 1}), name) == 1


def test_a_step_is_a_forward_and_a_backward_under_the_same_conditions() -> None:
    bound = rates(communicate=9, copy=2)
    _, seconds = cheapest([S1, S4], rates=bound, swiglu=True, travelling=0.5, **SMALL)
    # S1: 9 units copied at 2 s each way. S4: 2 sent * 9 s * 1/2 beside 3 products, then 3 beside 8.
    assert seconds == pytest.approx({S1: 18 + 18, S4: 9 + 13.5})
