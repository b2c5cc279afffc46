"""A wrong argument or input on one rank only is an error on every rank, long before the timeout.

On that rank the error names the argument; on the others it names the rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import pmoe
from pmoe.integrations.logging import StatsWriter
from pmoe.training.parallel import make_meshes, reduce_gradients
from tests.gloo.kit import error_of
from tests.pool import SHORT_TIMEOUT_SECONDS, Pool, ranks

M, H, E = 6, 8, 4


def called(**given: Any) -> None:
    right = {"x": torch.randn(5, M), "token_ids": torch.arange(5)}
    layer = pmoe.MoELayer(M, H, E, 2, gate="hash", pipeline=2)
    layer(**{**right, **given}).sum().backward()


def parallelized(mesh: DeviceMesh, **given: Any) -> nn.Module:
    layer = pmoe.MoELayer(M, H, E, mesh=mesh)
    return pmoe.parallelize(**{"model": nn.Sequential(layer), "mesh": mesh, **given})


def saved(mesh: DeviceMesh, folder: Path, **given: Any) -> None:
    pmoe.save_checkpoint(**{"folder": folder, "model": parallelized(mesh), "step": 1, **given})


def loaded(mesh: DeviceMesh, folder: Path, **given: Any) -> None:
    pmoe.load_checkpoint(**{"folder": folder, "model": parallelized(mesh), **given})


def written(folder: Path, **given: Any) -> None:
    with StatsWriter(**{"run_dir": folder / "run", "model": nn.Linear(M, M), **given}):
        pass


BAD: dict[str, dict[str, Callable[[], Any]]] = {
    "call": {
        "x": lambda: [1.0],
        "x ": lambda: torch.eye(M).to_sparse(),
        "x  ": lambda: torch.ones(5, M, dtype=torch.complex64),
        "x   ": lambda: torch.ones(5, M, device="meta"),
        "x    ": lambda: torch.tensor(1.0),
        "token_ids": lambda: None,
        "token_ids ": lambda: torch.ones(5),
    },
    "parallelize": {"model": lambda: nn.Linear(M, M), "model ": lambda: 3, "reduce": lambda: 1},
    "save": {
        "folder": lambda: 3,
        "model": lambda: "no such",
        "optimizer": lambda: 3,
        "step": lambda: -1,
        "extra": lambda: 3,
        "keep": lambda: 0,
    },
    "load": {"folder": lambda: b"x", "model": lambda: None, "optimizer": lambda: [3], "step": lambda: 0.5},
    "write": {
        "run_dir": lambda: 3,
        "model": lambda: None,
        "every": lambda: 0,
        "tensorboard": lambda: 1,
        "settings": lambda: [1],
    },
}
"""Wrong values by call and argument. Spaces at the end distinguish several values of an argument."""


def bad_on_rank_1(rank: int, world: int, folder: Path) -> dict[str, str]:
    """Returns the errors of this rank by call and argument."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    saved(mesh, folder)
    calls: dict[str, Callable[..., Any]] = {
        "call": called,
        "parallelize": lambda **given: parallelized(mesh, **given),
        "save": lambda **given: saved(mesh, **{"folder": folder, **given}),
        "load": lambda **given: loaded(mesh, **{"folder": folder, **given}),
        "write": lambda **given: written(folder, **given),
    }
    found = {}
    for name, call in calls.items():
        for argument, make in BAD[name].items():
            given = {argument.strip(): make()} if rank == 1 else {}
            found[f"{name}: {argument}"] = error_of(lambda call=call, given=given: call(**given))
        call()  # nobody is out of step
    return found


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        return ranks(2).run(bad_on_rank_1, Path(folder))


@pytest.mark.parametrize("case", [f"{name}: {argument}" for name, found in BAD.items() for argument in found])
def test_a_bad_argument_of_one_rank_is_an_error_on_both(case: str, told: list[dict[str, str]]) -> None:
    others, own = (each[case] for each in told)
    argument = case.split(": ")[1].strip()
    assert argument in own, own
    assert "rank 1" in others or others == own, others


def stepped(mesh: DeviceMesh, **given: Any) -> None:
    """Runs a training step. If a rank has refused it, the others end by the timeout."""
    model = nn.Linear(M, M)
    model(torch.ones(1, M)).sum().backward()
    if "divide_by" in given:
        reduce_gradients(model, make_meshes(), **given)
    else:
        pmoe.clip_grad_norm_(model, group=mesh.get_group(), **given)


def bad_in_a_step(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    make_meshes()
    bad = {"divide_by": -1} if rank == 1 else {"divide_by": 2}
    worse = {"max_norm": -1} if rank == 1 else {"max_norm": 1}
    return [error_of(lambda: stepped(mesh, **worse)), error_of(lambda: stepped(mesh, **bad))]


@pytest.mark.slow
def test_who_waits_for_a_rank_that_refused_an_argument_of_a_step_is_told_the_stage() -> None:
    with Pool(2, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        waited, refused = pool.run(bad_in_a_step)
    assert "max_norm (-1)" in refused[0] and "divide_by (-1)" in refused[1], refused
    assert "rank 0 of 2 failed in taking the norm of all gradients" in waited[0], waited
    assert "rank 0 of 2 failed in reducing gradients" in waited[1], waited
