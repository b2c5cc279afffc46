"""FlashDMoE's Table 6.2, and the simulation of its actors: by hand, against bounds and beside COMET's
code.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pmoe import cli
from pmoe.papers.comet_figures import chunked_run, fused_run
from pmoe.papers.comet_layers import LAUNCHES
from pmoe.papers.comet_tasks import Arriving, DeviceRates, FusedTask, even_layer
from pmoe.papers.flashdmoe_actors import (
    DECODE,
    H100,
    LAYER,
    PAIR_COLUMNS,
    SCHEDULE,
    TOKENS,
    actor_run,
    actor_tasks,
    chunked_seconds,
    first_come,
    pair_run,
    synchronous_seconds,
)
from pmoe.papers.flashdmoe_figures import (
    EXPERTS,
    SIZES,
    figure61,
    figure65,
    late_peers,
    latencies,
    scaled_layers,
    speed_ups,
    ways_by_size,
)
from pmoe.papers.flashdmoe_table62 import symmetric_bytes, table62
from pmoe.planner.simulator import makespan, simulate

ROOT = Path(__file__).resolve().parents[2]
# A tile of reduction 4 takes a second; nothing else takes any time but 0.5 s of a signal.
BY_HAND = DeviceRates(
    blocks=3,
    block_flops=2 * 128 * 256 * 4,
    block_local_bytes=math.inf,
    block_peer_bytes=math.inf,
    link_bytes=math.inf,
    signal_seconds=0.5,
)
SMALL = Arriving(rows_WE=((128,), (128,)), reduction=4, columns=4, element_size=4)


def task(name: str, lane: str, seconds: float, *waits: str) -> FusedTask:
    return FusedTask(name=name, lane=lane, waits=waits, kind="C", part=0, seconds=seconds)


def test_table_6_2_is_exact() -> None:
    rows = table62()
    assert len(rows) == 12
    for row in rows:
        assert row["Size(L)"] == math.floor(row["paper"])  # the paper prints up to 0.02 more
        assert row["EC"] * row["experts"] == int(row["tokens"][:-1]) * 1024
        assert 0.5 < row["rest"] < 2.6
    assert symmetric_bytes(8, 2, 256, 4096) == 64 * 2**20
    assert symmetric_bytes(8, 8, 64, 4096) == 2 * symmetric_bytes(8, 4, 128, 4096)  # cells are whole tiles


def test_the_first_free_processor_takes_what_is_ready_first_by_hand() -> None:
    tasks = [task("a", "processor", 3), task("b", "comm 0", 1), task("c", "processor", 1, "b", "link")]
    tasks += [task("d", "processor", 1), task("link", "link", 1.5)]
    found = {each.task.name: (each.start, each.end) for each in first_come(tasks, 2)}
    # d became ready at 0, c at 1.5: d goes first on the processor that b leaves
    assert found == {"a": (0, 3), "b": (0, 1), "link": (0, 1.5), "d": (1, 2), "c": (2, 3)}


def test_one_tile_of_each_rank_by_hand() -> None:
    """Two processors, one tile of this rank and one of the peer: both run at once, each with its two products
    in order.
    """
    found = {each.task.name: each for each in first_come(actor_tasks(SMALL, BY_HAND), 2)}
    at = 0.5 + DECODE + SCHEDULE
    assert found["C0.0"].start == pytest.approx(at) and found["C0.0"].end == pytest.approx(at + 1)
    assert found["E1.0"].end == pytest.approx(0.5 + 2 * DECODE + 2 * SCHEDULE + 2, abs=2e-7)
    assert found["O1.0"].end == pytest.approx(3 + 3 * DECODE + 2 * SCHEDULE, abs=3e-7)


def test_a_late_peer_holds_up_its_own_rows_alone() -> None:
    ends = {each.task.name: each.end for each in first_come(actor_tasks(SMALL, BY_HAND), 2)}
    late = {each.task.name: each.end for each in first_come(actor_tasks(SMALL, BY_HAND, 9.0, ends), 2)}
    assert all(late[f"{kind}0.0"] == ends[f"{kind}0.0"] for kind in "CEO")  # rows of this rank
    assert all(late[f"{kind}1.0"] == pytest.approx(ends[f"{kind}1.0"] + 9) for kind in "CEO")


@pytest.mark.parametrize("ranks", [2, 8])
def test_no_run_beats_its_blocks_or_its_link(ranks: int) -> None:
    run = actor_run(ranks)
    processors = [each for each in run if each.task.lane.startswith(("processor", "comm "))]
    work = sum(each.end - each.start for each in processors)
    assert makespan(run) >= work / (H100.blocks - 1)
    multiplied = 2 * 2 * 2 * TOKENS * LAYER.N * LAYER.K
    assert work > multiplied / H100.block_flops
    away = 2 * 2 * TOKENS * (ranks - 1) / ranks * LAYER.N * 4
    sent = sum(each.end - each.start for each in run if each.task.lane == "link")
    assert sent == pytest.approx(away / H100.link_bytes, rel=1e-6)
    assert makespan(run) >= sent
    starts = {each.task.name: each.start for each in run}
    ends = {each.task.name: each.end for each in run}
    assert all(starts[each.task.name] >= ends[name] - 1e-15 for each in run for name in each.task.waits)


def test_no_processor_does_two_things_at_once_or_idles_while_something_is_ready() -> None:
    arriving, _ = even_layer(LAYER, 512 * 4, ep=4)
    run = first_come(actor_tasks(replace(arriving, element_size=4), H100), 8)
    ends = {each.task.name: each.end for each in run}
    mine = [each for each in run if each.task.lane.startswith(("processor", "comm ")) and each.task.seconds]
    for each in mine[::17]:
        at = each.start + each.task.seconds / 2
        assert sum(other.start < at < other.end for other in mine) <= 8
        ready = max((ends[name] for name in each.task.waits), default=0.0)
        if each.start > ready + 1e-12:  # it waited: all were busy
            at = (ready + each.start) / 2
            assert sum(other.start <= at <= other.end for other in mine) >= 8


def test_given_lanes_the_run_is_the_simulators() -> None:
    """If tasks become ready in the order of the list, the actors run them as `simulate` does."""
    tasks = [task("a", "link", 2), task("b", "other", 1), task("c", "link", 1, "b"), task("d", "x", 1, "c")]
    assert first_come(tasks, 1) == simulate(tasks, lambda each: each.seconds)


def test_what_is_said_of_the_figures_follows() -> None:
    two, four, eight = scaled_layers()
    assert two["O_e"] == two["synchronous O_e"] == 1
    assert min(four["O_e"], eight["O_e"]) > 0.9 > eight["synchronous O_e"]  # near 1, and less
    assert all(row["ms"] < row["synchronous ms"] for row in (two, four, eight))
    assert eight["Mtokens/s"] > 17.7  # of the paper, whose tiles are slower
    few, many = late_peers()
    assert few["actors ms"] < 0.05 * few["late ms"]
    assert 0 < many["actors ms"] < many["late ms"] == many["synchronous ms"]
    assert synchronous_seconds(8)[1] == pytest.approx(few["late ms"] / 0.32 / 1e3)
    assert LAUNCHES["FlashDMoE"] == 1 and LAUNCHES["DeepSpeedMoE"] == 550


def test_ways_without_a_late_peer_are_comets_and_the_engines_models() -> None:
    arriving, returning = even_layer(LAYER, 512 * 8, ep=8)
    first, second = pair_run(arriving, returning, (8, 16))
    assert first == makespan(fused_run(arriving, H100, 8))
    assert second == makespan(fused_run(returning, H100, 16, PAIR_COLUMNS))
    for n in (1, 4):
        found = chunked_seconds(arriving, returning, n)
        assert found == pytest.approx(makespan(chunked_run(arriving, returning, H100, n)))


def test_a_late_peer_delays_a_pair_and_a_pipeline_by_no_more_than_it_is_late() -> None:
    arriving, returning = even_layer(LAYER, 512 * 8, ep=8)
    for run in (
        lambda late: sum(pair_run(arriving, returning, (8, 16), late)),
        lambda late: chunked_seconds(arriving, returning, 2, late),
    ):
        alone, late = run(0.0), run(1e-3)
        assert alone < late <= alone + 1e-3 + 1e-12
        assert run(1.0) > 1.0


# ---- Figs. 6.1 and 6.5


def test_the_kernels_time_does_not_depend_on_the_number_of_experts() -> None:
    """Fig. 6.5: cells of at least a tile are never padded, so the same tiles are computed."""
    few, many = latencies(8, 2048, 8), latencies(8, 2048, 32)  # 512 and 128 rows a cell
    assert many["FlashDMoE ms"] == pytest.approx(few["FlashDMoE ms"], rel=0.02)
    assert many["FasterMoE ms"] > few["FasterMoE ms"]  # launches of each expert
    padded = latencies(8, 2048, 128)  # 32 rows a cell, each of which costs a tile
    assert padded["FlashDMoE ms"] > 2 * few["FlashDMoE ms"]


def test_more_tokens_take_longer_than_one_launch_saves() -> None:
    """Fig. 6.1: with few tokens, launches are most of Megatron's time."""
    few, many = latencies(4, 1024, 8), latencies(4, 4096, 8)
    assert many["FlashDMoE ms"] > few["FlashDMoE ms"]
    gain_few, gain_many = (row["Megatron-TE ms"] / row["FlashDMoE ms"] for row in (few, many))
    assert gain_few > gain_many > 1
    launched = (LAUNCHES["Megatron-LM TE"] - LAUNCHES["Megatron-LM CUTLASS"]) * 5e-3
    assert few["Megatron-TE ms"] - few["Megatron-CUTLASS ms"] == pytest.approx(launched)


def test_others_take_longer_in_float32_than_in_16_bits() -> None:
    row = latencies(4, 2048, 8)
    assert row["Megatron-TE, float32 ms"] > row["Megatron-TE ms"]


@pytest.mark.slow
def test_largest_speed_ups_are_those_of_the_rows() -> None:
    figures = {"6.1": figure61(), "6.5": figure65()}
    assert [len(rows) for rows in figures.values()] == [2 * len(SIZES), 2 * len(EXPERTS)]
    four, faster, *_ = speed_ups(figures)
    assert (four["thesis"], faster["thesis"]) == (4.6, 2.6)
    ratios = [row["Megatron-TE ms"] / row["FlashDMoE ms"] for row in figures["6.1"] if row["GPUs"] == 4]
    assert four["most"] == max(ratios)
    times = [row["FlashDMoE ms"] for row in figures["6.5"]]
    assert max(times) < 1.01 * min(times)


@pytest.mark.slow
def test_simulate_draws_the_actors(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "flashdmoe.png"
    assert cli.main(["simulate", "flashdmoe", "--json", "--draw", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_page_says_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "flashdmoe"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    page = " ".join((ROOT / "docs" / "flashdmoe.md").read_text(encoding="utf-8").split())
    eight, (few, many) = scaled_layers()[-1], late_peers()
    assert f"{eight['O_e']:.2f} at 8 GPUs, the synchronous layer {eight['synchronous O_e']:.2f}" in page
    assert f"{eight['Mtokens/s']:.1f} million tokens" in page
    assert f"{eight['processors busy %']:.0f} %" in page
    assert f"{many['actors ms']:.2f} of {many['late ms']:.2f} ms" in page
    assert re.search(r"16K 128 128 128 256\.00 256\.02 258\.53 2\.53", out)
    assert f"{few['late ms']:.2f}" in out
    four, _, eight_gpus, _, experts = speed_ups({"6.1": figure61(), "6.5": figure65()})
    assert f"up to {four['most']:.2f} times, by launches alone" in page
    assert f"| up to {eight_gpus['most']:.2f} times |" in page
    assert f"with any number; up to {experts['most']:.2f} times |" in page
    for row in ways_by_size():
        cells = [f"{row['tokens']:,}", *(f"{value:.2f}" for name, value in row.items() if name != "tokens")]
        assert f"| {' | '.join(cells)} |" in page
