"""Fused layers of several processes with the kernels' own source: each rank's launches run in an emulator.

Rows are written straight into heaps, which are files that all processes map; flags are raised and awaited
across processes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import pmoe
from pmoe.comm.heap import close_heaps
from pmoe.comm.ranks import Ranks
from pmoe.kernels.comet.launcher import Division
from pmoe.kernels.heap import HeapError
from tests.emulated import emulated
from tests.pool import ranks
from tests.reference import relative_error

BF16 = torch.bfloat16
D_MODEL, D_HIDDEN = 264, 40  # two chunks of columns
pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Case:
    tokens: tuple[int, ...]
    skewed: bool = False
    steps: int = 2
    split: int = 1  # over how many ranks an expert is split
    options: dict[str, Any] = field(default_factory=dict)


def run(rank: int, case: Case, fused: bool | str, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Runs some steps of one layer, with routing that depends on the tokens."""
    torch.manual_seed(3)
    world = len(case.tokens)
    mesh = init_device_mesh("cpu", (world // case.split, case.split), mesh_dim_names=("ep", "esp"))
    layer = pmoe.MoELayer(
        D_MODEL, D_HIDDEN * case.split, 2 * world, 2, dtype=BF16, fused=fused, mesh=mesh, **case.options
    ).to(dtype)
    if case.skewed:
        with torch.no_grad():
            layer.gate.weight[0, 0] += 30
    found = []
    for turn in range(case.steps):
        generator = torch.Generator().manual_seed(10 * turn + rank)
        count = case.tokens[(rank + turn) % len(case.tokens)]
        x, grad = (
            torch.randn(count, D_MODEL, generator=generator, dtype=torch.float64).to(BF16).to(dtype)
            for _ in range(2)
        )
        x[:, 0] = 1
        x.requires_grad_()
        layer.zero_grad()
        y = layer(x)
        (y * grad).sum().backward()
        assert x.grad is not None
        grads = {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}
        found.append({"y": y.detach(), "x": x.grad, **grads})
    return found


def job(rank: int, world: int, path: Path, case: Case, fused: bool | str) -> list[tuple[str, float, float]]:
    """Returns (name, error of the fused layer, error of the unfused one), both against float64."""
    import warnings

    with emulated(path, division=Division(1, 256)), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*falls back.*")
        found = run(rank, case, fused, BF16)
        again = run(rank, case, fused, BF16)
        close_heaps(Ranks())
    plain, exact = run(rank, case, False, BF16), run(rank, case, False, torch.float64)
    errors = []
    for one, two, other, wanted in zip(found, again, plain, exact, strict=True):
        for name, values in wanted.items():
            assert torch.equal(one[name], two[name]), f"{name} has other bits the second time"
            pair = (one[name].double(), other[name].double())
            errors.append((name, *(relative_error(each, values) for each in pair)))
    return errors


def check(kernels: Path, case: Case, fused: bool | str) -> None:
    for errors in ranks(len(case.tokens)).run(job, kernels, case, fused):
        for name, error, plain in errors:
            assert error <= 2 * plain + 4e-3, (name, error, plain)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("expert", "fused"),
    [
        ("ffn", True),
        ("swiglu", "forward"),
        ("swiglu", True),
        ("ffn", "forward"),
    ],
)
def test_two_processes_train_as_unfused(kernels: Path, fused: bool | str, expert: str) -> None:
    check(kernels, Case(tokens=(23, 9), options={"expert": expert, "bias": expert == "ffn"}), fused)


def test_a_rank_without_tokens_skewed_routing_and_drops(kernels: Path) -> None:
    options = {"capacity_factor": 1.0, "slack": 2.0, "memory_reuse": "S4"}
    check(kernels, Case(tokens=(0, 31), skewed=True, options=options), True)


@pytest.mark.nightly
def test_four_processes(kernels: Path) -> None:
    check(kernels, Case(tokens=(5, 0, 17, 8), steps=3, options={"slack": 4.0}), True)


@pytest.mark.parametrize("fused", [True, "forward"])
def test_two_processes_split_their_experts(kernels: Path, fused: bool | str) -> None:
    check(kernels, Case(tokens=(23, 9), split=2, options={"expert": "swiglu"}), fused)


@pytest.mark.nightly
def test_four_processes_split_experts_of_two_nodes(kernels: Path) -> None:
    options = {"memory_reuse": "S4", "slack": 4.0, "shared_expert": 40, "capacity_factor": 2.0}
    check(kernels, Case(tokens=(5, 0, 17, 8), split=2, options=options), True)


def absent_job(rank: int, world: int, path: Path) -> str:
    """Rank 1 takes part in everything but the launches. Rank 0 must say for whom it waited, and go on."""
    import warnings

    from pmoe.kernels.comet import launcher

    os.environ["PMOE_WAIT_SECONDS"] = "0.002"  # of the emulator's time
    case = Case(tokens=(9, 9), steps=1)
    told = ""
    try:
        with emulated(path), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if rank == 1:
                patch.setattr(launcher.Launcher, "launch", lambda self, *args, **options: None)
            try:
                torch.manual_seed(3)
                layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 2, dtype=BF16, fused=True)
                with torch.no_grad():
                    layer(torch.ones(9, D_MODEL, dtype=BF16))  # the second launch knows of the first
            except HeapError as error:
                told = str(error)
            close_heaps(Ranks())
            patch.undo()
        os.environ.pop("PMOE_WAIT_SECONDS")
        with emulated(path):
            run(rank, case, True, BF16)  # with a new heap
            close_heaps(Ranks())
    finally:
        os.environ.pop("PMOE_WAIT_SECONDS", None)
    return told


def test_a_rank_that_never_comes_is_named_and_a_new_heap_serves(kernels: Path) -> None:
    pool = ranks(2)
    told, other = pool.run(absent_job, kernels)
    assert "rank 0 waited" in told and "rank 1" in told and "round" in told, told
    assert other == ""
