"""Checkpoints of train_lm.py, written so that a kill at any moment leaves a complete one.

    checkpoints/latest.json          {"folder": "step_00000400", "ranks": 2}
    checkpoints/step_00000400/
        shared.pt                    written by rank 0: dense parameters, their Adam state, step, curves
        rank0.pt  rank1.pt  ...      written by each rank: its experts, their Adam state, its random state

A checkpoint is published in three steps. First all ranks write their files to step_N.tmp and wait until the
disk has them. Then the folder is renamed to step_N. Then latest.json is replaced, in one rename. A folder
that latest.json names is never written to again.

The ranks of several machines need one file system. Experts are split along their first dimension in rank
order, so any number of ranks can continue a checkpoint. With the same number of ranks, the result is the same
to the bit.
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
    """There is no checkpoint, or it belongs to another run."""


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: State,
    extra: State,
    ranks: Ranks,
) -> None:
    """Writes a checkpoint of all ranks. Every rank must call it. ``settings`` and ``extra`` are plain data.

    Keeps this checkpoint and the previous one. Does nothing if the last checkpoint is of the same step.
    """
    name = f"step_{step:08d}"
    before = read_pointer(folder)
    if before and before["folder"] == name:
        return
    part = folder / f"{name}.tmp"
    if ranks.rank == 0:
        shutil.rmtree(part, ignore_errors=True)  # a run that was killed while writing may have left it
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
    """Makes the finished folder ``part`` the latest checkpoint."""
    sync_folder(part)
    # A folder of this name is of a run that was killed after the rename, before latest.json named it.
    shutil.rmtree(folder / name, ignore_errors=True)
    os.replace(part, folder / name)
    sync_folder(folder)
    pointer = json.dumps({"folder": name, "ranks": world}).encode()
    write_to_disk(folder / f"{POINTER}.tmp", lambda file: file.write(pointer))
    os.replace(folder / f"{POINTER}.tmp", folder / POINTER)
    sync_folder(folder)


def remove_all_but(folder: Path, keep: set[str]) -> None:
    """Removes all checkpoints except those with the names in ``keep``."""
    for path in folder.glob("step_*"):
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)


def load(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, settings: State, ranks: Ranks
) -> State:
    """Restores model, optimizer and random state from the latest checkpoint. Returns its step and extra data.

    Every rank reads the files of all ranks that saved: its experts are a slice of all experts, which other
    ranks may have written.

    Raises CheckpointError if there is no checkpoint, or if it was made with other settings.
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
    """Returns whether there is a checkpoint to resume, the same on all ranks."""
    return ranks.largest(read_pointer(folder) is not None) > 0


def set_aside(folder: Path) -> Path | None:
    """Renames the folder of an earlier run's checkpoints, so that a new run does not overwrite them.

    Returns the new name; None if there were no checkpoints.
    """
    if read_pointer(folder) is None:
        return None
    aside = folder.with_name(folder.name + ".previous")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    return aside


def pack(model: nn.Module, optimizer: torch.optim.Optimizer, wanted: Callable[[nn.Parameter], bool]) -> State:
    """Returns values and optimizer state of the wanted parameters, by parameter name."""
    return {
        name: {"value": parameter.detach(), **optimizer.state[parameter]}
        for name, parameter in model.named_parameters()
        if wanted(parameter)
    }


@torch.no_grad()
def unpack(
    model: nn.Module, optimizer: torch.optim.Optimizer, packed: State, local: Callable[[Tensor], Tensor]
) -> None:
    """Copies what `pack` returned back into model and optimizer.

    local: cuts this rank's part out of a saved tensor.
    """
    parameters = dict(model.named_parameters())
    for name, saved in packed.items():
        parameter = parameters[name]
        state = {key: local(tensor).to(parameter.device, copy=True) for key, tensor in saved.items()}
        parameter.copy_(state.pop("value"))
        optimizer.state[parameter] = state


def join(tensors: list[Tensor]) -> Tensor:
    """Returns the experts of all ranks as one tensor.

    A scalar (Adam's step count) is the same on all ranks.
    """
    return torch.cat(tensors) if tensors[0].dim() else tensors[0]


def read_pointer(folder: Path) -> State | None:
    """Returns the content of latest.json, or None if there is none."""
    try:
        pointer: State = json.loads((folder / POINTER).read_text())
    except FileNotFoundError:
        return None
    return pointer


def write_to_disk(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file and returns when the disk has it, not only the cache of the operating system."""
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Returns when the disk has the folder's entries: new files and renames."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
