"""Checkpoints of train_lm.py: what is in them, and why a kill at any moment leaves the last one whole.

    checkpoints/latest.json          {"folder": "step_00000400", "ranks": 2}; replaced last, in one move
    checkpoints/step_00000400/
        shared.pt                    by rank 0: dense parameters, their Adam state, step, curves
        rank0.pt  rank1.pt  ...      by each rank: its experts, their Adam state, its random state

A checkpoint is written as step_N.tmp; when the files of all ranks are on the disk it is renamed, and
only then named by latest.json. Nothing that latest.json names is ever written to. The ranks of several
machines need one file system. Experts are split along their first dimension in rank order, so a checkpoint
of W ranks can be continued by any number of them; bit for bit by W.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from lm_ranks import Ranks
from torch import Tensor, nn

from pmoe.training.parallel import is_expert

POINTER = "latest.json"
State = dict[str, Any]


class CheckpointError(ValueError):
    """There is no checkpoint where one was asked for, or it belongs to another run."""


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: State,
    extra: State,
    ranks: Ranks,
) -> None:
    """Writes a checkpoint of all ranks; every rank must call it. ``settings`` and ``extra`` are plain data.

    Leaves this one and the one before. Does nothing if the last checkpoint is of this very step.
    """
    name = f"step_{step:08d}"
    before = read_pointer(folder)
    if before and before["folder"] == name:
        return
    part = folder / f"{name}.tmp"
    if ranks.rank == 0:
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed while writing
        part.mkdir(parents=True)
    ranks.wait()
    own = {"experts": pack(model, optimizer, is_expert), "random": torch.get_rng_state()}
    write_to_disk(part / f"rank{ranks.rank}.pt", lambda file: torch.save(own, file))
    if ranks.rank == 0:
        dense = pack(model, optimizer, lambda parameter: not is_expert(parameter))
        shared = {"dense": dense, "step": step, "settings": settings, **extra}
        write_to_disk(part / "shared.pt", lambda file: torch.save(shared, file))
    ranks.wait()
    if ranks.rank == 0:
        publish(folder, part, name, ranks.world)
        remove_all_but(folder, {name, before["folder"] if before else name})


def publish(folder: Path, part: Path, name: str, world: int) -> None:
    """Makes the finished folder ``part`` the last checkpoint."""
    sync_folder(part)
    shutil.rmtree(folder / name, ignore_errors=True)  # finished once, but never named by the pointer
    os.replace(part, folder / name)
    sync_folder(folder)
    pointer = json.dumps({"folder": name, "ranks": world}).encode()
    write_to_disk(folder / f"{POINTER}.tmp", lambda file: file.write(pointer))
    os.replace(folder / f"{POINTER}.tmp", folder / POINTER)
    sync_folder(folder)


def remove_all_but(folder: Path, keep: set[str]) -> None:
    for path in folder.glob("step_*"):
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)


def load(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, settings: State, ranks: Ranks
) -> State:
    """Restores model, optimizer and random state from the last checkpoint; returns its step and extras.

    Raises CheckpointError where there is none or it was made with other settings. Reads the files of all
    ranks: the experts of this one are a slice of all, whoever wrote them.
    """
    pointer = read_pointer(folder)
    if pointer is None:
        raise CheckpointError(f"nothing to resume: no {folder / POINTER}")
    last = folder / pointer["folder"]
    shared: State = torch.load(last / "shared.pt", map_location=ranks.device, weights_only=True)
    saved_settings = shared.pop("settings")
    changed = [name for name in settings if saved_settings.get(name) != settings[name]]
    if changed:
        raise CheckpointError(f"the checkpoint in {last} was made with other {', '.join(changed)}")
    parts = [
        torch.load(last / f"rank{rank}.pt", map_location="cpu", weights_only=True)
        for rank in range(pointer["ranks"])
    ]
    unpack(model, optimizer, shared.pop("dense"), lambda tensor: tensor)
    experts = {
        name: {key: join([part["experts"][name][key] for part in parts]) for key in saved}
        for name, saved in parts[0]["experts"].items()
    }
    unpack(model, optimizer, experts, lambda tensor: ranks.slice(tensor) if tensor.dim() else tensor)
    if pointer["ranks"] == ranks.world:
        torch.set_rng_state(parts[ranks.rank]["random"])
    return shared


def is_there(folder: Path, ranks: Ranks) -> bool:
    """Whether there is a checkpoint to resume, the same answer on all ranks."""
    return ranks.largest(read_pointer(folder) is not None) > 0


def set_aside(folder: Path) -> Path | None:
    """Renames the checkpoints of an earlier run, so that a new one begun by mistake destroys nothing yet."""
    if read_pointer(folder) is None:
        return None
    aside = folder.with_name(folder.name + ".previous")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    return aside


def pack(model: nn.Module, optimizer: torch.optim.Optimizer, wanted: Callable[[nn.Parameter], bool]) -> State:
    """Values and optimizer state of the wanted parameters, by parameter name."""
    return {
        name: {"value": parameter.detach(), **optimizer.state[parameter]}
        for name, parameter in model.named_parameters()
        if wanted(parameter)
    }


@torch.no_grad()
def unpack(
    model: nn.Module, optimizer: torch.optim.Optimizer, packed: State, local: Callable[[Tensor], Tensor]
) -> None:
    """Undoes `pack`; ``local`` cuts this rank's part out of a saved tensor."""
    parameters = dict(model.named_parameters())
    for name, saved in packed.items():
        parameter = parameters[name]
        state = {key: local(tensor).to(parameter.device, copy=True) for key, tensor in saved.items()}
        parameter.copy_(state.pop("value"))
        optimizer.state[parameter] = state


def join(tensors: list[Tensor]) -> Tensor:
    """The experts of all ranks in one tensor; a scalar (Adam's step count) is the same on all."""
    return torch.cat(tensors) if tensors[0].dim() else tensors[0]


def read_pointer(folder: Path) -> State | None:
    try:
        pointer: State = json.loads((folder / POINTER).read_text())
    except FileNotFoundError:
        return None
    return pointer


def write_to_disk(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file and returns when the disk has it, not only the system's cache."""
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """The same for the names in a folder: new files and renames."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
