"""The base of both passes: the buffers and messages that the tasks of a schedule share.

Both passes send rows the same way. Only the names of the buffers differ:

    forward     T_I  -G-> send -S-> T_DI  -C-> T_DO  -R-> home  -O-> T_O
    backward    dT_O -G-> send -S-> dT_DO -C-> dT_DI -R-> dhome -O-> dT_I
    in `Pass`   source              received   sent_back  home_name  result

T_DI and T_M go from forward to backward as the plan's restore pair says. T_DO is not saved, and the routing
is never decided twice. All other buffers lie in ring slots if the plan rotates, else in memory of their own.
"_L" marks the buffers of rows that stay on their rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.engine.buffers.arena import Arena, DevicePool, pool
from pmoe.engine.lanes import run as lanes_run
from pmoe.engine.lanes.base import Actions
from pmoe.engine.plan.plan import PassPlan, Plan, WeightMessage, length
from pmoe.experts.base import Allocate, ExpertRows, Experts, Hidden
from pmoe.experts.products import RowGroups
from pmoe.schedule.buffer_sizes import BufferSizes
from pmoe.schedule.tasks import Schedule, Stages, sequential

if TYPE_CHECKING:
    from pmoe.engine.variants.callbacks import HookGraph

Unit = tuple[int, str]
"""The rows that experts compute in one task: (chunk, "") received rows, (piece, "_L") rows that stay."""


@dataclass(frozen=True)
class AutocastState:
    """The autocast state of a layer's caller, for one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def now(device_type: str) -> AutocastState:
        """Returns the state at present."""
        enabled = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type)
        return AutocastState(device_type, enabled, dtype)

    def again(self) -> AbstractContextManager[object]:
        """Returns a context that restores this state.

        It does not use autocast's cache. A pass makes cast copies without a graph; from the cache a caller
        would get them later, even if it needs the graph.
        """
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of a call that may have gradients, and the caller's autocast.

    x_TM: (T, M), T_I, cast to autocast's type.
    weight_TK: (T, K), the routing weights.
    parameters: the experts' operands, (E_local, ...) each; a module's parameters have any shape.
    shared_weight_T: (T,) the factor of the shared expert's output; None without a shared expert.
    shared_parameters: the shared expert's operands.
    hook_parameters: the parameters of callbacks that are modules.
    autocast: the type to which the caller's autocast casts rows; None without autocast.
    hooks_autocast: the caller's autocast state, in which callbacks' hooks run; None without hooks.
    compare: compare(wanted, device), which runs before backward and compares among the ranks which of
        ``parameters`` want gradients. A collective. None if nothing needs it.
    """

    x_TM: Tensor
    weight_TK: Tensor
    parameters: Sequence[Tensor]
    shared_weight_T: Tensor | None = None
    shared_parameters: Sequence[Tensor] = ()
    hook_parameters: Sequence[Tensor] = ()
    autocast: torch.dtype | None = None
    hooks_autocast: AutocastState | None = None
    compare: Callable[[Sequence[bool], torch.device], None] | None = None

    def autocast_for(self, experts: Experts) -> AbstractContextManager[object]:
        """Returns the context in which experts compute: the caller's autocast for modules, else none."""
        device_type = self.x_TM.device.type
        if self.autocast is None and not torch.is_autocast_enabled(device_type):
            return nullcontext()
        is_enabled = self.autocast is not None and experts.runs_under_autocast
        return torch.autocast(device_type, enabled=is_enabled, dtype=self.autocast)

    @property
    def all(self) -> list[Tensor | None]:
        """All tensors of the call in one list, the order in which the autograd Function takes them."""
        others = (*self.parameters, *self.shared_parameters, *self.hook_parameters)
        return [self.x_TM, self.weight_TK, self.shared_weight_T, *others]

    def like(self, tensors: Sequence[Any]) -> Inputs:
        """Returns a copy with other tensors in place of these, given in the order of ``all``."""
        x_TM, weight_TK, shared_weight_T, *rest = tensors
        shared_start = len(self.parameters)
        hooks_start = len(self.parameters) + len(self.shared_parameters)
        return Inputs(
            x_TM=x_TM,
            weight_TK=weight_TK,
            parameters=rest[:shared_start],
            shared_weight_T=shared_weight_T,
            shared_parameters=rest[shared_start:hooks_start],
            hook_parameters=rest[hooks_start:],
            autocast=self.autocast,
            hooks_autocast=self.hooks_autocast,
            compare=self.compare,
        )


@dataclass
class SavedUnit:
    """The tensors of one unit that forward leaves for backward, on the device or on the host.

    rows_NM: (N, M), T_DI; None if backward sends it again.
    hidden: T_M, or a module's saved tensors; None if backward recomputes it.
    recipe: random states and the like, by which `Experts.recompute` repeats T_M exactly; None without any.
    """

    rows_NM: Tensor | None = None
    hidden: Hidden | None = None
    recipe: Any = None


@dataclass(kw_only=True)
class ForwardState:
    """The state that a forward pass leaves for backward, whether the engine or fused kernels ran it.

    inputs: the tensors of the call.
    wanted: for each of ``inputs.all``, whether its gradient is wanted; () until backward begins.
    kept: T_DI and T_M of each unit of ``plan.forward``.
    weight_received: (N,) the routing weights of received rows, by chunk, in expert order; None if no rows
        travel.
    passed: the graphs of hooks, by point and chunk.
    regroup: for each chunk, the index of `Chunk.regroup` if it became known only in forward
        (`pmoe.engine.variants.send_once`); else ().
    """

    inputs: Inputs
    wanted: Sequence[bool] = ()
    kept: dict[Unit, SavedUnit] = field(default_factory=dict)
    weight_received: Tensor | None = None
    passed: dict[tuple[str, int], HookGraph] = field(default_factory=dict)
    regroup: Sequence[Tensor | None] = ()


def plan_schedule(plan: Plan, direction: str, keep: bool = True) -> Schedule:
    """Returns the schedule of a pass of ``plan``. Every rank of the group builds the same one.

    direction: "forward" or "backward".
    keep: whether a backward pass may follow.
    """
    n = len((plan.forward if direction == "forward" else plan.backward).chunks)
    if not plan.modules.rotates:
        from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule

        schedule = (forward_schedule if direction == "forward" else backward_schedule)(n, plan.modules.stages)
    else:
        from pmoe.schedule.ring_buffers import rotating

        restore = plan.restore if keep else None
        schedule = rotating(direction, n, plan.modules.stages, restore=restore, rearranged=plan.rearranged)
    return sequential(schedule) if plan.modules.sequential else schedule


class Pass:
    """One pass of a call, forward or backward: its buffers, and a method for each kind of task.

    A task of kind K runs the method named after K (`actions`): G is `gather`, S `dispatch`, R `combine`,
    O `output`. Features that only some layers have are subclasses, each in a file of its own
    (`pmoe.runners.pipeline`).

    direction: "forward" or "backward".
    received, sent_back: the names of the buffers that the experts read and write.
    home_name: the name of the buffer of results that come home.
    brought_by_S, taken_by_R: the names of the buffers that the two all-to-alls fill and send. They differ
        from received and sent_back only if experts are sharded, where AG and RS come between.
    parameters: the experts' operands.
    cut: ``plan.forward`` or ``plan.backward``.
    source_TM, result_TM: (T, M), T_I and T_O, or dT_O and dT_I.
    keep: whether forward leaves anything for a backward pass.
    results: result_TM by chunk.
    positions: (tokens of the chunk, K) by chunk, the sorted row of each slot (`PassPlan.position`).
    own: the buffers with memory of their own, by name.
    home: (rows, M), the results of all chunks; None if the home buffers of chunks take turns in ring slots.
    """

    direction: str
    received: str
    sent_back: str
    home_name: str
    dispatch_output: str
    combine_input: str
    parameters: Sequence[Tensor]
    plan: Plan
    cut: PassPlan
    source_TM: Tensor
    keep: bool
    stages: Stages
    result_TM: Tensor
    results: tuple[Tensor, ...]
    positions: tuple[Tensor, ...]
    schedule: Schedule
    sizes: BufferSizes
    pool: DevicePool
    arena: Arena

    def __init__(self, plan: Plan, cut: PassPlan, source_TM: Tensor, keep: bool) -> None:
        self.plan = plan
        self.cut = cut
        self.source_TM = source_TM
        self.keep = keep
        self.stages = plan.modules.stages
        self.result_TM = torch.empty_like(source_TM, memory_format=torch.contiguous_format)
        self.results = self.result_TM.split_with_sizes([length(chunk.tokens) for chunk in cut.chunks])
        slots = [length(chunk.slots) // plan.top_k for chunk in cut.chunks]
        self.positions = cut.position.view(-1, plan.top_k).split_with_sizes(slots)
        self.shared_TM: Tensor | None = None
        self.regroup: Sequence[Tensor | None] = [chunk.regroup for chunk in cut.chunks]
        self.schedule = plan_schedule(plan, self.direction, keep)
        self.sizes = BufferSizes(
            direction=self.direction,
            extent=cut.rows,
            d_model=source_TM.shape[1],
            columns=plan.modules.experts.columns(source_TM.device.type),
            restore=plan.restore if keep else None,
            rearranged=plan.rearranged,
        )
        # On a GPU each lane is a stream, and the allocator knows only the stream that allocated a buffer. So
        # all buffers that a collective or a copy touches are made on the compute lane, most of them in this
        # function. They live until the end of the pass, when that lane has waited for the others.
        self.pool = pool(source_TM.device).device
        self.arena = Arena(self.pool, self.schedule, self.sizes, source_TM)
        self.own: dict[str, Tensor] = {}
        self.home: Tensor | None = None
        rotates = plan.modules.rotates
        keeps_what_arrives = self.sizes.keeps_what_arrives
        for i, chunk in enumerate(cut.chunks):
            if not rotates:
                self.make_buffers(i)
            if not rotates or (keeps_what_arrives and not self.sizes.extent.regrouped[i]):
                self.own[f"{self.received}.{i}"] = self.new(chunk.num_gathered, source_TM.shape[1])
        if not rotates:
            rows_sent = sum(chunk.num_sent for chunk in cut.chunks)
            rows_kept = sum(piece.groups.num_rows for piece in cut.pieces)
            self.home = self.new(rows_sent + rows_kept + cut.has_drops, source_TM.shape[1])
            if cut.has_drops:
                self.home[-1].zero_()  # a dropped slot adds this row to its token

    @property
    def weight_message(self) -> WeightMessage:
        """The message of routing weights. Only for passes in which rows travel."""
        assert self.cut.weights is not None
        return self.cut.weights

    def make_buffers(self, i: int) -> None:
        """Makes the buffers from which chunk i is sent. Called if nothing rotates."""
        self.own_buffer("send", i)

    def new(self, rows: int, columns: int) -> Tensor:
        """Returns uninitialised memory (rows, columns) of the type of the layer's rows."""
        return self.pool.new(self.source_TM, rows, columns)

    def own_buffer(self, name: str, i: int) -> Tensor:
        """Returns the buffer ``name`` of chunk i in memory of its own, which it keeps until the pass ends."""
        key = f"{name}.{i}"
        if key not in self.own:
            self.own[key] = self.new(*self.sizes.shape(key))
        return self.own[key]

    def buffer(self, name: str, i: int) -> Tensor:
        """Returns the buffer ``name`` of chunk i: its own memory if it has some, else its ring slot."""
        key = f"{name}.{i}"
        slots = self.arena.buffers
        return slots[key] if key in slots and key not in self.own else self.own_buffer(name, i)

    def temporary(self, name: str, i: int) -> Tensor:
        """Returns the ring slot of buffer ``name`` of chunk i; without one, new memory.

        The pass keeps no reference to new memory: it lasts as long as the caller holds it.
        """
        slot = self.arena.buffers.get(f"{name}.{i}")
        return self.new(*self.sizes.shape(f"{name}.{i}")) if slot is None else slot

    def space(self, unit: Unit) -> Allocate:
        """Returns the function by which experts get memory while they compute a unit."""
        i, at = unit

        def place(name: str, rows: int, columns: int) -> Tensor:
            slot = self.arena.buffers.get(f"{name}{at}.{i}")
            if slot is None:
                return self.new(rows, columns)
            assert slot.shape == (rows, columns), (name, unit, slot.shape, rows, columns)
            return slot

        return place

    def groups(self, unit: Unit) -> RowGroups:
        """Returns the rows of each local expert in a unit."""
        i, at = unit
        return self.cut.pieces[i].groups if at else self.cut.chunks[i].received

    def for_experts(self, unit: Unit, rows_NM: Tensor, out: Tensor | None = None) -> ExpertRows:
        """Returns the argument of the experts' functions: T_DI of a unit, and memory for the result."""
        return ExpertRows(rows_NM, self.groups(unit), self.parameters, self.space(unit), out)

    # ---- towards the experts

    def gather_rows(self, source_TM: Tensor, out: Tensor, i: int) -> None:
        """Copies the tokens that chunk i sends from source_TM (T, M) to ``out``, in sorted order."""
        self.plan.modules.order.order(source_TM, self.cut.sent_tokens[i], out)

    def gather(self, i: int) -> None:
        """Runs G of chunk i."""
        self.gather_rows(self.source_TM, self.buffer("send", i), i)

    def gather_local(self, source_TM: Tensor, out: Tensor, j: int) -> Tensor:
        """Copies the tokens of piece j, which stay on this rank, from source_TM (T, M) to ``out``."""
        self.plan.modules.order.order(source_TM, self.cut.row_token[self.cut.pieces[j].rows], out)
        return out

    def send_rows(self, name: str, received: str, i: int) -> dist.Work | None:
        """Starts the all-to-all that sends buffer ``name`` of chunk i and fills buffer ``received``."""
        chunk = self.cut.chunks[i]
        return self.plan.modules.dispatch.exchange(
            self.buffer(name, i), chunk.send_rows, self.buffer(received, i), chunk.recv_rows, chunk.relayed[0]
        )

    def dispatch(self, i: int) -> dist.Work | None:
        """Runs S of chunk i."""
        return self.send_rows("send", self.dispatch_output, i)

    def arrived(self, i: int) -> Tensor:
        """Returns the rows that reached this rank's experts in chunk i, still by source rank."""
        return self.buffer(self.received, i)

    def in_expert_order(self, name: str, i: int, arrived: Tensor) -> Tensor:
        """Returns the arrived rows of chunk i sorted by expert; ``arrived`` itself if they are.

        A row that came once for several experts is copied for each (`pmoe.engine.variants.send_once`).
        name: buffer of the result, without "_sorted".
        """
        regroup = self.regroup[i]
        if regroup is None:
            return arrived
        return torch.index_select(arrived, 0, regroup, out=self.temporary(f"{name}_sorted", i))

    # ---- and back

    def result_of(self, i: int) -> Tensor:
        """Returns the memory into which the experts write chunk i; `in_source_order` makes it ready to leave.

        It is the buffer that leaves, if rows need no sorting.
        """
        if self.regroup[i] is None:
            return self.leaving_buffer(i)
        return self.temporary(f"{self.sent_back}_sorted", i)

    def leaving_buffer(self, i: int) -> Tensor:
        """Returns the buffer of chunk i that RS or R sends: the experts' results by source rank."""
        return self.buffer(self.sent_back, i)

    def in_source_order(self, i: int, rows_NM: Tensor) -> None:
        """Puts the experts' results of chunk i, rows_NM (N, M), in the order in which their rows arrived."""
        regroup = self.regroup[i]
        if regroup is not None:
            self.put_back(self.leaving_buffer(i), regroup, rows_NM)

    def put_back(self, leaving_NM: Tensor, regroup: Tensor, rows_NM: Tensor) -> None:
        """Writes leaving[regroup[i]] = rows[i]: the inverse of `in_expert_order`."""
        leaving_NM.index_copy_(0, regroup, rows_NM)

    def home_rows(self, i: int, at: slice) -> Tensor:
        """Returns the part of the home buffer for ``at``, a slice of sorted rows that belong to chunk i."""
        if self.home is not None:
            return self.home[at]
        home = self.temporary(self.home_name, i)
        start = self.cut.home[i].start
        return home if length(at) == home.shape[0] else home[at.start - start : at.stop - start]

    def combine_output(self, i: int) -> Tensor:
        """Returns the memory to which R brings the results of chunk i."""
        return self.home_rows(i, self.cut.chunks[i].sent)

    def combine(self, i: int) -> dist.Work | None:
        """Runs R of chunk i."""
        chunk = self.cut.chunks[i]
        leaving = self.buffer(self.combine_input, i)
        return self.plan.modules.combine.exchange(
            leaving, chunk.recv_rows, self.combine_output(i), chunk.send_rows, chunk.relayed[1]
        )

    def output(self, i: int) -> None:
        """Runs O of chunk i: sums each token's rows in the order of its choices.

        The order in which rows came home does not change the sum.
        """
        cut = self.cut
        chunk = self.cut.chunks[i]
        row_SK = self.positions[i]
        out_TM = self.results[i]
        home = self.home
        if home is None:
            home = self.temporary(self.home_name, i)
            row_SK = row_SK - cut.home[i].start
            if cut.has_drops:
                home[-1].zero_()
        if cut.has_drops:
            # Slots without a row have a larger number. They read the last row, which is zero.
            row_SK = row_SK.clamp(max=home.shape[0] - 1)
        slot_token = self.plan.slot_token
        if slot_token is not None:
            slot_token = slot_token[chunk.slots] - chunk.tokens.start
        self.plan.modules.order.restore(home, row_SK, out_TM, slot_token)
        if self.shared_TM is not None:
            out_TM.add_(self.shared_TM[chunk.tokens])

    # ---- run

    def actions(self) -> Actions:
        """Returns the method of each kind of task in the schedule; it takes the chunk.

        A kind for rows that stay, LOCAL_WGRAD say, is the method `wgrad` with at="_L".
        """
        return {kind: self._action(kind.name.lower()) for kind in self.schedule.kinds}

    def _action(self, name: str) -> Callable[[int], dist.Work | None]:
        method: Callable[..., dist.Work | None] = getattr(self, name.removeprefix("local_"))
        return functools.partial(method, at="_L") if name.startswith("local_") else method

    def run_schedule(self) -> None:
        """Runs all tasks of the pass, then gives its memory back, also after an error."""
        modules = self.plan.modules
        stages = self.stages
        in_steps = stages.sharded or modules.dispatch.in_steps or modules.combine.in_steps
        in_steps = in_steps or (self.direction == "backward" and stages.gradients)
        try:
            lanes_run.run_schedule(
                self.schedule, self.actions(), self.source_TM, modules.grid.all, in_steps, modules.experts
            )
        finally:
            self.arena.close()
            self.own.clear()  # a lane's thread may hold this pass a moment longer
            self.home = None


def split_by_chunk(per_row: Tensor, cut: PassPlan) -> tuple[Tensor, ...]:
    """Splits a tensor (N,) of all received rows into the rows of each chunk."""
    return per_row.split_with_sizes(list(cut.rows.received))
