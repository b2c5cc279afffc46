"""Eq. 10 against the simulator: is the pair that the formula picks nearly the fastest on the real schedule?

The regimes are those of bench/restore_regions.py. Nothing is measured here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.restore_regions import (
    DEGREES,
    ELEMENT_SIZE,
    RANKS,
    REGIMES,
    SLOWED,
    B,
    H,
    M,
    Regime,
    draw,
    h200,
    picked,
    profile_of,
    shape_of,
    simulated,
    table,
)
from pmoe.planner.cost_model import Interference, cheapest_pair, eq10_seconds, lane_seconds
from pmoe.planner.degree import Choice
from pmoe.planner.layer_seconds import simulated_step, step_seconds
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.schedule.restore import KEEP, STRATEGIES
from pmoe.schedule.tasks import Lane


def excess(regime: Regime, n: int, name: str) -> float:
    """Returns how much longer a simulated step with a strategy takes than with the best one, as a
    fraction.
    """
    seconds = simulated(regime, n)
    return seconds[name] / min(seconds.values()) - 1


def all_lanes(regime: Regime, name: str) -> float:
    """Returns the seconds of a step if the work of all lanes ran one after another."""
    return sum(
        sum(
            lane_seconds(
                STRATEGIES[name],
                direction,
                profile_of(regime),
                b=B,
                M=M,
                H=H,
                element_size=ELEMENT_SIZE,
                travelling=1 - 1 / regime.ranks,
            )
        )
        for direction in ("forward", "backward")
    )


LIMITS = {
    Regime(ranks=64, link=2.0, copy=4.0, slowed=False): 0.12,
}
"""The only one of 486 regimes in which, at n = 4, the pick is more than 10 % slower than the best.

Eq. 10 gives S3 9.0 products and S4 9.84; the simulator gives them 10.95 and 9.87. S3's copies to the host
begin only after the first chunk is computed, and its backward computes only after the first copy has come
back. Eq. 10 does not know the time to fill and to empty the pipeline. This time is proportional to 1 / n, so
at n = 8 the same pick is within 10 %.
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [4, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_the_pair_that_equation_10_picks_is_within_a_tenth_of_the_best(n: int) -> None:
    """This holds at n = 4, too, except for `LIMITS`.

    On a grid of ratios twice as fine, 16 of 5814 cases are more than a tenth slower, all at n = 4, up to 14
    %: where copies take 0.7 of computing, and Eq. 10 picks S2, which it finds 2.5 % faster than S4.
    """
    for regime in REGIMES:
        limit = LIMITS.get(regime, 0.1) if n == 4 else 0.1
        assert excess(regime, n, picked(regime)) <= limit, (regime, simulated(regime, n))


def test_where_the_limit_is_passed_more_chunks_heal_it() -> None:
    for regime, limit in LIMITS.items():
        assert 0.1 < excess(regime, 4, picked(regime)) <= limit
        assert excess(regime, 8, picked(regime)) < 0.1
        assert excess(regime, 32, picked(regime)) < 0.02


@pytest.mark.parametrize("n, limit", [(4, 0.14), (8, 0.1), pytest.param(16, 0.1, marks=pytest.mark.slow)])
def test_any_of_the_pairs_that_are_equal_by_equation_10_is_near_the_best(n: int, limit: float) -> None:
    """Each pair that Eq. 10 finds equally fast is near the best; the one that `cheapest_pair` takes is
    nearer.
    """
    for regime in REGIMES:
        shape, profile = shape_of(regime.ranks), profile_of(regime)
        seconds = {name: eq10_seconds(shape, profile, B, pair) for name, pair in STRATEGIES.items()}
        for name in STRATEGIES:
            if seconds[name] <= min(seconds.values()) * (1 + 1e-12):
                assert excess(regime, n, name) <= limit, (regime, name)


@pytest.mark.parametrize("n", [4, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_a_step_takes_equation_10_and_at_most_one_chunk_of_every_lane_beside(n: int) -> None:
    """Filling and emptying the pipeline cost at most the work of one chunk on all lanes, one after another.

    If lanes slow each other, a lane that begins later is slowed for less time: by up to a thousandth.

    So copies hide behind computation also if few rows stay. That was not so while rows that stay and rows
    that travel shared two slots of an offloaded T_M.
    """
    for regime in REGIMES:
        shape, profile = shape_of(regime.ranks), profile_of(regime)
        for name, pair in STRATEGIES.items():
            closed = eq10_seconds(shape, profile, B, pair)
            beside = simulated(regime, n)[name] - closed
            assert -1e-3 * closed <= beside <= all_lanes(regime, name) / n, (regime, name)


def test_of_equals_the_one_with_least_work_on_all_lanes_is_taken() -> None:
    """Computation decides, and S3 and S4 compute the same. S3 copies T_DI, S4 sends it again; the cheaper is
    taken.
    """
    shape = shape_of(8)
    for link, copy, expected in ((0.0625, 2.0, "S4"), (1.0, 0.25, "S3")):
        regime = Regime(ranks=8, link=link, copy=copy, slowed=False)
        candidates = [STRATEGIES["S3"], STRATEGIES["S4"]]
        for pairs in (candidates, candidates[::-1]):
            pair, seconds = cheapest_pair(shape, profile_of(regime), B, pairs)
            assert seconds[pairs[0]] == seconds[pairs[1]]
            assert pair.strategy == expected


def test_copies_of_what_travels_run_beside_its_own_computing_where_few_rows_stay() -> None:
    regime = Regime(ranks=64, link=0.0625, copy=0.5, slowed=False)
    for direction in ("forward", "backward"):
        spans = simulated_step(
            shape_of(64), profile_of(regime), B, Choice(forward=8, backward=8, restore=STRATEGIES["S1"])
        )[direction]
        lane = Lane.COPY_OUT if direction == "forward" else Lane.COPY_IN
        copies = sum(item.end - item.start for item in spans if item.task.lane is lane)
        computing = [item for item in spans if item.task.lane is Lane.COMPUTE]
        overlap = sum(
            max(0.0, min(a.end, b.end) - max(a.start, b.start))
            for a in computing
            for b in spans
            if b.task.lane is lane
        )
        assert overlap > 0.7 * copies


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("interference", [Interference(), SLOWED], ids=["alone", "slowed"])
@pytest.mark.parametrize("n", DEGREES)
def test_with_an_h200s_ratios_the_hidden_activation_is_not_offloaded(
    ranks: int, interference: Interference, n: int
) -> None:
    shape, profile = shape_of(ranks), h200(ranks, interference)
    pair, _ = cheapest_pair(shape, profile, B, STRATEGIES.values())
    seconds = {
        name: step_seconds(shape, profile, B, Choice(forward=n, backward=n, restore=each))
        for name, each in STRATEGIES.items()
    }
    best = min(seconds, key=seconds.__getitem__)
    assert pair.strategy == best == "S4"
    assert min(seconds["S1"], seconds["S2"]) > 1.5 * seconds["S4"]
    assert seconds["S4"] < 1.25 * step_seconds(shape, profile, B, Choice(forward=n, backward=n, restore=KEEP))


def test_with_an_h200s_ratios_and_wide_rows_offloading_the_hidden_activation_pays() -> None:
    """An element of T_M costs a copy, or M multiply-adds: the wider the rows, the longer it takes to
    recompute.

    M = 8192 is above the turning point, which without interference is near 8 * 300e12 / (12 * 50e9) = 4000.
    """
    shape = sizes_from_options(8192, 4 * 8192, 64, num_ranks=8, dtype=torch.bfloat16, device_type="cuda")
    for interference in (Interference(), SLOWED):
        profile = h200(8, interference)
        pair, _ = cheapest_pair(shape, profile, B, STRATEGIES.values())
        seconds = {
            name: step_seconds(shape, profile, B, Choice(forward=8, backward=8, restore=each))
            for name, each in STRATEGIES.items()
        }
        assert pair.strategy == min(seconds, key=seconds.__getitem__) == "S2"


def test_the_regions_are_drawn_and_printed(tmp_path: Path) -> None:
    lines = table(8, False, 4).splitlines()
    assert len(lines) == 11 and lines[2].startswith("| 0.03125 | S2 | S1 |")
    pytest.importorskip("matplotlib")
    draw(tmp_path / "regions.png", 4)
    assert (tmp_path / "regions.png").stat().st_size > 10_000
