"""Ranks that fail in training steps of a graph: the others name them, and no rank makes the step.

`tests.captured` takes the place of CUDA graphs, and an emulator that of the device. Kernels wait only a
short time, in the emulator's time.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pmoe.comm import failures
from pmoe.training import bounded_steps
from tests.captured import Graph, is_launch
from tests.emulated import emulated
from tests.gloo.test_bounded_graph import InGraph
from tests.pool import Pool

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly]  # the kernels are compiled for the CPU first
FAILS_AT = 1
"""The step in which rank 1 fails."""
WAIT_SECONDS = 0.1
"""How long kernels wait for a rank, in the emulator's time. On a busy machine, a living rank comes late:
after 0.02 s it was taken for a dead one."""


# ---- a rank that goes on without its kernels


class Faulty(InGraph):
    """Rank 1 launches no kernel, or those of another graph. Its collectives are those of the others."""

    fault: str

    def replay(self, index: int) -> None:
        graph = self.take(index)
        if index < FAILS_AT or not self.fault:
            graph.replay()
        elif self.fault == "no kernel":
            graph.replay(leaves_out=is_launch)
        else:
            self.take(index + 1).replay()


def fault_job(rank: int, world: int, path: Path, folder: str, fault: str) -> tuple[str, bool]:
    """Returns the error, and whether the parameters are those before the step in which rank 1 fails.

    Rank 0 reads in this step that its kernel has waited in vain. The collectives of one more replay on rank
    1 would wait for rank 0 without reading its report, because here the host waits for them.
    """
    tempfile.tempdir = folder  # nobody closes the heaps, which are files
    told = ""
    with emulated(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Faulty(rank, world, path, {}, repeats=(1, 2))
        training.fault = fault if rank == 1 else ""
        training.capture(WAIT_SECONDS)
        for index in range(FAILS_AT):
            training.steps.step(index)
        before = [parameter.detach().clone() for parameter in training.layer.parameters()]
        try:
            training.steps.step(FAILS_AT)
            training.steps.finish()
        except RuntimeError as error:
            told = f"{type(error).__name__}: {error}"
    return told, all(map(torch.equal, before, training.layer.parameters()))


@pytest.mark.parametrize("fault", ["no kernel", "another graph"])
def test_a_rank_whose_kernels_do_not_come_is_named_and_nobody_makes_the_step(
    kernels: Path, tmp_path: Path, fault: str
) -> None:
    with Pool(2) as pool:  # of its own: the group cannot be used afterwards
        (told, is_kept), (told_there, is_kept_there) = pool.run(fault_job, kernels, str(tmp_path), fault)
    assert re.match(r"HeapError: pmoe: rank 0 waited \S+ s in vain for rank 1", told), told
    assert "in vain for rank" in told_there, told_there
    assert is_kept and is_kept_there


# ---- a rank whose process ends


class Device(threading.Thread):
    """A device that replays a graph while the host goes on. As on a GPU, a collective whose peer has ended
    never ends."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(daemon=True)
        self._graph = graph
        self.has_finished = False

    def run(self) -> None:
        try:
            self._graph.replay()
        except RuntimeError:  # gloo's collectives end with an error, NCCL's do not end
            return
        self.has_finished = True


class Dying(InGraph):
    """The process of rank 1 ends before a replay, or in a replay before its first kernel."""

    ends: str
    device: Device

    def replay(self, index: int) -> None:
        graph = self.take(index)
        if index < FAILS_AT:
            graph.replay()
        elif self.ends:
            graph.replay(leaves_out=self._end)
        else:
            self.device = Device(graph)
            self.device.start()

    def _end(self, work: object) -> bool:
        if self.ends == "before a replay" or is_launch(work):
            os._exit(3)
        return False

    def note(self, step: Any, skips: Tensor, unseen: Tensor) -> None:
        """Takes the place of `_Step.note`: the device copies the answer after the replay."""
        step.answer = torch.stack([skips, unseen])
        step.was_copied = SimpleNamespace(query=lambda: self.device.has_finished)


def dying_job(rank: int, world: int, path: Path, folder: str, ends: str) -> str:
    """Returns the error of rank 0, whose device waits for rank 1.

    On a device the operators after the replay wait for it. So they are left out here, and the optimizer's
    step with them.
    """
    tempfile.tempdir = folder
    with emulated(path), warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        training = Dying(rank, world, path, {})
        training.ends = ends if rank == 1 else ""
        training.capture(WAIT_SECONDS)
        for index in range(FAILS_AT):
            training.steps.step(index)
        patch.setattr(bounded_steps, "reduce_to_largest", lambda *_: None)
        patch.setattr(bounded_steps._Step, "note", lambda *given: training.note(*given))
        patch.setattr(training.optimizer, "step", lambda: None)
        if ends == "before a replay":
            patch.setattr(failures, "timeout_of", lambda _: timedelta(seconds=3))
        try:
            training.steps.step(FAILS_AT)
            training.steps.finish()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (
            "before a replay",
            "RuntimeError: the device has not finished step 2 after 3 s; rank 1 has not reported that it "
            "waits for it",
        ),
        ("in a replay", r"HeapError: pmoe: rank 0 waited 0\.1 s in vain for rank 1"),
    ],
)
def test_a_rank_whose_process_ends_is_named_although_the_device_waits_for_it(
    kernels: Path, tmp_path: Path, ends: str, told: str
) -> None:
    with Pool(2) as pool:
        pool.start(dying_job, kernels, str(tmp_path), ends)
        error = pool.answer(0)
        assert pool.exit_code(1, 5) == 3
    assert re.match(told, error), error
