"""pmoe profile --kernels: which division points it measures, prints and refuses. All devices are fakes.

A division point says how many blocks of a fused kernel communicate.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pmoe import warn
from pmoe.cli import profile_kernels
from pmoe.comm.ranks import Ranks
from pmoe.kernels import extension
from pmoe.measure import block_split, fused_kernels
from pmoe.measure.block_split import as_fields, division_path, load_divisions, save_divisions
from pmoe.planner.block_split import Division, DivisionTable, FusedKernelSizes, all_kernel_sizes
from tests.unit.test_cli import printed, refused, run
from tests.unit.test_division import (
    SECONDS,
    SHAPE,
    SIZES,
    WHEN,
    entry,
    forgotten,  # noqa: F401 (a fixture)
)

KERNELS = ["profile", "--kernels"]
NEEDS = "pmoe profile --kernels needs a CUDA device with the fused kernels: "


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], f"{NEEDS}no code for this device"),
        (["--device", "cpu"], f"{NEEDS}device cpu: the kernels are for CUDA"),
        (["--device", "cuda:3"], "--device ('cuda:3') must exist: torch sees 1 GPUs"),
    ],
)
def test_without_a_device_that_runs_them_one_message_says_why(
    options: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    if not options:
        monkeypatch.setattr(extension, "path", lambda device: (None, "no code for this device"))
    assert refused(capsys, *KERNELS, *options).endswith(f"{told}\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_on_a_machine_without_one_the_message_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device ('cuda:0') must exist: torch sees 0 GPUs" in refused(capsys, *KERNELS)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["profile", "--show"], "--show needs --kernels"),
        (["profile", "--top-k", "2"], "--top-k needs --kernels"),
        (["profile", "--virtual-ranks", "2"], "--virtual-ranks needs --kernels"),
        ([*KERNELS, "--quick"], "--quick must not be given with --kernels"),
        ([*KERNELS, "--out", "x"], "--out must not be given with --kernels"),
        ([*KERNELS, "--tokens", "0"], "argument --tokens: '0' must be a whole number of at least 1"),
        ([*KERNELS, "--device", "abacus"], "--device ('abacus') must be cpu or cuda"),
        (["kernels", "--capability", "9.0", "--archs", ","], "--archs (',') must name an architecture"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, *argv)


def test_virtual_ranks_are_of_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refused(capsys, *KERNELS, "--virtual-ranks", "4")
    assert "--virtual-ranks (4) needs a single process, but torchrun started 2" in message


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[FusedKernelSizes, Division, dict[str, Any]]]:
    """Stands in for an H200 on which fused kernels are fastest with 16 communicating blocks.

    Returns a list of what was timed.
    """
    asked: list[tuple[FusedKernelSizes, Division, dict[str, Any]]] = []

    def time_division(shape: FusedKernelSizes, division: Division, **options: Any) -> float:
        asked.append((shape, division, options))
        return 1e-3 + abs(division.n_c - 16) * 1e-5 + division.chunk_columns * 1e-9

    monkeypatch.setattr(fused_kernels, "time_division", time_division)
    monkeypatch.setattr(extension, "path", lambda device: ("sm_90a", None))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(block_split, "device_name", lambda device: "NVIDIA H200")
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return asked


def test_profile_kernels_fills_the_table(
    tmp_path: Path, timed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--folder", str(tmp_path), "--tokens", "1000", "1024", "--virtual-ranks", "8"]
    found = printed(capsys, *KERNELS, *options)
    assert found["path"] == str(division_path("NVIDIA H200", tmp_path))
    sizes = replace(SIZES, experts=1, rows=2048, d_hidden=14336, virtual=True)  # Mixtral 8x7B's, K = 2
    assert list(dict.fromkeys(shape for shape, _, _ in timed)) == all_kernel_sizes(sizes)
    assert timed[0][2] | {"group": None} == {"top_k": 2, "device": torch.device("cuda:0"), "group": None}
    stored = load_divisions(tmp_path)
    assert {each.division for each in stored.entries.values()} == {Division(16, 512), Division(16, 256)}
    assert as_fields(stored) == {"entries": found["entries"], "layers": []}
    layer_options = ["--d-model", "64", "--d-hidden", "96", "--num-experts", "2", "--top-k", "1"]
    layer_options += ["--expert", "ffn", "--dtype", "float16", "--tokens", "4", "--folder", str(tmp_path)]
    run(*KERNELS, *layer_options)
    out = capsys.readouterr().out
    assert "float16, 1 rank, 2 experts, 4 rows, 64 x 96, on 132 blocks of NVIDIA H200\n" in out
    assert re.search(r"^dispatch forward +16 +- +1\.000 +1\.050 ", out, re.MULTILINE)
    assert re.search(r"^combine backward +16 +256 +1\.000 +1\.050 ", out, re.MULTILINE)
    assert out.endswith(f"\nwrote {found['path']}\n")
    assert len(load_divisions(tmp_path).entries) == 8


def test_no_times_are_stored_of_a_layer_that_falls_back_the_second_time_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer that is not fused warns only once, but must not be timed for any number of tokens."""
    monkeypatch.setattr(profile_kernels, "time_layers", lambda *_: pytest.fail("timed"))
    warn.GIVEN.clear()  # of other tests
    sizes = {tokens: replace(SIZES, rows=tokens) for tokens in (4, 8)}
    options: dict[str, Any] = {"d_model": 8, "d_hidden": 8, "num_experts": 2, "top_k": 1, "expert": "ffn"}
    options |= {"device": torch.device("cpu"), "dtype": torch.float32}
    with pytest.warns(UserWarning, match="falls back") as given:
        assert profile_kernels._time_layers(options, sizes, Ranks.single()) == {}
    assert len([each for each in given if "falls back" in str(each.message)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"pmoe: no layer times for {each}: it ran on path 'pipeline', not fused" for each in sizes.values()
    ]


def test_show_prints_what_is_stored_and_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show = [*KERNELS, "--show", "--folder", str(tmp_path)]
    run(*show)
    assert capsys.readouterr().out == f"no measurements of fused kernels in {tmp_path}\n"
    stored = DivisionTable({SHAPE: entry(SHAPE, 26, 1024)}, {SIZES: SECONDS})
    save_divisions(stored, tmp_path)
    assert printed(capsys, *show) == {"folder": str(tmp_path), **as_fields(stored)}
    run(*show)
    out = capsys.readouterr().out
    assert f"{SIZES}\nkernel " in out
    assert re.search(rf"^combine forward +26 +1024 +1\.000 +- +{re.escape(WHEN)}$", out, re.MULTILINE)
    assert re.search(rf"^{SIZES} +1\.000 +2\.000 +4\.000 +3\.000 +{re.escape(WHEN)}$", out, re.MULTILINE)


def test_bad_sizes_and_kernels_that_cannot_be_timed_end_with_one_message(
    tmp_path: Path, timed: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, *KERNELS, "--virtual-ranks", "3")
    assert "num_experts (8) must be divisible by num_ranks (3)" in message
    assert "top_k (9) must be at most num_experts (8)" in refused(capsys, *KERNELS, "--top-k", "9")
    blocked = tmp_path / "file"
    blocked.touch()
    message = refused(capsys, *KERNELS, "--tokens", "4", "--folder", str(blocked / "in"))
    assert f"--folder ({blocked / 'in'}) must be a folder to write: " in message

    def fail(*args: Any, **options: Any) -> float:
        raise RuntimeError("no memory")

    monkeypatch.setattr(fused_kernels, "time_division", fail)
    with pytest.warns(UserWarning, match="could not be measured: no memory"):
        message = refused(capsys, *KERNELS, "--tokens", "4", "--folder", str(tmp_path))
    assert "no fused kernel could be measured" in message
    assert list(tmp_path.iterdir()) == [blocked]
