"""Forward and backward of the experts' part of a layer: what each task of a schedule does.

One autograd function holds both, so that backward's order is the schedule's and not autograd's. T_DO is
not saved; the routing is never decided twice.

Letters: T tokens, K choices, N rows, M = d_model, n chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.experts.base import Hidden
from pmoe.experts.products import GradientSum
from pmoe.pipeline import engine
from pmoe.pipeline.plan import Plan
from pmoe.pipeline.schedule import Kind, Schedule, backward_schedule, forward_schedule, sequential


@dataclass
class Rows:
    """What forward keeps of a group of rows: T_DI, the routing weights, T_M (or a module's graphs).

    hidden is None only where nothing is kept.
    """

    rows_NM: Tensor
    weight_N: Tensor
    hidden: Hidden | None = None


def plan_schedule(plan: Plan, direction: str) -> Schedule:
    """The schedule that a pass of ``plan`` runs; every rank of the group builds the same."""
    build = forward_schedule if direction == "forward" else backward_schedule
    # Whether there is a journey, not how many rows this rank sends: all ranks issue the same collectives.
    schedule = build(len(plan.chunks), local=plan.bypass_local, remote=plan.weights is not None)
    return sequential(schedule) if plan.sequential else schedule


class _Pass:
    """What both directions share: rows leave by `gather` and `dispatch`, and come home by `combine` and
    `output`. ``source`` is T_I or dT_O, ``result`` T_O or dT_I; both (T, M)."""

    def __init__(self, plan: Plan, source_TM: Tensor, result_TM: Tensor) -> None:
        self.plan, self.source_TM, self.result_TM = plan, source_TM, result_TM
        # All buffers that a collective touches are made here, on the compute lane, and live until the end
        # of the pass: the communication lane of a GPU is another stream, to which the allocator is blind.
        self.send = [self._rows(sum(chunk.send_rows)) for chunk in plan.chunks]
        self.arrived = [self._rows(chunk.received.num_rows) for chunk in plan.chunks]
        self.leaving: list[Tensor | None] = [None for _ in plan.chunks]
        self.home = self._rows(plan.num_kept + plan.has_drops)
        if plan.has_drops:
            self.home[-1].zero_()  # what a dropped slot adds to its token

    def _rows(self, count: int) -> Tensor:
        return self.source_TM.new_empty(count, self.source_TM.shape[1])

    def gather(self, i: int) -> None:
        torch.index_select(self.source_TM, 0, self.plan.row_token[self.plan.chunks[i].sent], out=self.send[i])

    def gather_local(self, j: int) -> Tensor:
        return self.source_TM.index_select(0, self.plan.row_token[self.plan.pieces[j].rows])

    def dispatch(self, i: int) -> dist.Work | None:
        chunk = self.plan.chunks[i]
        return self.plan.collective.exchange(self.send[i], chunk.send_rows, self.arrived[i], chunk.recv_rows)

    def in_expert_order(self, i: int) -> Tensor:
        regroup = self.plan.chunks[i].regroup
        return self.arrived[i] if regroup is None else self.arrived[i].index_select(0, regroup)

    def in_source_order(self, i: int, rows_NM: Tensor) -> Tensor:
        regroup = self.plan.chunks[i].regroup
        return rows_NM if regroup is None else torch.empty_like(rows_NM).index_copy_(0, regroup, rows_NM)

    def combine(self, i: int) -> dist.Work | None:
        chunk, leaving = self.plan.chunks[i], self.leaving[i]
        assert leaving is not None
        home = self.home[chunk.sent]
        return self.plan.collective.exchange(leaving, chunk.recv_rows, home, chunk.send_rows)

    def output(self, i: int) -> None:
        """Each token's rows are summed in the order of its choices, whatever order they came home in."""
        tokens, top_k = self.plan.chunks[i].tokens, self.plan.top_k
        row = self.plan.position[tokens.start * top_k : tokens.stop * top_k]
        if self.plan.has_drops:
            row = row.clamp(max=self.plan.num_kept)
        out_TM = self.result_TM[tokens]
        if top_k == 1:
            torch.index_select(self.home, 0, row, out=out_TM)
        else:
            chosen = self.home.index_select(0, row).view(-1, top_k, self.home.shape[1])
            torch.sum(chosen, dim=1, out=out_TM)


class _Forward(_Pass):
    def __init__(
        self, plan: Plan, x_TM: Tensor, weight_TK: Tensor, parameters: Sequence[Tensor], keep: bool
    ) -> None:
        super().__init__(plan, x_TM, torch.empty_like(x_TM, memory_format=torch.contiguous_format))
        self.parameters, self.keep = parameters, keep
        self.weight = weight_TK.reshape(-1)
        self.local: list[Rows | None] = [None for _ in plan.pieces]
        self.received: list[Rows | None] = [None for _ in plan.chunks]
        if plan.weights is not None:
            self.weight_sent = self.weight.index_select(0, plan.weights.slot)
            self.weight_arrived = self.weight.new_empty(plan.num_received)
        self.weight_of_chunk: tuple[Tensor, ...] = ()

    def run(self) -> Tensor:
        actions = {
            Kind.GATHER: self.gather,
            Kind.WEIGHTS: self.send_weights,
            Kind.DISPATCH: self.dispatch,
            Kind.LOCAL: self.compute_local,
            Kind.COMPUTE: self.compute,
            Kind.COMBINE: self.combine,
            Kind.OUTPUT: self.output,
        }
        schedule = plan_schedule(self.plan, "forward")
        engine.run(schedule, actions, self.source_TM, self.plan.collective.ranks)
        return self.result_TM

    def send_weights(self, _: int) -> dist.Work | None:
        journey = self.plan.weights
        assert journey is not None
        return self.plan.collective.exchange(
            self.weight_sent, journey.send, self.weight_arrived, journey.recv
        )

    def compute_local(self, j: int) -> None:
        piece = self.plan.pieces[j]
        weight_N = self.weight.index_select(0, self.plan.slot[piece.rows])
        rows = Rows(self.gather_local(j), weight_N)
        _, rows.hidden = self.plan.experts.compute(
            rows.rows_NM, weight_N, piece.groups, self.parameters, out=self.home[piece.rows], keep=self.keep
        )
        self.local[j] = rows if self.keep else None

    def compute(self, i: int) -> None:
        if not self.weight_of_chunk:
            self.weight_of_chunk = self.split_weights()
        rows = Rows(self.in_expert_order(i), self.weight_of_chunk[i])
        out_NM, rows.hidden = self.plan.experts.compute(
            rows.rows_NM, rows.weight_N, self.plan.chunks[i].received, self.parameters, keep=self.keep
        )
        self.leaving[i] = self.in_source_order(i, out_NM)
        self.received[i] = rows if self.keep else None

    def split_weights(self) -> tuple[Tensor, ...]:
        """The routing weights of the received rows, in expert order, by chunk."""
        assert self.plan.weights is not None
        regroup = self.plan.weights.regroup
        weight = self.weight_arrived if regroup is None else self.weight_arrived.index_select(0, regroup)
        return torch.split(weight, [chunk.received.num_rows for chunk in self.plan.chunks])


class _Backward(_Pass):
    def __init__(
        self,
        plan: Plan,
        grad_TM: Tensor,
        weight_like: Tensor,
        local: Sequence[Rows],
        received: Sequence[Rows],
        parameters: Sequence[Tensor],
        wanted: Sequence[bool],
    ) -> None:
        super().__init__(plan, grad_TM, torch.empty_like(grad_TM, memory_format=torch.contiguous_format))
        self.local, self.received, self.parameters = local, received, parameters
        self.schedule = plan_schedule(plan, "backward")
        additions = sum(task.kind in (Kind.WGRAD, Kind.LOCAL_WGRAD) for task in self.schedule.tasks)
        self.sums = [
            GradientSum(parameter, additions) if want else None
            for parameter, want in zip(parameters, wanted, strict=True)
        ]
        self.pending: dict[tuple[Kind, int], Any] = {}
        # Dropped slots have no row; nothing is ever added to their weight's gradient.
        self.grad_weight = weight_like.new_zeros(plan.num_tokens * plan.top_k)
        self.grad_weight_rows = weight_like.new_empty(plan.num_received)
        if plan.weights is not None:
            self.grad_weight_leaving = torch.empty_like(self.grad_weight_rows)
            self.grad_weight_home = weight_like.new_empty(plan.weights.slot.shape[0])
        self.first_row = [0]
        for chunk in plan.chunks:
            self.first_row.append(self.first_row[-1] + chunk.received.num_rows)

    def run(self) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        actions = {
            Kind.GATHER: self.gather,
            Kind.DISPATCH: self.dispatch,
            Kind.LOCAL: self.input_gradient_local,
            Kind.LOCAL_WGRAD: self.weight_gradient_local,
            Kind.COMPUTE: self.input_gradient,
            Kind.WGRAD: self.weight_gradient,
            Kind.COMBINE: self.combine,
            Kind.WEIGHTS: self.return_weights,
            Kind.OUTPUT: self.output,
        }
        engine.run(self.schedule, actions, self.source_TM, self.plan.collective.ranks)
        if self.plan.weights is not None:
            self.grad_weight[self.plan.weights.slot] = self.grad_weight_home
        return self.result_TM, self.grad_weight, [s if s is None else s.result() for s in self.sums]

    def input_gradient_local(self, j: int) -> None:
        piece, kept = self.plan.pieces[j], self.local[j]
        assert kept.hidden is not None
        _, grad_weight_N, self.pending[Kind.LOCAL, j] = self.plan.experts.input_gradient(
            self.gather_local(j),
            kept.rows_NM,
            kept.weight_N,
            kept.hidden,
            piece.groups,
            self.parameters,
            out=self.home[piece.rows],
        )
        self.grad_weight[self.plan.slot[piece.rows]] = grad_weight_N.to(self.grad_weight.dtype)

    def input_gradient(self, i: int) -> None:
        kept = self.received[i]
        assert kept.hidden is not None
        grad_rows_NM, grad_weight_N, self.pending[Kind.COMPUTE, i] = self.plan.experts.input_gradient(
            self.in_expert_order(i),
            kept.rows_NM,
            kept.weight_N,
            kept.hidden,
            self.plan.chunks[i].received,
            self.parameters,
        )
        self.leaving[i] = self.in_source_order(i, grad_rows_NM)
        self.grad_weight_rows[self.first_row[i] : self.first_row[i + 1]] = grad_weight_N
        if i == len(self.plan.chunks) - 1:
            self._weights_in_source_order()

    def _weights_in_source_order(self) -> None:
        """After the last chunk, still on the compute lane: the message of weights' gradients."""
        assert self.plan.weights is not None
        regroup = self.plan.weights.regroup
        if regroup is None:
            self.grad_weight_leaving.copy_(self.grad_weight_rows)
        else:
            self.grad_weight_leaving.index_copy_(0, regroup, self.grad_weight_rows)

    def return_weights(self, _: int) -> dist.Work | None:
        journey = self.plan.weights
        assert journey is not None
        return self.plan.collective.exchange(
            self.grad_weight_leaving, journey.recv, self.grad_weight_home, journey.send
        )

    def weight_gradient_local(self, j: int) -> None:
        self._weight_gradient(Kind.LOCAL, j, self.plan.pieces[j].groups)

    def weight_gradient(self, i: int) -> None:
        self._weight_gradient(Kind.COMPUTE, i, self.plan.chunks[i].received)

    def _weight_gradient(self, source: Kind, i: int, groups: Any) -> None:
        self.plan.experts.weight_gradient(self.pending.pop((source, i)), groups, self.sums)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, anchor: Tensor, x_TM: Tensor, weight_TK: Tensor, *parameters: Tensor
    ) -> Tensor:
        done = _Forward(plan, x_TM, weight_TK, parameters, keep=True)
        y_TM = done.run()
        kept = [rows for rows in (*done.local, *done.received) if rows is not None]
        hidden = [rows.hidden for rows in kept if rows.hidden is not None]
        ctx.save_for_backward(
            weight_TK,
            *parameters,
            *(rows.rows_NM for rows in kept),
            *(rows.weight_N for rows in kept),
            *(tensor for each in hidden for tensor in each.tensors),
        )
        ctx.graphs = [(each.graph, len(each.tensors)) for each in hidden]
        ctx.plan, ctx.num_parameters = plan, len(parameters)
        return y_TM

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable lets this pass where grad_TM needs no gradient, and what follows is wrong.
        if torch.is_grad_enabled():
            raise RuntimeError("a MoELayer has no second derivative: create_graph (True) must be False")
        plan: Plan = ctx.plan
        weight_TK, *saved = ctx.saved_tensors
        parameters, saved = saved[: ctx.num_parameters], saved[ctx.num_parameters :]
        count = len(ctx.graphs)
        rest = iter(saved[2 * count :])
        kept = [
            Rows(rows, weight, Hidden(tensors=list(itertools.islice(rest, num_tensors)), graph=graph))
            for rows, weight, (graph, num_tensors) in zip(
                saved[:count], saved[count : 2 * count], ctx.graphs, strict=True
            )
        ]
        num_local = len(plan.pieces)
        with torch.autocast(grad_TM.device.type, enabled=False):
            grad_x, grad_weight, grads = _Backward(
                plan,
                grad_TM,
                weight_TK,
                kept[:num_local],
                kept[num_local:],
                parameters,
                ctx.needs_input_grad[4:],
            ).run()
        return None, None, grad_x, grad_weight.view_as(weight_TK), *grads


def run_experts(
    plan: Plan,
    x_TM: Tensor,
    weight_TK: Tensor,
    parameters: Sequence[Tensor],
    *,
    needs_grad: bool,
) -> Tensor:
    """T_O (T, M) of the tokens x_TM under ``plan``, with a hand-written backward where ``needs_grad``.

    needs_grad must be the same on every rank: where one rank differentiates all take part, whatever of
    their own inputs needs a gradient.
    """
    if needs_grad and torch.is_grad_enabled():
        # A leaf that always needs a gradient keeps this rank's backward in the graph.
        anchor = torch.empty(0, device=x_TM.device, requires_grad=True)
        y_TM: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
            plan, anchor, x_TM, weight_TK, *parameters
        )
        return y_TM
    with torch.no_grad():
        return _Forward(plan, x_TM, weight_TK, parameters, keep=False).run()
