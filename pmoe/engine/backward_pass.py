"""The backward pass of the experts' part of a layer: what each task of its schedule does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.engine.passes import Forwarded, Kept, Pass, Unit, split_by_chunk
from pmoe.engine.plan import Plan
from pmoe.experts.base import Hidden, Runs
from pmoe.experts.products import GradientSum


class Backward(Pass):
    direction: str = "backward"
    received: str = "dT_DO"
    sent_back: str = "dT_DI"
    home_name: str = "dhome"
    brought_by_S: str = received
    taken_by_R: str = sent_back
    brought_by_SI = "T_DI"
    """What the all-to-all that sends T_DI again fills."""

    saved: Forwarded
    kept: dict[Unit, Kept]
    parameters: Sequence[Tensor]
    regroup: Sequence[Tensor | None]
    sums: list[GradientSum | None]
    shared_sums: list[GradientSum | None]
    weight: Tensor
    grad_weight: Tensor
    grad_weight_rows: Tensor
    grad_weight_of_chunk: tuple[Tensor, ...]
    weight_of_chunk: tuple[Tensor, ...]
    grad_weight_leaving: Tensor
    grad_weight_gathered: Tensor
    grad_weight_home: Tensor
    chunks_done: int

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: Forwarded) -> None:
        super().__init__(plan, plan.backward, grad_TM, keep=True)
        self.saved, self.kept, self.parameters = saved, saved.kept, saved.inputs.parameters
        self.regroup = saved.regroup or self.regroup  # which may be known since forward's rows arrived
        wanted, additions = saved.inputs.like(saved.wanted), self.schedule.num_weight_gradients
        self.sums = gradient_sums(self.parameters, wanted.parameters, additions)
        self.shared_sums = gradient_sums(saved.inputs.shared_parameters, wanted.shared_parameters, 1)
        self.grad_shared_weight: Tensor | None = None
        self.grad_hooks: list[Tensor | None] = [None] * len(saved.inputs.hook_parameters)
        self.rows: dict[Unit, Tensor] = {}
        self.hidden: dict[Unit, Hidden] = {}
        self.pending: dict[Unit, Any] = {}
        weight = saved.inputs.weight_TK
        self.weight = weight.reshape(-1)
        # Dropped slots have no row; nothing is ever added to their weight's gradient.
        self.grad_weight = weight.new_zeros(weight.numel())
        self.grad_weight_rows = weight.new_empty(self.cut.num_received)
        self.grad_weight_of_chunk = split_by_chunk(self.grad_weight_rows, self.cut)
        self.chunks_done = 0
        if self.cut.weights is not None:
            received = saved.weight_received
            assert received is not None
            if plan.joined is not None:
                received = received.index_select(0, plan.joined.weight_map)
            self.weight_of_chunk = split_by_chunk(received, self.cut)
            self.grad_weight_leaving = self.grad_weight_gathered = torch.empty_like(self.grad_weight_rows)
            self.grad_weight_home = weight.new_empty(self.journey.slot.shape[0])

    def run(self) -> list[Tensor | None]:
        """The gradients of ``inputs.all``."""
        gradients = self.plan.modules.gradients
        if gradients is not None:
            gradients.begins()
        self.run_schedule()
        if gradients is not None:
            gradients.ends()
        if self.cut.weights is not None:
            self.grad_weight[self.journey.slot] = self.grad_weight_home
        grad_weight_TK = self.grad_weight.view_as(self.saved.inputs.weight_TK)
        grads: list[Tensor | None] = [self.result_TM, grad_weight_TK, self.grad_shared_weight]
        for sums in (self.sums, self.shared_sums):
            while sums:  # each sum goes as soon as it is rounded
                total = sums.pop(0)
                grads.append(None if total is None else total.result())
        return [*grads, *self.grad_hooks]

    # ---- T_DI and T_M, restored

    def gather_again(self, i: int) -> None:
        self.gather_rows(self.saved.inputs.x_TM, self.buffer("send_again", i), i)

    def dispatch_again(self, i: int) -> dist.Work | None:
        return self.send_rows("send_again", self.brought_by_SI, i)

    def arrived_again(self, i: int) -> Tensor:
        return self.buffer("T_DI", i)

    def parts(self, unit: Unit) -> list[tuple[Kept, Runs]]:
        """What forward kept, by chunk of forward, with where its rows stand here."""
        whole = slice(0, self.groups(unit).num_rows)
        return [(self.kept[unit], ((whole, whole),))]

    def rows_of(self, unit: Unit) -> Tensor:
        """T_DI of a unit in expert order, arranged by whichever task needs it first."""
        if unit not in self.rows:
            i, at = unit
            if self.plan.restore.dispatched != "communicate":
                rows_NM = self.kept[unit].rows_NM
                assert rows_NM is not None
                self.rows[unit] = rows_NM
            elif at:
                self.rows[unit] = self.gather_local(self.saved.inputs.x_TM, self.temporary("T_DI_L", i), i)
            else:
                self.rows[unit] = self.in_expert_order("T_DI", i, self.arrived_again(i))
        return self.rows[unit]

    def recompute(self, i: int, at: str = "") -> None:
        unit = (i, at)
        recipe = next((kept.recipe for kept, _ in self.parts(unit)), None)
        given = self.for_experts(unit, self.rows_of(unit))
        self.hidden[unit] = self.plan.modules.experts.recompute(given, recipe)

    def hidden_of(self, unit: Unit) -> Hidden:
        if unit not in self.hidden:
            if self.plan.restore.hidden == "keep" and not self.plan.rearranged:
                kept = self.kept[unit].hidden
                assert kept is not None
                return kept
            self.recompute(*unit)
        return self.hidden.pop(unit)

    # ---- gradients

    def local(self, j: int) -> None:
        piece, unit = self.cut.pieces[j], (j, "_L")
        slot = self.cut.slot[piece.rows]
        grad_NM = self.gather_local(self.source_TM, self.temporary("dT_DO_L", j), j)
        weight_N = self.weight.index_select(0, slot)
        grad_weight_N = self._input_gradient(unit, grad_NM, weight_N, self.home_rows(j, piece.rows))
        self.grad_weight[slot] = grad_weight_N.to(self.grad_weight.dtype)

    def compute(self, i: int) -> None:
        out_NM = self.result_of(i)
        grad_NM = self.in_expert_order("dT_DO", i, self.arrived(i))
        grad_weight_N = self._input_gradient((i, ""), grad_NM, self.weight_of_chunk[i], out_NM)
        self.in_source_order(i, out_NM)
        self.grad_weight_of_chunk[i].copy_(grad_weight_N)
        self.chunks_done += 1
        if self.chunks_done == len(self.cut.chunks):
            self._weights_in_source_order()

    def _input_gradient(self, unit: Unit, grad_NM: Tensor, weight_N: Tensor, out_NM: Tensor) -> Tensor:
        given = self.for_experts(unit, self.rows_of(unit), out_NM)
        _, grad_weight_N, self.pending[unit] = self.plan.modules.experts.input_gradient(
            grad_NM, given, weight_N, self.hidden_of(unit)
        )
        return grad_weight_N

    def _weights_in_source_order(self) -> None:
        """After the last chunk, still on the compute lane: the message of weights' gradients."""
        regroup = self.journey.regroup
        if regroup is None:
            self.grad_weight_gathered.copy_(self.grad_weight_rows)
        else:
            self.grad_weight_gathered.index_copy_(0, regroup, self.grad_weight_rows)

    def weights(self, _: int) -> dist.Work | None:
        return self.plan.modules.scalars.exchange(
            self.grad_weight_leaving, self.journey.recv, self.grad_weight_home, self.journey.send
        )

    def wgrad(self, i: int, at: str = "") -> None:
        unit = (i, at)
        self.plan.modules.experts.weight_gradient(self.pending.pop(unit), self.groups(unit), self.sums)
        self.rows.pop(unit, None)

    def gradients(self, _: int) -> dist.Work | None:
        """Other layers', as many as travel here."""
        work: dist.Work | None = self.plan.modules.gradients.inside()
        return work


def gradient_sums(
    parameters: Sequence[Tensor], wanted: Sequence[Any], contributions: int
) -> list[GradientSum | None]:
    """Of each parameter whose gradient is wanted."""
    pairs = zip(parameters, wanted, strict=True)
    return [GradientSum(parameter, contributions) if wants else None for parameter, wants in pairs]
