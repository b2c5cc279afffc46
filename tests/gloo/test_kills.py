"""Runs that are killed at random moments of their saves, many times in one folder: nothing is lost."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import pmoe
from pmoe.experts.operands import local_part
from tests import backend
from tests.gloo.lm import SLOW_IMPORT, batch, build, loss_of, make_mesh
from tests.pool import forks


def made(world: int) -> tuple[nn.Module, AdamW]:
    """Returns a model and its optimizer, which has state."""
    mesh = make_mesh({"ep": world}) if world > 1 else None
    model: nn.Module = build(mesh and mesh["ep"])
    if mesh is not None:
        model = pmoe.parallelize(model, mesh)
    optimizer = AdamW(pmoe.parameter_groups(model) if mesh is not None else model.parameters())
    loss_of(model, batch(0, 1)).backward()
    optimizer.step()
    return model, optimizer


def numbers(model: nn.Module, optimizer: AdamW, step: int) -> list[tuple[torch.Tensor, float]]:
    """Returns each tensor of this rank, and the number that all its elements have at a step."""
    found = []
    for at, parameter in enumerate(model.parameters()):
        state = optimizer.state[parameter].values()
        found += [(local_part(each), step + (at + 1) / 64) for each in (parameter.detach(), *state)]
    return found


def run(rank: int, world: int, folder: Path, rendezvous: str, pipe: Any, switch: str) -> None:
    """Joins the other ranks, and saves until it is killed. switch: of tests/backend.py."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    place = backend.prepare(switch, rank, world)
    if world > 1:
        where = {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": world}
        seconds = 30 * backend.patience(switch)
        dist.init_process_group(place.backend, timeout=datetime.timedelta(seconds=seconds), **where)
    backend.run_job(place, save_on, (rank, world, folder, pipe))


def save_on(rank: int, world: int, folder: Path, pipe: Any) -> None:
    """Continues from the last checkpoint, and saves without an end. Rank 0 reports each saved step."""
    model, optimizer = made(world)
    first = 1
    if (folder / "latest.json").exists():
        first = pmoe.load_checkpoint(folder, model, optimizer).step + 1
        assert_full(model, optimizer, first - 1)
    with contextlib.suppress(RuntimeError):  # the peer is gone
        for step in itertools.count(first):
            for tensor, number in numbers(model, optimizer, step):
                tensor.fill_(number)
            pmoe.save_checkpoint(folder, model, optimizer, step=step, extra={"seen": [step]}, keep=3)
            if rank == 0:
                pipe.send(step)


def assert_full(model: nn.Module, optimizer: AdamW, step: int) -> None:
    for tensor, number in numbers(model, optimizer, step):
        assert torch.equal(tensor, torch.full_like(tensor, number))


def killed(world: int, folder: Path, draw: random.Random, number: int) -> int:
    """Returns the last step that the run reported before some or all of its ranks were killed."""
    context = forks()
    ours, theirs = context.Pipe()
    processes = [
        context.Process(
            target=run,
            args=(rank, world, folder, f"{folder}-{number}", theirs, backend.chosen()),
            daemon=True,
        )
        for rank in range(world)
    ]
    for each in processes:
        each.start()
    theirs.close()
    try:
        assert ours.poll(SLOW_IMPORT), "no step was saved"
        last, began = ours.recv(), time.monotonic()
        assert ours.poll(SLOW_IMPORT)
        last = ours.recv()
        time.sleep(draw.uniform(0, 2 * (time.monotonic() - began)))  # a save takes half of that
        for each in draw.sample(processes, draw.randint(1, world)):
            each.kill()
    finally:
        time.sleep(draw.uniform(0, 0.1))  # others may go on for a while
        for each in processes:
            each.kill()
            each.join()
    while ours.poll():
        try:
            last = ours.recv()
        except EOFError:
            break
    return int(last)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("world", "kills"),
    [
        (1, 3),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(1, 100, marks=pytest.mark.nightly),
        pytest.param(2, 100, marks=pytest.mark.nightly),
    ],
)
def test_kills_at_random_moments_of_a_save_lose_nothing(world: int, kills: int, tmp_path: Path) -> None:
    draw, folder = random.Random(kills), tmp_path / "checkpoints"
    model, optimizer = made(1)
    last, left = 0, 0
    for number in range(kills):
        last = max(last, killed(world, folder, draw, number))
        found = pmoe.load_checkpoint(folder, model, optimizer)
        assert found.step >= last, "a checkpoint that was told to be saved is lost"
        assert_full(model, optimizer, found.step)
        whole = sorted(each.name for each in folder.glob("step_*") if each.suffix != ".tmp")
        assert len(whole) >= min(3, last)
        for step in {int(name[5:13]) for name in whole}:
            assert pmoe.load_checkpoint(folder, model, optimizer, step=step).extra == {"seen": [step]}
            assert_full(model, optimizer, step)
        left += len(list(folder.glob("*.tmp"))) + len(list(folder.glob(".*.tmp")))
        last = found.step
    pmoe.save_checkpoint(folder, model, optimizer, step=last + 1, keep=3)
    names = sorted(each.name for each in folder.iterdir())
    assert names[0] == "latest.json" and len(names) == 4 and not any(name.endswith(".tmp") for name in names)
    print(
        f"{kills} kills of {world} ranks, {last} steps saved; {left} unfinished folders and files were left"
    )
    assert left or kills < 100  # the kills came in the midst of saves
