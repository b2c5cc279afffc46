"""COMET's Figs. 10, 12, 13 and 14 as simulated: the systems, their launches, skew, and the figures'
statements.
"""

from __future__ import annotations

import statistics

import pytest

from pmoe.papers.assumptions import assumptions, printed
from pmoe.papers.comet_figures import H800, best_division, chunked_run
from pmoe.papers.comet_layers import (
    CHUNKS,
    L20,
    LAUNCH_SECONDS,
    LAUNCHES,
    MIXTRAL,
    STDS,
    chunk_launches,
    figure10,
    figure12,
    figure13,
    figure14_left,
    figure14_right,
    skewed_layer,
    speed_ups,
    system_times,
)
from pmoe.papers.comet_tasks import even_layer
from pmoe.planner.simulator import makespan

M = 8192


def seconds(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.endswith("_seconds") and value is not None}


# ---- systems


def test_systems_are_comets_kernels_and_the_chunked_layer_with_their_launches() -> None:
    arriving, returning = even_layer(MIXTRAL, M, ep=8)
    times = system_times(arriving, returning, H800)
    chunked = {n: makespan(chunked_run(arriving, returning, H800, n)) for n in CHUNKS}
    assert times["COMET"].device == best_division(arriving, H800)[1] + best_division(returning, H800)[1]
    assert times["TE"].seconds == chunked[1] + 261 * LAUNCH_SECONDS
    assert times["CUTLASS"].seconds == chunked[1] + 85 * LAUNCH_SECONDS
    assert times["FasterMoE"].seconds == chunked[2] + chunk_launches(2, 1) * LAUNCH_SECONDS
    in_chunks = [chunked[n] + chunk_launches(n, 1) * LAUNCH_SECONDS for n in CHUNKS]
    assert times["Tutel"].seconds == min(in_chunks)
    assert LAUNCHES["COMET"] == 33


def test_launches_by_hand() -> None:
    """20 launches, and some for each of 2 chunks.

    These are two collectives, two arrangements of rows and three kernels for each expert.
    """
    assert chunk_launches(2, 4) == 20 + 2 * (2 + 2 + 3 * 4)


# ---- skew


def test_without_skew_the_layer_is_the_even_one() -> None:
    arriving, returning = skewed_layer(MIXTRAL, M, 0.0)
    even_arriving, even_returning = even_layer(MIXTRAL, M, ep=8)
    assert arriving == even_arriving
    assert returning.rows_E == even_returning.rows_E and returning.tokens == even_returning.tokens


def test_the_busiest_rank_has_the_largest_of_evenly_spaced_shares() -> None:
    """The shares of 8 experts have this spread: the largest is 1.53 standard deviations above 1/8."""
    arriving, _ = skewed_layer(MIXTRAL, M, 0.05)
    spaced = [i - 3.5 for i in range(8)]
    shares = [1 / 8 + 0.05 * each / statistics.pstdev(spaced) for each in spaced]
    assert statistics.pstdev(shares) == pytest.approx(0.05)
    assert sum(shares) == pytest.approx(1)
    assert sum(arriving.rows_E) == pytest.approx(2 * M * max(shares), abs=8)
    assert f"gets {2 * M * min(shares):.0f} rows" in assumptions("comet")["skew"]


# ---- figures


def test_comets_advantage_is_largest_where_tokens_are_few() -> None:
    """Fig. 10: with few tokens, launches are most of the other systems' time."""
    gains = [row["CUTLASS_seconds"] / row["COMET_seconds"] for row in figure10()]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.5 and gains[-1] > 1
    times = [row["COMET_seconds"] for row in figure10()]
    assert times == sorted(times)


@pytest.mark.slow
def test_tensor_parallelism_costs_comet_less_than_others() -> None:
    """Fig. 12: with TP = 8 Megatron takes more than 1.5 times as long as without, COMET less than 1.3
    times.
    """
    first, *_, last = figure12()
    assert (first["EP"], first["TP"], last["EP"], last["TP"]) == (8, 1, 1, 8)
    assert last["COMET_seconds"] / first["COMET_seconds"] < 1.3
    assert last["CUTLASS_seconds"] / first["CUTLASS_seconds"] > 1.5
    assert first["FasterMoE_seconds"] is not None and last["FasterMoE_seconds"] is None
    until_four = [row["COMET_seconds"] for row in figure12() if row["TP"] <= 4]
    assert max(until_four) < 1.03 * min(until_four)


def test_more_experts_of_a_token_take_longer_and_more_experts_cost_launches() -> None:
    """Fig. 13."""
    rows = {(row["E"], row["topk"]): row for row in figure13()}
    for E in (8, 16, 32):
        times = [rows[E, topk]["COMET_seconds"] for topk in (2, 4, 8)]
        assert times == sorted(times)
    assert rows[32, 2]["FasterMoE_seconds"] > rows[8, 2]["FasterMoE_seconds"] + 20 * LAUNCH_SECONDS
    assert all(
        min(seconds(row), key=seconds(row).__getitem__) == "no launches_seconds" for row in rows.values()
    )


@pytest.mark.slow
def test_skew_makes_every_system_slower_and_comets_gain_smaller() -> None:
    """Fig. 14, left."""
    rows = figure14_left()
    assert [row["1000 std"] for row in rows] == [round(1000 * std) for std in STDS]
    for name in seconds(rows[0]):
        times = [row[name] for row in rows]
        assert times == sorted(times) and times[-1] > 1.2 * times[0]
    assert rows[-1]["over CUTLASS"] < rows[0]["over CUTLASS"]
    assert all(row["over CUTLASS"] > 1 for row in rows)
    said = f"falls from {rows[0]['over CUTLASS']:.2f} to {rows[-1]['over CUTLASS']:.2f}"
    assert said in assumptions("comet, why")["Fig. 14"]


@pytest.mark.slow
def test_on_l20_the_link_costs_more_and_comet_is_still_the_fastest() -> None:
    """Fig. 14, right."""
    rows = figure14_right()
    assert L20.link_bytes < H800.link_bytes / 6
    for row in rows:
        others = [value for name, value in seconds(row).items() if name[:2] not in ("CO", "no")]
        assert row["COMET_seconds"] < min(others)
    figures = {"figure12": figure12(), "figure14_right": rows}
    on_h800, on_l20 = speed_ups(figures)
    assert on_l20["paper"] == printed("comet speed-ups")["14, right"]
    assert on_l20["CUTLASS"] == statistics.fmean(
        row["CUTLASS_seconds"] / row["COMET_seconds"] for row in rows
    )
    assert on_h800["figure"] == "12"
