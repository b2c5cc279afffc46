"""Runs one training of fairseq, and writes what each of its steps did: exact loss, sizes, choices, peak.

fairseq's own log rounds a loss to three decimals, which would hide an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

RANK = int(os.environ.get("RANK", "0"))

MEASURED = "measured"
"""Stands before a command that is measured, with a path and a way: [MEASURED, PATH, WAY, "train", ...]."""

PLAIN, COUNTED, CUT, HALF = "plain", "bytes counted", "batches cut", "float16 on the CPU"
FAILING, DYING = "a trial out of memory", "a rank that dies"
"""The ways to run a training: as it is, with its bytes counted, with batches of which a random number of
sentences is left, with --fp16 allowed on the CPU, or with a trial in which rank 1 fails or dies."""


@dataclass
class Step:
    """What one training step did on one rank.

    loss: sum of the losses of all ranks and batches; 0 if the step was skipped because of an overflow.
    norm: norm of all gradients; 0 if the step was skipped.
    tokens: tokens of each batch of the step on this rank, without padding; 0 for a dummy batch.
    sizes: tokens of each call for which pmoe looked for a number of chunks by trials, on the fullest rank.
    degrees: of each layer with experts, the chunks of the forward and of the backward pass in its last call.
    peak: the most bytes of tensors that the step had allocated at once; 0 if they are not counted.
    resident: bytes of the process in memory after the step.
    ranges: number of ranges of batch sizes for which the tables of trials' results have a number of chunks.
    """

    loss: float = 0.0
    norm: float = 0.0
    tokens: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    degrees: list[list[int]] = field(default_factory=list)
    peak: int = 0
    resident: int = 0
    ranges: int = 0


def steps_of(path: Path, rank: int = 0) -> list[Step]:
    """The steps that `measured` wrote."""
    return [Step(**fields) for fields in json.loads(_file(path, rank).read_text(encoding="utf-8"))]


def _file(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank{rank}.json")


def measured(path: Path, way: str, arguments: list[str], main: Callable[[list[str]], None]) -> None:
    """Runs a training as in a process of its own that knows no earlier trials, and writes its steps.

    way: `PLAIN`, `COUNTED`, `CUT`, `HALF`, `FAILING` or `DYING`.
    main: runs the command.
    """
    from pmoe.choose import search
    from pmoe.integrations.fairseq.plugin import MoETrainer
    from pmoe.measure import profile
    from pmoe.warn import GIVEN

    steps: list[Step] = []
    original_search = search.search
    train_step = MoETrainer.train_step
    reduce_stats = MoETrainer._reduce_and_log_stats

    def searching(known: Any, batch: Any, *args: Any, **options: Any) -> Any:
        steps[-1].sizes.append(batch.counts.max_tokens)
        return original_search(known, batch, *args, **options)

    def step(trainer: Any, samples: Any, raise_oom: bool = False) -> Any:
        if way == CUT:
            samples = [_cut(sample, len(steps)) for sample in samples]
        steps.append(Step(tokens=[sample["ntokens"] if sample else 0 for sample in samples]))
        logged: list[Any] = []

        def run(_: object = None) -> None:
            logged.append(train_step(trainer, samples, raise_oom))

        if way == COUNTED:
            steps[-1].peak = _peak(run)
        else:
            run()
        for layer in trainer._model.moe_layers:
            steps[-1].degrees.append([layer.fc1.ran.forward, layer.fc1.ran.backward])
        steps[-1].resident = _resident()
        tables = [table for learned in search._LEARNED.values() for table in learned.tables.values()]
        steps[-1].ranges = sum(len(table.ranges) for table in tables)
        return logged[0]

    def reduced(trainer: Any, outputs: list[dict[str, Any]], size: Any, norm: Any = None) -> Any:
        if norm is not None:  # else it is a step of validation
            steps[-1].loss = sum(float(output["loss"]) for output in outputs)
            steps[-1].norm = float(norm)
        return reduce_stats(trainer, outputs, size, norm)

    GIVEN.clear()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, PMOE_CACHE=folder),
        mock.patch.dict(search._LEARNED, clear=True),
        mock.patch.dict(profile.PROFILES, clear=True),
        mock.patch.object(search, "search", searching),
        mock.patch.object(MoETrainer, "train_step", step),
        mock.patch.object(MoETrainer, "_reduce_and_log_stats", reduced),
        _failing() if way == FAILING else contextlib.nullcontext(),
        _dying() if way == DYING else contextlib.nullcontext(),
        _half() if way == HALF else contextlib.nullcontext(),
    ):
        main(arguments)
    _file(path, RANK).write_text(json.dumps([asdict(each) for each in steps]), encoding="utf-8")


def _cut(sample: dict[str, Any], index: int) -> dict[str, Any]:
    """A batch with the first sentences of ``sample``, another number of them for each step and rank."""
    if not sample:
        return sample
    draw = random.Random(2 * index + RANK)
    num_sentences = draw.randint(1, sample["target"].shape[0])
    net_input = {name: value[:num_sentences] for name, value in sample["net_input"].items()}
    target = sample["target"][:num_sentences]
    ntokens = int((target != 1).sum())  # 1 is padding
    return {
        **sample,
        "net_input": net_input,
        "target": target,
        "ntokens": ntokens,
        "nsentences": num_sentences,
    }


def _resident() -> int:
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _peak(run: Callable[[object], None]) -> int:
    from bench.allocations import freed_late
    from tests.allocated import Allocated

    with freed_late(0.03):
        return Allocated(run).peak


@contextlib.contextmanager
def _half() -> Iterator[None]:
    """The CPU takes --fp16. fairseq makes a tensor on a GPU where it skips a step."""
    import torch

    from pmoe.integrations.fairseq import plugin

    with (
        mock.patch.object(plugin, "check_training"),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
    ):
        yield


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """The third allocation inside trials fails on rank 1."""
    from tests.failing_trials import ERRORS, Failing

    with contextlib.ExitStack() as patched:
        for patch in Failing(RANK, ERRORS["torch"], 3, float("inf")).patches():
            patched.enter_context(patch)
        yield


@contextlib.contextmanager
def _dying() -> Iterator[None]:
    """Rank 1 is killed in the backward pass of its first trial."""
    from types import SimpleNamespace

    from pmoe.choose import trials
    from pmoe.engine.lanes import base as lanes

    run = trials.Trial.run
    in_trial = []

    def marked(trial: trials.Trial) -> tuple[float, float]:
        in_trial.append(trial)
        return run(trial)

    def watch(schedule: Any, act: Any, device: Any, of: object) -> Any:
        def action(task: Any) -> Any:
            if RANK == 1 and in_trial and schedule.direction == "backward":
                os.kill(os.getpid(), signal.SIGKILL)
            return act(task)

        return action

    watcher = SimpleNamespace(watch=watch)
    lanes.watchers.append(watcher)
    try:
        with mock.patch.object(trials.Trial, "run", marked):
            yield
    finally:
        lanes.watchers.remove(watcher)
