"""Layers of megatron-core, DeepSpeed and fairscale, on one rank and on two, beside pmoe's.

make .venv-convert has the packages. Tutel and Transformer Engine cannot be had here: docs/weights.md says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-convert"
LAYERS = {"of_megatron": 6, "of_deepspeed": 3, "of_fairscale": 1}
"""How many each program compares."""


def run_ranks(program: str, ranks: int, tmp_path: Path) -> list[str]:
    """Runs a program of this folder on some ranks, and returns what each of them printed."""
    check_environment()
    environment = os.environ | {
        "PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCHDYNAMO_DISABLE": str(int(program != "on_torchtitan")),  # Megatron would compile its activations
    }
    launch = [sys.executable, "-W", "ignore", "-m", f"tests.convert.{program}", f"{tmp_path}/ranks"]
    commands = [[*launch, str(rank), str(ranks)] for rank in range(ranks)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes) for command in commands]
    printed = [process.communicate(timeout=200)[0] for process in running]
    for process, text in zip(running, printed, strict=True):
        assert process.returncode == 0, text[-6000:]
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("program", LAYERS)
def test_a_layer_of_the_real_package_and_pmoes_give_the_same_output(
    program: str, ranks: int, tmp_path: Path
) -> None:
    for text in run_ranks(program, ranks, tmp_path):
        assert text.count("the same output") == LAYERS[program], text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_pmoes_layer_in_megatron_gives_the_output_and_gradients_of_megatrons(
    ranks: int, tmp_path: Path
) -> None:
    for text in run_ranks("on_megatron", ranks, tmp_path):
        assert text.count("equal to Megatron's") == 9, text
        assert "refusals: named" in text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_deepspeed_trains_as_one_rank_does_and_its_checkpoints_resume(ranks: int, tmp_path: Path) -> None:
    for text in run_ranks("on_deepspeed", ranks, tmp_path):
        assert text.count("losses of one rank") == 9 * ranks, text
        assert text.count("resumed with the same losses") == 3 and "refusals: named" in text, text
        assert text.count("losses and checkpoints of one process") == 3, text
        assert "adapters alone: restored" in text, text
        assert text.count("differences between ranks: named") == ranks - 1, text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_pmoes_experts_in_torchtitan_give_the_output_and_gradients_of_torchtitans(
    ranks: int, tmp_path: Path
) -> None:
    for text in run_ranks("on_torchtitan", ranks, tmp_path):
        assert text.count("equal to torchtitan's") == 4 and "refusals: named" in text, text


@pytest.mark.slow
def test_lightning_trains_as_one_rank_does_and_resumes_on_other_numbers_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "on 2", tmp_path / "on 1"]
    for ranks, folder in zip((2, 1), folders, strict=True):
        folder.mkdir()
        for text in run_ranks("on_lightning", ranks, folder):
            assert text.count("losses of one rank") == ranks and "refusals: named" in text, text
            assert "ddp: resumed with the same losses" in text
            assert ("resumed on another number of ranks" in text) == (ranks == 1)
        monkeypatch.setenv("PMOE_EARLIER", f"{folder}/saved/epoch=0-step=3.ckpt")


@pytest.mark.slow
def test_lightnings_deepspeed_strategy_trains_as_one_rank_does_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ranks in (2, 1):
        folder = tmp_path / f"on {ranks}"
        folder.mkdir()
        for text in run_ranks("on_lightning_deepspeed", ranks, folder):
            assert text.count("losses of one rank, also after resuming") == 3 * ranks, text
            assert text.count("checkpoints of 2 ranks: loaded or refused by name") == 1, text
            assert "refusals: named" in text, text
        monkeypatch.setenv("PMOE_EARLIER", str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("heading", ["DeepSpeed", "Lightning", "Megatron-Core", "torchtitan"])
def test_the_lines_of_the_page_of_stacks_run(
    heading: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMOE_HEADING", heading)
    for text in run_ranks("on_page", ranks, tmp_path):
        assert f"the lines of {heading} ran" in text, text


def check_environment() -> None:
    """AssertionError, never a skip, where the packages are not there or not what environment.sh now makes."""
    there, wanted = FOLDER / "requirements.txt", Path(__file__).parent / "requirements.txt"
    fresh = there.exists() and there.read_text() == wanted.read_text()
    assert fresh, f"{FOLDER} is missing or out of date: make .venv-convert"
