"""Checkpoints that load on any number of ranks and survive a kill at any moment.

Requirements: all ranks see one file system, and every run saves to a folder of its own. `save_checkpoint`
removes unfinished checkpoints from that folder, because it takes them for the remains of a killed run.

`pmoe.parallelize` makes experts' parameters DTensors; each rank writes and reads its own part of them. The
names of experts in the files are those that one process with all experts would use, so they do not depend on
the number of ranks (`pmoe.training.checkpoint_state`).

torch.distributed.checkpoint (DCP) writes and reads the tensors. Loading runs no code from the files: pickled
plain data and DCP's own records are accepted, and nothing else.
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

from pmoe.arguments import check_count, check_int, check_kind, check_module, check_path, plain_int, shown
from pmoe.comm.agreement import from_first, gathered
from pmoe.comm.counts import ranks_in_words
from pmoe.comm.ranks import Ranks
from pmoe.training import checkpoint_files as files
from pmoe.training import checkpoint_state as states
from pmoe.training.checkpoint_files import CheckpointError

__all__ = ["CheckpointError", "Loaded", "load_checkpoint", "save_checkpoint"]

T = TypeVar("T")

MAX_PROBLEMS = 12
"""Number of mismatches that an error message lists before it says "and ... more"."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Result of `load_checkpoint`: everything that is not loaded into the model and the optimizers.

    Attributes:
        path: folder of the checkpoint.
        step: number of the training step at which it was saved.
        extra: the ``extra`` that `save_checkpoint` got on rank 0.
        random: True if the random generators were set to their saved states. They are set only if the number
            of ranks is the same as when they were saved.
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
    """Writes a checkpoint of all ranks into a new subfolder of ``folder`` and returns that subfolder.

    Args:
        folder: folder of the run's checkpoints.
        model: its parameters and buffers, of any shape, and the extra states of its modules are saved.
        optimizer: one optimizer of the model, several, or None. Their states and options are saved.
        step: number of the training step, at least 0.
        extra: plain data of the run, such as a scheduler's state or the position in the data. Only rank 0's
            is saved.
        keep: number of newest checkpoints that stay in ``folder``, at least 1. Older ones are removed.
        group: the ranks that hold the model together. None is the default group, or this process.

    Collective: every rank must call it. When it returns, the checkpoint is on the disk and is the one that
    `load_checkpoint` loads. If a kill or a full disk interrupts the writing, the previous checkpoint is
    unchanged and is still the one that is loaded.

    Raises CheckpointError on every rank if any rank fails. For example, the model was not parallelized, so
    that ranks hold different experts under one name. Also raises it on every rank if ``folder``, ``step``,
    ``keep`` or the classes of the optimizers differ between ranks. Raises RuntimeError if another rank died.
    """
    ranks = Ranks(group)
    step = plain_int(step)
    keep = plain_int(keep)

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
        extra_data = dict(extra or {}) if ranks.rank == 0 else {}
        plain |= {"step": step, "extra": extra_data, "model": of_modules}
        # Checked before the ranks exchange it: a rank that cannot pickle it would leave the others waiting.
        files.check_plain(plain)
        return tensors | of_optimizer, plain

    def arguments() -> dict[str, str]:
        return _as_texts("save_checkpoint", folder, optimizer, step=step, keep=keep)

    tensors, own = _on_all(ranks, "collecting", collect, arguments)
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
    """Loads a checkpoint into the model and the optimizers, in place, on any number of ranks.

    Args:
        folder: the folder that was given to `save_checkpoint`.
        optimizer: one optimizer of the model, several, or None. With None the saved optimizer state is
            ignored. Options such as the learning rate are loaded too, except those that only say how a step
            is computed (foreach, fused). Parameters may be in other groups than when they were saved, if all
            parameters that now share a group had the same options.
        step: number of the step to load; None loads the latest checkpoint.
        group: the ranks that hold the model together, as in `save_checkpoint`.

    Collective: every rank must call it.

    Raises CheckpointError on every rank, before anything is changed, if there is no checkpoint, if files are
    missing, too short or damaged, or if names, shapes or dtypes do not fit the model and the optimizers. The
    message names the files or tensors that are wrong. Also raises it on every rank if ``folder``, ``step`` or
    the classes of the optimizers differ between ranks. For example, one rank has passed no optimizer.
    """
    ranks = Ranks(group)
    step = plain_int(step)

    def collect() -> tuple[states.Names, dict[str, Tensor], list[Optimizer]]:
        check_path(folder=folder)
        check_int(0, step=0 if step is None else step)
        check_module(model=model)
        states.check_group(model, ranks.size)
        names = states.Names(model)
        return names, states.model_state(model, names)[0], _listed(optimizer)

    def arguments() -> dict[str, str]:
        return _as_texts("load_checkpoint", folder, optimizer, step=step)

    names, tensors, optimizers = _on_all(ranks, "collecting", collect, arguments)
    path = Path(folder) / _on_first(
        ranks, "looking for a checkpoint in folder", lambda: files.find(Path(folder), step)
    )
    plain, metadata, random = _on_all(
        ranks, f"reading {path} (step= loads another)", lambda: files.read(path, ranks.rank, ranks.size)
    )
    _check_fit(ranks, path, names, tensors, metadata, "model")
    if optimizers:
        tensors |= _states_to_fill(ranks, path, names, optimizers, plain, metadata)
    reader = FileSystemReader(path)
    # DCP's own `read_metadata` would unpickle anything; this metadata was read safely by `files.read`.
    reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
    with _by_dcp(ranks, f"reading {path}") as peers:
        load(states.in_boxes(tensors), storage_reader=reader, **peers)
    states.set_model_state(model, names, plain["model"])
    states.set_optimizer_state(names, optimizers, plain, metadata)
    if random is not None:
        files.set_random(random)
    return Loaded(path=path, step=plain["step"], extra=plain["extra"], random=random is not None)


def _listed(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Returns the argument ``optimizer`` (one optimizer, several, or None) as a list.

    Raises TypeError for anything that is not an optimizer.
    """
    several: Any = () if optimizer is None else optimizer
    optimizers: list[Optimizer] = list(several) if isinstance(several, list | tuple) else [several]
    for candidate in optimizers:
        check_kind(Optimizer, "a torch.optim.Optimizer, or a list of them", optimizer=candidate)
    return optimizers


def _as_texts(
    function: str,
    folder: str | os.PathLike[str],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    **numbers: object,
) -> dict[str, str]:
    """Returns the arguments that must be the same on every rank, as texts: {name of the argument: its value}.

    Ranks compare the texts (`_check_same`).

    function: name of the function that was called, which must be the same on every rank, too.
    folder: the argument ``folder``. Its text is the path as it was given: the same folder may be mounted, or
        linked, at different places on different machines.
    optimizer: the argument ``optimizer``. Its text has the classes of the optimizers, because each rank has
        optimizers of its own.
    numbers: arguments that are ints or None.
    """
    classes = [type(of_model).__name__ for of_model in _listed(optimizer)]
    texts = {name: shown(number) for name, number in numbers.items()}
    return {
        "the function": function,
        "folder": os.fspath(folder),
        "optimizer": ", ".join(classes) or "None",
        **texts,
    }


def _check_same(of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raises CheckpointError, with the same text on all ranks, if an argument differs between ranks.

    Without this error, some ranks would run collectives that the others do not run. For example, only ranks
    with an optimizer compare the states of optimizers.

    of_ranks: for each rank, its arguments as texts (`_as_texts`). The function is compared first, because the
        other names depend on it.
    """
    for name in of_ranks[0]:
        ranks_with = dict[str, list[int]]()
        for rank, arguments in enumerate(of_ranks):
            ranks_with.setdefault(arguments[name], []).append(rank)
        if len(ranks_with) > 1:
            values = "; ".join(f"{ranks_in_words(some)}: {value}" for value, some in ranks_with.items())
            raise CheckpointError(
                f"checkpoint: {name} must be the same on every rank, and differs: {values}. {CURES[name]}"
            )


CURES = {
    "the function": "Every rank must call the same function",
    "folder": "Pass the same folder, which all ranks see, on every rank",
    "optimizer": "Pass the optimizers of the model on every rank, or None on every rank",
    "step": "Pass the same step on every rank",
    "keep": "Pass the same keep on every rank",
}
"""What to do if an argument differs between ranks, by the argument's name."""


def _joined(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the plain data of all ranks into one dict.

    Plain data are everything that is not a model's or optimizer's tensor. If several ranks have data under
    the same name, the lowest rank's data are taken.

    of_ranks: one dict from each rank, in rank order, with the keys

        step       number of the training step
        extra      the caller's extra data; only the extra data of rank 0 are saved
        model      extra states of modules, by name
        options    options of optimizers, by name of the parameter
        values     optimizer states that are not tensors, by name of the parameter
    """
    plain = dict(of_ranks[0])
    for kind in ("model", "options", "values"):
        plain[kind] = {
            name: value for plain_data in reversed(of_ranks) for name, value in plain_data[kind].items()
        }
    return plain


def _states_to_fill(
    ranks: Ranks,
    path: Path,
    names: states.Names,
    optimizers: Sequence[Optimizer],
    plain: states.Plain,
    metadata: Metadata,
) -> dict[str, Tensor]:
    """Returns the optimizers' state tensors by their names in the checkpoint.

    torch.distributed.checkpoint (DCP) reads the saved values into these tensors later. An optimizer that made
    no step yet has no state, so its state is created first. If the checkpoint does not fit, the optimizers
    get back the state that they had before. Collective.

    ranks: the ranks that hold the model together.
    path: folder of the checkpoint, for the message.
    names: maps parameters to their names in the checkpoint.
    optimizers: the optimizers.
    plain: the checkpoint's data that are not tensors.
    metadata: DCP's list of the saved tensors.
    """
    before = [dict(optimizer.state) for optimizer in optimizers]

    def collect() -> tuple[dict[str, Tensor], list[str]]:
        states.make_states(optimizers, names, metadata)
        tensors = states.of_saved(states.optimizer_state(names, optimizers)[0], metadata)
        return tensors, states.option_problems(names, optimizers, plain)

    try:
        tensors, problems = _on_all(ranks, "collecting the optimizer's state", collect)
        _check_fit(ranks, path, names, tensors, metadata, "optimizer", problems)
    except BaseException:
        for optimizer, state in zip(optimizers, before, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
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
    """Raises CheckpointError on every rank if, on any rank, the checkpoint does not fit ``tensors``.

    ranks: the ranks that hold the model together.
    path: folder of the checkpoint, for the message.
    names: maps parameters to their names in the checkpoint.
    tensors: this rank's tensors by their names in the checkpoint, of any shape.
    metadata: the list of the saved tensors that torch.distributed.checkpoint wrote.
    part: "model" or "optimizer": the word with which the names of these tensors begin.
    more: further mismatches that this rank found, in words, for the message.
    """
    of_some_ranks = gathered(ranks, names.of_this_rank(tensors), stage="comparing names")
    problems = [*more, *states.problems_of(tensors, set(tensors).union(*of_some_ranks), metadata, part)]
    of_ranks = gathered(ranks, problems, stage="comparing what does not fit")
    all_problems = list(dict.fromkeys(problem for rank_problems in of_ranks for problem in rank_problems))
    if all_problems:
        text = "; ".join(all_problems[:MAX_PROBLEMS])
        text += f"; and {len(all_problems) - MAX_PROBLEMS} more" if len(all_problems) > MAX_PROBLEMS else ""
        raise CheckpointError(f"checkpoint {path} does not fit the {part}: {text}")


# ---- an error on one rank raises on all ranks


def _on_all(
    ranks: Ranks, stage: str, act: Callable[[], T], arguments: Callable[[], dict[str, str]] = dict
) -> T:
    """Calls ``act`` on every rank and returns this rank's result.

    Raises CheckpointError on every rank if ``act`` raised an error on any rank, or if the ranks have
    different ``arguments``. Collective.

    ranks: the ranks that hold the model together.
    stage: what ``act`` does, for the message.
    arguments: returns the arguments that must be the same on every rank, as texts (`_as_texts`).
    """
    error = None
    value = None
    own = dict[str, str]()
    try:
        value = act()
        own = arguments()
    except Exception as raised:
        error = str(raised) if isinstance(raised, ValueError) else f"{type(raised).__name__}: {raised}"
    of_ranks = gathered(ranks, (error, own), stage=f"agreeing on a checkpoint ({stage})")
    _raise(stage, [error_of_rank for error_of_rank, _ in of_ranks])
    _check_same([arguments_of_rank for _, arguments_of_rank in of_ranks])
    return value  # type: ignore[return-value]


def _on_first(ranks: Ranks, stage: str, act: Callable[[], T]) -> T:
    """Calls ``act`` on rank 0 only and returns its result on every rank.

    Raises CheckpointError on every rank if ``act`` raised an error. Collective.

    ranks: the ranks that hold the model together.
    stage: what ``act`` does, for the message.
    """
    value = _on_all(ranks, stage, lambda: act() if ranks.rank == 0 else None)
    return from_first(ranks, value, stage=f"agreeing on a checkpoint ({stage})")  # type: ignore[return-value]


@contextlib.contextmanager
def _by_dcp(ranks: Ranks, stage: str) -> Iterator[dict[str, Any]]:
    """Returns a with-block in which errors of torch.distributed.checkpoint (DCP) become CheckpointErrors.

    The value of the with-block is a dict: the arguments of DCP's functions that say which ranks take part.

    If DCP fails on any rank, it raises a CheckpointException on all of them. That class derives from
    BaseException, so `except Exception` would not catch it.

    ranks: the ranks that hold the model together.
    stage: what DCP does, for the message.
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
    """Raises CheckpointError if any rank has an error.

    The message is the same on all ranks: one text if all ranks have the same error, else a text for each rank
    that has one.

    stage: what was being done, for the message.
    errors: for each rank its error in words, or None.
    """
    if not any(errors):
        return
    texts = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
    common = len(set(errors)) == 1
    raise CheckpointError(f"checkpoint: {stage}: {errors[0] if common else '; '.join(texts)}")
