"""Pass programs in tests of the backend over CUDA (``cuda/program/cuda_backend.h``), without a GPU.

The backend is compiled with a runtime that writes calls on streams down, and with a stand-in for NCCL
(``tests/cuda/runtime``). Launches run in the emulator, where a test wants that. Everything then happens at
once, in the order of the calls: that lanes wait for each other is read from the calls that were written down.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.bench_program import PLACES_OF_LAUNCH, SUMS_OF_LAUNCH, joined_exchanges
from bench.recorded_program import Issue, Signal, Wait
from pmoe.engine.passes.base import plan_schedule
from pmoe.kernels import extension
from pmoe.kernels.heap import tensor_at
from pmoe.program.layer_shape import LayerShape
from pmoe.program.on_cuda import LoadedProgram
from pmoe.program.records import Base, Kernel, PassProgram
from pmoe.schedule.tasks import Lane, Schedule
from tests.cuda.compiled import compile_program
from tests.emulated import load_kernels
from tests.programs import Calls, ProgramCall, unset

STREAMS = {lane: 1000 + number for number, lane in enumerate(Lane)}
"""A stream for each lane. The stand-in for CUDA does not look behind the number."""

PRODUCTS = frozenset(
    {Kernel.HIDDEN, Kernel.OUTPUT, Kernel.RECOMPUTE, Kernel.HIDDEN_GRADIENT, Kernel.INPUT_GRADIENT}
    | {Kernel.WEIGHT_GRADIENT}
)
"""Kernels that are grouped products."""


@functools.cache
def nccl() -> ctypes.CDLL:
    """Returns the stand-in for NCCL, which the process then has loaded under the name that tests use."""
    flags = ("-shared", "-fPIC", "-Wl,-soname,libpmoe_nccl.so", "-ldl")
    loaded = ctypes.CDLL(str(compile_program("runtime/nccl.cpp", *flags)))
    loaded.stub_nccl_set.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    loaded.stub_nccl_fail.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return loaded


@contextmanager
def stand_ins(kernels: Path, *, runs: bool, folder: Path | None = None) -> Iterator[ModuleType]:
    """Makes the extension one that launches in the emulator, with the stand-in for NCCL, in the block.

    runs: whether launches and copies happen, or are only written down.
    folder: where rows of several processes travel; None if they do not.
    """
    module = load_kernels(kernels)
    module.stub_reset(runs=runs, processors=2)
    nccl().stub_nccl_set(module.stub_note_address(), str(folder or "").encode(), folder is not None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "load", lambda: module)
        try:
            yield module
        finally:
            module.stub_reset()


@dataclass(frozen=True)
class Noted:
    """A call of CUDA or NCCL that was written down.

    what: "launch", "record", "wait", "copy", "set", or the name of a function of NCCL.
    numbers: its arguments.
    """

    what: str
    stream: int
    numbers: tuple[int, ...] = ()


def journal(module: ModuleType) -> list[Noted]:
    """Returns all calls since the last reset, launches among them, in their order."""
    launches = [Noted("launch", each["stream"]) for each in module.stub_launched()]
    calls = []
    num_launches = 0
    for what, stream, numbers, launches_before in module.stub_noted():
        calls += launches[num_launches:launches_before]
        num_launches = launches_before
        calls.append(Noted(what, stream, tuple(numbers)))
    return calls + launches[num_launches:]


PRODUCT_NAMES = {"HIDDEN", "OUTPUT", "RECOMPUTE", "HIDDEN_GRADIENT", "INPUT_GRADIENT", "WEIGHT_GRADIENT"}


def counter_bytes(program: PassProgram) -> int:
    """Returns the bytes of the tile counters of a program's products, which begin its workspace."""
    return 4 * sum(record.kernel.name in PRODUCT_NAMES for record in program.records)


class Reader:
    """Reads a journal beside the calls that the recording backend wrote for the same pass.

    noted: the journal. What is read is removed.
    heaps: whether exchanges are launches that write into heaps.
    fill_bytes: bytes of counters that a fill of memory sets to 0 right before the first product; 0 if there
        is no fill.
    """

    def __init__(self, noted: list[Noted], *, heaps: bool = False, fill_bytes: int = 0) -> None:
        self.noted = list(noted)
        self.heaps = heaps
        self.fill_bytes = fill_bytes
        self.event_of: dict[int, int] = {}
        self.placed: Noted | None = None
        self.num_placed = 0
        self.num_unsummed = 0

    def take(self, *names: str) -> Noted:
        call = self.noted.pop(0)
        assert call.what in names, (call, names)
        return call

    def next_is(self, *names: str) -> bool:
        return bool(self.noted) and self.noted[0].what in names

    def lane(self, call: Noted) -> Lane:
        """Returns the lane on whose stream a call is."""
        (lane,) = (lane for lane, stream in STREAMS.items() if stream == call.stream)
        return lane

    def read(self, recorded: Calls, *, parts: int, own_rank: int) -> Calls:
        """Returns the journal as calls of lanes: those of the streams on which CUDA and NCCL were called.

        recorded: the calls of the recording backend.
        parts: partial sums of HIDDEN_GRADIENT: with more than one, another launch adds them up.
        own_rank: the rank of the pass.
        """
        calls: Calls = []
        left = list(recorded)
        while left:
            call = left.pop(0)
            if self.heaps and isinstance(call, Issue) and call.kernel is Kernel.EXCHANGE:
                self.num_placed = 0
                group = [call, *joined_exchanges(call, left)]
                del left[: len(group) - 1]
                calls += self._pushed(group)
                continue
            if isinstance(call, Issue) and call.kernel is Kernel.PLACE:
                calls.append(replace(call, lane=self.lane(self._placed())))
                continue
            self.num_placed = 0
            if isinstance(call, Issue):
                if call.kernel in (Kernel.TAKE, Kernel.PUT) and call.operands[0].columns == 1:
                    self._sum()
                calls += [replace(call, lane=self.lane(noted)) for noted in self._issued(call, own_rank)]
                self.num_unsummed += call.kernel is Kernel.HIDDEN_GRADIENT and parts > 1
                if self.num_unsummed == SUMS_OF_LAUNCH:
                    self._sum()
                continue
            if isinstance(call, Signal) and call.lane is Lane.COMPUTE:
                self._sum()
            noted = self.take("wait" if isinstance(call, Wait) else "record")
            event = self.event_of.setdefault(noted.numbers[0], call.event)
            assert event == call.event
            calls.append(type(call)(self.lane(noted), event))
        assert not self.noted, self.noted
        return calls

    def _placed(self) -> Noted:
        """Returns the launch of a PLACE call. Up to `PLACES_OF_LAUNCH` that follow one another have one."""
        if self.num_placed % PLACES_OF_LAUNCH == 0:
            self.placed = self.take("launch")
        self.num_placed += 1
        assert self.placed is not None
        return self.placed

    def _pushed(self, group: list[Issue]) -> Calls:
        """Reads the launch of exchanges that directly follow each other, if any of them has rows."""
        moving = [call for call in group if any(call.send) or any(call.recv)]
        if not moving:
            return []
        lane = self.lane(self.take("launch"))
        return [replace(call, lane=lane) for call in moving]

    def _sum(self) -> None:
        """Reads the launch that adds up the partial sums of the HIDDEN_GRADIENT calls before, if any wait."""
        if self.num_unsummed:
            assert self.lane(self.take("launch")) is Lane.COMPUTE
        self.num_unsummed = 0

    def _issued(self, call: Issue, own_rank: int) -> list[Noted]:
        if call.kernel is Kernel.EXCHANGE:
            return self._exchanged(call, own_rank)
        if call.kernel is Kernel.COPY:
            copied = self.take("copy")
            source, target = call.operands
            assert copied.numbers == (target.address, source.address, source.rows * source.row_bytes)
            return [copied]
        if self.fill_bytes and call.kernel.name in PRODUCT_NAMES:
            fill = self.take("set")
            assert self.lane(fill) is Lane.COMPUTE and fill.numbers[1] == self.fill_bytes
            self.fill_bytes = 0
        return [self.take("launch")]

    def _exchanged(self, call: Issue, own_rank: int) -> list[Noted]:
        """Reads an exchange: each rank's rows go from their place, and to their place."""
        source, target = call.operands
        expected = []
        for rank, (sent, received) in enumerate(zip(call.send, call.recv, strict=True)):
            if rank != own_rank:
                begin = source.address + sum(call.send[:rank]) * source.row_bytes
                expected += [("ncclSend", rank, sent * source.row_bytes, begin)] if sent else []
                begin = target.address + sum(call.recv[:rank]) * target.row_bytes
                expected += [("ncclRecv", rank, received * target.row_bytes, begin)] if received else []
        found = []
        if expected:
            self.take("ncclGroupStart")
            while self.next_is("ncclSend", "ncclRecv"):
                found.append(self.take("ncclSend", "ncclRecv"))
            self.take("ncclGroupEnd")
        assert [(each.what, *each.numbers) for each in found] == expected
        if call.send[own_rank]:
            own = self.take("copy")
            begins = (
                memory.address + sum(rows[:own_rank]) * memory.row_bytes
                for memory, rows in ((target, call.recv), (source, call.send))
            )
            assert own.numbers == (*begins, call.send[own_rank] * source.row_bytes)
            found.append(own)
        return found


def load(
    program: PassProgram,
    schedule: Schedule,
    *,
    device: int = 0,
    kernels: str = "sm_80",
    spare: int = 0,
    activation: str = "swiglu",
    communicator: Any = None,
) -> LoadedProgram:
    return LoadedProgram(
        program, schedule, device=device, kernels=kernels, dtype=torch.bfloat16, activation=activation,
        spare=spare, communicator=communicator,
    )  # fmt: skip


@dataclass
class DeviceCall(ProgramCall):
    """Both passes of one call of a layer, by launches in the emulator.

    kernels: "sm_80" or "sm_90a".
    communicator: the communicator of several ranks.
    num_lent: passes whose ring slots lay in a heap.
    device_rows: the table of row counts, if the host does not know them.
    workspaces: the scratch memory of all passes. Launches that are repeated use it again.
    """

    kernels: str = "sm_80"
    communicator: Any = None
    num_lent: int = 0
    device_rows: Tensor | None = None
    workspaces: list[Tensor] = field(default_factory=list)

    def layer_shape(self) -> LayerShape:
        """Returns the facts of the layer as on a device: the activated hidden has memory of its own."""
        experts = self.call.plan.modules.experts
        shape = super().layer_shape()
        columns = experts.columns("cuda")  # type: ignore[attr-defined]
        return replace(shape, columns=columns, weighs_active=not shape.bias, places=True)

    def run(self, direction: str) -> None:
        plan = self.call.plan
        schedule = plan_schedule(plan, direction)
        self.program = self.compiled(schedule)
        activation = plan.modules.experts.fused_activation  # type: ignore[attr-defined]
        spare = 1 if self.communicator is not None else 0
        loaded = load(
            self.program, schedule, kernels=self.kernels, spare=spare, activation=activation,
            communicator=self.communicator,
        )  # fmt: skip
        cut = loaded.cut(self.call.inputs.x_TM.shape[0], self.rank, self.send, self.recv)
        self.put(ARENA=unset(cut.arena_bytes // 2, dtype=torch.bfloat16))
        addresses = self.addresses()
        lent = loaded.take_arena(cut)
        if lent:
            tensor_at(lent, (cut.arena_bytes,), torch.uint8, torch.device("cpu")).fill_(255)  # NaN
            addresses[Base.ARENA] = lent
        workspace = torch.full((loaded.workspace_bytes(cut),), 255, dtype=torch.uint8)
        counters = workspace[: counter_bytes(self.program) if spare else 0].view(torch.int32).fill_(1 << 30)
        self.workspaces.append(workspace)
        device_rows = 0 if self.device_rows is None else self.device_rows.data_ptr()
        loaded.run(cut, addresses, STREAMS, workspace.data_ptr(), device_rows)
        assert (counters < 1 << 30).all(), "a launch sets the counters of all products to 0"
        if lent:
            loaded.give_back_arena()
            self.num_lent += 1


def in_float64(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()
