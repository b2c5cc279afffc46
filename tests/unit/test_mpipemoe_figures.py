"""MPipeMoE's Figs. 8 and 12 as simulated: what both splits send, bounds of a step, and how n grows with B."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from pmoe.cli import main
from pmoe.papers.assumptions import assumptions, printed
from pmoe.papers.mpipemoe_figures import (
    DEGREES,
    FIGURE12_MODEL,
    MODELS,
    NO_TENSOR_CORES,
    RANKS,
    TASK_SECONDS,
    TENSOR_CORES,
    TOKENS,
    Products,
    Sizes,
    SplitChunk,
    along_tokens,
    best_n,
    both_passes_seconds,
    by_destination,
    fast_moe,
    faster_moe,
    figure8,
    figure12,
    pipe_moe,
    speed_ups,
)

ROOT = Path(__file__).resolve().parents[2]
B = 8192
XL = MODELS[FIGURE12_MODEL]


# ---- the two splits


@pytest.mark.parametrize("split", [along_tokens, by_destination])
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32, 64])
def test_a_split_sends_every_row_once_whatever_n_is(split: type, n: int) -> None:
    chunks: list[SplitChunk] = split(B, n)
    assert len(chunks) == n
    assert sum(chunk.rows for chunk in chunks) == B
    assert sum(chunk.inside * chunk.message_rows for chunk in chunks) == 7 * B / RANKS
    assert sum(chunk.outside * chunk.message_rows for chunk in chunks) == 56 * B / RANKS


def test_two_chunks_by_destination_by_hand() -> None:
    """Groups of 32 ranks on 4 nodes: 7 peers in the node, 24 in the group's other nodes, then 32 in the other
    group.
    """
    assert by_destination(B, 2) == [SplitChunk(7, 24, 128, 4096), SplitChunk(0, 32, 128, 4096)]
    assert along_tokens(B, 2) == [SplitChunk(7, 56, 64, 4096)] * 2


def test_by_destination_each_peer_gets_one_message_and_along_tokens_one_for_each_chunk() -> None:
    for n in (2, 8, 32):
        assert sum(chunk.inside + chunk.outside for chunk in by_destination(B, n)) == RANKS - 1
        assert sum(chunk.inside + chunk.outside for chunk in along_tokens(B, n)) == n * (RANKS - 1)


def test_an_exchange_takes_as_long_as_its_slower_link_by_hand() -> None:
    """64 rows of 1000 float32 make 256 kB a message: 20 GB/s between nodes, 240 GB/s inside."""
    outside = 2 * (1e-6 + 256e3 / 20e9)
    assert SplitChunk(7, 2, 64, 1).exchange_seconds(1000) == pytest.approx(outside)
    assert SplitChunk(7, 0, 64, 1).exchange_seconds(1000) == pytest.approx(7 * (0.5e-6 + 256e3 / 240e9))


# ---- a step


def test_fastmoes_step_is_the_sum_of_its_tasks() -> None:
    """It has four all-to-alls, and three times the products of forward."""
    (chunk,) = along_tokens(B, 1)
    products = TENSOR_CORES.seconds(B, 4 * B * XL.M * XL.H)
    whole = 4 * chunk.exchange_seconds(XL.M) + 3 * (products + TASK_SECONDS)
    assert fast_moe(XL, B, TENSOR_CORES) == pytest.approx(whole)


def test_products_of_few_rows_are_slower() -> None:
    assert TENSOR_CORES.seconds(512, 1e12) == pytest.approx(2 * 1e12 / 78e12)
    assert Products(1e12, 0.0).seconds(1, 1e12) == 1


@pytest.mark.parametrize("split", [along_tokens, by_destination])
def test_no_step_beats_its_busier_lane_or_is_slower_than_all_tasks_in_turn(split: type) -> None:
    for sizes, n in itertools.product(MODELS.values(), (1, 2, 4, 8)):
        chunks: tuple[SplitChunk, ...] = tuple(split(B, n))
        sent = 2 * sum(chunk.exchange_seconds(sizes.M) for chunk in chunks)
        flops = 4 * B * sizes.M * sizes.H
        computed = n * TASK_SECONDS + TENSOR_CORES.seconds(B / n, flops)
        seconds = both_passes_seconds(sizes, chunks, TENSOR_CORES)
        assert max(sent, computed) + max(sent, 2 * computed) <= seconds * (1 + 1e-9)
        assert seconds <= both_passes_seconds(sizes, chunks, TENSOR_CORES, overlaps=False)


def test_equal_links_and_free_messages_make_the_splits_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference between Fig. 5a and 5b then comes only from messages and the node's own rows."""
    from pmoe.papers import mpipemoe_figures
    from pmoe.planner.costs import LineCost

    monkeypatch.setattr(mpipemoe_figures, "OUTSIDE", LineCost(0.0, 1e-10))
    monkeypatch.setattr(mpipemoe_figures, "INSIDE", LineCost(0.0, 1e-10))
    sizes = Sizes(17, 19)  # of no other test: results are kept
    token, destination = (
        both_passes_seconds(sizes, tuple(split(B, 2)), TENSOR_CORES)
        for split in (along_tokens, by_destination)
    )
    assert destination == pytest.approx(token, rel=0.02)


# ---- Fig. 8


def test_pipemoe_is_never_slower_than_its_own_two_chunks_and_gains_most_where_others_multiply_slowly() -> (
    None
):
    for row in figure8():
        assert row["PipeMoE_seconds"] <= row["n=2_seconds"]
        assert row["PipeMoE_seconds"] < row["FastMoE_seconds"]
        assert row["FasterMoE_seconds"] < row["FastMoE_seconds"]
        assert row["n"] in DEGREES
    of_all, of_pipe = ([row for row in figure8() if row["TF32"] == name] for name in ("all", "PipeMoE"))
    assert len(of_all) == len(of_pipe) == len(MODELS) * len(TOKENS)
    pairs = zip(of_all, of_pipe, strict=True)
    assert all(slow["over FasterMoE"] > equal["over FasterMoE"] for equal, slow in pairs)


def test_largest_and_mean_speed_ups_are_those_of_the_rows() -> None:
    rows = figure8()
    table = {row["speed-up"]: row for row in speed_ups(rows)}
    equal = [row["over FastMoE"] for row in rows if row["TF32"] == "all"]
    assert table["most over FastMoE"]["TF32: all"] == max(equal)
    assert table["mean over FasterMoE"]["TF32: all"] < table["most over FasterMoE"]["TF32: all"]
    assert {name: row["paper"] for name, row in table.items()} == printed("mpipemoe figure 8")


# ---- Fig. 12


def test_n_grows_with_the_batch() -> None:
    """The paper's hypothesis: from 256 tokens to 256k, the best n never falls, and takes every value."""
    best = [best_n(XL, 256 << i) for i in range(11)]
    assert best == sorted(best)
    assert set(best) == set(DEGREES)


def test_figure_12s_rows_hold_the_steps_and_the_papers_n() -> None:
    rows = {row["B"]: row for row in figure12()}
    assert [rows[tokens]["paper"] for tokens in (4096, 8192, 20480, 24576)] == [2, 4, 4, 8]
    for tokens, row in rows.items():
        seconds = {n: row[f"n={n}_seconds"] for n in DEGREES}
        assert seconds[4] == pipe_moe(XL, tokens, 4)
        assert row["best"] == min(seconds, key=seconds.__getitem__)


# ---- what is said of it


def test_what_the_output_says_of_the_figures_follows() -> None:
    why = assumptions("mpipemoe, why")
    ratios = [
        pipe_moe(sizes, tokens, 2) / faster_moe(sizes, tokens, TENSOR_CORES)
        for sizes, tokens in itertools.product(MODELS.values(), TOKENS)
    ]
    assert f"at most {100 * (max(ratios) - 1):.0f} % faster" in why["the split"]
    mean, most, _ = speed_ups(figure8())
    assert f"up to {100 * (most['TF32: all'] - 1):.0f} %" in why["FasterMoE"]
    assert f"would give {mean['TF32: PipeMoE']:.2f}" in why["FasterMoE"]
    assert f"has {mean['paper']} on average" in why["FasterMoE"]
    firsts = [next(k for k in range(1, 65) if best_n(XL, 1024 * k) == n) for n in (4, 8)]
    assert firsts == pytest.approx([10, 40], abs=2)
    assert "from about 10k tokens on and 8 from about 40k" in why["n"]
    assert best_n(XL, 1024) == 1
    assert NO_TENSOR_CORES.rate < TENSOR_CORES.rate / 4


def test_simulate_prints_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "mpipemoe", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(found[name]) for name in ("figure8", "speed_ups", "figure12")] == [24, 3, 12]
    assert main(["simulate", "mpipemoe"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 110
    assert "MoE-GPT3-XL  32768" in out and "simulated" in out
