"""What other GPUs than 8.0 and 9.0 run: the kernels compiled by the driver, from PTX of compute_80.

CUDA_FORCE_PTX_JIT=1 makes the driver do so on any GPU. PyTorch's wheels have PTX for the newest GPUs only, so
its own kernels cannot be loaded then, nor those of its libraries: copies between host and device are all that
there is of it. So operands are drawn and results compared on the CPU, and the tests named from_ptx here, or
every_element in test_grouped_gemm.py, run in another process.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import permutes
from pmoe.kernels import extension, permute, route, status
from pmoe.kernels.route import reference as plain_route
from pmoe.kernels.route.launches import launch_route
from pmoe.kernels.route.operators import route_backward
from tests.gpu.support import DEVICE, NEEDS_GPU

pytestmark = NEEDS_GPU

ROOT = Path(__file__).resolve().parents[2]
FORCED = os.environ.get("CUDA_FORCE_PTX_JIT") == "1"
INSIDE = pytest.mark.skipif(not FORCED, reason="test_the_kernels_run_from_ptx runs this in another process")
FEWEST = 50
"""Tests that must have passed there: with none found, pytest would be content with what it skipped."""

NAN = float("nan")
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def forced_environment() -> dict[str, str]:
    """Without what tells the other pytest that it was a worker of this one. LAZY loads each kernel when it is
    used first, so those of PyTorch that cannot be loaded are not missed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {"CUDA_FORCE_PTX_JIT": "1", "CUDA_MODULE_LOADING": "LAZY"}


@pytest.mark.skipif(FORCED, reason="this is the other process")
@pytest.mark.timeout(420)
def test_the_kernels_run_from_ptx() -> None:
    if extension.load() is None:
        if os.environ.get("PMOE_CUDA") == "0":
            pytest.skip("PMOE_CUDA=0, and pmoe._cuda is not built")
        pytest.fail(str(extension.why_missing()))
    copies = 'import torch; assert torch.ones(8).to("cuda").cpu().sum() == 8'
    probe = subprocess.run(
        [sys.executable, "-c", copies],
        env=forced_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    if probe.returncode:
        pytest.skip(f"torch cannot copy to the device with CUDA_FORCE_PTX_JIT=1: {probe.stderr[-500:]}")
    files = [f"tests/gpu/test_{name}.py" for name in ("ptx", "grouped_gemm", "comet")]
    # Of the fused kernels one test: the others' heaps are poisoned and compared by PyTorch's kernels.
    tests = "from_ptx or (every_element and not test_comet)"
    command = [
        sys.executable,
        "-m",
        "pytest",
        *files,
        "-m",
        "gpu",
        "-k",
        tests,
        "-q",
        "--maxfail=5",
        "--timeout=200",
    ]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        command, cwd=ROOT, env=forced_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout[-12000:]}\n{done.stderr[-2000:]}"
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= FEWEST, done.stdout[-2000:]


@INSIDE
def test_status_says_so_from_ptx() -> None:
    module = extension.load()
    assert module is not None
    hopper = {each["name"] for each in module.declared() if each["hopper"]}
    (device, *_) = status().devices
    assert device.kernels and hopper, device.reason
    for kernel in device.kernels:
        assert kernel.ptx_version == 80, f"{kernel.name}: {kernel.runs}"
        if device.capability != (8, 0):  # there the driver's code has the version of nvcc's
            assert kernel.runs == "PTX of compute_80, compiled by the driver", kernel
        if kernel.name not in hopper:
            assert kernel.refusal is None, f"{kernel.name}: {kernel.refusal}"
        else:
            assert kernel.refusal is not None and "of PTX version 80 was loaded" in kernel.refusal, kernel
    if device.capability == (9, 0):
        assert all(
            "CUDA_FORCE_PTX_JIT" in str(each.refusal) for each in device.kernels if each.name in hopper
        )


def assert_near(got: Tensor, expected: Tensor, lost: Tensor | float = 0.0) -> None:
    """One rounding to got's type, beside what sums have ``lost``. NaN is never near."""
    bound = 1.001 * ROUNDING[got.dtype] * expected.abs() + lost + 2.0**-24
    wrong = ~((got.double() - expected).abs() <= bound)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}: {got[wrong][:4]}, {expected[wrong][:4]}"


@INSIDE
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("tokens, top_k, columns", [(65, 1, 64), (97, 2, 1024), (33, 8, 2048), (9, 3, 2880)])
def test_permute_and_back_from_ptx(tokens: int, top_k: int, columns: int, dtype: torch.dtype) -> None:
    assert permute.refusal(DEVICE, dtype, top_k) is None
    num_rows = tokens * top_k - 1  # the row of one slot is dropped
    position = torch.randperm(num_rows + 1).int().view(tokens, top_k)
    weight, x = torch.randn(tokens, top_k), torch.randn(tokens, columns).to(dtype)
    rows = torch.randn(num_rows, columns).to(dtype)
    places, weights, given, routed = (each.to(DEVICE) for each in (position, weight, x, rows))

    def poisoned(like: Tensor) -> Tensor:
        return torch.full_like(like, NAN).to(DEVICE)

    permuted, d_rows, y, d_x = (poisoned(each) for each in (rows, rows, x, x))
    d_weights = [poisoned(weight), poisoned(weight)]
    permutes.launch_permute(given, places, weights, permuted)
    permutes.launch_unpermute(routed, places, weights, y)
    permutes.launch_permute_backward(routed, given, places, weights, d_x, d_weights[0])
    permutes.launch_unpermute_backward(given, routed, places, weights, d_rows, d_weights[1])

    kept = position < num_rows
    at = position.long().clamp(max=num_rows - 1)
    factor = torch.where(kept, weight, 0).double().unsqueeze(2)
    wide = x.double().unsqueeze(1) * factor
    expected = torch.empty(num_rows, columns, dtype=torch.float64)
    expected[at[kept]] = wide[kept]
    for found in (permuted, d_rows):
        assert_near(found.cpu(), expected)
    terms = rows[at].double() * factor
    for found in (y, d_x):
        assert_near(found.cpu(), terms.sum(1), terms.abs().sum(1) * (top_k + 2) * 2.0**-24)
    products = x.double().unsqueeze(1) * rows[at].double() * kept.unsqueeze(2)
    for found in d_weights:
        assert_near(found.cpu(), products.sum(2), products.abs().sum(2) * 2e-5)


@INSIDE
@pytest.mark.parametrize(
    "tokens, experts, top_k, chunks", [(130, 16, 4, 2), (3000, 64, 2, 1), (77, 250, 8, 1)]
)
def test_routing_from_ptx(tokens: int, experts: int, top_k: int, chunks: int) -> None:
    logits = 2 * torch.randn(tokens, experts)
    options = {"normalize": True, "z_loss_weight": 0.1}
    on_device = logits.to(DEVICE)
    assert route.refusal(on_device, top_k, chunks) is None
    found = plain_route.empty_routes(on_device, top_k, chunks)
    launch_route(on_device, found, **options)
    expected = plain_route.route(logits, top_k, num_chunks=chunks, **options)
    for name in ("expert_TK", "position_TK", "slot_N", "counts_nE", "ends_nE"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    torch.testing.assert_close(found.weight_TK.cpu(), expected.weight_TK, rtol=2e-6, atol=1e-37)
    torch.testing.assert_close(found.l_aux.cpu(), expected.l_aux, rtol=2e-5, atol=0)

    grad_weight, grad_aux = torch.randn(tokens, top_k), torch.tensor(math.pi)
    out = route_backward(
        on_device,
        found.expert_TK,
        found.weight_TK,
        found.counts_nE,
        grad_weight_TK=grad_weight.to(DEVICE),
        grad_l_aux=grad_aux.to(DEVICE),
        **options,
    )
    wanted = plain_route.route_backward(
        logits.double(),
        expected.expert_TK,
        expected.weight_TK.double(),
        expected.counts_nE,
        grad_weight_TK=grad_weight.double(),
        grad_l_aux=grad_aux.double(),
        **options,
    )
    error = (out.cpu().double() - wanted).norm() / wanted.norm()
    assert error < 1e-5, float(error)
