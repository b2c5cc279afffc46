"""examples/compress_rows.py: rows and gradients are sent in the bytes that it says, and are rounded as its
formats.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pmoe
from tests.pool import ranks

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"

sys.path.insert(0, str(EXAMPLES))
import compress_rows  # noqa: E402

D_MODEL, TOKENS = 24, {2: (61, 40), 4: (33, 0, 50, 17)}
ROW_BYTES = {
    "float32": 4 * D_MODEL,
    "bfloat16": 2 * D_MODEL,
    "float8": D_MODEL + 4,
    "float8, e5m2 back": D_MODEL + 4,
}
ROUNDING = {"bfloat16": 2.0**-8, "float8": 2.0**-4, "float8, e5m2 back": 2.0**-3}
"""Largest relative rounding error of a format."""
FLOAT8 = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}


def run(rank: int, world: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    arguments = Namespace(d_model=D_MODEL, num_experts=8, pipeline=3, device="cpu")
    layer = compress_rows.make_layer(compress_rows.VARIANTS[name], arguments)
    if options:
        again = pmoe.MoELayer(
            D_MODEL, 2 * D_MODEL, 8, top_k=2, callbacks=compress_rows.VARIANTS[name], **options
        )
        again.load_state_dict(layer.state_dict())
        layer = again
    generator = torch.Generator().manual_seed(rank)
    x, dy = torch.randn(2, TOKENS[world][rank], D_MODEL, generator=generator)
    bytes_sent, found = compress_rows.step_results(layer, x, dy)
    own = slice(rank * 8 // world, (rank + 1) * 8 // world)
    away = layer.tokens_per_expert.clone()
    away[own] = 0
    return {"bytes": bytes_sent, "rows": int(away.sum()), "found": found}


def together(results: list[dict[str, Any]], what: str) -> Tensor:
    """Returns the tensors ``what`` of all ranks, concatenated."""
    return torch.cat([each["found"][what].flatten() for each in results])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", list(compress_rows.VARIANTS))
def test_bytes_are_those_of_the_format_forward_and_backward(world: int, name: str) -> None:
    results = ranks(world).run(run, name, {})
    rows = sum(each["rows"] for each in results)
    assert rows > 0
    # There and back, and the gradients of both.
    assert sum(each["bytes"] for each in results) == 4 * rows * ROW_BYTES[name]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", list(ROUNDING))
def test_output_and_every_gradient_are_off_by_what_the_format_rounds(world: int, name: str) -> None:
    exact, rounded = (ranks(world).run(run, each, {}) for each in ("float32", name))
    for what in exact[0]["found"]:
        expected = together(exact, what)
        error = float((together(rounded, what) - expected).norm() / expected.norm())
        # Values are rounded twice or thrice on their way, each time by less than half the bound on average.
        bound = ROUNDING["float8"] if name.startswith("float8") and what == "output" else ROUNDING[name]
        assert bound / 16 < error < bound, (what, error)


@pytest.mark.parametrize("options", [{"pipeline": 1}, {"pipeline": 4, "memory_reuse": "S4"}])
@pytest.mark.parametrize("name", ["bfloat16", "float8"])
def test_chunks_and_rows_sent_again_change_nothing(name: str, options: dict[str, Any]) -> None:
    one, other = (ranks(2).run(run, name, each) for each in ({}, options))
    for what in one[0]["found"]:
        expected = together(one, what)
        assert (together(other, what) - expected).norm() < 1e-5 * expected.norm(), what


@pytest.mark.parametrize("dtype", list(FLOAT8))
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_packed_row_comes_back_within_its_formats_rounding(dtype: torch.dtype, size: float) -> None:
    rows = size * torch.randn(500, D_MODEL, generator=torch.Generator().manual_seed(0))
    packed = compress_rows.pack(rows, dtype)
    assert packed.shape == (500, D_MODEL + 4)
    assert packed.element_size() == 1
    # Values far below the row's largest are subnormal: they are off by half the smallest step at most.
    smallest = rows.abs().amax(1, keepdim=True) / torch.finfo(dtype).max * torch.finfo(dtype).smallest_normal
    bound = 1.0001 * FLOAT8[dtype] * torch.maximum(rows.abs(), smallest)
    assert ((compress_rows.unpack(packed, dtype) - rows).abs() <= bound).all()


@pytest.mark.parametrize("dtype", list(FLOAT8))
def test_rows_of_zeros_come_back_exactly_and_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    rows = torch.zeros(3, D_MODEL)
    rows[1, 4] = float("nan")
    restored = compress_rows.unpack(compress_rows.pack(rows, dtype), dtype)
    assert (restored[[0, 2]] == 0).all()
    assert restored[1].isnan().any()
    assert compress_rows.unpack(compress_rows.pack(rows[:0], dtype), dtype).shape == (0, D_MODEL)


@pytest.mark.slow
def test_the_example_runs_and_ends_well() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLES / "compress_rows.py"), "--steps", "3", "--tokens", "64"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ratios = {line[:20].strip(): line.split()[-1] for line in done.stdout.splitlines() if "0." in line}
    assert [ratios[name] for name in ("bfloat16", "float8")] == ["0.5000", "0.2578"], done.stdout
