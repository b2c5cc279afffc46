"""Passes that keep T_DI or T_M on the host between them (MPipeMoE's S1 to S3).

Forward copies tensors out (tasks D), backward copies them in (tasks H). Backward uses the same copies if it
has other chunks than forward: it collects its rows from the chunks that forward kept
(`pmoe.engine.plan.regroup_chunks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pmoe.engine.buffers.arena import copy, pool
from pmoe.engine.buffers.host_pool import HostMemoryError
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import Forwarded, Inputs, Kept, Unit
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.plan import Plan
from pmoe.experts.base import Hidden, Runs
from pmoe.schedule.buffer_sizes import aligned
from pmoe.schedule.restore import Restore
from pmoe.warn import warn_once


class OffloadingForward(Forward):
    """A forward pass that copies T_DI or T_M to the host.

    leaving_device: by tensor and unit, the pairs (host memory, tensor on the device) still to be copied.
    host_bytes_due: host bytes that T_DI of later units still needs.
    """

    host_bytes_due: int

    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        super().__init__(plan, inputs, keep)
        self.leaving_device: dict[tuple[str, Unit], list[tuple[Tensor, Tensor]]] = {}
        self.host_bytes_due = 0
        if plan.restore.dispatched == "offload":
            units = (*(piece.groups for piece in self.cut.pieces), *(c.received for c in self.cut.chunks))
            row_bytes = self.source_TM.shape[1] * self.source_TM.element_size()
            self.host_bytes_due = sum(aligned(groups.num_rows * row_bytes) for groups in units)

    def copy_rows_out(self, i: int, at: str = "") -> None:
        """Runs DI of a unit: copies T_DI to the host."""
        self._copy_out("T_DI", (i, at))

    def copy_hidden_out(self, i: int, at: str = "") -> None:
        """Runs DM of a unit: copies T_M to the host."""
        self._copy_out("T_M", (i, at))

    def put_away(self, unit: Unit, kept: Kept, rows_NM: Tensor, changed: bool) -> None:
        super().put_away(unit, kept, rows_NM, changed)
        restore = self.plan.restore
        hidden = kept.hidden
        if restore.dispatched == "offload":
            self.host_bytes_due -= aligned(rows_NM.nbytes)
            try:
                kept.rows_NM = self._to_host(unit, "T_DI", [rows_NM])[0]
            except HostMemoryError:  # enough bytes are free, but not in one piece: a copy stays on the device
                kept.rows_NM = rows_NM.clone()
        if hidden is not None and restore.hidden == "offload":
            try:
                # Leaves the room that T_DI of later units needs.
                tensors = self._to_host(unit, "T_M", hidden.tensors, leave=self.host_bytes_due)
                kept.hidden = replace(hidden, tensors=tensors)
            except HostMemoryError as error:
                # T_M cannot be recomputed from other chunks if modules drew random numbers, nor from an input
                # that they changed.
                if kept.recipe is None or not (self.plan.rearranged or changed):
                    warn_once(f"{error}. T_M that does not fit is recomputed in backward instead")
                    kept.hidden = None
                else:
                    warn_once(f"{error}. T_M that does not fit stays on the device")

    def _to_host(self, unit: Unit, tensor: str, tensors: Sequence[Tensor], leave: int = 0) -> list[Tensor]:
        """Takes host memory for the tensors of a unit. A later task copies them.

        tensor: "T_DI" or "T_M".
        leave: host bytes that must stay free for others.

        Raises HostMemoryError if there is too little.
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
        """Copies tensors for which `_to_host` took memory."""
        for target, tensor in self.leaving_device.pop((name, unit), ()):
            if not self._lies_in_a_slot(tensor):
                # The tensor was allocated on the compute lane and is freed when this returns, maybe before
                # the copy has ended.
                hold_for(current_stream(tensor), tensor)
            copy(target, tensor)

    def _lies_in_a_slot(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in a ring slot. All slots of a pass share one storage."""
        slot = next(iter(self.arena.buffers.values()), None)
        return slot is not None and slot.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


class OffloadingBackward(Backward):
    """A backward pass that fetches T_DI or T_M from the host, or from other chunks of forward.

    compute_stream: the stream of the compute lane; None on the CPU.
    """

    compute_stream: torch.cuda.Stream | None

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: Forwarded) -> None:
        super().__init__(plan, grad_TM, saved)
        self.compute_stream = current_stream(grad_TM)

    def parts(self, unit: Unit) -> list[tuple[Kept, Runs]]:
        i, at = unit
        joined = self.plan.joined
        if joined is None:
            return super().parts(unit)
        return [(self.kept[chunk, at], runs) for chunk, runs in (joined.local if at else joined.received)[i]]

    def copy_rows_in(self, i: int, at: str = "") -> None:
        """Runs HI of a unit: copies T_DI into its slot, from the host or from chunks that forward kept."""
        unit = (i, at)
        rows_NM = self.temporary(f"T_DI{at}", i)
        for kept, runs in self.parts(unit):
            assert kept.rows_NM is not None
            for forward_rows, backward_rows in runs:
                copy(rows_NM[backward_rows], kept.rows_NM[forward_rows])
        self.rows[unit] = rows_NM

    def copy_hidden_in(self, i: int, at: str = "") -> None:
        """Runs HM of a unit: copies T_M into its slot; tensors that modules saved, to new memory."""
        unit = (i, at)
        parts = self.parts(unit)
        experts = self.plan.modules.experts
        saved = [(kept.hidden, runs) for kept, runs in parts if kept.hidden is not None]
        if not saved or len(saved) < len(parts):
            return  # some of it did not fit on the host: `hidden_of` recomputes it when it is needed
        hidden = experts.join(saved, self.groups(unit).num_rows, space=self.space(unit))
        if experts.columns(self.source_TM.device.type).hidden == 0 and self.plan.restore.hidden == "offload":
            hidden = replace(hidden, tensors=[self._fetched(tensor) for tensor in hidden.tensors])
        self.hidden[unit] = hidden

    def _fetched(self, tensor: Tensor) -> Tensor:
        """Returns a copy on the device of a tensor on the host."""
        target = torch.empty_like(tensor, device=self.source_TM.device)
        copy(target, tensor)
        # Allocated on the copy lane's stream; the compute lane reads and frees it.
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
    """Returns the stream on which operators of the device of ``tensor`` run now; None on the CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def hold_for(stream: torch.cuda.Stream | None, tensor: Tensor) -> None:
    """Tells the allocator that ``stream`` uses ``tensor``, which another stream allocated.

    The allocator then reuses the memory, once freed, only after that use has ended. None does nothing.
    """
    if stream is not None:
        tensor.record_stream(stream)


def check_host_memory(restore: Restore, where: torch.device) -> None:
    """Raises ValueError if no host memory is left for a layer that offloads.

    restore: the layer's pair, for the message.
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
