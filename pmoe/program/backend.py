"""The interface of backends, which issue pass programs on a type of device, and a layer's programs.

A pass program is a pass that was compiled into a list of kernel launches, copies and collectives.

    ProgramBackend   loads programs, and provides the streams and the communicator with which they run
    Programs         the programs of all layers with the same sizes on a device, each loaded once
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from pmoe.comm.ranks import Ranks
from pmoe.engine.passes.base import plan_schedule
from pmoe.engine.plan.plan import PassModules, Plan
from pmoe.experts.stacked import StackedExperts
from pmoe.program.compiler import compile_pass
from pmoe.program.layer_shape import LayerShape
from pmoe.program.records import Base, PassProgram
from pmoe.schedule.restore import Restore
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.tasks import Lane, Schedule, sequential


class PassCut(Protocol):
    """The numbers of one call: row counts of its chunks, and offsets that follow from the row counts.

    `LoadedPass.cut` computes them before a pass, and the other methods of `LoadedPass` take them.

    arena_bytes: number of bytes of all ring slots together. Ring slots are memory that chunks use in turn.
    """

    @property
    def arena_bytes(self) -> int: ...


class LoadedPass(Protocol):
    """The interface of a program that a backend has loaded. Each pass calls the methods in this order."""

    def cut(self, tokens: int, rank: int, send_nWE: Tensor, recv_nWE: Tensor) -> PassCut:
        """Returns the numbers of a call: where the rows of each chunk begin and end, and sizes of buffers.

        tokens: T, number of tokens of this rank.
        rank: index of this rank.
        send_nWE, recv_nWE: (n, W, E_local) int64 on the host, row counts: rows that this rank has for each
            expert of each rank, and rows that each rank has for each expert of this rank.

        Raises ValueError for impossible counts, such as negative ones.
        """

    def take_arena(self, cut: Any) -> int:
        """Returns the address of memory for the ring slots of a pass; 0 if the caller must allocate it.

        The memory lies in a heap, so that other ranks can write rows into it. If the result is not 0, the
        caller must call `give_back_arena` after it has enqueued the pass.

        cut: the numbers of the call, from `cut`.
        """

    def workspace_bytes(self, cut: Any) -> int:
        """Returns the number of bytes of scratch memory that a pass needs on the device.

        The tensors and ring slots of the pass (`Base`) are not included.

        cut: the numbers of the call, from `cut`.
        """

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

        Raises RuntimeError for an error of the device or of a collective. The message names the record, for
        example "C1: hidden".
        """

    def give_back_arena(self) -> None:
        """Gives back the memory from `take_arena`. The caller skips it if `take_arena` returned 0."""


class ProgramBackend(Protocol):
    """The interface of a backend, which issues pass programs on one type of device.

    device_type: "cuda" or "cpu": the type of device whose kernels the backend runs. The widths of some
        buffers depend on it (`StackedExperts.columns`).
    """

    @property
    def device_type(self) -> str: ...

    def refusal(self, shape: LayerShape, rows: Tensor) -> str | None:
        """Returns the first reason why this rank cannot run programs of a layer; None if it can.

        shape: the sizes of the layer.
        rows: a tensor with the dtype and device of the rows.
        """

    def connect(self, ranks: Ranks, device: torch.device, *, heaps: bool) -> Any:
        """Returns a communicator, with which programs send rows between these ranks. Collective.

        heaps: whether programs write rows directly into heaps (memory of the other ranks), if the ranks can
            have heaps.

        Raises RuntimeError on all ranks if there can be no communicator.
        """

    def bounded_refusal(self, communicator: Any) -> str | None:
        """Returns why the host must know the row counts of all passes; None if the device may know them.

        communicator: the result of `connect`.
        """

    def streams(self, device: torch.device, schedule: Schedule) -> Mapping[Lane, int]:
        """Returns the stream of each lane of a schedule: the integer handle that `LoadedPass.run` takes."""

    def load(
        self,
        program: PassProgram,
        schedule: Schedule,
        *,
        experts: StackedExperts,
        dtype: torch.dtype,
        device: torch.device,
        communicator: Any,
    ) -> LoadedPass:
        """Loads a program for a device.

        program, schedule: the program, and the schedule from which it was compiled.
        experts: the experts of a layer for which the program was compiled. Only their class and settings
            matter.
        dtype, device: dtype and device of the rows.
        communicator: the result of `connect`; None on one rank.
        """


@dataclass(frozen=True)
class CompiledPass:
    """A program that was compiled and loaded, with its schedule.

    loaded: the program, as a backend has loaded it.
    schedule: the schedule from which the program was compiled.
    """

    loaded: LoadedPass
    schedule: Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class Programs:
    """The programs of all layers with the same sizes on one device.

    `of` and `bounded` compile a program when it is first needed.

    backend: the backend that runs the programs.
    shape: the sizes of the layers. Its field ``trained`` names all parameters; each program replaces this
        field.
    dtype, device: dtype and device of the rows.
    communicator: the communicator with which programs send rows; None on one rank.
    """

    backend: ProgramBackend
    shape: LayerShape
    dtype: torch.dtype
    device: torch.device
    communicator: Any
    _compiled: dict[tuple[object, ...], CompiledPass] = field(default_factory=dict)

    def of(self, plan: Plan, direction: str, *, keep: bool, trained: frozenset[str]) -> CompiledPass:
        """Returns the program of a pass. Compiles and loads the program when it is first needed.

        plan: the plan of a call of one of the layers.
        direction: "forward" or "backward".
        keep: whether a backward pass may follow; True in backward.
        trained: names of the experts' parameters of which backward computes gradients.
        """
        modules = plan.modules
        restore = plan.restore if keep else None
        n = len(plan.forward.chunks)
        key = (direction, n, restore, trained, modules.stages, modules.sequential)
        found = self._compiled.get(key)
        if found is None:
            schedule = plan_schedule(plan, direction, keep)
            found = self._compiled[key] = self._load(schedule, modules, restore, trained)
        return found

    def bounded(
        self,
        modules: PassModules,
        n: int,
        direction: str,
        *,
        restore: Restore | None,
        trained: frozenset[str],
    ) -> CompiledPass:
        """Returns the program of a pass whose row counts stay on the device (`pmoe.program.bounded`).

        Compiles and loads the program when it is first needed.

        modules: the modules of one of the layers. Chunks take turns in ring slots.
        n: number of chunks.
        direction: "forward" or "backward".
        restore: the restore pair; None for a forward pass without a backward pass.
        trained: names of the experts' parameters of which backward computes gradients.
        """
        key = ("bounded", direction, n, restore, trained, modules.stages, modules.sequential)
        found = self._compiled.get(key)
        if found is None:
            schedule = rotating(direction, n, modules.stages, restore=restore)
            schedule = sequential(schedule) if modules.sequential else schedule
            found = self._compiled[key] = self._load(schedule, modules, restore, trained, bounded=True)
        return found

    def _load(
        self,
        schedule: Schedule,
        modules: PassModules,
        restore: Restore | None,
        trained: frozenset[str],
        *,
        bounded: bool = False,
    ) -> CompiledPass:
        """Compiles and loads a program.

        The arguments are those of `bounded`, and the schedule of the pass.
        """
        if schedule.direction == "backward" and not trained:
            schedule = schedule.frozen
        shape = replace(self.shape, trained=trained)
        program = compile_pass(schedule, shape, restore, bounded=bounded)
        experts = modules.experts
        assert isinstance(experts, StackedExperts)
        loaded = self.backend.load(
            program,
            schedule,
            experts=experts,
            dtype=self.dtype,
            device=self.device,
            communicator=self.communicator,
        )
        return CompiledPass(loaded, schedule)
