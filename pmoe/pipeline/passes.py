"""Forward and backward of the experts' part of a layer: what each task of a schedule does.

One autograd function holds both, so that backward's order is the schedule's and not autograd's. T_DO is
not saved; the routing is never decided twice. T_DI and T_M go from forward to backward as the plan's
restore pair says; whatever else a pass needs lies in ring slots, or in memory of its own where the plan does
not rotate.

Letters: T tokens, K choices, N rows, M = d_model, n chunks. "_L" marks buffers of rows that stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.experts.base import Hidden, Runs, Space
from pmoe.experts.products import GradientSum, RowGroups
from pmoe.pipeline import callbacks, engine
from pmoe.pipeline.buffers import Arena, Extent, HostMemoryError, Sizes, aligned, copy, pool, warn_once
from pmoe.pipeline.callbacks import Passed
from pmoe.pipeline.lanes import current_stream, hold_for
from pmoe.pipeline.padded import Padding
from pmoe.pipeline.plan import Cut, Joined, Plan
from pmoe.pipeline.rotation import rotating
from pmoe.pipeline.schedule import Kind, Schedule, backward_schedule, forward_schedule, sequential

Unit = tuple[int, str]
"""What experts compute at a time: (chunk, "") the rows received in it, (piece, "_L") rows that stay."""

SHARED: Unit = (-1, "_S")
"""All tokens, by the shared expert."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of a call that have gradients: of the experts, of the shared expert, and of callbacks.

    shared_weight_T: the factor of the shared expert's output, None where there is none.
    """

    x_TM: Tensor
    weight_TK: Tensor
    parameters: Sequence[Tensor]
    shared_weight_T: Tensor | None = None
    shared_parameters: Sequence[Tensor] = ()
    hook_parameters: Sequence[Tensor] = ()

    @property
    def all(self) -> list[Tensor | None]:
        others = (*self.parameters, *self.shared_parameters, *self.hook_parameters)
        return [self.x_TM, self.weight_TK, self.shared_weight_T, *others]

    def like(self, tensors: Sequence[Any]) -> Inputs:
        """The same with other tensors, in the order of ``all``."""
        x_TM, weight_TK, shared_weight_T, *others = tensors
        rest = iter(others)
        return Inputs(
            x_TM=x_TM,
            weight_TK=weight_TK,
            shared_weight_T=shared_weight_T,
            parameters=list(itertools.islice(rest, len(self.parameters))),
            shared_parameters=list(itertools.islice(rest, len(self.shared_parameters))),
            hook_parameters=list(rest),
        )

    def padded(self, padding: Padding | None) -> Inputs:
        """The same with a row for each token that ``padding`` says."""
        if padding is None:
            return self
        x_TM = self.x_TM  # None in a backward pass that has no use for it
        return replace(
            self,
            x_TM=x_TM if x_TM is None else padding.spread(x_TM),
            weight_TK=padding.spread_weights(self.weight_TK),
        )


@dataclass
class Kept:
    """What forward leaves of a unit for backward: T_DI and T_M (or a module's saved tensors), each on the
    device, on the host, or None where it is made again. recipe: how to make T_M again alike."""

    rows_NM: Tensor | None = None
    hidden: Hidden | None = None
    recipe: Any = None


@dataclass(frozen=True, kw_only=True)
class Forwarded:
    """What a forward pass leaves, whoever ran it. y_TM: T_O. kept: for each unit of ``plan.forward``.
    weight_received: the routing weights of the rows that its chunks received, by chunk and in expert order;
    None where none did. passed: what hooks saved. regroup: of chunks whose rows travelled once (`Cut.once`).
    """

    y_TM: Tensor
    kept: Mapping[Unit, Kept]
    weight_received: Tensor | None
    passed: Mapping[tuple[str, int], Passed] = field(default_factory=dict)
    regroup: Sequence[Tensor | None] = ()


ForwardPass = Callable[[Plan, Inputs], Forwarded]


def plan_schedule(plan: Plan, direction: str, keep: bool = True) -> Schedule:
    """The schedule that a pass of ``plan`` runs; every rank of the group builds the same."""
    n = len((plan.forward if direction == "forward" else plan.backward).chunks)
    if not plan.rotates:
        schedule = (forward_schedule if direction == "forward" else backward_schedule)(n, plan.stages)
    else:
        restore = plan.restore if keep else None
        schedule = rotating(direction, n, plan.stages, restore=restore, rearranged=plan.rearranged)
    return sequential(schedule) if plan.sequential else schedule


def extent(cut: Cut, has_drops: bool) -> Extent:
    """Rows of the buffers of a pass through ``cut``. Where pieces are not chunks nothing rotates, and what is
    said of rows by chunk of home and of those that stay is not used."""
    n, inside = len(cut.chunks), len(cut.chunks[0].gathered)
    by_chunk = len(cut.pieces) in (0, n)
    apart = inside > 0 or cut.once is not None
    return Extent(
        arrived=tuple(chunk.num_arrived for chunk in cut.chunks) if apart else None,
        gathered=tuple(chunk.num_gathered for chunk in cut.chunks) if apart else None,
        inside=inside,
        send=tuple(chunk.num_sent for chunk in cut.chunks),
        received=tuple(chunk.received.num_rows for chunk in cut.chunks),
        local=tuple(piece.groups.num_rows for piece in cut.pieces) or (0,) * n,
        home=tuple(_length(cut.home(i)) + has_drops for i in range(n)) if by_chunk else (0,) * n,
        regrouped=tuple(cut.once is not None or chunk.regroup is not None for chunk in cut.chunks),
    )


def _length(at: slice) -> int:
    return int(at.stop - at.start)


class _Pass:
    """What both directions share: rows leave by `gather` and `dispatch`, and come home by `combine` and
    `output`. ``source`` is T_I or dT_O, ``result`` T_O or dT_I; both (T, M).

    received, sent_back: names of what arrives at the experts and of what leaves them again.
    """

    direction: str
    received: str
    sent_back: str
    home_name: str

    def __init__(self, plan: Plan, cut: Cut, source_TM: Tensor, keep: bool) -> None:
        self.plan, self.cut, self.source_TM, self.keep = plan, cut, source_TM, keep
        self.hooks = plan.hooks
        self.result_TM = torch.empty_like(source_TM, memory_format=torch.contiguous_format)
        self.shared_TM: Tensor | None = None
        self.regroup: Sequence[Tensor | None] = [chunk.regroup for chunk in cut.chunks]
        self.schedule = plan_schedule(plan, self.direction, keep)
        self.sizes = Sizes(
            direction=self.direction,
            extent=extent(cut, plan.has_drops),
            d_model=source_TM.shape[1],
            columns=plan.experts.columns(source_TM.device.type),
            restore=plan.restore if keep else None,
            rearranged=plan.rearranged,
        )
        # All buffers that a collective or a copy touches are made on the compute lane, most of them here, and
        # live until the end of the pass: the other lanes of a GPU are other streams, to which the allocator
        # is blind.
        self.arena = Arena(pool(source_TM.device).device, self.schedule.slots, self.sizes, source_TM)
        self.own: dict[str, Tensor] = {}
        self.home: Tensor | None = None
        for i, chunk in enumerate(cut.chunks):
            if not plan.rotates:
                self.own_buffer("send", i)
                if plan.stages.sharded:
                    self.own_buffer("arrived", i)
                    self.own_buffer("copies", i)
            if not plan.rotates or (not self.sizes.extent.regrouped[i] and self.keeps_received()):
                self.own[f"{self.received}.{i}"] = self.new(chunk.num_gathered, source_TM.shape[1])
        if not plan.rotates:
            self.home = self.new(cut.num_home + plan.has_drops, source_TM.shape[1])
            if plan.has_drops:
                self.home[-1].zero_()  # what a dropped slot adds to its token

    def keeps_received(self) -> bool:
        """Whether rows stay where they arrived after the pass, if they need no sorting."""
        return False

    def new(self, rows: int, columns: int) -> Tensor:
        return self.source_TM.new_empty(rows, columns)

    def own_buffer(self, name: str, i: int) -> Tensor:
        """Memory of its own until the pass ends."""
        key = f"{name}.{i}"
        if key not in self.own:
            self.own[key] = self.new(*self.sizes.shape(key))
        return self.own[key]

    def buffer(self, name: str, i: int) -> Tensor:
        """The slot that the schedule gives it, or memory of its own."""
        key = f"{name}.{i}"
        if key not in self.own and key in self.arena:
            return self.arena.view(key)
        return self.own_buffer(name, i)

    def temporary(self, name: str, i: int) -> Tensor:
        """The slot, or memory that lasts as long as its user holds it."""
        key = f"{name}.{i}"
        return self.arena.view(key) if key in self.arena else self.new(*self.sizes.shape(key))

    def space(self, unit: Unit) -> Space:
        i, at = unit

        def place(name: str, rows: int, columns: int) -> Tensor:
            key = f"{name}{at}.{i}"
            if key not in self.arena:
                return self.new(rows, columns)
            found = self.arena.view(key)
            assert found.shape == (rows, columns), (key, found.shape, rows, columns)
            return found

        return place

    def groups(self, unit: Unit) -> RowGroups:
        i, at = unit
        return self.cut.pieces[i].groups if at else self.cut.chunks[i].received

    # ---- towards the experts

    def gather_rows(self, source_TM: Tensor, out: Tensor, i: int) -> None:
        self.plan.order.order(source_TM, self.cut.row_token[self.cut.chunks[i].sent], out)

    def gather(self, i: int) -> None:
        self.leave("send", "arrived" if self.plan.stages.sharded else self.received, i, self.source_TM)

    def leave(self, name: str, received: str, i: int, source_TM: Tensor) -> None:
        """Rows of chunk i into the buffer that is sent. What hooks make of them has its own columns and type,
        and so has what arrives."""
        if not self.changes_leaving():
            self.gather_rows(source_TM, self.buffer(name, i), i)
            return
        rows_NM = self.new(self.cut.chunks[i].num_sent, source_TM.shape[1])
        self.gather_rows(source_TM, rows_NM, i)
        leaving = self.on_leaving(i, rows_NM, name)
        self.own[f"{name}.{i}"] = leaving
        self.own[f"{received}.{i}"] = leaving.new_empty(self.cut.chunks[i].num_arrived, leaving.shape[1])

    def open(self, i: int) -> None:
        """Callbacks on the rows that S brought, before they are gathered inside the node."""
        self.own[f"opened.{i}"] = self.on_arrival(i, self.buffer("arrived", i))

    def changes_leaving(self) -> bool:
        """Whether hooks see what leaves or what arrives: their graphs may hold it."""
        raise NotImplementedError

    def on_leaving(self, i: int, rows_NM: Tensor, name: str) -> Tensor:
        raise NotImplementedError

    def on_arrival(self, i: int, rows: Tensor) -> Tensor:
        """What the hooks make of rows that have arrived for the experts."""
        raise NotImplementedError

    def gather_local(self, source_TM: Tensor, out: Tensor, j: int) -> Tensor:
        self.plan.order.order(source_TM, self.cut.row_token[self.cut.pieces[j].rows], out)
        return out

    def send_rows(self, name: str, received: str, i: int) -> dist.Work | None:
        chunk = self.cut.chunks[i]
        return self.plan.dispatch.exchange(
            self.buffer(name, i), chunk.send_rows, self.buffer(received, i), chunk.recv_rows, chunk.relayed[0]
        )

    def dispatch(self, i: int) -> dist.Work | None:
        return self.send_rows("send", "arrived" if self.plan.stages.sharded else self.received, i)

    def gather_inside(self, arrived: str, received: str, copies: str, i: int) -> None:
        self.plan.sharing.all_gather(
            self.buffer(arrived, i),
            self.buffer(received, i),
            self.cut.chunks[i].gathered,
            self.buffer(copies, i),
        )

    def all_gather(self, i: int) -> None:
        self.gather_inside("opened" if self.plan.stages.hooked else "arrived", self.received, "copies", i)

    def arrived(self, i: int) -> Tensor:
        """What the experts get: behind the hooks, which have run already where experts are sharded."""
        rows = self.buffer(self.received, i)
        return rows if self.plan.stages.hooked else self.on_arrival(i, rows)

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
        if self.changes_returning() and not self.plan.stages.hooked:
            return self.own_buffer(self.sent_back, i)
        return self.buffer(self.sent_back, i)

    def in_source_order(self, i: int, rows_NM: Tensor) -> None:
        """The experts' results as their rows came, summed where these came once for several, past the
        hooks."""
        regroup = self.regroup[i]
        if regroup is not None:
            leaving = self.leaving_buffer(i)
            if self.cut.once is not None:
                leaving.zero_().index_add_(0, regroup, rows_NM)
            else:
                leaving.index_copy_(0, regroup, rows_NM)
        if self.plan.stages.hooked:
            self.own_buffer("leaving", i)  # hooks' graphs may hold it
        if self.plan.stages.sharded:
            self.buffer("leaving", i), self.buffer("parts", i)  # made here, on the compute lane
        elif self.changes_returning():
            self.return_changed(self.sent_back, i, self.leaving_buffer(i))

    def return_changed(self, name: str, i: int, rows_NM: Tensor) -> None:
        """What hooks make of results, ready to leave, and memory for what comes home."""
        leaving = self.on_returning(i, rows_NM)
        self.own[f"{name}.{i}"] = leaving
        self.own[f"came.{i}"] = leaving.new_empty(self.cut.chunks[i].num_sent, leaving.shape[1])

    def close(self, i: int) -> None:
        """Callbacks on the sums that RS made."""
        leaving = self.buffer("leaving", i)
        if self.changes_returning():
            self.return_changed("closed", i, leaving)
        else:
            self.own[f"closed.{i}"] = leaving

    def changes_returning(self) -> bool:
        raise NotImplementedError

    def on_returning(self, i: int, rows_NM: Tensor) -> Tensor:
        raise NotImplementedError

    def on_return(self, i: int, rows: Tensor) -> Tensor:
        """What the hooks make of rows that have come home."""
        raise NotImplementedError

    def reduce_scatter(self, i: int) -> None:
        self.plan.sharing.reduce_scatter(
            self.buffer(self.sent_back, i),
            self.buffer("leaving", i),
            self.cut.chunks[i].gathered,
            self.buffer("parts", i),
        )

    def home_rows(self, i: int, at: slice) -> Tensor:
        """The part of home for rows ``at`` of the sorted order, which are chunk i's."""
        if self.home is not None:
            return self.home[at]
        start = self.cut.home(i).start
        return self.temporary(self.home_name, i)[at.start - start : at.stop - start]

    def combine(self, i: int) -> dist.Work | None:
        chunk = self.cut.chunks[i]
        stages = self.plan.stages
        name = "closed" if stages.hooked else "leaving" if stages.sharded else self.sent_back
        leaving = self.buffer(name, i)
        home = self.own[f"came.{i}"] if f"came.{i}" in self.own else self.home_rows(i, chunk.sent)
        return self.plan.combine.exchange(leaving, chunk.recv_rows, home, chunk.send_rows, chunk.relayed[1])

    def output(self, i: int) -> None:
        """Each token's rows are summed in the order of its choices, whatever order they came home in."""
        plan, chunk = self.plan, self.cut.chunks[i]
        tokens, top_k = chunk.tokens, plan.top_k
        if self.changes_returning():
            self.home_rows(i, chunk.sent).copy_(self.on_return(i, self.own.pop(f"came.{i}")))
        row = self.cut.position[chunk.slots]
        home = self.home
        if home is None:
            home, at = self.temporary(self.home_name, i), self.cut.home(i)
            row = row - at.start
            if plan.has_drops:
                home[-1].zero_()
        if plan.has_drops:
            row = row.clamp(max=home.shape[0] - 1)
        of_slot = plan.slot_token
        if of_slot is not None:
            of_slot = of_slot[chunk.slots] - tokens.start
        out_TM = self.result_TM[tokens]
        plan.order.restore(home, row.view(-1, top_k), out_TM, of_slot)
        if self.shared_TM is not None:
            out_TM.add_(self.shared_TM[tokens])

    def place_shared(self) -> Tensor:
        """Where the shared expert's result for all tokens goes; `output` adds it."""
        self.shared_TM = torch.empty_like(self.result_TM)
        return self.shared_TM

    def shared_groups(self) -> RowGroups:
        tokens = self.source_TM.shape[0]
        ends = None
        if self.source_TM.is_cuda:
            ends = torch.full((1,), tokens, dtype=torch.int32, device=self.source_TM.device)
        return RowGroups(counts=(tokens,), ends=ends)

    def run_schedule(self, actions: dict[Kind, Callable[[int], dist.Work | None]]) -> None:
        every = {
            Kind.GATHER: self.gather,
            Kind.DISPATCH: self.dispatch,
            Kind.OPEN: self.open,
            Kind.CLOSE: self.close,
            Kind.ALL_GATHER: self.all_gather,
            Kind.REDUCE_SCATTER: self.reduce_scatter,
            Kind.COMBINE: self.combine,
            Kind.OUTPUT: self.output,
        }
        try:
            engine.run(
                self.schedule,
                every | actions,
                self.source_TM,
                self.plan.grid.all,
                in_steps=self.plan.in_steps or (self.direction == "backward" and self.plan.stages.gradients),
                of=self.plan.experts,
            )
        finally:
            self.arena.close()
            self.own.clear()  # a lane's thread may hold this pass a moment longer
            self.home = None


class _Forward(_Pass):
    direction, received, sent_back, home_name = "forward", "T_DI", "T_DO", "home"

    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        inputs = inputs.padded(plan.padding)
        x_TM = inputs.x_TM
        super().__init__(plan, plan.forward, x_TM, keep)
        self.inputs, self.parameters = inputs, inputs.parameters
        self.weight = inputs.weight_TK.reshape(-1)
        self.kept: dict[Unit, Kept] = {}
        self.passed: dict[tuple[str, int], Passed] = {}
        self.leaving_device: dict[tuple[Kind, int], list[tuple[Tensor, Tensor]]] = {}
        self.weight_received: Tensor | None = None
        self.host_bytes_due = 0
        if keep and plan.restore.dispatched == "offload":
            units = (*(piece.groups for piece in self.cut.pieces), *(c.received for c in self.cut.chunks))
            row_bytes = x_TM.shape[1] * x_TM.element_size()
            self.host_bytes_due = sum(aligned(groups.num_rows * row_bytes) for groups in units)
        journey = self.cut.weights
        if journey is not None:
            self.weight_sent = self.weight.index_select(0, journey.slot)
            self.weight_arrived = self.weight.new_empty(self.cut.num_received)
            self.weight_own = self.weight_arrived  # before it is shared inside the node
            self.weight_copies = self.weight_arrived
            if plan.stages.sharded:
                own = sum(journey.recv)
                self.weight_own = self.weight.new_empty(own)
                self.weight_copies = self.weight.new_empty(plan.sharing.copies(own))
        once = self.cut.once
        if once is not None:
            self.number_arrived = once.number.new_empty(self.cut.num_received)
            self.number_own = once.number.new_empty(self.weight_own.shape)
            self.number_copies = once.number.new_empty(self.weight_copies.shape)

    def keeps_received(self) -> bool:
        return self.keep and self.plan.restore.dispatched == "keep"

    def run(self) -> Tensor:
        self.run_schedule(
            {
                Kind.WEIGHTS: self.send_weights,
                Kind.SHARE_WEIGHTS: self.share_weights,
                Kind.SHARED: self.compute_shared,
                Kind.LOCAL: self.compute_local,
                Kind.COMPUTE: self.compute,
                **{kind: self._copy_out(kind) for kind in _COPIES_OUT.values()},
            }
        )
        padding = self.plan.padding
        return self.result_TM if padding is None else padding.gather(self.result_TM)

    def send_weights(self, _: int) -> dist.Work | None:
        journey, once = self.cut.weights, self.cut.once
        assert journey is not None
        scalars = self.plan.scalars
        work = scalars.exchange(self.weight_sent, journey.send, self.weight_own, journey.recv)
        if once is None:
            return work
        numbers = scalars.exchange(once.number, journey.send, self._number_target(), journey.recv)
        return _both(work, numbers)

    def _number_target(self) -> Tensor:
        return self.number_own if self.plan.stages.sharded else self.number_arrived

    def share_weights(self, _: int) -> None:
        journey = self.cut.weights
        assert journey is not None
        share = self.plan.sharing.all_gather
        share(self.weight_own, self.weight_arrived, journey.gathered, self.weight_copies)
        if self.cut.once is not None:
            share(self.number_own, self.number_arrived, journey.gathered, self.number_copies)

    # ---- hooks

    def changes_leaving(self) -> bool:
        return self.hooks.on_dispatch

    def on_leaving(self, i: int, rows_NM: Tensor, name: str) -> Tensor:
        return self._through("before_dispatch", i, rows_NM, last="after_dispatch")

    def on_arrival(self, i: int, rows: Tensor) -> Tensor:
        return self._through("after_dispatch", i, rows)

    def changes_returning(self) -> bool:
        return self.hooks.on_combine

    def on_returning(self, i: int, rows_NM: Tensor) -> Tensor:
        return self._through("before_combine", i, rows_NM, last="after_combine")

    def on_return(self, i: int, rows: Tensor) -> Tensor:
        return self._through("after_combine", i, rows)

    def _through(self, point: str, i: int, rows: Tensor, last: str | None = None) -> Tensor:
        """rows behind the hooks of a point; ``last``: the point that may still follow before they are
        used."""
        if not self.hooks.has(point):
            return rows
        like = None if last is not None and self.hooks.has(last) else self.source_TM
        rows, passed = callbacks.forward(self.hooks, point, rows, i, like, self.keep)
        if passed is not None:
            self.passed[point, i] = passed
        return rows

    # ---- experts

    def compute_shared(self, _chunk: int) -> None:
        experts, weight_T = self.plan.shared, self.inputs.shared_weight_T
        assert experts is not None and weight_T is not None
        _, hidden = experts.compute(
            self.source_TM,
            weight_T,
            self.shared_groups(),
            self.inputs.shared_parameters,
            out=self.place_shared(),
            keep=self.keep,
        )
        if self.keep:
            self.kept[SHARED] = Kept(hidden=hidden)

    def compute_local(self, j: int) -> None:
        piece = self.cut.pieces[j]
        weight_N = self.weight.index_select(0, self.cut.slot[piece.rows])
        rows_NM = self.gather_local(self.source_TM, self.temporary("T_DI_L", j), j)
        self._compute((j, "_L"), rows_NM, weight_N, self.home_rows(j, piece.rows))

    def compute(self, i: int) -> None:
        if self.weight_received is None:
            self.weight_received = self._sorted_weights()
            self.weight_of_chunk = split_by_chunk(self.weight_received, self.cut)
        arrived = self.arrived(i)
        out_NM = self.result_of(i)
        rows_NM = self.in_expert_order("T_DI", i, arrived)
        self._compute((i, ""), rows_NM, self.weight_of_chunk[i], out_NM)
        self.in_source_order(i, out_NM)

    def _sorted_weights(self) -> Tensor:
        """The routing weights of the received rows, by chunk and in expert order. With them came which rows
        they belong to, where rows travel once."""
        assert self.cut.weights is not None
        regroup, once = self.cut.weights.regroup, self.cut.once
        if once is not None:
            row = once.base + self.number_arrived
            self.regroup = split_by_chunk(row if regroup is None else row.index_select(0, regroup), self.cut)
        return self.weight_arrived if regroup is None else self.weight_arrived.index_select(0, regroup)

    def _compute(self, unit: Unit, rows_NM: Tensor, weight_N: Tensor, out_NM: Tensor) -> None:
        experts, restore = self.plan.experts, self.plan.restore
        remakes = self.keep and restore.hidden != "keep"
        recipe = experts.recipe(rows_NM.device) if remakes else None
        version = rows_NM._version if recipe is not None else 0
        keeps_hidden = self.keep and restore.hidden != "recompute"
        _, hidden = experts.compute(
            rows_NM,
            weight_N,
            self.groups(unit),
            self.parameters,
            space=self.space(unit),
            out=out_NM,
            keep=keeps_hidden,
        )
        if not self.keep:
            return
        if recipe is not None and restore.hidden == "recompute":
            self._check_recipe(recipe, rows_NM, version)
        kept = self.kept[unit] = Kept(hidden=hidden, recipe=recipe)
        if restore.dispatched == "keep":
            kept.rows_NM = rows_NM
        elif restore.dispatched == "offload":
            self.host_bytes_due -= aligned(rows_NM.nbytes)
            try:
                kept.rows_NM = self._to_host(unit, "T_DI", [rows_NM])[0]
            except HostMemoryError:  # there is enough in all, but in pieces
                kept.rows_NM = rows_NM.clone()
        if hidden is not None and restore.hidden == "offload":
            try:
                # T_DI of the chunks to come has been promised its place.
                tensors = self._to_host(unit, "T_M", hidden.tensors, leave=self.host_bytes_due)
                kept.hidden = replace(hidden, tensors=tensors)
            except HostMemoryError as error:
                # Modules may draw random numbers, which other chunks would not repeat, or spoil their input.
                if recipe is None or not (self.plan.rearranged or rows_NM._version != version):
                    warn_once(f"{error}; T_M is recomputed where it does not fit")
                    kept.hidden = None
                else:
                    warn_once(f"{error}; T_M stays on the device where it does not fit")

    def _check_recipe(self, recipe: Any, rows_NM: Tensor, version: int) -> None:
        if rows_NM._version != version:
            raise RuntimeError(
                "an expert changes its input in place: its hidden cannot be recomputed from that input, so "
                'memory_reuse must keep or offload it (hidden="keep" or "offload")'
            )
        if self.plan.rearranged and not self.plan.experts.is_repeatable(recipe):
            raise RuntimeError(
                "an expert draws random numbers: it can be recomputed only where backward has forward's "
                f"chunks ({len(self.plan.forward.chunks)}), not {len(self.plan.backward.chunks)}"
            )

    def _to_host(self, unit: Unit, tensor: str, tensors: Sequence[Tensor], leave: int = 0) -> list[Tensor]:
        """Host memory for tensors; the copy itself is a task that follows. leave: bytes for others."""
        host = pool(self.source_TM.device).host
        wanted = sum(aligned(each.nbytes) for each in tensors)
        if leave and wanted + leave > host.free_bytes:
            raise HostMemoryError(
                f"host memory for offloading: {wanted} bytes wanted, {host.free_bytes} of {host.limit_bytes} "
                f"left, {leave} of them for T_DI"
            )
        targets = [host.take(each.shape, each.dtype) for each in tensors]
        pairs = list(zip(targets, tensors, strict=True))
        self.leaving_device[_COPIES_OUT[tensor + unit[1]], unit[0]] = pairs
        return targets

    def _copy_out(self, kind: Kind) -> Callable[[int], None]:
        def act(i: int) -> None:
            for target, tensor in self.leaving_device.pop((kind, i), ()):
                if not self.arena.owns(tensor):
                    # A module's own, or a part of it: made on the compute lane, and freed once this returns.
                    hold_for(current_stream(tensor), tensor)
                copy(target, tensor)

        return act


_COPIES_OUT = {
    "T_DI": Kind.COPY_ROWS_OUT,
    "T_M": Kind.COPY_HIDDEN_OUT,
    "T_DI_L": Kind.LOCAL_COPY_ROWS_OUT,
    "T_M_L": Kind.LOCAL_COPY_HIDDEN_OUT,
}


@dataclass(kw_only=True)
class _Given:
    """What a backward pass starts from, beside the gradient. wanted: of which of ``inputs.all`` gradients
    are. regroup: as forward had it, where it is not the plan's."""

    inputs: Inputs
    weight_received: Tensor | None
    kept: dict[Unit, Kept]
    wanted: Sequence[bool]
    regroup: Sequence[Tensor | None] | None = None
    passed: dict[tuple[str, int], Passed] = field(default_factory=dict)


class _Backward(_Pass):
    direction, received, sent_back, home_name = "backward", "dT_DO", "dT_DI", "dhome"

    def __init__(self, plan: Plan, grad_TM: Tensor, given: _Given) -> None:
        if plan.padding is not None:
            given = replace(given, inputs=given.inputs.padded(plan.padding))
            grad_TM = plan.padding.spread(grad_TM)
        super().__init__(plan, plan.backward, grad_TM, keep=True)
        self.given, self.kept, self.parameters = given, given.kept, given.inputs.parameters
        if given.regroup is not None:
            self.regroup = given.regroup
        additions = sum(task.kind in (Kind.WGRAD, Kind.LOCAL_WGRAD) for task in self.schedule.tasks)
        wanted = given.inputs.like(given.wanted)

        def sums(parameters: Sequence[Tensor], wants: Sequence[Any], times: int) -> list[GradientSum | None]:
            pairs = zip(parameters, wants, strict=True)
            return [GradientSum(parameter, times) if want else None for parameter, want in pairs]

        self.sums = sums(given.inputs.parameters, wanted.parameters, additions)
        self.shared_sums = sums(given.inputs.shared_parameters, wanted.shared_parameters, 1)
        self.shared_pending: Any = None
        self.grad_shared_weight: Tensor | None = None
        self.grad_hooks: list[Tensor | None] = [None] * len(given.inputs.hook_parameters)
        self.compute_stream = current_stream(grad_TM)
        self.rows: dict[Unit, Tensor] = {}
        self.hidden: dict[Unit, Hidden] = {}
        self.pending: dict[Unit, Any] = {}
        weight = given.inputs.weight_TK
        self.weight = weight.reshape(-1)
        # Dropped slots have no row; nothing is ever added to their weight's gradient.
        self.grad_weight = weight.new_zeros(plan.num_slots)
        self.grad_weight_rows = weight.new_empty(self.cut.num_received)
        journey = self.cut.weights
        if journey is not None:
            received = given.weight_received
            assert received is not None
            if plan.weight_map is not None:
                received = received.index_select(0, plan.weight_map)
            self.weight_of_chunk = split_by_chunk(received, self.cut)
            self.grad_weight_gathered = torch.empty_like(self.grad_weight_rows)
            self.grad_weight_leaving = self.grad_weight_gathered
            if plan.stages.sharded:
                own = sum(journey.recv)
                self.grad_weight_leaving = weight.new_empty(own)
                self.grad_weight_parts = weight.new_empty(own * plan.grid.inside.size)
            self.grad_weight_home = weight.new_empty(journey.slot.shape[0])
        self.grad_weight_of_chunk = split_by_chunk(self.grad_weight_rows, self.cut)
        self.chunks_done = 0

    def run(self) -> list[Tensor | None]:
        """The gradients of ``inputs.all``."""
        sharded, gradients = self.plan.stages.sharded, self.plan.gradients
        if gradients is not None:
            gradients.begins()
        self.run_schedule(
            {
                Kind.GATHER_AGAIN: self.gather_again,
                Kind.DISPATCH_AGAIN: lambda i: self.send_rows(
                    "send_again", "arrived_again" if sharded else "T_DI", i
                ),
                Kind.OPEN_AGAIN: self.open_again,
                Kind.ALL_GATHER_AGAIN: lambda i: self.gather_inside(
                    "opened_again" if self.plan.stages.hooked else "arrived_again", "T_DI", "copies_again", i
                ),
                Kind.SHARE_WEIGHTS: self.sum_weights,
                Kind.SHARED: self.shared_gradient,
                Kind.SHARED_WGRAD: self.shared_weight_gradient,
                Kind.GRADIENTS: lambda _: None if gradients is None else gradients.inside(),
                Kind.COPY_ROWS_IN: lambda i: self.fetch_rows((i, "")),
                Kind.COPY_HIDDEN_IN: lambda i: self.fetch_hidden((i, "")),
                Kind.LOCAL_COPY_ROWS_IN: lambda i: self.fetch_rows((i, "_L")),
                Kind.LOCAL_COPY_HIDDEN_IN: lambda i: self.fetch_hidden((i, "_L")),
                Kind.RECOMPUTE: lambda i: self.recompute((i, "")),
                Kind.LOCAL_RECOMPUTE: lambda i: self.recompute((i, "_L")),
                Kind.LOCAL: self.input_gradient_local,
                Kind.LOCAL_WGRAD: lambda i: self.weight_gradient((i, "_L")),
                Kind.COMPUTE: self.input_gradient,
                Kind.WGRAD: lambda i: self.weight_gradient((i, "")),
                Kind.WEIGHTS: self.return_weights,
            }
        )
        if gradients is not None:
            gradients.ends()
        journey = self.cut.weights
        if journey is not None:
            self.grad_weight[journey.slot] = self.grad_weight_home
        grad_TM, grad_weight_TK = self.result_TM, self.grad_weight.view_as(self.given.inputs.weight_TK)
        padding = self.plan.padding
        if padding is not None:
            grad_TM, grad_weight_TK = padding.gather(grad_TM), padding.gather_weights(grad_weight_TK)
        grads: list[Tensor | None] = [grad_TM, grad_weight_TK, self.grad_shared_weight]
        for sums in (self.sums, self.shared_sums):
            while sums:  # each sum goes as soon as it is rounded
                total = sums.pop(0)
                grads.append(None if total is None else total.result())
        return [*grads, *self.grad_hooks]

    # ---- hooks, backwards

    def changes_leaving(self) -> bool:
        return self.hooks.on_combine

    def on_leaving(self, i: int, rows_NM: Tensor, name: str) -> Tensor:
        return self._back_through("after_combine", i, rows_NM)

    def on_arrival(self, i: int, rows: Tensor) -> Tensor:
        return self._back_through("before_combine", i, rows)

    def changes_returning(self) -> bool:
        return self.hooks.on_dispatch

    def on_returning(self, i: int, rows_NM: Tensor) -> Tensor:
        return self._back_through("after_dispatch", i, rows_NM)

    def on_return(self, i: int, rows: Tensor) -> Tensor:
        return self._back_through("before_dispatch", i, rows)

    def _back_through(self, point: str, i: int, grad: Tensor) -> Tensor:
        if not self.hooks.has(point):
            return grad
        found_grad, *of_parameters = callbacks.backward(
            self.given.passed[point, i], grad, self.given.inputs.hook_parameters
        )
        for j, found in enumerate(of_parameters):
            if found is not None:
                total = self.grad_hooks[j]
                self.grad_hooks[j] = found if total is None else total + found
        assert found_grad is not None
        return found_grad

    # ---- the shared expert

    def shared_gradient(self, _chunk: int) -> None:
        experts, inputs = self.plan.shared, self.given.inputs
        hidden = self.kept[SHARED].hidden
        assert experts is not None and inputs.shared_weight_T is not None and hidden is not None
        _, self.grad_shared_weight, self.shared_pending = experts.input_gradient(
            self.source_TM.clone(),  # it is written over, and every chunk still reads it
            inputs.x_TM,
            inputs.shared_weight_T,
            hidden,
            self.shared_groups(),
            inputs.shared_parameters,
            out=self.place_shared(),
        )

    def shared_weight_gradient(self, _: int) -> None:
        assert self.plan.shared is not None
        self.plan.shared.weight_gradient(self.shared_pending, self.shared_groups(), self.shared_sums)
        self.shared_pending = None

    # ---- T_DI and T_M, restored

    def gather_again(self, i: int) -> None:
        x_TM, chunk = self.given.inputs.x_TM, self.cut.chunks[i]
        hooks = self.hooks
        if not hooks.on_dispatch:
            self.gather_rows(x_TM, self.buffer("send_again", i), i)
            return
        rows = x_TM.new_empty(chunk.num_sent, x_TM.shape[1])
        self.gather_rows(x_TM, rows, i)
        if hooks.has("before_dispatch"):
            like = None if hooks.has("after_dispatch") else x_TM
            rows, _ = callbacks.forward(hooks, "before_dispatch", rows, i, like, keep=False)
        self.own[f"send_again.{i}"] = rows
        arrived = "arrived_again" if self.plan.stages.sharded else "T_DI"
        self.own[f"{arrived}.{i}"] = rows.new_empty(chunk.num_arrived, rows.shape[1])

    def opened_again(self, i: int, rows: Tensor) -> Tensor:
        if self.hooks.has("after_dispatch"):
            x_TM = self.given.inputs.x_TM
            rows, _ = callbacks.forward(self.hooks, "after_dispatch", rows, i, x_TM, keep=False)
        return rows

    def open_again(self, i: int) -> None:
        self.own[f"opened_again.{i}"] = self.opened_again(i, self.buffer("arrived_again", i))

    def arrived_again(self, i: int) -> Tensor:
        rows = self.buffer("T_DI", i)
        return rows if self.plan.stages.hooked else self.opened_again(i, rows)

    def parts(self, unit: Unit) -> list[tuple[Kept, Runs]]:
        """What forward kept, by chunk of forward, with where its rows stand here."""
        i, at = unit
        joined: Joined | None = self.plan.joined_local if at else self.plan.joined_received
        if joined is None:
            whole = slice(0, self.groups(unit).num_rows)
            return [(self.kept[unit], ((whole, whole),))]
        return [(self.kept[there, at], runs) for there, runs in joined[i]]

    def fetch_rows(self, unit: Unit) -> None:
        """Into the slot of T_DI, from the host or from what other chunks of forward kept."""
        i, at = unit
        rows_NM = self.temporary(f"T_DI{at}", i)
        for kept, runs in self.parts(unit):
            assert kept.rows_NM is not None
            for there, here in runs:
                copy(rows_NM[here], kept.rows_NM[there])
        self.rows[unit] = rows_NM

    def fetch_hidden(self, unit: Unit) -> None:
        """Into the slot of T_M, or into memory of its own where modules saved what they liked."""
        parts = self.parts(unit)
        if any(kept.hidden is None for kept, _ in parts):
            return  # it did not fit on the host, and is made again when its turn comes
        experts, num_rows = self.plan.experts, self.groups(unit).num_rows
        given = [(kept.hidden, runs) for kept, runs in parts if kept.hidden is not None]
        if not given:
            return
        hidden = experts.join(given, num_rows, space=self.space(unit))
        if experts.columns(self.source_TM.device.type).hidden == 0 and self.plan.restore.hidden == "offload":
            hidden = replace(hidden, tensors=[self._fetched(tensor) for tensor in hidden.tensors])
        self.hidden[unit] = hidden

    def _fetched(self, tensor: Tensor) -> Tensor:
        here = torch.empty_like(tensor, device=self.source_TM.device)
        copy(here, tensor)
        hold_for(self.compute_stream, here)  # the copy lane made it, the compute lane reads and frees it
        return here

    def rows_of(self, unit: Unit) -> Tensor:
        """T_DI of a unit in expert order, arranged by whichever task needs it first."""
        if unit in self.rows:
            return self.rows[unit]
        (i, at), dispatched = unit, self.plan.restore.dispatched
        if dispatched == "communicate":
            if at:
                self.rows[unit] = self.gather_local(self.given.inputs.x_TM, self.temporary("T_DI_L", i), i)
            else:
                self.rows[unit] = self.in_expert_order("T_DI", i, self.arrived_again(i))
        elif self.plan.rearranged:
            self.fetch_rows(unit)
        else:
            rows_NM = self.kept[unit].rows_NM
            assert rows_NM is not None
            self.rows[unit] = rows_NM
        return self.rows[unit]

    def recompute(self, unit: Unit) -> None:
        recipe = next((kept.recipe for kept, _ in self.parts(unit)), None)
        self.hidden[unit] = self.plan.experts.recompute(
            self.rows_of(unit), self.groups(unit), self.parameters, recipe, space=self.space(unit)
        )

    def hidden_of(self, unit: Unit) -> Hidden:
        if unit not in self.hidden:
            kept = self.kept.get(unit)
            if self.plan.restore.hidden == "keep" and not self.plan.rearranged:
                assert kept is not None and kept.hidden is not None
                return kept.hidden
            if self.plan.restore.hidden == "keep":
                self.fetch_hidden(unit)
            if unit not in self.hidden:
                self.recompute(unit)
        return self.hidden.pop(unit)

    # ---- gradients

    def input_gradient_local(self, j: int) -> None:
        piece, unit = self.cut.pieces[j], (j, "_L")
        slot = self.cut.slot[piece.rows]
        grad_NM = self.gather_local(self.source_TM, self.temporary("dT_DO_L", j), j)
        weight_N = self.weight.index_select(0, slot)
        grad_weight_N = self._input_gradient(unit, grad_NM, weight_N, self.home_rows(j, piece.rows))
        self.grad_weight[slot] = grad_weight_N.to(self.grad_weight.dtype)

    def input_gradient(self, i: int) -> None:
        out_NM = self.result_of(i)
        grad_NM = self.in_expert_order("dT_DO", i, self.arrived(i))
        grad_weight_N = self._input_gradient((i, ""), grad_NM, self.weight_of_chunk[i], out_NM)
        self.in_source_order(i, out_NM)
        self.grad_weight_of_chunk[i].copy_(grad_weight_N)
        self.chunks_done += 1
        if self.chunks_done == len(self.cut.chunks):
            self._weights_in_source_order()

    def _input_gradient(self, unit: Unit, grad_NM: Tensor, weight_N: Tensor, out_NM: Tensor) -> Tensor:
        rows_NM = self.rows_of(unit)
        _, grad_weight_N, self.pending[unit] = self.plan.experts.input_gradient(
            grad_NM,
            rows_NM,
            weight_N,
            self.hidden_of(unit),
            self.groups(unit),
            self.parameters,
            space=self.space(unit),
            out=out_NM,
        )
        return grad_weight_N

    def _weights_in_source_order(self) -> None:
        """After the last chunk, still on the compute lane: the message of weights' gradients."""
        assert self.cut.weights is not None
        regroup = self.cut.weights.regroup
        if regroup is None:
            self.grad_weight_gathered.copy_(self.grad_weight_rows)
        else:
            self.grad_weight_gathered.index_copy_(0, regroup, self.grad_weight_rows)

    def sum_weights(self, _: int) -> None:
        """Each shard made a part of the inner products that are the routing weights' gradients."""
        journey = self.cut.weights
        assert journey is not None
        self.plan.sharing.reduce_scatter(
            self.grad_weight_gathered, self.grad_weight_leaving, journey.gathered, self.grad_weight_parts
        )

    def return_weights(self, _: int) -> dist.Work | None:
        journey = self.cut.weights
        assert journey is not None
        return self.plan.scalars.exchange(
            self.grad_weight_leaving, journey.recv, self.grad_weight_home, journey.send
        )

    def weight_gradient(self, unit: Unit) -> None:
        self.plan.experts.weight_gradient(self.pending.pop(unit), self.groups(unit), self.sums)
        self.rows.pop(unit, None)


def split_by_chunk(per_row: Tensor, cut: Cut) -> tuple[Tensor, ...]:
    return torch.split(per_row, [chunk.received.num_rows for chunk in cut.chunks])


class _Both:
    """Two messages of one task."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _both(*works: dist.Work | None) -> dist.Work | None:
    begun: Any = _Both([work for work in works if work is not None])
    waited: dist.Work | None = begun
    return waited


def forward_pass(plan: Plan, inputs: Inputs) -> Forwarded:
    """Forward by ``plan``'s schedule, with all that a backward pass needs."""
    done = _Forward(plan, inputs, keep=True)
    return Forwarded(
        y_TM=done.run(),
        kept=done.kept,
        weight_received=done.weight_received,
        passed=done.passed,
        regroup=done.regroup if plan.forward.once is not None else (),
    )


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        inputs: Inputs,
        forward: ForwardPass | None,
        anchor: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        inputs = inputs.like(tensors)
        done = (forward or forward_pass)(plan, inputs)
        needs_x = plan.restore.dispatched == "communicate" or plan.stages.shared
        saved = [*inputs.all, done.weight_received]
        saved[0] = inputs.x_TM if needs_x else None
        ctx.units, ctx.passed = [], []
        for unit, kept in done.kept.items():
            hidden, hidden_tensors = kept.hidden, kept.hidden.tensors if kept.hidden is not None else ()
            emptied = None if hidden is None else replace(hidden, tensors=())
            ctx.units.append((unit, kept.recipe, emptied, len(hidden_tensors)))
            saved += [kept.rows_NM, *hidden_tensors]
        for point, passed in done.passed.items():
            ctx.passed.append((point, passed.emptied(), len(passed.tensors)))
            saved += passed.tensors
        saved += done.regroup  # which rows are whose was not known when the plan was made
        ctx.save_for_backward(*saved)
        ctx.plan, ctx.inputs = plan, inputs.like([None] * len(tensors))
        return done.y_TM

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable lets this pass where grad_TM needs no gradient, and what follows is wrong.
        if torch.is_grad_enabled():
            raise RuntimeError("a MoELayer has no second derivative: create_graph (True) must be False")
        saved = iter(ctx.saved_tensors)
        inputs = ctx.inputs.like(list(itertools.islice(saved, len(ctx.inputs.all))))
        given = _Given(
            inputs=inputs,
            weight_received=next(saved),
            kept={},
            wanted=ctx.needs_input_grad[4:],
        )
        for unit, recipe, hidden, count in ctx.units:
            rows_NM = next(saved)
            tensors = list(itertools.islice(saved, count))
            restored = None if hidden is None else replace(hidden, tensors=tensors)
            given.kept[unit] = Kept(rows_NM, restored, recipe)
        for point, passed, count in ctx.passed:
            given.passed[point] = replace(passed, tensors=tuple(itertools.islice(saved, count)))
        if ctx.plan.forward.once is not None:
            given = replace(given, regroup=list(saved))
        with torch.autocast(grad_TM.device.type, enabled=False):
            grads = _Backward(ctx.plan, grad_TM, given).run()
        return None, None, None, None, *grads


def run_experts(
    plan: Plan, inputs: Inputs, *, needs_grad: bool, forward: ForwardPass | None = None
) -> Tensor:
    """T_O (T, M) of the tokens under ``plan``, with a hand-written backward where ``needs_grad``.

    needs_grad must be the same on every rank: where one rank differentiates all take part, whatever of
    their own inputs needs a gradient. forward: who goes forward instead of the plan's schedule.
    """
    if needs_grad and torch.is_grad_enabled():
        y_TM: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
            plan, inputs.like([None] * len(inputs.all)), forward, make_anchor(inputs.x_TM), *inputs.all
        )
        return y_TM
    with torch.no_grad():
        if forward is not None:
            return forward(plan, inputs).y_TM
        return _Forward(plan, inputs, keep=False).run()


def make_anchor(like: Tensor) -> Tensor:
    """A leaf that always needs a gradient: it keeps this rank's backward in the graph."""
    return torch.empty(0, device=like.device, requires_grad=True)


def run_both(plan: Plan, inputs: Inputs, now: Callable[[], float]) -> tuple[float, float, float]:
    """Both passes, with what comes out for a gradient, and all results thrown away: the times of ``now()``
    before, between and after them."""
    with torch.no_grad():
        start = now()
        done = forward_pass(plan, inputs)
        middle = now()
        given = _Given(
            inputs=inputs,
            weight_received=done.weight_received,
            kept=dict(done.kept),
            wanted=[tensor is not None and tensor.requires_grad for tensor in inputs.all],
            regroup=done.regroup or None,
            passed=dict(done.passed),
        )
        _Backward(plan, done.y_TM, given).run()
        return start, middle, now()
