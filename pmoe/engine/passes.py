"""What both passes of the experts' part of a layer have in common: the buffers and messages that a
schedule's tasks read and write.

T_DO is not saved; the routing is never decided twice. T_DI and T_M go from forward to backward as the plan's
restore pair says; whatever else a pass needs lies in ring slots, or in memory of its own where the plan does
not rotate. "_L" marks buffers of rows that stay.
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

from pmoe.engine import lanes as engine
from pmoe.engine.arena import Arena, DevicePool, pool
from pmoe.engine.lanes import Actions
from pmoe.engine.plan import PassPlan, Plan, WeightJourney, length
from pmoe.experts.base import Allocate, ExpertRows, Experts, Hidden
from pmoe.experts.products import RowGroups
from pmoe.schedule.slots import BufferSizes
from pmoe.schedule.tasks import Schedule, Stages, sequential

if TYPE_CHECKING:
    from pmoe.engine.hooked import Passed

Unit = tuple[int, str]
"""What experts compute at a time: (chunk, "") the rows received in it, (piece, "_L") rows that stay."""


@dataclass(frozen=True)
class AutocastState:
    """Whether autocast was on where a layer was called, and its type; of one kind of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def now(device_type: str) -> AutocastState:
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return AutocastState(device_type, enabled, dtype)

    def again(self) -> AbstractContextManager[object]:
        """That state. Nothing goes into autocast's cache: a copy that is made without a graph would stay
        there for a caller who needs one."""
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of a call that have gradients: of the experts, of the shared expert, and of callbacks.

    shared_weight_T: the factor of the shared expert's output, None where there is none.
    autocast: the type that the caller's autocast gives rows; None where there is none.
    hooks_autocast: the caller's autocast state, in which callbacks' hooks run; None without hooks.
    compare: called before backward with which of ``parameters`` want gradients, and the device; a collective.
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
        """The autocast state in which experts compute: the caller's for modules, else none."""
        kind = self.x_TM.device.type
        if self.autocast is None and not torch.is_autocast_enabled(kind):
            return nullcontext()
        inside = self.autocast is not None and experts.runs_under_autocast
        return torch.autocast(kind, enabled=inside, dtype=self.autocast)

    @property
    def all(self) -> list[Tensor | None]:
        others = (*self.parameters, *self.shared_parameters, *self.hook_parameters)
        return [self.x_TM, self.weight_TK, self.shared_weight_T, *others]

    def like(self, tensors: Sequence[Any]) -> Inputs:
        """The same with other tensors, in the order of ``all``."""
        x_TM, weight_TK, shared_weight_T, *rest = tensors
        own, shared = len(self.parameters), len(self.parameters) + len(self.shared_parameters)
        return Inputs(
            x_TM=x_TM,
            weight_TK=weight_TK,
            parameters=rest[:own],
            shared_weight_T=shared_weight_T,
            shared_parameters=rest[own:shared],
            hook_parameters=rest[shared:],
            autocast=self.autocast,
            hooks_autocast=self.hooks_autocast,
            compare=self.compare,
        )


@dataclass
class Kept:
    """What forward leaves of a unit for backward: T_DI and T_M (or a module's saved tensors), each on the
    device, on the host, or None where it is made again. recipe: how to make T_M again alike."""

    rows_NM: Tensor | None = None
    hidden: Hidden | None = None
    recipe: Any = None


@dataclass(kw_only=True)
class Forwarded:
    """What a forward pass leaves for backward, whoever ran it.

    inputs: of the call. wanted: of which of ``inputs.all`` gradients are, once that is known.
    kept: for each unit of ``plan.forward``.
    weight_received: (N,), the routing weights of the rows that its chunks received, by chunk and in expert
        order; None where none did.
    passed: what hooks saved. regroup: of chunks whose rows travelled once (`PassPlan.once`).
    """

    inputs: Inputs
    wanted: Sequence[bool] = ()
    kept: dict[Unit, Kept] = field(default_factory=dict)
    weight_received: Tensor | None = None
    passed: dict[tuple[str, int], Passed] = field(default_factory=dict)
    regroup: Sequence[Tensor | None] = ()


def plan_schedule(plan: Plan, direction: str, keep: bool = True) -> Schedule:
    """The schedule that a pass of ``plan`` runs; every rank of the group builds the same."""
    n = len((plan.forward if direction == "forward" else plan.backward).chunks)
    if not plan.modules.rotates:
        from pmoe.schedule.straight import backward_schedule, forward_schedule

        schedule = (forward_schedule if direction == "forward" else backward_schedule)(n, plan.modules.stages)
    else:
        from pmoe.schedule.rings import rotating

        restore = plan.restore if keep else None
        schedule = rotating(direction, n, plan.modules.stages, restore=restore, rearranged=plan.rearranged)
    return sequential(schedule) if plan.modules.sequential else schedule


class Pass:
    """What both directions share: rows leave by `gather` and `dispatch`, and come home by `combine` and
    `output`. ``source`` is T_I or dT_O, ``result`` T_O or dT_I; both (T, M).

    What only some layers need is in subclasses, each in a file of its own (`pmoe.runners.pipeline`).

    received, sent_back: names of what arrives at the experts and of what leaves them again. brought_by_S,
    taken_by_R: what the two all-to-alls fill and send, the same two where experts are not sharded.
    """

    direction: str
    received: str
    sent_back: str
    home_name: str
    brought_by_S: str
    taken_by_R: str
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
        self.plan, self.cut, self.source_TM, self.keep = plan, cut, source_TM, keep
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
        # All buffers that a collective or a copy touches are made on the compute lane, most of them here, and
        # live until the end of the pass: the other lanes of a GPU are other streams, to which the allocator
        # is blind.
        self.pool = pool(source_TM.device).device
        self.arena = Arena(self.pool, self.schedule, self.sizes, source_TM)
        self.own: dict[str, Tensor] = {}
        self.home: Tensor | None = None
        rotates, keeps = plan.modules.rotates, self.sizes.keeps_what_arrives
        for i, chunk in enumerate(cut.chunks):
            if not rotates:
                self.make_buffers(i)
            if not rotates or (keeps and not self.sizes.extent.regrouped[i]):
                self.own[f"{self.received}.{i}"] = self.new(chunk.num_gathered, source_TM.shape[1])
        if not rotates:
            comes = sum(chunk.num_sent for chunk in cut.chunks)
            stays = sum(piece.groups.num_rows for piece in cut.pieces)
            self.home = self.new(comes + stays + cut.has_drops, source_TM.shape[1])
            if cut.has_drops:
                self.home[-1].zero_()  # what a dropped slot adds to its token

    @property
    def journey(self) -> WeightJourney:
        """Of the routing weights, where rows travel."""
        assert self.cut.weights is not None
        return self.cut.weights

    def make_buffers(self, i: int) -> None:
        """Memory for chunk i to leave from, where nothing rotates."""
        self.own_buffer("send", i)

    def new(self, rows: int, columns: int) -> Tensor:
        return self.pool.new(self.source_TM, rows, columns)

    def own_buffer(self, name: str, i: int) -> Tensor:
        """Memory of its own until the pass ends."""
        key = f"{name}.{i}"
        if key not in self.own:
            self.own[key] = self.new(*self.sizes.shape(key))
        return self.own[key]

    def buffer(self, name: str, i: int) -> Tensor:
        """Memory of its own, if it has some already, or the slot that the schedule gives it."""
        key, slots = f"{name}.{i}", self.arena.buffers
        return slots[key] if key in slots and key not in self.own else self.own_buffer(name, i)

    def temporary(self, name: str, i: int) -> Tensor:
        """The slot, or memory that lasts as long as its user holds it."""
        found = self.arena.buffers.get(f"{name}.{i}")
        return self.new(*self.sizes.shape(f"{name}.{i}")) if found is None else found

    def space(self, unit: Unit) -> Allocate:
        i, at = unit

        def place(name: str, rows: int, columns: int) -> Tensor:
            found = self.arena.buffers.get(f"{name}{at}.{i}")
            if found is None:
                return self.new(rows, columns)
            assert found.shape == (rows, columns), (name, unit, found.shape, rows, columns)
            return found

        return place

    def groups(self, unit: Unit) -> RowGroups:
        i, at = unit
        return self.cut.pieces[i].groups if at else self.cut.chunks[i].received

    def for_experts(self, unit: Unit, rows_NM: Tensor, out: Tensor | None = None) -> ExpertRows:
        return ExpertRows(rows_NM, self.groups(unit), self.parameters, self.space(unit), out)

    # ---- towards the experts

    def gather_rows(self, source_TM: Tensor, out: Tensor, i: int) -> None:
        self.plan.modules.order.order(source_TM, self.cut.sent_tokens[i], out)

    def gather(self, i: int) -> None:
        self.gather_rows(self.source_TM, self.buffer("send", i), i)

    def gather_local(self, source_TM: Tensor, out: Tensor, j: int) -> Tensor:
        self.plan.modules.order.order(source_TM, self.cut.row_token[self.cut.pieces[j].rows], out)
        return out

    def send_rows(self, name: str, received: str, i: int) -> dist.Work | None:
        chunk = self.cut.chunks[i]
        return self.plan.modules.dispatch.exchange(
            self.buffer(name, i), chunk.send_rows, self.buffer(received, i), chunk.recv_rows, chunk.relayed[0]
        )

    def dispatch(self, i: int) -> dist.Work | None:
        return self.send_rows("send", self.brought_by_S, i)

    def arrived(self, i: int) -> Tensor:
        """What the experts get."""
        return self.buffer(self.received, i)

    def in_expert_order(self, name: str, i: int, arrived: Tensor) -> Tensor:
        """Rows that have arrived, replicated where they came once for several experts."""
        regroup = self.regroup[i]
        if regroup is None:
            return arrived
        return torch.index_select(arrived, 0, regroup, out=self.temporary(f"{name}_sorted", i))

    # ---- and back

    def result_of(self, i: int) -> Tensor:
        """Where the experts' result of chunk i goes; `in_source_order` makes it ready to leave."""
        if self.regroup[i] is None:
            return self.leaving_buffer(i)
        return self.temporary(f"{self.sent_back}_sorted", i)

    def leaving_buffer(self, i: int) -> Tensor:
        return self.buffer(self.sent_back, i)

    def in_source_order(self, i: int, rows_NM: Tensor) -> None:
        """The experts' results as their rows came."""
        regroup = self.regroup[i]
        if regroup is not None:
            self.put_back(self.leaving_buffer(i), regroup, rows_NM)

    def put_back(self, leaving_NM: Tensor, regroup: Tensor, rows_NM: Tensor) -> None:
        leaving_NM.index_copy_(0, regroup, rows_NM)

    def home_rows(self, i: int, at: slice) -> Tensor:
        """The part of home for rows ``at`` of the sorted order, which are chunk i's."""
        if self.home is not None:
            return self.home[at]
        home, start = self.temporary(self.home_name, i), self.cut.home[i].start
        return home if length(at) == home.shape[0] else home[at.start - start : at.stop - start]

    def comes_home(self, i: int) -> Tensor:
        """Where R brings the results of chunk i."""
        return self.home_rows(i, self.cut.chunks[i].sent)

    def combine(self, i: int) -> dist.Work | None:
        chunk, leaving = self.cut.chunks[i], self.buffer(self.taken_by_R, i)
        return self.plan.modules.combine.exchange(
            leaving, chunk.recv_rows, self.comes_home(i), chunk.send_rows, chunk.relayed[1]
        )

    def output(self, i: int) -> None:
        """Each token's rows are summed in the order of its choices, whatever order they came home in."""
        cut, chunk = self.cut, self.cut.chunks[i]
        row_SK, out_TM, home = self.positions[i], self.results[i], self.home
        if home is None:
            home = self.temporary(self.home_name, i)
            row_SK = row_SK - cut.home[i].start
            if cut.has_drops:
                home[-1].zero_()
        if cut.has_drops:
            row_SK = row_SK.clamp(max=home.shape[0] - 1)
        of_slot = self.plan.slot_token
        if of_slot is not None:
            of_slot = of_slot[chunk.slots] - chunk.tokens.start
        self.plan.modules.order.restore(home, row_SK, out_TM, of_slot)
        if self.shared_TM is not None:
            out_TM.add_(self.shared_TM[chunk.tokens])

    # ---- run

    def actions(self) -> Actions:
        """What each kind of task does: the method of its name, of a chunk, with "_L" of rows that stay."""
        return {kind: self._action(kind.name.lower()) for kind in self.schedule.kinds}

    def _action(self, name: str) -> Callable[[int], dist.Work | None]:
        method: Callable[..., dist.Work | None] = getattr(self, name.removeprefix("local_"))
        return functools.partial(method, at="_L") if name.startswith("local_") else method

    def run_schedule(self) -> None:
        modules, stages = self.plan.modules, self.stages
        in_steps = stages.sharded or modules.dispatch.in_steps or modules.combine.in_steps
        in_steps = in_steps or (self.direction == "backward" and stages.gradients)
        try:
            engine.run_schedule(
                self.schedule, self.actions(), self.source_TM, modules.grid.all, in_steps, modules.experts
            )
        finally:
            self.arena.close()
            self.own.clear()  # a lane's thread may hold this pass a moment longer
            self.home = None


def split_by_chunk(per_row: Tensor, cut: PassPlan) -> tuple[Tensor, ...]:
    return per_row.split_with_sizes(list(cut.rows.received))
