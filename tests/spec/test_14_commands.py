"""The command pmoe, and installing: without a GPU, without a compiler, without optional packages."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import pmoe
from pmoe.kernels import status

ROOT = Path(__file__).resolve().parents[2]
SIZES = ["--d-model", "64", "--d-hidden", "256", "--num-experts", "8", "--tokens", "512"]


def command(*words: str) -> tuple[int, str, str]:
    """Exit code, output and messages of ``python -m pmoe``, in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["pmoe", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_module("pmoe", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def test_help_names_every_command() -> None:
    code, out, _ = command("--help")
    assert code == 0
    assert all(name in out for name in ("memory", "plan", "profile", "simulate", "kernels", "report"))


def test_memory_prints_the_bytes_of_every_pair() -> None:
    code, out, _ = command("memory", *SIZES, "--ranks", "2", "--n", "4")
    assert code == 0
    assert all(pair in out for pair in ("S1", "S2", "S3", "S4"))


def test_json_is_one_object_and_nothing_else() -> None:
    code, out, _ = command("memory", *SIZES, "--json")
    assert code == 0 and isinstance(json.loads(out), dict)


def test_memory_prints_what_a_layer_predicts() -> None:
    _, out, _ = command("memory", *SIZES, "--n", "4", "--memory-reuse", "S4", "--json")
    layer = pmoe.MoELayer(64, 256, 8, pipeline=4, memory_reuse="S4", device="meta")
    assert str(layer.predict_memory(512).peak) in out


@pytest.mark.parametrize(
    "words, named",
    [
        (["memory", *SIZES, "--n", "0"], "0"),
        (["memory", *SIZES, "--memory-reuse", "S7"], "S7"),
        (["plan", *SIZES, "--budget", "much"], "much"),
        (["simulate", "the-weather"], "the-weather"),
        (["bake"], "bake"),
        (["memory"], "--d-model"),
    ],
    ids=lambda each: "" if isinstance(each, list) else each,
)
def test_a_bad_argument_ends_with_code_2_and_one_message_that_names_it(words: list[str], named: str) -> None:
    code, _, err = command(*words)
    assert code == 2 and named in err
    assert "Traceback" not in err


def test_plan_without_a_profile_says_how_to_measure_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    code, _, err = command("plan", *SIZES, "--ranks", "8", "--dtype", "bfloat16")
    assert code == 2
    assert "no profile fits 8 ranks and bfloat16" in err and "-m pmoe profile" in err


def test_kernels_says_what_there_is_and_is_no_failure() -> None:
    code, out, _ = command("kernels")
    assert code == 0 and out.strip() == str(status()).strip()


def test_importing_pmoe_starts_nothing_and_needs_only_torch() -> None:
    program = (
        "import sys\n"
        "for name in ('matplotlib', 'transformers', 'fairseq', 'triton', 'jinja2', 'tensorboard', 'scipy'):\n"
        "    sys.modules[name] = None\n"
        "import torch, torch.distributed as dist, pmoe\n"
        "layer = pmoe.MoELayer(8, 16, 4, pipeline=2, memory_reuse='S4')\n"
        "layer(torch.randn(5, 8, requires_grad=True)).sum().backward()\n"
        "assert not dist.is_initialized() and not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, check=True)


# ---- installing


def build(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """setup.py on a copy of the tree, where no program is found but what ``environment`` names."""
    tree = tmp_path / "tree"
    for folder in ("pmoe", "cuda"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, tree)
    bare = {name: each for name, each in os.environ.items() if not name.startswith(("PMOE_", "CUDA_"))}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree,
        env={**bare, "PATH": str(tmp_path / "none"), "CUDA_HOME": str(tmp_path / "none"), **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "environment, why",
    [({}, "no nvcc on PATH, in CUDA_HOME or PMOE_NVCC"), ({"PMOE_CUDA": "0"}, "PMOE_CUDA=0")],
    ids=["no compiler", "not wanted"],
)
def test_without_cuda_installing_says_so_in_one_line_and_succeeds(
    environment: dict[str, str], why: str, tmp_path: Path
) -> None:
    ended = build(tmp_path, **environment)
    assert (ended.returncode, ended.stdout) == (0, f"pmoe: building without CUDA kernels: {why}\n"), (
        ended.stderr
    )


def test_kernels_that_were_asked_for_and_cannot_be_built_are_refused_in_one_line(tmp_path: Path) -> None:
    ended = build(tmp_path, PMOE_CUDA="1")
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("pmoe: PMOE_CUDA=1 needs nvcc, and there is none")


def test_a_compiler_that_is_too_old_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    ended = build(tmp_path, PMOE_NVCC=str(nvcc))
    assert ended.returncode == 1
    assert "is of CUDA 11.8, and 12.5 or newer is needed" in ended.stderr
    assert "PMOE_NVCC=/path/to/newer/nvcc" in ended.stderr and "PMOE_CUDA=0" in ended.stderr
