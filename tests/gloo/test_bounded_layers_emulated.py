"""Training steps in a graph by layers over bounded programs: several ranks, kernels in the emulator.

`tests.captured` takes the place of CUDA graphs: it repeats the launches of both passes with the arguments of
their capture. Heaps are files. The reference is a loop without a graph, whose programs have exact row counts.
Bits are compared. The emulator repeats launches in the order of the capture, so the order between streams is
not tested.
"""

from __future__ import annotations

import gc
import re
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import pmoe
from pmoe.comm.heap import close_heaps, program_heap
from pmoe.comm.heap.program_heap import ARENA_MIB
from pmoe.comm.ranks import Ranks
from pmoe.decide import program_choice
from pmoe.experts.stacked import StackedExperts
from pmoe.kernels.heap import WAIT_SECONDS
from pmoe.program.layer_shape import LayerShape
from pmoe.program.on_cuda import CudaBackend, LoadedProgram
from pmoe.program.records import PassProgram
from pmoe.schedule.tasks import Lane, Schedule
from tests.captured import Graph, is_launch
from tests.device_programs import STREAMS, load, stand_ins
from tests.gloo.test_bounded_layers import BY_PROGRAMS, compute, unlike, values
from tests.gloo.test_bounded_programs import BALANCED, CROWDED, TURNED, UNEVEN, batch
from tests.heaps import FileMemory
from tests.pool import Pool, ranks
from tests.unit.test_program_cuda import WIDTH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the kernels are compiled for the CPU first


class EmulatedBackend(CudaBackend):
    """Runs the programs of layers on the CPU by the launches for CUDA devices, in the emulator.

    kernels: "sm_80" or "sm_90a".
    """

    def __init__(self, kernels: str) -> None:
        self.kernels = kernels

    def refusal(self, shape: LayerShape, rows: Tensor) -> str | None:
        return None

    def connect(self, ranks: Ranks, device: torch.device, *, heaps: bool) -> Any:
        assert heaps
        memory: Any = FileMemory()
        return program_heap.program_heap(ranks, device, memory=memory).exchanger

    def streams(self, device: torch.device, schedule: Schedule) -> Mapping[Lane, int]:
        return STREAMS

    def load(
        self,
        program: PassProgram,
        schedule: Schedule,
        *,
        experts: StackedExperts,
        communicator: Any,
        **_: Any,
    ) -> LoadedProgram:
        activation = experts.fused_activation
        assert activation is not None
        return load(
            program, schedule, kernels=self.kernels, spare=1, activation=activation, communicator=communicator
        )


@contextmanager
def emulated(kernels: Path, path: str, mib: str = "1") -> Iterator[Any]:
    """Lets layers on the CPU run as programs over heaps in the block, by kernels in the emulator.

    path: "sm_80" or "sm_90a", the kernels.
    mib: the size of the heaps' arenas.
    """
    with (
        stand_ins(kernels, runs=True) as module,
        mock.patch.dict(program_choice.BACKENDS, {"cpu": EmulatedBackend(path)}),
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        patch.setenv(ARENA_MIB, mib)
        yield module


def build(world: int, n: int) -> tuple[pmoe.MoELayer, torch.optim.Optimizer]:
    """Returns a layer whose gate sends column e of a token to expert e, and its optimizer."""
    torch.manual_seed(3)
    layer = pmoe.MoELayer(
        WIDTH, WIDTH, 2 * world, 2, pipeline=n, memory_reuse="S4", slack=1.5, expert="swiglu", bias=False,
        dtype=torch.bfloat16,
    )  # fmt: skip
    layer.switches = BY_PROGRAMS
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight.fill_diagonal_(8)
    return layer, torch.optim.AdamW(layer.parameters(), lr=0.01, fused=True)


ORDER = (BALANCED, UNEVEN, CROWDED, TURNED, BALANCED)
"""The batches of the steps. The rows of the third do not fit."""


class InGraph:
    """Training steps that a graph repeats.

    tokens: number of this rank's tokens.
    """

    def __init__(self, rank: int, world: int, module: Any, n: int, tokens: int) -> None:
        self.layer, self.optimizer = build(world, n)
        self.batch_of = lambda step: batch(rank, ORDER[step], 2 * world)[:tokens]
        self.x = self.batch_of(0)
        self.graph = Graph(module)
        self.steps = pmoe.BoundedSteps(
            self.layer, self.optimizer, self.replay, lambda step: compute(self.layer, self.batch_of(step))
        )

    def capture(self) -> None:
        compute(self.layer, self.x)  # ranks agree on the bound
        self.layer.zero_grad()
        with self.steps.bounded_calls(), self.graph.capture():
            compute(self.layer, self.x)

    def replay(self, step: int) -> None:
        self.x.copy_(self.batch_of(step))
        self.graph.replay()


def job(
    rank: int, world: int, kernels: Path, path: str, n: int, tokens: tuple[int, ...], mib: str
) -> tuple[list[str], int, list[str]]:
    """Returns the values that differ from those without a graph, the repeated steps, and how calls ran."""
    with emulated(kernels, path, mib) as module:
        layer, optimizer = build(world, n)
        ran = []
        for step in range(len(ORDER)):
            compute(layer, batch(rank, ORDER[step], 2 * world)[: tokens[rank]])
            optimizer.step()
            assert layer.ran is not None
            ran.append(layer.ran.path)
        expected = values(layer, optimizer)
        training = InGraph(rank, world, module, n, tokens[rank])
        training.capture()
        for step in range(len(ORDER)):
            training.steps.step(step)
        training.steps.finish()
        found = values(training.layer, training.optimizer)
        assert module.stub_refused() == []
        close_heaps(Ranks())
    return unlike(found, expected), training.steps.repeated, ran


@pytest.mark.parametrize(
    "world, path, n, tokens, mib",
    [
        (2, "sm_80", 2, (8, 8), "1"),
        pytest.param(2, "sm_80", 4, (8, 8), "1", marks=pytest.mark.nightly),
        pytest.param(2, "sm_90a", 2, (8, 8), "1", marks=pytest.mark.nightly),
        (3, "sm_80", 2, (8, 0, 8), "1"),
        pytest.param(2, "sm_80", 2, (8, 8), "0", marks=pytest.mark.nightly),
    ],
    ids=["2", "2 in four chunks", "2 on Hopper", "3, one without tokens", "2, rows in pieces"],
)
def test_a_graph_of_launches_trains_as_a_loop_without_it(
    kernels: Path, world: int, path: str, n: int, tokens: tuple[int, ...], mib: str
) -> None:
    for wrong, repeated, ran in ranks(world).run(job, kernels, path, n, tokens, mib):
        assert not wrong
        assert repeated == 1
        assert ran == ["program"] * len(ORDER)


def closed_job(rank: int, world: int, kernels: Path) -> tuple[list[str], list[str]]:
    """Closes heaps between steps. Returns how a capture is refused then, and what differs in training."""
    with emulated(kernels, "sm_80") as module:
        layer, optimizer = build(world, 2)
        for step in range(3):
            compute(layer, batch(rank, ORDER[step], 2 * world))
            optimizer.step()
        expected = values(layer, optimizer)
        training = InGraph(rank, world, module, 2, 8)
        training.capture()
        training.steps.step(0)
        bound = training.layer.cache.row_bound
        assert bound is not None
        (heap,) = map(weakref.ref, bound.open_heaps)
        gc.disable()
        close_heaps(Ranks())
        assert heap() is None, "a closed heap is still referenced"
        gc.enable()
        told = []
        try:
            with training.steps.bounded_calls(), Graph(module).capture():
                compute(training.layer, training.x)
        except RuntimeError as error:
            told.append(str(error))
        training.graph = Graph(module)
        training.capture()
        for step in (1, 2):
            training.steps.step(step)
        training.steps.finish()
        found = values(training.layer, training.optimizer)
        close_heaps(Ranks())
    return told, unlike(found, expected)


def test_after_heaps_were_closed_a_call_without_a_graph_makes_new_ones(kernels: Path) -> None:
    for told, wrong in ranks(2).run(closed_job, kernels):
        (message,) = told
        assert "its heap was closed after the last call of its kind: make one more call" in message
        assert not wrong


FAILS_AT = 1
"""The step in which rank 1 launches no kernels."""


def fault_job(rank: int, world: int, kernels: Path, folder: str) -> tuple[str, bool]:
    """Returns the error, and whether the parameters are those before the step in which rank 1 fails."""
    tempfile.tempdir = folder  # nobody closes the heaps, which are files
    told = ""
    with emulated(kernels, "sm_80") as module, pytest.MonkeyPatch.context() as patch:
        patch.setenv(WAIT_SECONDS, "0.5")  # in the emulator's time, of which a second takes several
        training = InGraph(rank, world, module, 2, 8)
        training.capture()
        training.steps.step(0)
        before = [parameter.detach().clone() for parameter in training.layer.parameters()]
        if rank == 1:
            replay = training.graph.replay
            patch.setattr(training.graph, "replay", lambda: replay(leaves_out=is_launch))
        try:
            training.steps.step(FAILS_AT)
            training.steps.finish()
        except RuntimeError as error:
            told = f"{type(error).__name__}: {error}"
    return told, all(map(torch.equal, before, training.layer.parameters()))


@pytest.mark.nightly
def test_a_rank_whose_kernels_do_not_come_is_named_and_nobody_makes_the_step(
    kernels: Path, tmp_path: Path
) -> None:
    with Pool(2) as pool:  # of its own: the group cannot be used afterwards
        (told, is_kept), (told_there, is_kept_there) = pool.run(fault_job, kernels, str(tmp_path))
    assert re.match(r"HeapError: pmoe: rank 0 of 2: an exchange .* in vain for rank 1", told), told
    assert "in vain for rank" in told_there, told_there
    assert is_kept and is_kept_there
