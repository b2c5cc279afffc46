"""The backend of pass programs for CUDA devices: issues them over CUDA, and over NCCL or symmetric heaps.

The C++ side is ``cuda/program/cuda_backend.h``. A loaded program holds those arguments of its launches that
are the same in every call. A call adds row counts, addresses and streams. For each pass, Python makes these
calls of C++, in this order:

    cut = loaded.cut(tokens, rank, send, recv)     computes the numbers of the call from its row counts
    lent = loaded.take_arena(cut)                  address of memory for the ring slots in a heap; 0 if there
                                                   is no heap: the caller then allocates this memory
    size = loaded.workspace_bytes(cut)             bytes of scratch memory: tile counters and partial sums
    loaded.run(cut, bases, streams, workspace)     all launches, copies, exchanges, events and waits
    loaded.give_back_arena()                       only if the memory is in a heap

Nothing of this has run on a GPU.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.agreement import all_fail_together, from_first
from pmoe.comm.group_options import timeout_of
from pmoe.comm.group_record import collectives
from pmoe.comm.heap.program_heap import ARENA_MIB, program_heap
from pmoe.comm.heap.providers import NoHeapError
from pmoe.comm.ranks import Ranks
from pmoe.engine.lanes.cuda import CudaLanes
from pmoe.experts.stacked import StackedExperts
from pmoe.kernels import extension
from pmoe.kernels.gemm import ACTIVATIONS, ELEMENTS, SPARE, layout_problem
from pmoe.program.compiler import NO_TASK
from pmoe.program.layer_shape import LayerShape
from pmoe.program.records import LANES, Base, Kernel, PassProgram
from pmoe.schedule.tasks import Lane, Schedule
from pmoe.warn import warn_once

FLOAT32_BYTES = 4
"""Bytes of a routing weight. The kernels read float32."""


class CudaBackend:
    """The backend that runs pass programs on CUDA devices: implements `ProgramBackend`."""

    device_type = "cuda"

    def refusal(self, shape: LayerShape, rows: Tensor) -> str | None:
        problem = layout_problem(rows.dtype, d_model=shape.d_model, hidden=shape.columns.scratch)
        code, why = extension.path(rows.device)
        reasons = {
            f"pmoe's kernels do not run on {rows.device}: {why}": code is None,
            f"{problem}": problem is not None,
            f"routing weights have {shape.weight_bytes} bytes, and kernels read float32": (
                shape.weight_bytes != FLOAT32_BYTES
            ),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def connect(self, ranks: Ranks, device: torch.device, *, heaps: bool) -> Any:
        if heaps:
            try:
                return program_heap(ranks, device).exchanger
            except NoHeapError as error:  # raised on all ranks; other errors perhaps on one rank only
                warn_once(f"programs send rows by NCCL, because there are no heaps: {error}")
        return make_communicator(ranks, device)

    def bounded_refusal(self, communicator: Any) -> str | None:
        if isinstance(communicator, extension.module().HeapExchanger):
            return None
        return "rows of its programs travel by NCCL, and the host tells NCCL how many: they need heaps"

    def streams(self, device: torch.device, schedule: Schedule) -> Mapping[Lane, int]:
        lanes = {
            lane: CudaLanes.stream_of(device, lane).cuda_stream for lane in schedule.lanes - {Lane.COMPUTE}
        }
        return {Lane.COMPUTE: torch.cuda.current_stream(device).cuda_stream, **lanes}

    def load(
        self,
        program: PassProgram,
        schedule: Schedule,
        *,
        experts: StackedExperts,
        dtype: torch.dtype,
        device: torch.device,
        communicator: Any,
    ) -> LoadedProgram:
        code, why = extension.path(device)
        assert code is not None, why
        assert experts.fused_activation is not None  # other experts are refused by the table of features
        return LoadedProgram(
            program,
            schedule,
            device=device.index,
            kernels=code,
            dtype=dtype,
            activation=experts.fused_activation,
            spare=SPARE if program.ranks > 1 and program.chunks > 1 else 0,
            communicator=communicator,
        )


def make_communicator(ranks: Ranks, device: torch.device) -> Any:
    """Returns a new NCCL communicator, which only the exchanges of pass programs use. Collective.

    It is made by the NCCL library that torch has loaded. Rank 0 makes the communicator's id, and the other
    ranks get the id through the process group.

    Neither NCCL nor torch's watchdog ends an exchange of this communicator that takes too long. So a thread
    watches whether passes end within the timeout of the ranks' group. If a pass does not, because another
    rank never began it, the thread aborts the communicator, and warns. The thread also does this after an
    error of NCCL or of the device. Later passes raise RuntimeError with the reason.

    ranks: the ranks, more than one.
    device: this rank's device.

    Raises RuntimeError on every rank if NCCL is not loaded on some rank, if NCCL refuses to make the
    communicator, or if a rank does not call this function within half of the timeout.
    """
    module = extension.module()
    assert ranks.group is not None
    limit = timeout_of(ranks.group) or dist.default_pg_timeout
    with all_fail_together(ranks, stage="look for NCCL for pass programs"):
        module.nccl_loaded()
        identity = module.nccl_id() if ranks.rank == 0 else b""
    identity = from_first(ranks, identity, stage="send NCCL's id for pass programs")
    with all_fail_together(ranks, stage="make a communicator for pass programs"):
        communicator = module.Communicator(
            identity, ranks.size, ranks.rank, device.index, limit.total_seconds()
        )
    threading.Thread(target=_watch, args=(weakref.ref(communicator),), daemon=True).start()
    return communicator


LOOK_SECONDS = 1.0
"""Seconds between two checks of whether the passes have ended."""


def _watch(communicator: weakref.ref[Any]) -> None:
    """Aborts a communicator if a pass does not end in time, or after an error, and warns of the reason.

    Returns when the communicator has been aborted or freed.

    communicator: a weak reference to the communicator.
    """
    reason: str | None = ""
    while reason == "":
        time.sleep(LOOK_SECONDS)
        existing = communicator()
        reason = None if existing is None else existing.abort_if_late()
        del existing  # so that this thread does not keep the communicator alive while it sleeps
    if reason:
        warn_once(reason, for_each_reason=True)


def record_labels(program: PassProgram, schedule: Schedule) -> list[str]:
    """Returns the name of each record for error messages, such as "C1: hidden": task and kernel.

    program: the program.
    schedule: the schedule from which the program was compiled.
    """
    names = (
        "before or after all tasks" if record.task == NO_TASK else schedule.tasks[record.task].name
        for record in program.records
    )
    return [
        f"{name}: {record.kernel.name.lower()}" for name, record in zip(names, program.records, strict=True)
    ]


class LoadedProgram:
    """A pass program that was loaded for a CUDA device.

    program, schedule: the program, and the schedule from which it was compiled.
    device: index of the CUDA device.
    kernels: the architecture of the kernels that are launched, "sm_90a" or "sm_80"
        (`pmoe.kernels.extension.path`).
    dtype: dtype of the rows.
    activation: name of the experts' nonlinearity (`StackedExperts.fused_activation`).
    spare: number of multiprocessors that products leave free for communication (`pmoe.kernels.gemm.SPARE`);
        0 if no communication runs beside products.
    communicator: the result of `CudaBackend.connect`; None if the program sends no rows.

    Raises ValueError, with the record's name, for a record that has no kernel on CUDA devices.
    """

    def __init__(
        self,
        program: PassProgram,
        schedule: Schedule,
        *,
        device: int,
        kernels: str,
        dtype: torch.dtype,
        activation: str,
        spare: int,
        communicator: Any,
    ) -> None:
        self._shape = (program.chunks, program.ranks, program.local_experts)
        exchanges = {record.task for record in program.records if record.kernel is Kernel.EXCHANGE}
        self._num_exchanges = len(exchanges)
        self._communicator = communicator
        self._loaded = extension.module().PassProgram(
            words=program.words(),
            labels=record_labels(program, schedule),
            device=device,
            hopper=kernels == "sm_90a",
            element=ELEMENTS[dtype],
            activation=ACTIVATIONS[activation],
            spare=spare,
            communicator=communicator,
        )

    def cut(self, tokens: int, rank: int, send_nWE: Tensor, recv_nWE: Tensor) -> Any:
        """Returns the numbers of a call (`PassCut`), such as the bytes of all ring slots (``arena_bytes``).

        tokens: T, number of tokens of this rank.
        rank: index of this rank.
        send_nWE, recv_nWE: (n, W, E_local) int64 on the host, row counts: rows that this rank has for each
            expert of each rank, and rows that each rank has for each expert of this rank.

        Raises ValueError for tensors of another shape, dtype or device, for tensors that are not contiguous,
        and for impossible counts, such as negative ones.
        """
        for name, counts in (("send", send_nWE), ("recv", recv_nWE)):
            is_readable = counts.dtype == torch.int64 and counts.is_contiguous() and not counts.is_cuda
            if counts.shape != self._shape or not is_readable:
                raise ValueError(
                    f"{name} ({counts.dtype} {tuple(counts.shape)} on {counts.device}) must be contiguous "
                    f"int64 {self._shape} on the host"
                )
        return self._loaded.cut(tokens, rank, send_nWE.data_ptr(), recv_nWE.data_ptr())

    def take_arena(self, cut: Any) -> int:
        """Returns the address of memory in a heap for the ring slots of a pass; 0 if there is none.

        The result is also 0 while another pass uses the memory, or if the ring slots need more memory than
        the heap has. In the last case rows are sent in pieces, which takes longer, and a warning says so
        once.

        cut: the numbers of the call, from `cut`.
        """
        if self._communicator is None:
            return 0
        most = self._communicator.arena_bytes
        if 0 < most < cut.arena_bytes:
            warn_once(
                "programs send rows in pieces, which is slower, because the ring slots of a pass do not fit "
                f"into its heap: {cut.arena_bytes} bytes in {most}; {ARENA_MIB} sets the size in MiB"
            )
        address: int = self._communicator.take_arena(cut.arena_bytes)
        return address

    def workspace_bytes(self, cut: Any) -> int:
        """Returns the number of bytes of scratch memory that a pass needs on the device.

        The tensors and ring slots of the pass (`Base`) are not included.

        cut: the numbers of the call, from `cut`.
        """
        size: int = self._loaded.workspace_bytes(cut)
        return size

    def run(
        self,
        cut: Any,
        bases: Mapping[Base, int],
        streams: Mapping[Lane, int],
        workspace: int,
        device_rows: int = 0,
    ) -> None:
        """Enqueues all work of a pass. The host does not wait for the device.

        cut: the numbers of the call, from `cut`.
        bases: for each `Base`, the address of its memory; 0 if the pass does not use it.
        streams: the stream of each lane that the pass uses.
        workspace: address of the scratch memory, `workspace_bytes` bytes on the device.
        device_rows: address of `pmoe.program.bounded.DeviceRows.rows_by_rank`, if the host does not know the
            row counts; else 0.

        Raises RuntimeError, with the record's name, for an error of CUDA or NCCL. The compute lane then still
        waits for all other lanes. Raises RuntimeError, before anything is enqueued, if an earlier pass did
        not end in time. Raises ValueError for an address that is not a multiple of 16, and for row counts on
        the device if rows travel by NCCL.
        """
        compute = streams[Lane.COMPUTE]
        collectives.begun += self._num_exchanges
        self._loaded.run(
            cut,
            [bases.get(base, 0) for base in Base],
            [streams.get(lane, compute) for lane in LANES],
            workspace,
            device_rows,
        )

    def give_back_arena(self) -> None:
        """Gives back the memory from `take_arena`, after the pass was enqueued."""
        self._communicator.give_back_arena()
