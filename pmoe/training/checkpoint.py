"""Checkpoints that any number of ranks can load, and that a kill at any moment leaves whole.

    folder/latest.json               {"folder": "step_00000400", "step": 400}; replaced last, in one move
    folder/step_00000400/
        .metadata  __0_0.distcp ...  tensors, as torch.distributed.checkpoint (DCP) writes them
        plain.pt                     by rank 0: step, what the caller adds, options of optimizers
        random_0.pt  random_1.pt ... by each rank: the state of its random generators

A checkpoint is written as step_N.tmp; when the files of all ranks are on the disk it is renamed, and only
then named by latest.json. Nothing that has been named is ever written to. All ranks need one file system,
and each run that saves a folder of its own: what is unfinished in it is taken for left behind, and removed.

Experts that `pmoe.parallelize` laid out are saved as the DTensors that they are, each rank its part; the file
holds the experts of one process. plain.pt and random_*.pt are read as plain data (weights_only), but DCP's
.metadata is a pickle: load only what you trust.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from pmoe.training.checkpoint_state import (
    State,
    make_states,
    model_state,
    optimizer_state,
    option_problems,
    problems_of,
    set_model_state,
    set_optimizer_state,
)

T = TypeVar("T")

POINTER, PLAIN = "latest.json", "plain.pt"

MOST_PROBLEMS = 12
"""That a message names."""


class CheckpointError(ValueError):
    """A checkpoint could not be saved, is not there, is damaged, or is of another model: on every rank."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a checkpoint held beside the model and the optimizers.

    extra: as it was given to `save_checkpoint`. random: whether the random generators were set to their saved
    states, which needs as many ranks as it was saved by.
    """

    path: Path
    step: int
    extra: dict[str, Any]
    random: bool


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes a checkpoint of all ranks into a new subfolder of ``folder``, which it returns.

    step: its number, at least 0. extra: plain data of the run (a scheduler's state, the place in the data),
    rank 0's. keep: how many of the newest checkpoints stay, at least 1. group: the ranks that hold the model
    together; None is all ranks, or this process alone without a process group.

    Every rank must call it; returns when the checkpoint is on the disk and is the one to load. However it
    ends before (a kill, a full disk), the checkpoint before is untouched and still the one to load.

    Raises CheckpointError on every rank where one failed, such as where ranks hold different experts under
    one name because the model was not parallelized; RuntimeError where a peer died.
    """
    peers, folder = _Peers.of(group), Path(folder)

    def collect() -> tuple[dict[str, Any], dict[str, Any]]:
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step ({step!r}) must be an int of at least 0")
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ValueError(f"keep ({keep!r}) must be an int of at least 1")
        if extra is not None and not isinstance(extra, Mapping):
            raise ValueError(f"extra ({extra!r}) must be a mapping of names, or None")
        of_model, of_optimizer = model_state(model), optimizer_state(model, _listed(optimizer))
        own = {"step": step, "extra": dict(extra or {}) if peers.rank == 0 else {}, "model": of_model.plain}
        own |= of_optimizer.plain
        _check_plain(own)  # here: a rank that could not send it would leave the others waiting
        return {**of_model.tensors, **of_optimizer.tensors}, own

    tensors, own = peers.agree("collecting", collect)
    of_all = peers.gather(own)
    steps = [each["step"] for each in of_all]
    if len(set(steps)) > 1:
        raise CheckpointError(f"checkpoint: step must be the same on every rank, not {steps}")
    plain = of_all[0] | {"ranks": peers.size}
    for kind in ("model", "options", "values"):
        plain[kind] = {name: value for each in reversed(of_all) for name, value in each[kind].items()}
    part = peers.first("making the folder", lambda: _new_folder(folder, step))
    try:
        with peers.dcp("writing"):
            writer = FileSystemWriter(part, overwrite=False)
            save(tensors, storage_writer=writer, process_group=peers.group, no_dist=peers.is_alone)
        peers.agree("writing", lambda: _write_beside(part, peers.rank, plain))
    except CheckpointError:
        if peers.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise
    return peers.first("publishing", lambda: _publish(part, step, keep))


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Loads what `save_checkpoint` wrote, by as many ranks or another number, in place.

    step: None is the last. Without optimizer the optimizer's state is left in the file. Options of optimizers
    are loaded too (the learning rate, say), but for how a step is computed (foreach, fused). Parameters may
    be in other groups than when it was saved, where those of one group had the same options.

    Every rank must call it. Raises CheckpointError on every rank, before anything is changed, where there is
    no checkpoint, where names, shapes or types are others than the model's and the optimizers' (the message
    names them), or where files are missing or too short on any rank.
    """
    peers, folder, optimizers = _Peers.of(group), Path(folder), _listed(optimizer)
    name = peers.first("looking for it", lambda: _find(folder, step))
    path = folder / name

    def read() -> tuple[dict[str, Any], dict[str, Any] | None, Metadata]:
        plain = _read_plain(path / PLAIN)
        same_ranks = plain["ranks"] == peers.size
        return plain, _read_plain(_random_file(path, peers.rank)) if same_ranks else None, _stored(path)

    plain, generators, stored = peers.agree(f"reading {path}", read)
    of_model = peers.agree("collecting", lambda: model_state(model))
    _check(peers, path, of_model, stored, "model")
    tensors = dict(of_model.tensors)
    if optimizers:
        before = [dict(each.state) for each in optimizers]
        try:
            peers.agree("making the optimizer's state", lambda: make_states(optimizers))
            of_optimizer = peers.agree("collecting", lambda: _saved_state(model, optimizers, stored))
            more = peers.agree("collecting", lambda: option_problems(model, optimizers, plain))
            _check(peers, path, of_optimizer, stored, "optimizer", more)
        except BaseException:
            for each, state in zip(optimizers, before, strict=True):
                each.state.clear()
                each.state.update(state)
            raise
        tensors |= of_optimizer.tensors
    with peers.dcp(f"reading {path}"):
        reader = FileSystemReader(path)
        load(tensors, storage_reader=reader, process_group=peers.group, no_dist=peers.is_alone)
    set_model_state(model, plain["model"])
    if optimizers:
        set_optimizer_state(model, optimizers, plain, stored)
    if generators is not None:
        _set_random(generators)
    return Loaded(path=path, step=plain["step"], extra=plain["extra"], random=generators is not None)


@dataclass(frozen=True)
class _Peers:
    """The ranks that hold the model together; what one of them fails in, all fail in."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    is_alone: bool

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> _Peers:
        if not (dist.is_available() and dist.is_initialized()):
            return _Peers(None, 0, 1, True)
        return _Peers(group, dist.get_rank(group), dist.get_world_size(group), False)

    def gather(self, value: T) -> list[T]:
        if self.is_alone:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def agree(self, stage: str, act: Callable[[], T]) -> T:
        """What act returns here. CheckpointError on every rank where it raised on any."""
        error = value = None
        try:
            value = act()
        except Exception as raised:
            error = str(raised) if isinstance(raised, ValueError) else f"{type(raised).__name__}: {raised}"
        _raise(stage, self.gather(error))
        return value  # type: ignore[return-value]

    def first(self, stage: str, act: Callable[[], T]) -> T:
        """What act returns on the first rank, the only one to call it."""
        return self.gather(self.agree(stage, lambda: act() if self.rank == 0 else None))[0]  # type: ignore[return-value]

    @contextlib.contextmanager
    def dcp(self, stage: str) -> Iterator[None]:
        """Around DCP's own calls, which tell all ranks of a failure by an exception that is no Exception."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield
        except CheckpointException as error:
            errors: list[str | None] = [None] * self.size
            for rank, (failure, _) in error.failures.items():
                errors[rank] = f"{type(failure).__name__}: {failure}"
            _raise(stage, errors)


def _raise(stage: str, errors: Sequence[str | None]) -> None:
    """One message for all ranks; what all have in common is not told of each."""
    if not any(errors):
        return
    if len(set(errors)) == 1:
        raise CheckpointError(f"checkpoint: {stage}: {errors[0]}")
    told = "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None)
    raise CheckpointError(f"checkpoint: {stage}: {told}")


def _listed(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _saved_state(model: nn.Module, optimizers: Sequence[Optimizer], stored: Metadata) -> State:
    """Without parameters of which nothing was saved: those had no gradient yet."""
    state = optimizer_state(model, optimizers)
    saved = {name.rpartition(".")[0] for name in stored.state_dict_metadata}
    tensors = {name: each for name, each in state.tensors.items() if name.rpartition(".")[0] in saved}
    return State(tensors, state.plain, state.own & tensors.keys())


def _check(
    peers: _Peers, path: Path, state: State, stored: Metadata, part: str, more: Sequence[str] = ()
) -> None:
    """CheckpointError on every rank where the checkpoint is not of these tensors on any."""
    names = set(state.tensors).union(*peers.gather(state.own))
    problems = [*more, *problems_of(state.tensors, names, stored, part)]
    of_all = list(dict.fromkeys(problem for each in peers.gather(problems) for problem in each))
    if of_all:
        told = "; ".join(of_all[:MOST_PROBLEMS])
        told += f"; and {len(of_all) - MOST_PROBLEMS} more" if len(of_all) > MOST_PROBLEMS else ""
        raise CheckpointError(f"checkpoint {path} does not fit the {part}: {told}")


def _new_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint is written. What a killed save or removal left is cleared away."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("step_*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    name, number = f"step_{step:08d}", 1
    while (folder / name).exists():
        number += 1
        name = f"step_{step:08d}-{number}"
    part = folder / f"{name}.tmp"
    part.mkdir()
    return part


def _publish(part: Path, step: int, keep: int) -> Path:
    """Makes the finished folder ``part`` the last checkpoint, and removes those too many."""
    folder, path = part.parent, part.with_suffix("")
    _sync_folder(part)
    os.replace(part, path)
    _sync_folder(folder)
    pointer = json.dumps({"folder": path.name, "step": step}).encode()
    _write_to_disk(folder / f"{POINTER}.tmp", lambda file: file.write(pointer))
    os.replace(folder / f"{POINTER}.tmp", folder / POINTER)
    _sync_folder(folder)
    by_age = sorted(_complete(folder), key=lambda each: (each == path, (each / PLAIN).stat().st_mtime_ns))
    for old in by_age[:-keep]:
        doomed = old.with_name(f"{old.name}.tmp")
        os.replace(old, doomed)  # a removal that is cut short leaves nothing that looks whole
        shutil.rmtree(doomed, ignore_errors=True)
    return path


def _complete(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step_*") if path.suffix != ".tmp" and (path / PLAIN).exists()]


def _find(folder: Path, step: int | None) -> str:
    """The name of the checkpoint's folder."""
    if step is None:
        try:
            found = json.loads((folder / POINTER).read_text())
        except FileNotFoundError:
            raise CheckpointError(f"there is no {folder / POINTER}") from None
        except ValueError:  # no JSON, or no text at all
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("folder"), str):
            raise CheckpointError(f"{folder / POINTER} is damaged: it must name a folder")
        return str(found["folder"])
    if not isinstance(step, int):
        raise ValueError(f"step ({step!r}) must be an int, or None for the last")
    pattern = re.compile(rf"step_{step:08d}(-(\d+))?")
    numbered = {
        int(match[2] or 1): path.name for path in _complete(folder) if (match := pattern.fullmatch(path.name))
    }
    if not numbered:
        known = sorted(path.name for path in _complete(folder))
        raise CheckpointError(f"step ({step}) must be one of those in {folder} ({known})")
    return numbered[max(numbered)]


def _stored(path: Path) -> Metadata:
    """DCP's list of what is in the files. Raises where a file of it is missing or too short."""
    try:
        stored = FileSystemReader(path).read_metadata()
    except FileNotFoundError:
        raise
    except Exception:  # a damaged pickle may raise anything
        raise ValueError(f"{path / '.metadata'} is damaged: it cannot be read") from None
    ends = dict[str, int]()
    for place in stored.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        found = (path / name).stat().st_size
        if found < end:
            raise ValueError(f"{path / name} ({found} bytes) must have at least {end}")
    return stored


def _check_plain(plain: Mapping[str, Any]) -> None:
    """ValueError where it could not be written, or not be read back as plain data."""
    memory = io.BytesIO()
    try:
        torch.save(plain, memory)
        memory.seek(0)
        torch.load(memory, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            "extra, extra states of modules and options of optimizers must be plain data and tensors: "
            f"{reason}"
        ) from None


def _write_beside(part: Path, rank: int, plain: Mapping[str, Any]) -> None:
    """What DCP does not write: this rank's random state and, on the first, the plain data."""
    generators: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state()
    _write_to_disk(_random_file(part, rank), lambda file: torch.save(generators, file))
    if rank == 0:
        _write_to_disk(part / PLAIN, lambda file: torch.save(plain, file))


def _set_random(generators: Mapping[str, Any]) -> None:
    torch.set_rng_state(generators["torch"])
    random.setstate(generators["python"])
    if "cuda" in generators and torch.cuda.is_available():
        torch.cuda.set_rng_state(generators["cuda"])


def _random_file(path: Path, rank: int) -> Path:
    return path / f"random_{rank}.pt"


def _read_plain(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError):
        raise ValueError(f"{path} is damaged: it cannot be read") from None
    return found


def _write_to_disk(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file and returns when the disk has it, not only the system's cache."""
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """The same for the names in a folder: new files and renames."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
