"""Pass programs whose exchanges write into heaps of other ranks: several processes, kernels in the emulator.

Heaps are files that the processes map. Each exchange is a launch of the kernel of ``cuda/program/push.cuh``,
which waits inside the launch for the kernels of the other processes.
"""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pmoe import Restore, warn
from pmoe.comm.heap import close_heaps, closing, program_heap
from pmoe.comm.heap.program_heap import ARENA_MIB, ProgramHeap
from pmoe.comm.ranks import Ranks
from pmoe.decide import program_choice
from pmoe.program import on_cuda
from pmoe.program.on_cuda import make_communicator
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES
from tests.device_programs import DeviceCall, stand_ins
from tests.gloo.kit import NUM_EXPERTS, error_of
from tests.gloo.test_program import ROWS, all_to_all, counts_of
from tests.gloo.test_program_layers import options_of
from tests.heaps import CPU, FileMemory
from tests.kit import assert_same, build, gradients, loss_of, tokens
from tests.pool import SHORT_TIMEOUT_SECONDS, Pool, ranks
from tests.programs import CpuBackend, Exchange, engine_call, on_cpu, own_counts
from tests.unit.test_program_cuda import WIDTH

DEVICE = torch.device("cuda", 0)
STREAM = 1001


class HeapBackend(CpuBackend):
    """Runs programs of layers in float64, whose exchanges are launches over heaps, in the emulator.

    memory: the memory of the heap.
    heap: the heap that was made last.
    num_lent: passes whose ring slots lay in the heap.
    """

    def __init__(self, seed: int = 0, memory: FileMemory | None = None) -> None:
        super().__init__(seed)
        self.memory: Any = memory or FileMemory()
        self.heap: ProgramHeap | None = None
        self.num_lent = 0
        self.lender = self

    def connect(self, ranks: Ranks, device: torch.device, *, heaps: bool) -> Exchange:
        assert heaps
        self.heap = heap = program_heap.program_heap(ranks, device, memory=self.memory)

        def exchange(rows: Tensor, send: Sequence[int], out: Tensor, recv: Sequence[int]) -> None:
            # A program keeps the heap with which it was loaded, also after this heap was closed.
            row_bytes = rows.shape[1] * rows.element_size()
            heap.exchanger.exchange(STREAM, rows.data_ptr(), out.data_ptr(), row_bytes, send, recv)

        return exchange

    def take_arena(self, num_bytes: int) -> int:
        assert self.heap is not None
        address = int(self.heap.exchanger.take_arena(num_bytes))
        self.num_lent += address != 0
        return address

    def give_back_arena(self) -> None:
        assert self.heap is not None
        self.heap.exchanger.give_back_arena()


@contextmanager
def heaps(kernels: Path, backend: HeapBackend) -> Iterator[Any]:
    """Lets layers run as programs over heaps in the block."""
    with stand_ins(kernels, runs=True) as module, on_cpu(backend):
        try:
            yield module
        finally:
            close_heaps(Ranks())


# ---- results


def layer_job(rank: int, world: int, kernels: Path, cases: list[dict[str, Any]], mib: str) -> int:
    """Compares a step by programs over heaps with the engine's, to the bit. Returns the lent passes."""
    num_experts = 6 if world == 3 else NUM_EXPERTS
    num_lent = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ARENA_MIB, mib)
        for number, options in enumerate(cases):
            x = tokens(ROWS[world][rank], 10 + rank)
            by_engine = gradients(build(num_experts, **options), x)
            backend = HeapBackend(seed=100 * number + rank)
            with heaps(kernels, backend):
                layer = build(num_experts, **options, program=True, program_heaps=True)
                by_heaps = gradients(layer, x)
                assert layer.ran is not None and layer.ran.path == "program", options
            num_lent += backend.num_lent
            present = [
                {name: value for name, value in found.items() if value is not None}
                for found in (by_heaps, by_engine)
            ]
            assert_same(*present, told=(options, world, rank))
    return num_lent


QUICK = options_of([STRATEGIES["S1"], STRATEGIES["S4"], KEEP], (2,))


def test_a_step_over_heaps_is_the_engines_to_the_bit(kernels: Path) -> None:
    """Rows are written into the ring slots of other ranks, which lie in their heaps."""
    assert min(ranks(2).run(layer_job, kernels, QUICK, "1")) == 2 * len(QUICK)


def test_without_room_for_ring_slots_rows_travel_in_pieces(kernels: Path) -> None:
    assert ranks(3).run(layer_job, kernels, QUICK, "0") == [0, 0, 0]


@pytest.mark.sampled(0)
@pytest.mark.slow
@pytest.mark.parametrize("bypass_local", [True, False])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_step_over_heaps_is_the_engines_to_the_bit_in_all_cases(
    kernels: Path, world: int, bypass_local: bool
) -> None:
    cases = options_of(ALL_PAIRS, (1, 4), bypass_local=bypass_local)
    ranks(world).run(layer_job, kernels, cases, "1")


def device_job(rank: int, world: int, kernels: Path, folder: Path, cases: list[tuple[Restore, int]]) -> int:
    """Compares launches in bfloat16 over heaps with those over NCCL, to the bit. Returns the lent passes."""
    num_experts = 6 if world == 3 else 4
    num_lent = 0
    with stand_ins(kernels, runs=True, folder=folder) as module, pytest.MonkeyPatch.context() as patch:
        patch.setenv(ARENA_MIB, "1")
        heap = program_heap.program_heap(Ranks(), CPU, memory=FileMemory())  # type: ignore[arg-type]
        by_nccl = make_communicator(Ranks(), DEVICE)
        for number, (pair, n) in enumerate(cases):
            layer = build(
                num_experts, pipeline=n, memory_reuse=pair, bypass_local=number % 2 == 0,
                expert=("ffn", "swiglu")[number % 2], bias=number % 3 == 0, d_model=WIDTH, d_hidden=WIDTH,
                dtype=torch.bfloat16,
            )  # fmt: skip
            x = tokens(ROWS[world][rank], 10 + rank, torch.bfloat16, WIDTH).requires_grad_()
            call = engine_call(lambda layer=layer, x=x: loss_of(layer, layer(x)).backward())
            send = own_counts(call, layer.gate(x.detach()).expert, num_experts, world)
            results = []
            for communicator in (by_nccl, heap.exchanger):
                device = DeviceCall(call, rank, send, counts_of(send), all_to_all, communicator=communicator)
                results.append([device.forward().clone(), *(each.clone() for each in device.backward())])
                num_lent += device.num_lent
            for one, other in zip(*results, strict=True):
                assert torch.equal(one, other), (str(pair), n, rank)
        assert module.stub_refused() == []
        close_heaps(Ranks())
    return num_lent


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, cases", [(2, [(STRATEGIES["S4"], 2), (KEEP, 1)]), (3, [(STRATEGIES["S1"], 2)])], ids=["2", "3"]
)
def test_launches_over_heaps_compute_what_they_compute_over_nccl(
    kernels: Path, world: int, cases: list[tuple[Restore, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        num_lent = ranks(world).run(device_job, kernels, Path(folder), cases)
    assert num_lent == [2 * len(cases)] * world


# ---- what fails


def refused_job(rank: int, world: int, kernels: Path) -> tuple[list[str], list[str], list[int]]:
    """Asks for heaps where rank 1 cannot open memory, twice, and again after heaps were closed.

    Returns the warnings, the communicators, and how often this rank has tried to make a heap after each call.
    """
    warn.GIVEN.clear()
    tries = []
    made = []
    memory = FileMemory(refuses="open" if rank == 1 else None)
    with (
        stand_ins(kernels, runs=False),
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        patch.setattr(on_cuda, "make_communicator", lambda ranks, device: "NCCL's")
        patch.setattr(on_cuda, "program_heap", functools.partial(program_heap.program_heap, memory=memory))
        for closes in (False, False, True):
            if closes:
                close_heaps(Ranks())
            made.append(on_cuda.CudaBackend().connect(Ranks(), CPU, heaps=True))
            tries.append(memory.log.count("place"))
        close_heaps(Ranks())
    return [str(each.message) for each in caught], made, tries


def test_ranks_without_heaps_use_nccl_and_say_why_once(kernels: Path) -> None:
    """They do not try again until heaps are closed."""
    for (warning,), made, tries in ranks(2).run(refused_job, kernels):
        assert made == ["NCCL's"] * 3
        assert tries == [1, 1, 2]
        assert "programs send rows by NCCL, because there are no heaps" in warning
        assert "rank 1: could not open the heap of rank 0: cannot open" in warning


def broken_job(rank: int, world: int, kernels: Path) -> tuple[str, str, list[str]]:
    """Asks for heaps where a collective fails, and where rank 1 has a wrong size of heaps.

    Returns both errors, and the communicators of NCCL that were made.
    """
    made: list[str] = []
    memory = FileMemory()

    def fail(steps: program_heap._HeapSteps, value: object) -> list[object]:
        raise RuntimeError("the other rank did not come")

    def connect() -> object:
        return on_cuda.CudaBackend().connect(Ranks(), CPU, heaps=True)

    with stand_ins(kernels, runs=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_cuda, "make_communicator", lambda ranks, device: made.append("NCCL's"))
        patch.setattr(on_cuda, "program_heap", functools.partial(program_heap.program_heap, memory=memory))
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(program_heap._HeapSteps, "gather", fail)
            of_collective = error_of(connect)
        if rank == 1:
            patch.setenv(ARENA_MIB, "many")
        of_size = error_of(connect)
        close_heaps(Ranks())
    return of_collective, of_size, made


def test_no_rank_alone_goes_on_to_nccl(kernels: Path) -> None:
    """A collective may fail on one rank only, so its error is raised. So is that of a wrong size of heaps."""
    for of_collective, of_size, made in ranks(2).run(broken_job, kernels):
        assert "the other rank did not come" in of_collective
        assert "rank 1: PMOE_PROGRAM_HEAP_MIB ('many') must be a number of MiB" in of_size
        assert made == []


def impatient(heap: ProgramHeap, module: Any, seconds: float) -> Any:
    """Returns another exchanger over the memory of a heap, with another time limit."""
    steps = heap.steps
    assert steps.base is not None
    return module.HeapExchanger(
        heaps=[steps.opened.get(rank, steps.base) for rank in range(steps.ranks.size)],
        rank=steps.ranks.rank,
        device=0,
        bytes=steps.num_bytes,
        report=heap.report.data_ptr(),
        seconds=seconds,
    )


def absent_job(rank: int, world: int, kernels: Path) -> list[str]:
    """Rank 1 ends before its backward passes. Returns the errors of rank 0's."""
    backend = HeapBackend()
    with pytest.MonkeyPatch.context() as patch, stand_ins(kernels, runs=True) as module, on_cpu(backend):
        patch.setenv(ARENA_MIB, "1")
        layer = build(NUM_EXPERTS, pipeline=2, memory_reuse="S4", program=True, program_heaps=True)
        x = tokens(5, rank).requires_grad_()
        outputs = [layer(x).sum() for _ in range(2)]
        if rank == 1:
            os._exit(3)
        assert backend.heap is not None
        backend.heap.exchanger = impatient(backend.heap, module, 0.02)  # forward passes may take longer
        return [error_of(output.backward) for output in outputs]


@pytest.mark.slow
def test_a_peer_that_dies_is_named_by_the_next_pass(kernels: Path) -> None:
    """The kernel of the first pass ends after its time limit, and its report is raised by the second pass."""
    with Pool(2, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        pool.start(absent_job, kernels)
        _, error = pool.answer(0)
    assert "rank 0 of 2: an exchange of a pass program has waited 0.02 s in vain for rank 1" in error
    assert "call pmoe.comm.heap.close_heaps on every rank" in error


def closed_job(rank: int, world: int, kernels: Path) -> tuple[str, str]:
    """Closes the heaps of a layer between two calls. Returns how the second call ran, and an old error.

    Programs of closed heaps are forgotten when there are new ones.
    """
    with heaps(kernels, HeapBackend()), pytest.MonkeyPatch.context() as patch:
        patch.setenv(ARENA_MIB, "1")
        layer = build(NUM_EXPERTS, pipeline=2, memory_reuse="S4", program=True, program_heaps=True)
        old = layer(tokens(5, rank).requires_grad_()).sum()
        close_heaps(Ranks())
        layer(tokens(5, rank).requires_grad_()).sum().backward()
        assert layer.ran is not None
        kept = [key for key in program_choice._programs_of_group(Ranks()).agreed if key.heaps]
        assert {key.closings for key in kept} == {program_heap.num_closings(Ranks())}
        return layer.ran.path, error_of(old.backward)


def test_after_heaps_were_closed_layers_make_new_ones(kernels: Path) -> None:
    for path, error in ranks(2).run(closed_job, kernels):
        assert path == "program"
        assert "the heap of pass programs is closed" in error


class Group:
    """A stand-in for a process group, as a key."""


def test_an_error_of_closing_keeps_no_other_heap_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error is raised at the end, and the closing is counted."""
    stand_in = SimpleNamespace(group=Group())
    closed = []

    def fail(name: str) -> None:
        closed.append(name)
        raise RuntimeError(f"cannot close {name}")

    heaps = {
        DEVICE: SimpleNamespace(close=functools.partial(fail, "the first")),
        CPU: SimpleNamespace(close=functools.partial(closed.append, "the second")),
    }
    program_heap._heaps[stand_in.group] = heaps  # type: ignore[index, assignment]
    monkeypatch.setattr(program_heap, "_open_heaps", list(heaps.values()))
    monkeypatch.setattr(closing, "close_layer_heaps", lambda ranks: fail("fused kernels'"))
    with pytest.raises(RuntimeError, match="cannot close fused kernels'"):
        close_heaps(stand_in)  # type: ignore[arg-type]
    assert closed == ["fused kernels'", "the first", "the second"]
    assert program_heap._open_heaps == []
    assert program_heap.num_closings(stand_in) == 1  # type: ignore[arg-type]
    monkeypatch.undo()
    close_heaps(stand_in)  # type: ignore[arg-type]
    assert program_heap.num_closings(stand_in) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["-1", "many", "1048577"])
def test_a_size_of_heaps_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ARENA_MIB, text)
    with pytest.raises(
        ValueError, match=f"PMOE_PROGRAM_HEAP_MIB .'{text}'. must be a number of MiB from 0 to"
    ):
        program_heap.arena_bytes()
