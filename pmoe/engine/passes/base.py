"""The base class of both passes: the buffers of a pass, and the tasks that both passes share.

Both passes send rows to the experts' ranks and back. Only the names of the tensors differ. The tasks are:
gather (G), all-to-all to the experts (S), experts (C), all-to-all back (R), and sum for each token (O).

    forward     T_I  -G-> send -S-> T_DI  -C-> T_DO  -R-> home  -O-> T_O
    backward    dT_O -G-> send -S-> dT_DO -C-> dT_DI -R-> dhome -O-> dT_I
    in `Pass`   source              received   sent_back  home_name  result

In forward, T_I is the layer's input, T_DI the rows that the experts received, T_DO the experts' output, home
the experts' output after it has returned to the tokens' rank, and T_O the layer's output. In backward, dX is
the gradient of X.

Backward also needs T_DI and the experts' hidden activation T_M. The plan's restore pair says for each of the
two whether it is kept, offloaded to the host, or made again. T_DO is not saved. Backward uses the routing of
forward. All other buffers lie in ring slots (memory in which chunks take turns), or each has memory of its
own (`PassModules.rotates`). "_L" at the end of a name is for rows that are not sent, because their experts
are on this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.failures import NOTHING
from pmoe.engine.buffers.arena import Arena, DevicePool, pool
from pmoe.engine.lanes import run as lanes_run
from pmoe.engine.lanes.base import Actions
from pmoe.engine.plan.plan import PassPlan, Plan, WeightMessage
from pmoe.experts.base import ExpertRows, Experts, Hidden
from pmoe.experts.products import ExpertViews, RowGroups
from pmoe.schedule.buffer_sizes import BufferSizes
from pmoe.schedule.tasks import Kind, Schedule, Stages, sequential

if TYPE_CHECKING:
    from pmoe.engine.variants.callbacks import HookGraph
    from pmoe.experts.launched import LaunchedExperts
    from pmoe.experts.with_copies import ExpertsWithCopies

METHODS = {kind: kind.name.lower().removeprefix("local_") for kind in Kind}
"""The name of the method of `Pass` that runs each kind of task."""

LOCAL_KINDS = frozenset(kind for kind in Kind if kind.name.startswith("LOCAL_"))
"""Kinds of tasks for rows that stay on this rank. Their methods get place="_L"."""

Unit = tuple[int, str]
"""Names a set of rows that experts compute in one task.

(i, "") are the rows that this rank received in chunk i. (j, "_L") are block j of the rows that are not sent,
because their experts are on this rank (`PassPlan.pieces`).
"""


@dataclass(frozen=True)
class AutocastState:
    """The autocast state in which a layer was called, for one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def now(device_type: str) -> AutocastState:
        """Returns the current autocast state for a type of device ("cuda", "cpu")."""
        enabled = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type)
        return AutocastState(device_type, enabled, dtype)

    def again(self) -> AbstractContextManager[object]:
        """Returns a context manager that restores this autocast state, but without autocast's cache.

        The pass runs without autograd. With the cache, autocast would store casts of parameters without an
        autograd graph, and use these casts again later in the caller's autocast block. The parameters would
        then get no gradients.
        """
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)


class Inputs(NamedTuple):
    """The tensors of a call that may have gradients, and the autocast state of the layer's caller.

    T is the number of tokens, K the number of experts per token, M = d_model.

    x_TM: (T, M), the layer's input T_I, already cast to autocast's dtype.
    weight_TK: (T, K), the routing weights.
    parameters: the tensors with which the experts compute: (E_local, ...) for stacked experts, or parameters
        of any shape for experts that are a user's modules.
    shared_weight_T: (T,), the factor by which each token's result of the shared expert is multiplied; None
        without a shared expert.
    shared_parameters: the tensors with which the shared expert computes.
    hook_parameters: the parameters of callbacks that are modules.
    autocast: the dtype of the caller's autocast; None without autocast.
    hooks_autocast: the caller's autocast state, in which callbacks' hooks run; None without hooks.
    compare: function (wanted, device) that backward calls first. It is a collective in which the ranks
        compare which gradients they compute; None if it is not needed. ``wanted`` says for each of
        ``parameters`` whether it needs a gradient.
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
        """Returns the context manager in which ``experts`` compute: the caller's autocast, or no autocast.

        Only experts that are a user's modules run under autocast. The tensors of all other experts have been
        cast already.
        """
        device_type = self.x_TM.device.type
        if self.autocast is None and not torch.is_autocast_enabled(device_type):
            return NOTHING
        is_enabled = self.autocast is not None and experts.runs_under_autocast
        return torch.autocast(device_type, enabled=is_enabled, dtype=self.autocast)

    @property
    def all(self) -> list[Tensor | None]:
        """All tensors of the call: first the inputs, then parameters of experts, shared expert and hooks.

        The autograd Function takes its tensors in the same order.
        """
        others = (*self.parameters, *self.shared_parameters, *self.hook_parameters)
        return [self.x_TM, self.weight_TK, self.shared_weight_T, *others]

    def like(self, tensors: Sequence[Any]) -> Inputs:
        """Returns a copy in which ``tensors`` replace the tensors of this object.

        tensors: one value for each tensor of `all`, in the same order. Values need not be tensors: they may
            be None or bools.
        """
        x_TM, weight_TK, shared_weight_T, *rest = tensors
        shared_start = len(self.parameters)
        hooks_start = shared_start + len(self.shared_parameters)
        shared = rest[shared_start:hooks_start]
        of_call = (self.autocast, self.hooks_autocast, self.compare)
        return Inputs(
            x_TM, weight_TK, rest[:shared_start], shared_weight_T, shared, rest[hooks_start:], *of_call
        )


class SavedUnit(NamedTuple):
    """The tensors that forward saves for backward, for the rows that experts compute in one task.

    Each tensor is on the device, or on the host if it is offloaded.

    rows_NM: (N, M), the N rows that the experts received (T_DI), with M = d_model columns; None if backward
        sends them again.
    hidden: the hidden activation (T_M), or the tensors that autograd saved for a user's modules; None if
        backward recomputes it.
    recipe: random states and other values with which `Experts.recompute` repeats the computation exactly;
        None if the experts need none.
    """

    rows_NM: Tensor | None = None
    hidden: Hidden | None = None
    recipe: Any = None


@dataclass(kw_only=True)
class ForwardState:
    """Everything that a forward pass leaves for backward, whether the engine or fused kernels ran it.

    inputs: the tensors of the call.
    wanted: for each tensor of ``inputs.all``, whether it needs a gradient; () until backward begins.
    kept: the saved tensors, for each set of rows that experts computed in one task in forward.
    weight_received: (N,), the routing weights of the N rows that this rank's experts received, sorted by
        chunk, then expert; None if all rows stay on their rank.
    passed: the autograd graphs of callbacks' hooks. The key is (name of the point where the hook runs,
        chunk).
    regroup: for each chunk, the index that sorts arrived rows by expert, if forward computed it
        (`pmoe.engine.variants.send_once`); () if the plan has it (`Chunk.regroup`).
    """

    inputs: Inputs
    wanted: Sequence[bool] = ()
    kept: dict[Unit, SavedUnit] = field(default_factory=dict)
    weight_received: Tensor | None = None
    passed: dict[tuple[str, int], HookGraph] = field(default_factory=dict)
    regroup: Sequence[Tensor | None] = ()


def plan_schedule(plan: Plan, direction: str, keep: bool = True) -> Schedule:
    """Returns the schedule of the forward or backward pass of a plan: its list of tasks.

    All ranks get the same schedule, so their collectives match.

    plan: the plan of the call.
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

    `actions` maps kinds of tasks to methods, for example G to `gather` and S to `dispatch`. Features that
    only some layers have are subclasses, each in a file of its own (`pmoe.runners.pipeline`). The module's
    docstring has a table of the buffers. A buffer may lie in a ring slot: memory of fixed size in which
    chunks take turns. Names that end in "_L" are for rows that are not sent, because their experts are on
    this rank.

    direction: "forward" or "backward".
    received: the name of the buffer that the experts read.
    sent_back: the name of the buffer that the experts write.
    home_name: the name of the buffer in which results return to the tokens' rank.
    dispatch_output: the name of the buffer that the all-to-all to the experts fills. It differs from
        ``received`` only if experts are sharded, because an all-gather follows.
    combine_input: the name of the buffer that the all-to-all back sends. It differs from ``sent_back`` only
        if experts are sharded, because a reduce-scatter comes before.
    parameters: the tensors with which the experts compute.
    views: the views of each expert's part of the parameters.
    pass_plan: the plan of this pass, ``plan.forward`` or ``plan.backward``.
    source_TM, result_TM: (T, M), the pass's input and output for T tokens with M = d_model columns. In
        forward they are the layer's input and output, in backward the gradients of the output and the input.
    keep: in forward, whether a backward pass may follow; always True in backward.
    results: result_TM, split by chunk.
    positions: for each chunk a tensor (tokens of the chunk, K): the row of each (token, choice) pair, as a
        number among this rank's sorted rows (`PassPlan.position`).
    experts: the object that computes the rows of each task. It is one of three: this rank's experts; an
        object that launches their products on a GPU; or this rank's experts together with its copies of other
        ranks' busy experts.
    sizes_type: the class of ``sizes``, which has the rows and columns of every buffer of the pass.
    own: the buffers that are not in ring slots, by name and chunk, "send.0" for example.
    home: (rows, M), the results of all chunks on the tokens' rank; None if chunks share buffers, because the
        results of each chunk then have a buffer in a ring slot.
    """

    direction: str
    received: str
    sent_back: str
    home_name: str
    dispatch_output: str
    combine_input: str
    parameters: Sequence[Tensor]
    views: ExpertViews
    plan: Plan
    pass_plan: PassPlan
    source_TM: Tensor
    keep: bool
    stages: Stages
    result_TM: Tensor
    results: tuple[Tensor, ...]
    positions: tuple[Tensor, ...]
    experts: Experts | LaunchedExperts | ExpertsWithCopies
    schedule: Schedule
    sizes_type: Callable[..., BufferSizes] = BufferSizes
    sizes: BufferSizes
    pool: DevicePool
    arena: Arena

    def __init__(self, plan: Plan, pass_plan: PassPlan, source_TM: Tensor, keep: bool) -> None:
        self.plan = plan
        self.pass_plan = pass_plan
        self.source_TM = source_TM
        self.keep = keep
        self.stages = plan.modules.stages
        self.pool = pool(source_TM.device).device
        self.result_TM = self.pool.new(source_TM, *source_TM.shape)
        self.results = self.result_TM.split_with_sizes(pass_plan.num_tokens)
        self.positions = pass_plan.positions
        self.experts = plan.modules.experts
        self.shared_TM: Tensor | None = None
        self.regroup: Sequence[Tensor | None] = [chunk.regroup for chunk in pass_plan.chunks]
        self.schedule = plan_schedule(plan, self.direction, keep)
        self.sizes = self.sizes_type(
            direction=self.direction,
            extent=pass_plan.rows,
            d_model=source_TM.shape[1],
            columns=plan.modules.experts.columns(source_TM.device.type),
            restore=plan.restore if keep else None,
            rearranged=plan.joined is not None,
        )
        # On a GPU each lane is a stream, and torch's allocator knows only the stream that allocated a buffer.
        # So all buffers that a collective or a copy uses are allocated on the compute lane, most of them in
        # this function. They are freed when the pass ends, after the compute lane has waited for the others.
        self.arena = Arena(self.pool, self.schedule, self.sizes, source_TM)
        self.own: dict[str, Tensor] = {}
        self.home: Tensor | None = None
        rotates = plan.modules.rotates
        # Without other ranks no rows are sent, and chunks have no buffers for them.
        for i, chunk in enumerate(pass_plan.chunks if self.stages.remote else ()):
            if not rotates:
                self.make_buffers(i)
            stays = plan.restore.dispatched in ("keep", "message")
            if not rotates or (stays and self.sizes.stays_as_it_arrives(i)):
                self.own[f"{self.received}.{i}"] = self.new(
                    chunk.num_gathered, self.sizes.of(self.received)[1]
                )
        if not rotates:
            rows_sent = sum(chunk.num_sent for chunk in pass_plan.chunks)
            rows_kept = sum(piece.groups.num_rows for piece in pass_plan.pieces)
            self.home = self.new(rows_sent + rows_kept + pass_plan.has_drops, source_TM.shape[1])
            if pass_plan.has_drops:
                self.home[-1].zero_()  # one more row: the result of every dropped (token, choice) pair

    @property
    def weight_message(self) -> WeightMessage:
        """The plan of the message of routing weights. Fails if this pass sends no rows to other ranks."""
        assert self.pass_plan.weights is not None
        return self.pass_plan.weights

    def make_buffers(self, i: int) -> None:
        """Allocates the buffers from which chunk i is sent.

        Called only if each chunk has buffers of its own. Otherwise chunks take turns in shared buffers, which
        the pass has allocated already (`arena`).
        """
        self.own_buffer("send", i)

    def new(self, rows: int, columns: int) -> Tensor:
        """Returns uninitialised memory (rows, columns) with the dtype and device of the pass's input."""
        return self.pool.new(self.source_TM, rows, columns)

    def own_buffer(self, name: str, i: int) -> Tensor:
        """Returns buffer ``name`` of chunk i, in memory that it shares with no other chunk.

        The memory is allocated at the first call, and freed when the pass ends.
        """
        key = f"{name}.{i}"
        if key not in self.own:
            self.own[key] = self.new(*self.sizes.shape(key))
        return self.own[key]

    def buffer(self, name: str, i: int) -> Tensor:
        """Returns buffer ``name`` of chunk i: memory of its own if it has any, otherwise its ring slot.

        A ring slot is memory in which chunks take turns. If the buffer has no memory of its own and no ring
        slot, new memory is allocated for it (`own_buffer`).
        """
        key = f"{name}.{i}"
        slots = self.arena.buffers
        return slots[key] if key in slots and key not in self.own else self.own_buffer(name, i)

    def temporary(self, name: str, i: int) -> Tensor:
        """Returns the ring slot of buffer ``name`` of chunk i; newly allocated memory if it has no slot.

        A ring slot is memory in which chunks take turns. The pass keeps no reference to newly allocated
        memory. So that memory is freed as soon as the caller drops the result.
        """
        slot = self.arena.buffers.get(f"{name}.{i}")
        return self.new(*self.sizes.shape(f"{name}.{i}")) if slot is None else slot

    def place(self, unit: Unit, name: str, rows: int, columns: int) -> Tensor:
        """Returns the ring slot of a buffer of one task, or new memory if the buffer has no slot.

        A ring slot is memory in which chunks take turns. Experts get memory for their intermediate tensors
        from this method.

        unit: (i, "") for the rows received in chunk i, or (j, "_L") for block j of the rows that are not
            sent, because their experts are on this rank.
        name: the name of the buffer, such as "T_M".
        rows, columns: its sizes.
        """
        i, suffix = unit
        slot = self.arena.buffers.get(f"{name}{suffix}.{i}")
        if slot is None:
            return self.new(rows, columns)
        assert slot.shape == (rows, columns), (name, unit, slot.shape, rows, columns)
        return slot

    def groups(self, unit: Unit) -> RowGroups:
        """Returns how many rows each local expert has among the rows of one task.

        unit: (i, "") for the rows received in chunk i, or (j, "_L") for block j of the rows that are not
            sent, because their experts are on this rank.
        """
        i, place = unit
        return self.pass_plan.pieces[i].groups if place else self.pass_plan.chunks[i].received

    def for_experts(
        self, unit: Unit, rows_NM: Tensor, out: Tensor | None = None, grad_weight_N: Tensor | None = None
    ) -> ExpertRows:
        """Returns the argument for methods of `Experts`: rows, parameters, and memory to compute in.

        unit: (i, "") for the rows received in chunk i, or (j, "_L") for block j of the rows that are not
            sent, because their experts are on this rank.
        rows_NM: (N, M), the N rows of the task (T_DI) with M = d_model columns, sorted by expert.
        out: (N, M), memory for the result; None lets the experts choose it.
        grad_weight_N: (N,), memory for the gradient of the routing weights; None in forward.
        """
        groups = self.groups(unit)
        space = functools.partial(self.place, unit)
        return ExpertRows(rows_NM, groups, self.parameters, space, out, grad_weight_N, views=self.views)

    # ---- towards the experts

    def gather_rows(self, source_TM: Tensor, out: Tensor, i: int) -> None:
        """Copies into ``out`` the tokens that chunk i sends, sorted by destination rank and expert.

        source_TM: (T, M), T tokens with M = d_model columns; in backward, the gradients of their outputs.
        out: (rows of the chunk, M), memory for the copies.
        i: the number of the chunk.
        """
        self.plan.modules.order.order(source_TM, self.pass_plan.sent_tokens[i], out)

    def gather(self, i: int) -> None:
        """Copies the tokens of chunk i to its send buffer, sorted by destination rank and expert (task G).

        In backward it copies the gradients of the tokens' outputs.
        """
        self.gather_rows(self.source_TM, self.buffer("send", i), i)

    def gather_local(self, source_TM: Tensor, out: Tensor, j: int) -> Tensor:
        """Copies into ``out`` the tokens of block j of the rows that stay on this rank; returns ``out``.

        A row stays if its expert is on this rank. One task computes one block of these rows.

        source_TM: (T, M), T tokens with M = d_model columns; in backward, the gradients of their outputs.
        out: (rows of the block, M), memory for the copies.
        """
        self.plan.modules.order.order(source_TM, self.pass_plan.row_token[self.pass_plan.pieces[j].rows], out)
        return out

    def send_rows(self, name: str, received: str, i: int) -> dist.Work | None:
        """Starts the dispatch all-to-all of chunk i; returns its Work, or None if it has ended already.

        name: the name of the buffer that is sent, "send" for example.
        received: the name of the buffer that is filled, "T_DI" for example.
        """
        chunk = self.pass_plan.chunks[i]
        return self.plan.modules.dispatch.exchange(
            self.buffer(name, i), chunk.send_rows, self.buffer(received, i), chunk.recv_rows, chunk.relayed[0]
        )

    def dispatch(self, i: int) -> dist.Work | None:
        """Starts the all-to-all that sends chunk i's rows to the ranks of their experts (task S).

        The rows are tokens; in backward, gradients of the tokens' outputs.
        """
        return self.send_rows("send", self.dispatch_output, i)

    def arrived(self, i: int) -> Tensor:
        """Returns the rows that reached this rank's experts in chunk i, still sorted by source rank."""
        return self.buffer(self.received, i)

    def in_expert_order(self, name: str, i: int, arrived: Tensor) -> Tensor:
        """Returns the arrived rows of chunk i sorted by expert; ``arrived`` itself if it has this order.

        With ``send_once=True`` one arrived row may be copied for several experts
        (`pmoe.engine.variants.send_once`).

        name: the name of the buffer for the result, without its ending "_sorted".
        i: the number of the chunk.
        arrived: (rows, d_model), the rows sorted by source rank.
        """
        regroup = self.regroup[i]
        if regroup is None:
            return arrived
        return torch.index_select(arrived, 0, regroup, out=self.temporary(f"{name}_sorted", i))

    # ---- and back

    def result_of(self, i: int) -> Tensor:
        """Returns the memory into which the experts write their results for chunk i.

        If rows arrived sorted by expert, the result is the buffer that is sent back. Otherwise it is a
        temporary buffer, from which `in_source_order` copies the rows to the buffer that is sent back.
        """
        if self.regroup[i] is None:
            return self.leaving_buffer(i)
        return self.temporary(f"{self.sent_back}_sorted", i)

    def leaving_buffer(self, i: int) -> Tensor:
        """Returns the buffer of chunk i's results that is sent back. Its rows are sorted by source rank."""
        return self.buffer(self.sent_back, i)

    def in_source_order(self, i: int, rows_NM: Tensor) -> None:
        """Copies the experts' results for chunk i to the buffer that is sent back, in the order of arrival.

        Does nothing if rows arrived sorted by expert, because the experts then wrote to the buffer that is
        sent back.

        rows_NM: (N, M), the N results with M = d_model columns, sorted by expert.
        """
        regroup = self.regroup[i]
        if regroup is not None:
            self.put_back(self.leaving_buffer(i), regroup, rows_NM)

    def put_back(self, leaving_NM: Tensor, regroup: Tensor, rows_NM: Tensor) -> None:
        """Undoes the sorting by expert: leaving_NM[regroup[i]] = rows_NM[i] for each of N rows.

        leaving_NM: (N, M), the buffer that is sent back, with M = d_model columns. It is filled.
        regroup: (N,) int64, the index by which `in_expert_order` sorted the rows.
        rows_NM: (N, M), the experts' results, sorted by expert.
        """
        leaving_NM.index_copy_(0, regroup, rows_NM)

    def home_rows(self, i: int, rows: slice) -> Tensor:
        """Returns memory for the results of some of chunk i's rows, in the home buffer on the tokens' rank.

        All results of a rank's tokens return to the home buffer of that rank. The results of each token are
        then summed.

        i: the number of the chunk.
        rows: a slice of this rank's sorted rows (`PassPlan`). Every row in it must belong to chunk i.
        """
        if self.home is not None:
            return self.home[rows]
        home = self.temporary(self.home_name, i)
        start = self.pass_plan.chunks[i].sent.start  # the chunk's first row in its home buffer
        first = rows.start - start
        return home if rows.stop - rows.start == home.shape[0] else home[first : rows.stop - start]

    def combine_output(self, i: int) -> Tensor:
        """Returns the memory in which the all-to-all back to the tokens' rank puts the results of chunk i."""
        return self.home_rows(i, self.pass_plan.chunks[i].sent)

    def combine(self, i: int) -> dist.Work | None:
        """Starts the all-to-all that returns chunk i's results to the ranks of their tokens (task R).

        The results are the experts' outputs; in backward, the gradients of the experts' inputs.
        """
        chunk = self.pass_plan.chunks[i]
        leaving = self.buffer(self.combine_input, i)
        return self.plan.modules.combine.exchange(
            leaving, chunk.recv_rows, self.combine_output(i), chunk.send_rows, chunk.relayed[1]
        )

    def output(self, i: int) -> None:
        """Sums the results of each token of chunk i into the pass's output (task O).

        Results of a token are added in the order of its choices, not in the order of arrival, so the sum is
        the same in every run. A shared expert's result is added too. In backward, the results are gradients.
        """
        pass_plan = self.pass_plan
        chunk = pass_plan.chunks[i]
        row_SK = self.positions[i]
        out_TM = self.results[i]
        home = self.home
        if home is None:
            home = self.temporary(self.home_name, i)
            row_SK = row_SK - chunk.sent.start
            if pass_plan.has_drops:
                home[-1].zero_()
        if pass_plan.has_drops:
            # A dropped (token, choice) pair has no row: its number lies beyond the last row. Here it gets the
            # number of the last row, which is zero, so it adds nothing to the token's result.
            row_SK = row_SK.clamp(max=home.shape[0] - 1)
        slot_token = self.plan.slot_token
        if slot_token is not None:
            slot_token = slot_token[chunk.slots] - chunk.tokens.start
        self.plan.modules.order.restore(home, row_SK, out_TM, slot_token)
        if self.shared_TM is not None:
            out_TM.add_(self.shared_TM[chunk.tokens])

    # ---- run

    def actions(self) -> Actions:
        """Returns a dict from each kind of task in the schedule to the method that runs the task.

        The argument of the method is the number of a chunk. A kind LOCAL_... is for rows that stay on this
        rank. It uses the method for received rows, with the argument place="_L": LOCAL_WGRAD calls wgrad(i,
        place="_L"), for example.
        """
        actions: dict[Kind, Callable[..., dist.Work | None]] = {}
        for kind in self.schedule.kinds:
            method = getattr(self, METHODS[kind])
            actions[kind] = functools.partial(method, place="_L") if kind in LOCAL_KINDS else method
        return actions

    def run_schedule(self) -> None:
        """Runs all tasks of the pass, then frees its buffers, even if a task raised an error."""
        modules = self.plan.modules
        stages = self.stages
        in_steps = stages.sharded or modules.dispatch.in_steps or modules.combine.in_steps
        in_steps = in_steps or stages.relays_copies or (self.direction == "backward" and stages.gradients)
        try:
            lanes_run.run_schedule(
                self.schedule, self.actions(), self.source_TM, modules.grid.all, in_steps, modules.experts
            )
        finally:
            self.arena.close()
            self.own.clear()  # frees the buffers now: a lane's thread may refer to this pass a moment longer
            self.home = None


def split_by_chunk(per_row: Tensor, pass_plan: PassPlan) -> tuple[Tensor, ...]:
    """Splits a tensor of values for received rows into parts, one for each chunk.

    Received rows are the rows that were sent to this rank's experts.

    per_row: (N,), the values of the N rows, sorted by chunk.
    pass_plan: the plan of the pass, which has the number of rows of each chunk.
    """
    return per_row.split_with_sizes(list(pass_plan.rows.received))
