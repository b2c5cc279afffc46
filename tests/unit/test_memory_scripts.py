"""The memory benchmarks at tiny sizes: they run, write their results, and divide by the right yardstick."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import memory, memory_breakdown, memory_pairs, memory_saving, memory_timeline
from bench.allocations import StepMemory, mark, moment, step_memory, watched
from bench.memory import MODELS, Model
from pmoe import MoELayer
from pmoe.measure.step_memory import step_peak_bytes
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Restores the number of torch's threads, which the scripts set."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def results(path: Path) -> Any:
    found = json.loads(path.read_text())
    assert found["machine"]["torch"] == torch.__version__
    assert isinstance(found["command"], list)
    return found


# ---- what is allocated ----------------------------------------------------------------------------


def test_live_bytes_follow_every_tensor_with_its_name() -> None:
    before = torch.ones(1000)
    with watched() as seen:
        a = torch.empty(100)
        mark(a, "a")
        mark(a, "another name")
        b = torch.empty(50)
        moment("both")
        del a
        c = torch.empty(200)
        mark(c, "c")
        mark(before, "not seen")
    assert [(each.num_bytes, each.name, each.end is None) for each in seen.records] == [
        (400, "a", False),
        (200, "other", True),
        (800, "c", True),
    ]
    assert [held for _, held in seen.live_bytes()] == [0, 400, 600, 200, 1000]
    assert seen.peak_bytes() == 1000
    assert seen.peak_bytes(without=("c",)) == 600
    assert [held for when, held in seen.live_bytes() if when <= seen.moments["both"]][-1] == 600
    del b, c


def test_a_step_of_a_linear_layer_counted_by_hand() -> None:
    layer = torch.nn.Linear(64, 32, bias=False)

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(128, 64, requires_grad=True), torch.ones(128, 32)

    found = step_memory(layer, inputs)
    x, y, weight = 128 * 64 * 4, 128 * 32 * 4, 64 * 32 * 4
    small = 64  # scalars
    assert 0 <= found.peak - (x + 2 * y + x + weight) <= small  # x, dy, y, dx and dw
    assert 0 <= found.without_gradients - (x + 2 * y + x) <= small
    given = inputs()
    there_before = step_memory(layer, lambda: given).peak
    assert found.peak - there_before == x + y
    given[0].grad = None
    assert step_peak_bytes(layer, *given) == there_before  # as `pmoe memory --measure` counts


# ---- the yardstick --------------------------------------------------------------------------------


def test_the_models_are_the_paper_s() -> None:
    assert MODELS["MoE-GPT3-S"] == Model(768, 3072, 64)
    assert MODELS["MoE-GPT3-XL"] == Model(2048, 8192, 64)
    assert MODELS["MoE-BERT-L"] == Model(1024, 4096, 64)


def test_yardstick_saving_and_total_by_hand() -> None:
    model = Model(8, 16, 1)
    # Eq. 1: 4 (8 + 2 * 16 * 8) = 1056; Eq. 2 and Eq. 4: 4 * 64 * 8 + 64 * 16 = 3072 each
    assert memory.yardstick_bytes(64, model) == 4 * (1056 + 2 * 3072)
    assert memory.saving_bytes(64, model, 2) == 4 * 2 * 64 * 16 / 2
    assert memory.saving_bytes(64, model, 4) == 4 * 2 * 64 * (2 * 8 * 2 / 4 + 16 * 3 / 4)
    layer = memory.one_expert(model, 2, STRATEGIES["S4"])
    assert sum(p.numel() for p in layer.parameters()) == 8 + 2 * 16 * 8
    step = StepMemory(peak=9000, without_gradients=8000, seconds=0.0)
    assert memory.measured_total(layer, step) == 4 * 4 * 264 + 8000


def test_the_saving_script_writes_a_share_for_every_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = ["--models", "64x256", "--tokens", "512", "256", "--n", "2", "4", "--pairs", "S1", "keep/keep"]
    memory_saving.main([*cells, "--threads", "1", "--out", str(tmp_path)])
    rows = results(tmp_path / "memory_saving.json")["rows"]
    assert [(row["tokens"], row["n"], row["pair"]) for row in rows] == [
        (tokens, n, pair)
        for tokens in (256, 512)  # the smallest first
        for n in (2, 4)
        for pair in ("offload/offload S1", "keep/keep")
    ]
    row = rows[-2]
    yardstick = 4 * (4 * (64 + 2 * 256 * 64) + 2 * (4 * 512 * 64 + 512 * 256))
    saving = 4 * 2 * 512 * (2 * 64 * 2 / 4 + 256 * 3 / 4)
    assert (row["yardstick_bytes"], row["saving_bytes"]) == (yardstick, saving)
    assert row["share"] == pytest.approx((yardstick - row["measured_bytes"]) / saving)
    assert row["target"] == 0.92
    assert row["holds"] == (row["share"] >= 0.92)
    for row in rows:
        assert row["predicted_over_measured"] == pytest.approx(1, abs=0.02)
        assert row["predicted_bytes"] == pytest.approx(row["measured_bytes"], rel=0.02)
    assert rows[-2]["measured_bytes"] < rows[-1]["measured_bytes"]
    assert (tmp_path / "memory_saving.png").read_bytes().startswith(b"\x89PNG")
    assert "share" in capsys.readouterr().out


def test_the_saving_script_keeps_what_it_has_when_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, done = memory_saving.one_step, []

    def stopping(layer: MoELayer, tokens: int) -> StepMemory:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(tokens)
        return step(layer, tokens)

    monkeypatch.setattr(memory_saving, "one_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        memory_saving.main(["--models", "16x32", "--tokens", "32", "--out", str(tmp_path)])
    assert len(results(tmp_path / "memory_saving.json")["rows"]) == 2


# ---- the other scripts ----------------------------------------------------------------------------


def test_the_breakdown_is_the_theory_and_beside_it_what_was_measured(tmp_path: Path) -> None:
    arguments = ["--models", "32x64", "--tokens", "64", "128", "--out", str(tmp_path)]
    memory_breakdown.main([*arguments, "--measure"])
    rows = results(tmp_path / "memory_breakdown.json")["rows"]
    assert [(row["tokens"], row["source"]) for row in rows] == [
        (tokens, source) for tokens in (64, 128) for source in ("Eq. 1-3, E = 1", "measured, E = 1, n = 1")
    ]
    theory, measured = rows[0]["bytes"], rows[1]["bytes"]
    assert theory == {
        "model states": 4 * 4 * (32 + 2 * 64 * 32),
        "activations": 4 * (4 * 64 * 32 + 64 * 64),
        "temporaries": 4 * (64 * 32 + 64 * 64),
    }
    assert measured["model states"] == theory["model states"]
    # x, T_DI, T_M, T_O and what routing saves; T_DO is not kept.
    assert 0 <= measured["activations"] - 4 * (3 * 64 * 32 + 64 * 64) <= 64 * 80
    for row in rows:
        assert sum(row["ratios"].values()) == pytest.approx(1)
    assert (tmp_path / "memory_breakdown.png").read_bytes().startswith(b"\x89PNG")


def test_the_pairs_script_has_memory_and_time_of_every_way(tmp_path: Path) -> None:
    arguments = ["--models", "32x64", "--tokens", "128", "--n", "2", "--rounds", "1", "--threads", "1"]
    memory_pairs.main([*arguments, "--out", str(tmp_path)])
    found = results(tmp_path / "memory_pairs_1_ranks.json")
    names = [memory.pair_name(pair) for pair in ALL_PAIRS] + ["no rings"]
    assert [row["pair"] for row in found["rows"]] == names
    for row in found["rows"]:
        assert row["measured_bytes"] > 4 * 4 * (32 + 2 * 64 * 32)
        assert row["seconds"] > 0
        assert len(row["times"]["samples_s"]) == 1
    assert (tmp_path / "memory_pairs_1_ranks_32x64_128.png").exists()


def test_the_timeline_names_every_tensor(tmp_path: Path) -> None:
    memory_timeline.main(
        ["--models", "64x128", "--tokens", "256", "--n", "4", "--pair", "S4", "--out", str(tmp_path)]
    )
    stem = tmp_path / "memory_timeline_64x128_256_n4_communicate-recompute"
    panels = results(Path(f"{stem}.json"))["panels"]
    assert list(panels) == ["communicate/recompute S4", "keep/keep"]
    reused, kept = panels.values()
    rows = 256 * 64 * 4
    for panel in (reused, kept):
        parts = {part: max(values) for part, values in panel["bytes"].items()}
        assert set(parts) == set(memory.PARTS)
        assert (parts["x and dy"], parts["output"], parts["dx"]) == (2 * rows, rows, rows)
        assert parts["parameters' gradients"] == 4 * (64 + 2 * 64 * 128)
        assert parts["forward slots"] > 0
        assert parts["backward slots"] > 0
        assert sum(panel["at_peak_bytes"].values()) == panel["peak_bytes"]
        assert panel["predicted_peak_bytes"] == pytest.approx(panel["peak_bytes"], rel=0.02)
    assert (max(kept["bytes"]["kept T_DI"]), max(kept["bytes"]["kept T_M"])) == (rows, 2 * rows)
    assert max(reused["bytes"]["kept T_DI"]) == max(reused["bytes"]["kept T_M"]) == 0
    assert Path(f"{stem}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_scripts_run_from_anywhere_and_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    script = [sys.executable, "-W", "ignore", str(ROOT / "bench" / "memory_breakdown.py")]
    arguments = ["--models", "MoE-BERT-L", "--tokens", "1k", "--out", "out"]
    subprocess.run([*script, *arguments], cwd=tmp_path, check=True, capture_output=True)
    (row,) = results(tmp_path / "out" / "memory_breakdown.json")["rows"]
    assert row["bytes"]["activations"] == 4 * (4 * 1024 * 1024 + 1024 * 4096)


@pytest.mark.parametrize(
    "main, argv, told",
    [
        (memory_saving.main, ["--n", "1"], r"--n (1) must be at least 2"),
        (memory_saving.main, ["--n", "0"], "'0' must be a whole number of at least 1"),
        (memory_saving.main, ["--models", "GPT"], "'GPT' must be one of MoE-GPT3-S"),
        (memory_saving.main, ["--tokens", "4m"], "'4m' must be a number of tokens"),
        (memory_timeline.main, ["--pair", "S9"], "'S9' must be one of S1"),
        (memory_timeline.main, ["--device", "cuda"], "--device (cuda) must be cpu"),
    ],
)
def test_bad_arguments_are_named(
    main: Any, argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err
