"""The runner of pass programs: compiled programs run both passes, without Python between their calls.

A program (`pmoe.program`) is compiled from the same schedule that the engine runs, so it sends the same
messages and gives the same results. The runner allocates what the engine allocates, and passes the addresses:

    ring slots           one block, from the pool of the device, or in a heap that other ranks can write
    T_DI, T_M            kept for backward: one tensor for received rows, and one for rows that stay
    indices              the plan's indices that sort and gather rows, as int32
    ends                 where each expert's rows end in each chunk, as int32
    weights, gradients   the routing weights and their gradients, one number for each row

Letters: T tokens, K choices of a token, N received rows, M = d_model, G columns of T_M, W ranks, n chunks.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pmoe.comm.failures import at_stage, publishing_failures
from pmoe.engine.autograd import Path, Saved
from pmoe.engine.buffers.arena import pool
from pmoe.engine.buffers.host_pool import HostMemoryError
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.plan import PassModules, PassPlan, Plan
from pmoe.experts.products import GradientSum
from pmoe.experts.stacked import OPERANDS, StackedExperts
from pmoe.kernels.operands import VECTOR_BYTES, is_dense
from pmoe.program.backend import CompiledPass, Programs
from pmoe.program.records import Base
from pmoe.schedule.restore import GATHERED_AGAIN, Restore
from pmoe.warn import warn_once

SAVED = (
    Base.WEIGHT_RECEIVED,
    Base.WEIGHT_BY_NUMBER,
    Base.SAVED_T_DI,
    Base.SAVED_T_DI_L,
    Base.SAVED_T_M,
    Base.SAVED_T_M_L,
)
"""The memories that forward leaves for backward, in the order in which autograd saves them."""


class ProgramRows(NamedTuple):
    """The rows of a call, in the form in which programs read them.

    num_received, num_local: rows for which there is memory: rows that are received, and rows that stay.
    ends, position, pair_by_number: int32 tensors, as `Base` describes them.
    regroup: int32 tensor, as `Base.REGROUP`; None if all rows arrive sorted by expert.
    regroup_weights: int32 tensor, as `Base.REGROUP_WEIGHTS`; None if all weights arrive sorted.
    sends_weights: whether routing weights are sent.
    send_nWE, recv_nWE: (n, W, E_local) int64 on the host, the row counts from which the program computes
        addresses: rows that this rank has for each expert of each rank, and rows that each rank has for each
        expert of this rank.
    rows_by_rank: the rows that travel, on the device (`pmoe.program.bounded.DeviceRows`); None if those of
        ``send_nWE`` and ``recv_nWE`` travel.
    """

    num_received: int
    num_local: int
    ends: Tensor
    position: Tensor
    pair_by_number: Tensor
    regroup: Tensor | None
    regroup_weights: Tensor | None
    sends_weights: bool
    send_nWE: Tensor
    recv_nWE: Tensor
    rows_by_rank: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PassRunner(abc.ABC):
    """The base of runners that compute both passes by programs.

    programs: the programs of the layer.
    modules: the modules of the layer, with the experts to compute.
    restore: the restore pair: how backward gets the experts' input and hidden activation.
    """

    name: ClassVar[Path] = "program"

    programs: Programs
    modules: PassModules
    restore: Restore

    @abc.abstractmethod
    def rows(self) -> ProgramRows:
        """Returns the rows of the call, the same in both passes."""

    @abc.abstractmethod
    def compiled(self, direction: str, *, keep: bool, trained: frozenset[str]) -> CompiledPass:
        """Returns the program of a pass.

        direction: "forward" or "backward".
        keep: whether a backward pass may follow; True in backward.
        trained: names of the experts' parameters of which backward computes gradients.
        """

    @abc.abstractmethod
    def weights(self, weight_TK: Tensor) -> Tensor:
        """Returns the routing weights as the program reads them (`Base.WEIGHT`).

        weight_TK: (T, K), the routing weights of T tokens with K choices.
        """

    @abc.abstractmethod
    def weight_gradients(self, weight_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Returns memory for the gradients of the routing weights (`Base.DWEIGHT`), and its view (T, K).

        weight_TK: (T, K), the routing weights.
        """

    @abc.abstractmethod
    def count_traffic(self, direction: str, inputs: Inputs, like: Tensor) -> None:
        """Counts the bytes that a pass has sent to other ranks.

        direction: "forward" or "backward".
        inputs: the tensors of the call.
        like: a tensor with the dtype and width of the rows.
        """

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        with publishing_failures(self.modules.grid.all, "a forward pass"):
            return self._forward(inputs, keep)

    def _forward(self, inputs: Inputs, keep: bool) -> tuple[Tensor, Saved | None]:
        call = _PassCall(self, inputs, "forward")
        x_TM = inputs.x_TM
        y_TM = call.new(*x_TM.shape)
        call.put(Base.T_I, _readable(x_TM))
        call.put(Base.T_O, y_TM)
        call.put(Base.WEIGHT, self.weights(inputs.weight_TK))
        call.put_weights("WEIGHT", arrived=Base.WEIGHT_ARRIVED)
        if keep:
            call.put_saved()
        call.run(self.compiled("forward", keep=keep, trained=frozenset(OPERANDS)))
        if not keep:
            return y_TM, None
        tensors = [*inputs.all, *(call.memory.get(base) for base in SAVED)]
        if self.restore.dispatched not in GATHERED_AGAIN:
            tensors[0] = None  # backward does not read the input
        return y_TM, Saved(tensors, _ProgramBackward(self, inputs.like([None] * len(inputs.all))))


@dataclass(frozen=True, kw_only=True)
class ProgramRunner(PassRunner):
    """A runner that computes both passes by programs, if the host knows the row counts.

    plan: the chunks of both passes, which are the same.
    send_nWE, recv_nWE: (n, W, E_local) int64 on the host: rows that this rank has for each expert of each
        rank, and rows that each rank has for each expert of this rank.
    """

    plan: Plan
    send_nWE: Tensor
    recv_nWE: Tensor
    _rows: list[ProgramRows] = field(default_factory=list, compare=False, repr=False)

    def rows(self) -> ProgramRows:
        if not self._rows:  # the rows of both passes are the same
            self._rows.append(self._rows_of_plan())
        return self._rows[0]

    def _rows_of_plan(self) -> ProgramRows:
        """Returns the rows of the plan, in the form in which programs read them."""
        pass_plan = self.plan.forward
        chunks, pieces = pass_plan.chunks, pass_plan.pieces
        sends = self.programs.shape.sends
        units = [chunk.received for chunk in chunks if sends] + [piece.groups for piece in pieces]
        regroup = _regroup(pass_plan)
        message = pass_plan.weights
        regroup_weights = None if message is None else message.regroup
        return ProgramRows(
            num_received=sum(chunk.received.num_rows for chunk in chunks),
            num_local=sum(piece.groups.num_rows for piece in pieces),
            ends=_one_after_another([groups.ends_E for groups in units]),
            position=pass_plan.position.int(),
            pair_by_number=_pair_by_number(pass_plan).int(),
            regroup=None if regroup is None else regroup.int(),
            regroup_weights=None if regroup_weights is None else regroup_weights.int(),
            sends_weights=message is not None,
            send_nWE=self.send_nWE,
            recv_nWE=self.recv_nWE,
        )

    def compiled(self, direction: str, *, keep: bool, trained: frozenset[str]) -> CompiledPass:
        return self.programs.of(self.plan, direction, keep=keep, trained=trained)

    def weights(self, weight_TK: Tensor) -> Tensor:
        return _readable(weight_TK)

    def weight_gradients(self, weight_TK: Tensor) -> tuple[Tensor, Tensor]:
        gradients_TK = torch.empty_like(weight_TK, memory_format=torch.contiguous_format)
        return gradients_TK, gradients_TK

    def count_traffic(self, direction: str, inputs: Inputs, like: Tensor) -> None:
        message = self.plan.forward.weights
        if message is None:
            return
        own = self.modules.grid.all.rank
        sent = sum(message.send) - message.send[own]
        received = sum(message.recv) - message.recv[own]
        again = direction == "backward" and self.restore.dispatched == "communicate"
        traffic = self.modules.traffic
        traffic.add(like, sent * (1 + again) + received)
        traffic.add(inputs.weight_TK[0:0].view(-1), sent if direction == "forward" else received)


@dataclass(frozen=True)
class _ProgramBackward:
    """The function that runs the backward pass (`pmoe.engine.autograd.BackwardFunction`).

    runner: the runner of the forward pass.
    emptied: the inputs of the call with None in place of each tensor, because autograd saves the tensors.
    """

    runner: PassRunner
    emptied: Inputs

    def __call__(self, tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor) -> list[Tensor | None]:
        with publishing_failures(self.runner.modules.grid.all, "a backward pass"):
            return self._gradients(tensors, wanted, grad_TM)

    def _gradients(self, tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor) -> list[Tensor | None]:
        runner = self.runner
        num_inputs = len(self.emptied.all)
        inputs = self.emptied.like(tensors[:num_inputs])
        parameters_wanted = inputs.like(wanted).parameters
        names = _names(runner.modules)
        trained = frozenset(name for name, wants in zip(names, parameters_wanted, strict=True) if wants)
        call = _PassCall(runner, inputs, "backward", like=grad_TM)
        for base, tensor in zip(SAVED, tensors[num_inputs:], strict=True):
            if tensor is not None:
                call.put(base, tensor)
        if inputs.x_TM is not None:
            call.put(Base.T_I, _readable(inputs.x_TM))
        grad_x_TM = call.new(*grad_TM.shape)
        grad_weights, grad_weight_TK = runner.weight_gradients(inputs.weight_TK)
        call.put(Base.DT_O, _readable(grad_TM))
        call.put(Base.DT_I, grad_x_TM)
        call.put(Base.DWEIGHT, grad_weights)
        call.put_weights("DWEIGHT", arrived=Base.DWEIGHT_LEAVING)
        compiled = runner.compiled("backward", keep=True, trained=trained)
        sums: list[GradientSum | None] = []
        for name, parameter in zip(names, inputs.parameters, strict=True):
            # The second argument, 2, stands for "several additions": programs always sum in float32 if the
            # parameter has a narrower dtype.
            total = GradientSum(parameter, 2, call.pool.new) if name in trained else None
            if total is not None:
                call.put(Base[f"D{name.upper()}"], total.total)
                total.is_empty = False  # the first task overwrites it, also for experts without rows
            sums.append(total)
        call.run(compiled)
        gradients: list[Tensor | None] = [grad_x_TM, grad_weight_TK, None]
        while sums:  # frees each sum in float32 as soon as it is rounded
            total = sums.pop(0)
            if total is not None:
                del call.memory[Base[f"D{names[len(names) - len(sums) - 1].upper()}"]]
            gradients.append(None if total is None else total.result())
        return gradients


def _names(modules: PassModules) -> Sequence[str]:
    """Returns the names of the experts' parameters, in the order of `Inputs.parameters`."""
    experts = modules.experts
    assert isinstance(experts, StackedExperts)
    names: Sequence[str] = experts.operand_names
    return names


class _PassCall:
    """One run of a pass: collects the tensors that the program reads and writes, and runs the program.

    memory: the tensors. A key, a `Base`, says what the tensor is for, such as the layer's input (T_I). The
        tensors may be freed as soon as all work of the pass is enqueued: the current stream then waits for
        the streams of all other lanes, so the allocator can reuse the memory for later work on this stream.
    """

    def __init__(
        self, runner: PassRunner, inputs: Inputs, direction: str, like: Tensor | None = None
    ) -> None:
        self.runner = runner
        self.direction = direction
        self.inputs = inputs
        self.like: Tensor = inputs.x_TM if like is None else like
        self.pool = pool(self.like.device).device
        self.memory: dict[Base, Tensor] = {}
        self.rows: ProgramRows = runner.rows()
        for name, parameter in zip(_names(runner.modules), inputs.parameters, strict=True):
            self.put(Base[name.upper()], _readable(parameter))
        self.put(Base.ENDS, self.rows.ends)
        self.put(Base.POSITION, self.rows.position)
        self.put(Base.PAIR_BY_NUMBER, self.rows.pair_by_number)
        if self.rows.regroup is not None:
            self.put(Base.REGROUP, self.rows.regroup)
        if self.rows.regroup_weights is not None:
            self.put(Base.REGROUP_WEIGHTS, self.rows.regroup_weights)

    def new(self, rows: int, columns: int) -> Tensor:
        """Returns uninitialised memory (rows, columns) of the rows' dtype and device."""
        return self.pool.new(self.like, rows, columns)

    def put(self, base: Base, tensor: Tensor) -> None:
        """Sets the tensor that the program uses for ``base``, of any shape."""
        self.memory[base] = tensor

    def put_weights(self, kind: str, *, arrived: Base) -> None:
        """Allocates tensors for the routing weights of all rows, or for the gradients of these weights.

        There is one tensor for the rows of this rank's tokens, in the order that `Base` calls "by number",
        and one for the rows that this rank receives, in the order in which the experts read them.

        kind: "WEIGHT" for the weights, "DWEIGHT" for their gradients.
        arrived: the `Base` of one more tensor, for received rows in the order of their source ranks. It is
            allocated only if the experts read the rows in another order.
        """
        weight_TK = self.inputs.weight_TK
        self.put(Base[f"{kind}_BY_NUMBER"], weight_TK.new_empty(self.memory[Base.PAIR_BY_NUMBER].shape[0]))
        if self.rows.sends_weights:
            self.put(Base[f"{kind}_RECEIVED"], weight_TK.new_empty(self.rows.num_received))
            if Base.REGROUP_WEIGHTS in self.memory:
                self.put(arrived, weight_TK.new_empty(self.rows.num_received))

    def put_saved(self) -> None:
        """Allocates the memory in which T_DI and T_M stay until backward: on the device, or on the host."""
        restore = self.runner.restore
        columns = self.runner.programs.shape.columns.hidden
        for fate, tensor, width in (
            (restore.dispatched, "T_DI", self.like.shape[1]),
            (restore.hidden, "T_M", columns),
        ):
            if fate in ("keep", "offload"):
                for ending, rows in (("", self.rows.num_received), ("_L", self.rows.num_local)):
                    place = self._on_host if fate == "offload" else self.new
                    self.put(Base[f"SAVED_{tensor}{ending}"], place(rows, width))

    def _on_host(self, rows: int, columns: int) -> Tensor:
        """Returns memory (rows, columns) on the host; on the device, with a warning, if the host has none."""
        try:
            return pool(self.like.device).host.take((rows, columns), self.like.dtype)
        except HostMemoryError as error:
            warn_once(f"{error}. What does not fit stays on the device")
            return self.new(rows, columns)

    def run(self, compiled: CompiledPass) -> None:
        """Runs the program: enqueues all kernels and collectives of the pass, and counts the sent bytes.

        compiled: the program.
        """
        runner = self.runner
        programs = runner.programs
        ranks = runner.modules.grid.all
        loaded = compiled.loaded
        cut = loaded.cut(self.like.shape[0], ranks.rank, self.rows.send_nWE, self.rows.recv_nWE)
        table = self.rows.rows_by_rank
        device_rows = 0 if table is None else table.data_ptr()
        lent = loaded.take_arena(cut)
        arena: Tensor | None = None
        if not lent:
            arena = self.pool.take(cut.arena_bytes // self.like.element_size(), self.like, self)
        try:
            workspace = torch.empty(loaded.workspace_bytes(cut), dtype=torch.uint8, device=self.like.device)
            bases = {base: tensor.data_ptr() for base, tensor in self.memory.items()}
            streams = programs.backend.streams(programs.device, compiled.schedule)
            with at_stage(f"the program of a {self.direction} pass", ranks):
                bases[Base.ARENA] = lent if arena is None else arena.data_ptr()
                loaded.run(cut, bases, streams, workspace.data_ptr(), device_rows)
        finally:
            if lent:
                loaded.give_back_arena()
            else:
                self.pool.give_back(self)
        runner.count_traffic(self.direction, self.inputs, self.like)


def _readable(tensor: Tensor) -> Tensor:
    """Returns a tensor whose rows lie one after another at an aligned address; a copy if they do not."""
    return tensor if is_dense(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _pair_by_number(pass_plan: PassPlan) -> Tensor:
    """Returns the index of each row's (token, choice) pair, (rows,): first sent rows, then rows that stay."""
    if pass_plan.by_kernel is not None:
        return pass_plan.by_kernel.slot
    sent = [] if pass_plan.weights is None else [pass_plan.weights.slot]
    return torch.cat([*sent, *(pass_plan.slot[piece.rows] for piece in pass_plan.pieces)])


def _regroup(pass_plan: PassPlan) -> Tensor | None:
    """Returns the index (N,) that sorts the N received rows by expert, within each chunk.

    Returns None if the rows of all chunks arrive sorted. If the rows of only some chunks do, the part of the
    index for these chunks is uninitialised, because nothing reads it.
    """
    parts = [chunk.regroup for chunk in pass_plan.chunks]
    some = next((part for part in parts if part is not None), None)
    if some is None:
        return None
    return _one_after_another(
        [
            some.new_empty(chunk.received.num_rows) if part is None else part
            for part, chunk in zip(parts, pass_plan.chunks, strict=True)
        ]
    )


def _one_after_another(parts: Sequence[Tensor]) -> Tensor:
    """Returns the parts as one tensor: a view if they lie in this order in one memory, else a copy."""
    first = parts[0]
    begins = itertools.accumulate((part.numel() for part in parts[:-1]), initial=int(first.storage_offset()))
    if _are_views(first, parts, begins) and first.data_ptr() % VECTOR_BYTES == 0:
        return first.as_strided((sum(part.numel() for part in parts),), (1,))
    return torch.cat([part.reshape(-1) for part in parts])


def _are_views(first: Tensor, parts: Iterable[Tensor], begins: Iterable[int]) -> bool:
    """Returns whether all parts are contiguous views of the first part's storage, and begin at ``begins``.

    begins: for each part, the index of the element of the storage at which it should begin.
    """
    storage = first.untyped_storage().data_ptr()
    return all(
        part.untyped_storage().data_ptr() == storage
        and part.storage_offset() == begin
        and part.is_contiguous()
        for part, begin in zip(parts, begins, strict=True)
    )
