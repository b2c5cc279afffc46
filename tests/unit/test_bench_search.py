"""bench_search: its simulation is within the limits, its report is right, and its live part runs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from bench import bench_search
from bench.bench_search import MOST_REGRET, MOST_SEARCHES, STORED, live_summary, pair_row, simulated_rows
from bench.searches import (
    GROWING,
    GROWING_SIZES,
    Noise,
    PrintedAlgorithm1,
    losses_between_pairs,
    random_batches,
    simulated_curves,
    stored_curves,
    train,
)
from pmoe.planner.degree import DEGREES
from pmoe.planner.granularity import PassDegrees

ROOT = Path(__file__).resolve().parents[2]


def test_the_printed_algorithm_merges_by_n_alone_and_answers_what_it_has_met() -> None:
    """The third B has the same n as the first, so the range of n = 2 grows over the B of n = 4."""
    printed = PrintedAlgorithm1()
    for B, n in ((100, 2), (200, 4), (300, 2)):
        assert printed.lookup(B) is None
        printed.record(B, PassDegrees(n, n))
    assert {PassDegrees(2, 2): (100, 300), PassDegrees(4, 4): (200, 200)} == printed.S
    assert [printed.lookup(B) for B in (99, 150, 200)] == [None, PassDegrees(2, 2), PassDegrees(4, 4)]


def test_the_stored_curves_are_those_of_the_file() -> None:
    curve, lowest, highest = stored_curves(STORED)
    found = json.loads(STORED.read_text("utf-8"))["batches"]["found"]
    assert (lowest, highest) == (1024, 16384)
    for B in (1024, 4096, 16384):
        for n in DEGREES:
            assert curve(n, B) == found[str(B)]["times"][f"n={n}"]["median_s"]
    assert curve(2, 3072) == pytest.approx((curve(2, 2048) + curve(2, 4096)) / 2)


def test_on_the_growing_curves_the_fastest_n_grows() -> None:
    curve = simulated_curves(GROWING, GROWING_SIZES)
    fastest = [min(DEGREES, key=lambda n: curve(n, B)) for B in (1024, 2048, 4096, 8192, 16384)]
    assert fastest == sorted(fastest) and fastest[0] == 2 and fastest[-1] == 8


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02, 0.03])
def test_300_batches_on_the_stored_curves_need_few_searches_and_lose_little(noise: float) -> None:
    curve, *ends = stored_curves(STORED)
    outcomes = [train(curve, random_batches(*ends, 300, seed), Noise(noise), seed) for seed in range(7)]
    printed = [
        train(curve, random_batches(*ends, 300, seed), Noise(noise), seed, printed=True) for seed in range(7)
    ]
    searches = statistics.median(outcome.searches for outcome in outcomes)
    assert searches <= min(MOST_SEARCHES, statistics.median(outcome.searches for outcome in printed))
    assert 100 * statistics.median(outcome.regret for outcome in outcomes) <= MOST_REGRET
    steps = statistics.median(statistics.median(outcome.steps) for outcome in outcomes)
    assert steps <= 12


def test_without_noise_the_printed_algorithm_never_errs_and_pmoe_hardly_does() -> None:
    for curve in (stored_curves(STORED)[0], simulated_curves(GROWING, GROWING_SIZES)):
        batches = random_batches(1024, 16384, 300, 0)
        assert train(curve, batches, Noise(0.0), 0, printed=True).regret < 1e-9
        assert train(curve, batches, Noise(0.0), 0).regret < 2e-3


def test_a_report_has_a_row_for_each_noise_and_algorithm() -> None:
    curve, *ends = stored_curves(STORED)
    rows = simulated_rows("stored", curve, (ends[0], ends[1]), 20, [Noise(0.0), Noise(0.01, 0.02)], 2)
    assert [(row["noise"], row["algorithm"]) for row in rows] == [
        ("0% of a run", "pmoe"),
        ("0% of a run", "as printed"),
        ("1% of a run, 2% of a search", "pmoe"),
        ("1% of a run, 2% of a search", "as printed"),
    ]
    for row in rows:
        assert 1 <= row["searches"] <= row["worst searches"] <= 20
        assert 0 <= row["regret %"] <= row["worst regret %"]


def test_what_a_pair_loses_with_the_n_of_another_is_measured_among_pairs_that_are_close() -> None:
    assert all(loss >= 0 for loss in losses_between_pairs(5, 1.1))
    assert len(losses_between_pairs(5, 1.001)) < len(losses_between_pairs(5, 9.0)) == 5 * 4 * 3
    assert pair_row(5)["machines"] == 5


def test_a_live_run_is_summed_up_by_its_searches() -> None:
    def row(search_runs: int, steps: float, other: int) -> dict[str, float]:
        other_steps = float(other)
        return {
            "search runs": search_runs,
            "search steps": steps,
            "other runs": other,
            "other steps": other_steps,
        }

    rows = [row(9, 8.0, 0), row(0, 0.0, 5), row(7, 30.0, 0), row(5, 12.0, 3)]
    summary = live_summary(rows, 1.0)
    assert summary["searches"] == 3 and summary["median runs"] == 7 and summary["median steps"] == 12.0
    assert summary["all search runs"] == 21 and summary["all other runs"] == 8
    assert summary["median steps of all trials"] == (8.0 + 15.0) / 2  # of 8, 5, 30 and 12 + 3
    assert summary["10 searches, 12 steps"] == "met"
    assert live_summary([*rows, *[row(9, 13.0, 0)] * 2], 1.0)["10 searches, 12 steps"] == "MISSED"


@pytest.mark.nightly
def test_a_small_live_run_counts_its_trials(tmp_path: Path) -> None:
    sizes = ["--live-batches", "4", "--d-model", "32", "--d-hidden", "64", "--ends", "2048", "3000"]
    command = [sys.executable, bench_search.__file__, "--only-live", *sizes, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    live = json.loads((tmp_path / "search.json").read_text("utf-8"))["live"]
    assert set(live) == {"pipeline=True, seed 0", "both True, seed 0"}
    for run in live.values():
        assert run["rows"][0]["batch"] == 0 and run["rows"][0]["search runs"] >= 3
        assert list(run["table"]) == ["torch.float32"] and run["summary"]["searches"] >= 1
