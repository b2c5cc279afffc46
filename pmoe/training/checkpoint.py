"""Checkpoints that any number of ranks can load, and that a kill at any moment leaves whole.

All ranks need one file system, and each run that saves needs a folder of its own: what is unfinished in it is
taken for left behind, and removed. Experts that `pmoe.parallelize` laid out are saved as the DTensors that
they are, each rank its part; the files (`pmoe.training.checkpoint_files`) hold the experts of one process. Of
their pickles only plain data and DCP's records are read: nothing in a checkpoint is run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from pmoe.arguments import check_count, check_int, check_kind, check_module, check_path, plain_int
from pmoe.comm.agreement import from_first, gathered
from pmoe.comm.ranks import Ranks
from pmoe.training import checkpoint_files as files
from pmoe.training import checkpoint_state as states
from pmoe.training.checkpoint_files import CheckpointError

__all__ = ["CheckpointError", "Loaded", "load_checkpoint", "save_checkpoint"]

T = TypeVar("T")

MAX_PROBLEMS = 12
"""That a message names."""


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

    Args:
        step: its number, at least 0.
        extra: plain data of the run (a scheduler's state, the place in the data), rank 0's.
        keep: how many of the newest checkpoints stay, at least 1.
        group: the ranks that hold the model together; None is all ranks, or this process alone.

    Every rank must call it; returns when the checkpoint is on the disk and is the one to load. However it
    ends before (a kill, a full disk), the checkpoint before is untouched and still the one to load.

    Raises CheckpointError on every rank where one failed, for example because the model was not parallelized,
    so that ranks hold different experts under one name; RuntimeError where a peer died.
    """
    ranks, step, keep = Ranks(group), plain_int(step), plain_int(keep)

    def collect() -> tuple[dict[str, Tensor], dict[str, Any]]:
        check_path(folder=folder)
        check_int(0, step=step)
        check_count(keep=keep)
        check_kind((Mapping, type(None)), "a mapping of names, or None", extra=extra)
        check_module(model=model)
        states.check_group(model, ranks.size)
        names = states.Names(model)
        tensors, of_modules = states.model_state(model, names)
        of_optimizer, plain = states.optimizer_state(names, _listed(optimizer))
        given = dict(extra or {}) if ranks.rank == 0 else {}
        plain |= {"step": step, "extra": given, "model": of_modules}
        files.check_plain(plain)  # here: a rank that could not send it would leave the others waiting
        return tensors | of_optimizer, plain

    tensors, own = _on_all(ranks, "collecting", collect)
    joined = _joined(gathered(ranks, own, stage="collecting a checkpoint"))
    plain = joined | {"ranks": ranks.size, "format": files.FORMAT}
    part = _on_first(ranks, "making the folder", lambda: files.new_folder(Path(folder), step))
    try:
        with _by_dcp(ranks, "writing") as peers:
            save(states.in_boxes(tensors), storage_writer=FileSystemWriter(part, overwrite=False), **peers)
        _on_all(ranks, "writing", lambda: files.write_beside(part, ranks.rank, plain))
    except CheckpointError:
        if ranks.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise
    return _on_first(ranks, "publishing", lambda: files.publish(part, step, keep))


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Loads what `save_checkpoint` wrote, by as many ranks or another number, in place.

    Args:
        optimizer: without it the optimizer's state is left in the file. Options of optimizers are loaded too
            (the learning rate, say), but for how a step is computed (foreach, fused). Parameters may be in
            other groups than when it was saved, where those of one group had the same options.
        step: None is the last.

    Every rank must call it. Raises CheckpointError on every rank, before anything is changed, where there is
    no checkpoint, where names, shapes or types are others than the model's and the optimizers' (the message
    names them), or where files are missing or too short on any rank.
    """
    ranks = Ranks(group)

    def collect() -> tuple[states.Names, dict[str, Tensor], list[Optimizer]]:
        check_path(folder=folder)
        check_int(0, step=0 if step is None else step)
        check_module(model=model)
        states.check_group(model, ranks.size)
        names = states.Names(model)
        return names, states.model_state(model, names)[0], _listed(optimizer)

    names, tensors, optimizers = _on_all(ranks, "collecting", collect)
    path = Path(folder) / _on_first(
        ranks, "looking for it", lambda: files.find(Path(folder), plain_int(step))
    )
    plain, metadata, random = _on_all(
        ranks, f"reading {path} (step= loads another)", lambda: files.read(path, ranks.rank, ranks.size)
    )
    _check_fit(ranks, path, names, tensors, metadata, "model")
    if optimizers:
        tensors |= _states_to_fill(ranks, path, names, optimizers, plain, metadata)
    reader = FileSystemReader(path)
    reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]  # its own takes any pickle
    with _by_dcp(ranks, f"reading {path}") as peers:
        load(states.in_boxes(tensors), storage_reader=reader, **peers)
    states.set_model_state(model, names, plain["model"])
    states.set_optimizer_state(names, optimizers, plain, metadata)
    if random is not None:
        files.set_random(random)
    return Loaded(path=path, step=plain["step"], extra=plain["extra"], random=random is not None)


def _listed(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    several: Any = () if optimizer is None else optimizer
    found: list[Optimizer] = list(several) if isinstance(several, list | tuple) else [several]
    for each in found:
        check_kind(Optimizer, "a torch.optim.Optimizer, or a list of them", optimizer=each)
    return found


def _joined(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The plain data of all ranks; of what several have, the first rank's."""
    steps = [each["step"] for each in of_ranks]
    if len(set(steps)) > 1:
        raise CheckpointError(f"checkpoint: step must be the same on every rank, not {steps}")
    plain = dict(of_ranks[0])
    for kind in ("model", "options", "values"):
        plain[kind] = {name: value for each in reversed(of_ranks) for name, value in each[kind].items()}
    return plain


def _states_to_fill(
    ranks: Ranks,
    path: Path,
    names: states.Names,
    optimizers: Sequence[Optimizer],
    plain: states.Plain,
    metadata: Metadata,
) -> dict[str, Tensor]:
    """Of the optimizers, made where there is none yet; as before where the checkpoint does not fit."""
    before = [dict(each.state) for each in optimizers]

    def collect() -> tuple[dict[str, Tensor], list[str]]:
        states.make_states(optimizers)
        tensors = states.of_saved(states.optimizer_state(names, optimizers)[0], metadata)
        return tensors, states.option_problems(names, optimizers, plain)

    try:
        tensors, problems = _on_all(ranks, "collecting the optimizer's state", collect)
        _check_fit(ranks, path, names, tensors, metadata, "optimizer", problems)
    except BaseException:
        for each, state in zip(optimizers, before, strict=True):
            each.state.clear()
            each.state.update(state)
        raise
    return tensors


def _check_fit(
    ranks: Ranks,
    path: Path,
    names: states.Names,
    tensors: Mapping[str, Tensor],
    metadata: Metadata,
    part: str,
    more: Sequence[str] = (),
) -> None:
    """CheckpointError on every rank where the checkpoint is not of these tensors on any."""
    of_some_ranks = gathered(ranks, names.of_this_rank(tensors), stage="comparing names")
    problems = [*more, *states.problems_of(tensors, set(tensors).union(*of_some_ranks), metadata, part)]
    of_ranks = gathered(ranks, problems, stage="comparing what does not fit")
    found = list(dict.fromkeys(problem for each in of_ranks for problem in each))
    if found:
        text = "; ".join(found[:MAX_PROBLEMS])
        text += f"; and {len(found) - MAX_PROBLEMS} more" if len(found) > MAX_PROBLEMS else ""
        raise CheckpointError(f"checkpoint {path} does not fit the {part}: {text}")


# ---- where one rank fails, all fail


def _on_all(ranks: Ranks, stage: str, act: Callable[[], T]) -> T:
    """What ``act`` returns here. Raises CheckpointError on every rank where it raised on any."""
    error = value = None
    try:
        value = act()
    except Exception as raised:
        error = str(raised) if isinstance(raised, ValueError) else f"{type(raised).__name__}: {raised}"
    _raise(stage, gathered(ranks, error, stage=f"agreeing on a checkpoint ({stage})"))
    return value  # type: ignore[return-value]


def _on_first(ranks: Ranks, stage: str, act: Callable[[], T]) -> T:
    """What ``act`` returns on the first rank, the only one to call it."""
    value = _on_all(ranks, stage, lambda: act() if ranks.rank == 0 else None)
    return from_first(ranks, value, stage=f"agreeing on a checkpoint ({stage})")  # type: ignore[return-value]


@contextlib.contextmanager
def _by_dcp(ranks: Ranks, stage: str) -> Iterator[dict[str, Any]]:
    """Around DCP's own calls, which report a failure to all ranks by an exception that is no Exception.

    Yields the arguments by which they know the ranks.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield {"process_group": ranks.group, "no_dist": ranks.group is None}
    except CheckpointException as error:
        errors: list[str | None] = [None] * ranks.size
        for rank, (failure, _) in error.failures.items():
            errors[rank] = f"{type(failure).__name__}: {failure}"
        _raise(stage, errors)


def _raise(stage: str, errors: Sequence[str | None]) -> None:
    """One message for all ranks: the error that all have in common, or each rank's."""
    if not any(errors):
        return
    told = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
    common = len(set(errors)) == 1
    raise CheckpointError(f"checkpoint: {stage}: {errors[0] if common else '; '.join(told)}")
