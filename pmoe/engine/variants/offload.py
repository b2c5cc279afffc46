"""Passes that copy the experts' input T_DI or hidden activation T_M to host memory, and back.

They run MPipeMoE's strategies S1 to S3. Forward copies tensors to the host (tasks DI and DM), and backward
copies them back to the device (tasks HI and HM).

`OffloadingBackward` is also used if nothing is offloaded, but backward's chunks differ from forward's. Its
methods then copy rows from the chunks that forward kept on the device to backward's chunks
(`pmoe.engine.plan.regroup_chunks`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from pmoe.engine.buffers.arena import copy, pool
from pmoe.engine.buffers.host_pool import HostMemoryError
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import ForwardState, Inputs, SavedUnit, Unit
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.plan import Plan
from pmoe.experts.base import Hidden, Runs
from pmoe.schedule.buffer_sizes import aligned
from pmoe.schedule.restore import Restore
from pmoe.warn import warn_once


class OffloadingForward(Forward):
    """A forward pass that copies the experts' input T_DI or hidden activation T_M to host memory.

    leaving_device: the copies that are still to be made, as pairs (host tensor, device tensor). The key is
        ("T_DI" or "T_M", `Unit`), where the `Unit` names the rows of one task.
    host_bytes_due: the bytes of host memory that will be needed for T_DI of rows that are not computed yet.
    """

    host_bytes_due: int

    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        super().__init__(plan, inputs, keep)
        self.leaving_device: dict[tuple[str, Unit], list[tuple[Tensor, Tensor]]] = {}
        self.host_bytes_due = 0
        if plan.restore.dispatched == "offload":
            pieces = [piece.groups for piece in self.pass_plan.pieces]
            units = (*pieces, *(chunk.received for chunk in self.pass_plan.chunks))
            row_bytes = self.source_TM.shape[1] * self.source_TM.element_size()
            self.host_bytes_due = sum(aligned(groups.num_rows * row_bytes) for groups in units)

    def copy_rows_out(self, i: int, place: str = "") -> None:
        """Copies the experts' input T_DI of the rows of one task to host memory (task DI).

        i: the number of a chunk; with place="_L", the number of a block of rows.
        place: "" for the rows that this rank received in chunk i; "_L" for block i of the rows that are not
            sent, because their experts are on this rank.
        """
        self._copy_out("T_DI", (i, place))

    def copy_hidden_out(self, i: int, place: str = "") -> None:
        """Copies the hidden activation T_M of the rows of one task to host memory (task DM).

        i: the number of a chunk; with place="_L", the number of a block of rows.
        place: "" for the rows that this rank received in chunk i; "_L" for block i of the rows that are not
            sent, because their experts are on this rank.
        """
        self._copy_out("T_M", (i, place))

    def kept_for_backward(self, unit: Unit, kept: SavedUnit, rows_NM: Tensor, changed: bool) -> SavedUnit:
        kept = super().kept_for_backward(unit, kept, rows_NM, changed)
        restore = self.plan.restore
        hidden = kept.hidden
        if restore.dispatched == "offload":
            self.host_bytes_due -= aligned(rows_NM.nbytes)
            try:
                kept = kept._replace(rows_NM=self._to_host(unit, "T_DI", [rows_NM])[0])
            except HostMemoryError:  # no contiguous range is large enough: a copy stays on the device
                kept = kept._replace(rows_NM=rows_NM.clone())
        if hidden is not None and restore.hidden == "offload":
            try:
                # Leaves free the host memory that will be needed for T_DI of rows that are not computed yet.
                tensors = self._to_host(unit, "T_M", hidden.tensors, leave=self.host_bytes_due)
                kept = kept._replace(hidden=hidden._replace(tensors=tensors))
            except HostMemoryError as error:
                # Modules that drew random numbers cannot be recomputed in other chunks. Modules that changed
                # their input cannot be recomputed at all. T_M then stays on the device.
                if kept.recipe is None or not (self.plan.rearranged or changed):
                    warn_once(f"{error}. T_M that does not fit is recomputed in backward instead")
                    kept = kept._replace(hidden=None)
                else:
                    warn_once(f"{error}. T_M that does not fit stays on the device")
        return kept

    def _to_host(self, unit: Unit, tensor: str, tensors: Sequence[Tensor], leave: int = 0) -> list[Tensor]:
        """Takes host memory for tensors, and returns it. A later task copies the tensors.

        unit: (i, "") for the rows received in chunk i, or (j, "_L") for block j of the rows that are not
            sent, because their experts are on this rank.
        tensor: "T_DI" (the experts' input) or "T_M" (their hidden activation).
        tensors: the tensors on the device.
        leave: bytes of host memory that must stay free for later tensors.

        Raises HostMemoryError if there is too little host memory.
        """
        host = pool(self.source_TM.device).host
        wanted = sum(aligned(source.nbytes) for source in tensors)
        if leave and wanted + leave > host.free_bytes:
            raise HostMemoryError(
                f"host memory for offloading: {wanted} bytes wanted, {host.free_bytes} of {host.limit_bytes} "
                f"left, {leave} of these reserved for T_DI"
            )
        targets = [host.take(source.shape, source.dtype) for source in tensors]
        self.leaving_device[tensor, unit] = list(zip(targets, tensors, strict=True))
        return targets

    def _copy_out(self, name: str, unit: Unit) -> None:
        """Starts the copies to the host for which `_to_host` took memory.

        name: "T_DI" (the experts' input) or "T_M" (their hidden activation).
        unit: (i, "") for the rows received in chunk i, or (j, "_L") for block j of the rows that are not
            sent, because their experts are on this rank.
        """
        for target, tensor in self.leaving_device.pop((name, unit), ()):
            if not self._lies_in_a_slot(tensor):
                # The tensor was allocated on the compute lane. It is freed when this method returns, maybe
                # before the copy has ended.
                hold_for(current_stream(tensor), tensor)
            copy(target, tensor)

    def _lies_in_a_slot(self, tensor: Tensor) -> bool:
        """Returns whether a tensor lies in a ring slot (a buffer in which chunks take turns).

        All ring slots of a pass share one storage. The memory of a tensor outside a ring slot must not be
        used again before a lane has copied the tensor (`hold_for`).
        """
        slot = next(iter(self.arena.buffers.values()), None)
        return slot is not None and slot.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


class OffloadingBackward(Backward):
    """A backward pass that copies T_DI or T_M from memory of the forward pass to buffers of its own.

    T_DI is the experts' input, T_M the hidden activation. Forward has kept them in host memory, or on the
    device in chunks that differ from backward's chunks.

    compute_stream: the CUDA stream of the compute lane; None on the CPU.
    """

    compute_stream: torch.cuda.Stream | None

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: ForwardState) -> None:
        super().__init__(plan, grad_TM, saved)
        self.compute_stream = current_stream(grad_TM)

    def parts(self, unit: Unit) -> list[tuple[SavedUnit, Runs]]:
        i, place = unit
        joined = self.plan.joined
        if joined is None:
            return super().parts(unit)
        joined_units = joined.local if place else joined.received
        return [(self.kept[chunk, place], runs) for chunk, runs in joined_units[i]]

    def copy_rows_in(self, i: int, place: str = "") -> None:
        """Copies the experts' input T_DI of the rows of one task to a device buffer (task HI).

        The source is host memory, or chunks that forward kept on the device.

        i: the number of a chunk; with place="_L", the number of a block of rows.
        place: "" for the rows that this rank received in chunk i; "_L" for block i of the rows that are not
            sent, because their experts are on this rank.
        """
        unit = (i, place)
        rows_NM = self.temporary(f"T_DI{place}", i)
        for kept, runs in self.parts(unit):
            assert kept.rows_NM is not None
            for forward_rows, backward_rows in runs:
                copy(rows_NM[backward_rows], kept.rows_NM[forward_rows])
        self.rows[unit] = rows_NM

    def copy_hidden_in(self, i: int, place: str = "") -> None:
        """Copies the hidden activation T_M of the rows of one task to a device buffer (task HM).

        The source is host memory, or chunks that forward kept on the device. If a part of T_M did not fit on
        the host, nothing is copied, and a later task recomputes T_M.

        i: the number of a chunk; with place="_L", the number of a block of rows.
        place: "" for the rows that this rank received in chunk i; "_L" for block i of the rows that are not
            sent, because their experts are on this rank.
        """
        unit = (i, place)
        parts = self.parts(unit)
        experts = self.plan.modules.experts
        saved = [(kept.hidden, runs) for kept, runs in parts if kept.hidden is not None]
        if not saved or len(saved) < len(parts):
            return  # a part did not fit on the host: `hidden_of` recomputes T_M when it is needed
        hidden = self.joined(saved, unit)
        if experts.columns(self.source_TM.device.type).hidden == 0 and self.plan.restore.hidden == "offload":
            hidden = hidden._replace(tensors=[self._fetched(tensor) for tensor in hidden.tensors])
        self.hidden[unit] = hidden

    def joined(self, saved: Sequence[tuple[Hidden, Runs]], unit: Unit) -> Hidden:
        """Returns the hidden activation T_M of one task, copied from forward's chunks (`Experts.join`).

        saved: for each forward chunk its T_M, and the pairs (slice of its rows, slice of the task's rows) to
            copy.
        unit: (i, "") for the rows received in chunk i, or (j, "_L") for block j of the rows that are not
            sent, because their experts are on this rank.
        """
        return self.plan.modules.experts.join(
            saved, self.groups(unit).num_rows, space=functools.partial(self.place, unit)
        )

    def _fetched(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a host tensor in new device memory."""
        target = torch.empty_like(tensor, device=self.source_TM.device)
        copy(target, tensor)
        # The tensor was allocated on the copy lane's stream. The compute lane reads it and frees it.
        hold_for(self.compute_stream, target)
        return target

    def rows_of(self, unit: Unit) -> Tensor:
        if unit not in self.rows and self.plan.rearranged and self.plan.restore.dispatched == "keep":
            self.copy_rows_in(*unit)
        return super().rows_of(unit)

    def hidden_of(self, unit: Unit) -> Hidden:
        if unit not in self.hidden and self.plan.rearranged and self.plan.restore.hidden == "keep":
            self.copy_hidden_in(*unit)
        return super().hidden_of(unit)


def current_stream(tensor: Tensor) -> torch.cuda.Stream | None:
    """Returns the current CUDA stream of the device of ``tensor``; None on the CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def hold_for(stream: torch.cuda.Stream | None, tensor: Tensor) -> None:
    """Prevents torch from reusing a freed tensor's memory while ``stream`` still works with the tensor.

    This is needed if the tensor was allocated on another stream, because torch's allocator waits for the
    allocating stream only. Does nothing if ``stream`` is None.

    stream: the stream whose work uses the tensor.
    tensor: the tensor.
    """
    if stream is not None:
        tensor.record_stream(stream)


def check_host_memory(restore: Restore, where: torch.device) -> None:
    """Raises ValueError if no host memory is left for a layer that offloads tensors.

    restore: which tensors the layer offloads, for the message.
    where: the layer's device.
    """
    if where.type == "meta":
        return  # the layer's real device is not known yet
    host = pool(where).host
    if not host.free_bytes:
        raise ValueError(
            f"memory_reuse ({restore}) must not offload with no host memory left: {host.free_bytes} of "
            f"{host.limit_bytes} bytes are left. Set pmoe.pool(device).host.limit_bytes higher, or choose a "
            'pair that does not offload (memory_reuse="S4")'
        )
