"""The backward pass by the engine: one method for each kind of task in its schedule.

Each chunk gets T_DI and T_M back first, as the restore pair says, then its gradients are computed. Gradients
of parameters are tasks of their own (W), which fill the time while gradients of rows travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.engine.passes.base import ForwardState, Pass, SavedUnit, Unit, split_by_chunk
from pmoe.engine.plan.plan import Plan
from pmoe.experts.base import Hidden, Runs
from pmoe.experts.products import GradientSum


class Backward(Pass):
    """The backward pass of a call.

    saved: the state that forward left.
    kept: T_DI and T_M of forward's units.
    sums, shared_sums: the gradient of each operand of the experts and of the shared expert, summed over
        chunks; None for an operand whose gradient is not wanted.
    weight: (T * K,) the routing weights.
    weight_of_chunk: those of received rows by chunk, in expert order.
    grad_weight: (T * K,) the gradients of the routing weights. They return in one message:
        grad_weight_rows (N,) as the chunks compute them, in expert order; grad_weight_gathered (N,) in the
        order in which rows arrived; grad_weight_leaving, after RS if experts are sharded, else the same;
        grad_weight_home (S,) as they come home.
    rows, hidden: T_DI and T_M of units that are restored and not yet used up.
    pending: by unit, what `Experts.weight_gradient` needs from `Experts.input_gradient`.
    grad_hooks: the gradients of hooks' parameters; None for those without one so far.
    chunks_done: the number of chunks computed so far.
    """

    direction: str = "backward"
    received: str = "dT_DO"
    sent_back: str = "dT_DI"
    home_name: str = "dhome"
    dispatch_output: str = received
    combine_input: str = sent_back
    brought_by_SI = "T_DI"
    """The buffer that SI fills, the all-to-all that sends T_DI again."""

    saved: ForwardState
    kept: dict[Unit, SavedUnit]
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

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: ForwardState) -> None:
        super().__init__(plan, plan.backward, grad_TM, keep=True)
        self.saved = saved
        self.kept = saved.kept
        self.parameters = saved.inputs.parameters
        self.regroup = saved.regroup or self.regroup  # in `once` it became known only during forward
        wanted = saved.inputs.like(saved.wanted)
        additions = self.schedule.num_weight_gradients
        self.sums = gradient_sums(self.parameters, wanted.parameters, additions)
        self.shared_sums = gradient_sums(saved.inputs.shared_parameters, wanted.shared_parameters, 1)
        self.grad_shared_weight: Tensor | None = None
        self.grad_hooks: list[Tensor | None] = [None] * len(saved.inputs.hook_parameters)
        self.rows: dict[Unit, Tensor] = {}
        self.hidden: dict[Unit, Hidden] = {}
        self.pending: dict[Unit, Any] = {}
        weight = saved.inputs.weight_TK
        self.weight = weight.reshape(-1)
        # Zeros, because a dropped slot has no row and nothing writes its gradient.
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
            # One tensor, unless experts are sharded: `sharded` replaces the first.
            self.grad_weight_leaving = self.grad_weight_gathered = torch.empty_like(self.grad_weight_rows)
            self.grad_weight_home = weight.new_empty(self.weight_message.slot.shape[0])

    def run(self) -> list[Tensor | None]:
        """Runs all tasks and returns the gradients of ``inputs.all``; None for operands without one."""
        gradients = self.plan.modules.gradients
        if gradients is not None:
            gradients.begins()
        self.run_schedule()
        if gradients is not None:
            gradients.ends()
        if self.cut.weights is not None:
            self.grad_weight[self.weight_message.slot] = self.grad_weight_home
        grad_weight_TK = self.grad_weight.view_as(self.saved.inputs.weight_TK)
        grads: list[Tensor | None] = [self.result_TM, grad_weight_TK, self.grad_shared_weight]
        for sums in (self.sums, self.shared_sums):
            while sums:  # frees each sum in float32 as soon as it is rounded
                total = sums.pop(0)
                grads.append(None if total is None else total.result())
        return [*grads, *self.grad_hooks]

    # ---- T_DI and T_M are restored

    def gather_again(self, i: int) -> None:
        """Runs GI of chunk i: copies its tokens from T_I, to be sent again."""
        self.gather_rows(self.saved.inputs.x_TM, self.buffer("send_again", i), i)

    def dispatch_again(self, i: int) -> dist.Work | None:
        """Runs SI of chunk i: sends T_DI again."""
        return self.send_rows("send_again", self.brought_by_SI, i)

    def arrived_again(self, i: int) -> Tensor:
        """Returns the rows of chunk i that SI brought, still by source rank."""
        return self.buffer("T_DI", i)

    def parts(self, unit: Unit) -> list[tuple[SavedUnit, Runs]]:
        """The records of forward from which a unit of backward is made, each with its runs of rows.

        One record, whole, if backward has forward's chunks.
        """
        whole = slice(0, self.groups(unit).num_rows)
        return [(self.kept[unit], ((whole, whole),))]

    def rows_of(self, unit: Unit) -> Tensor:
        """Returns T_DI of a unit in expert order. The first task that asks arranges it."""
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
        """Runs M: recomputes T_M of a unit from T_DI."""
        unit = (i, at)
        recipe = next((kept.recipe for kept, _ in self.parts(unit)), None)
        expert_rows = self.for_experts(unit, self.rows_of(unit))
        self.hidden[unit] = self.plan.modules.experts.recompute(expert_rows, recipe)

    def hidden_of(self, unit: Unit) -> Hidden:
        """Returns T_M of a unit, and recomputes it if no earlier task restored it."""
        if unit not in self.hidden:
            if self.plan.restore.hidden == "keep" and not self.plan.rearranged:
                kept = self.kept[unit].hidden
                assert kept is not None
                return kept
            self.recompute(*unit)
        return self.hidden.pop(unit)

    # ---- gradients

    def local(self, j: int) -> None:
        """Runs L: computes the gradients of the inputs of piece j, whose rows stay on this rank."""
        piece = self.cut.pieces[j]
        unit = (j, "_L")
        slot = self.cut.slot[piece.rows]
        grad_NM = self.gather_local(self.source_TM, self.temporary("dT_DO_L", j), j)
        weight_N = self.weight.index_select(0, slot)
        grad_weight_N = self._input_gradient(unit, grad_NM, weight_N, self.home_rows(j, piece.rows))
        self.grad_weight[slot] = grad_weight_N.to(self.grad_weight.dtype)

    def compute(self, i: int) -> None:
        """Runs C: computes the gradients of the inputs of chunk i, dT_DI and those of its routing weights."""
        out_NM = self.result_of(i)
        grad_NM = self.in_expert_order("dT_DO", i, self.arrived(i))
        grad_weight_N = self._input_gradient((i, ""), grad_NM, self.weight_of_chunk[i], out_NM)
        self.in_source_order(i, out_NM)
        self.grad_weight_of_chunk[i].copy_(grad_weight_N)
        self.chunks_done += 1
        if self.chunks_done == len(self.cut.chunks):
            self._weights_in_source_order()

    def _input_gradient(self, unit: Unit, grad_NM: Tensor, weight_N: Tensor, out_NM: Tensor) -> Tensor:
        """Writes dT_DI of a unit to out_NM (N, M), and returns the gradients of its routing weights (N,)."""
        expert_rows = self.for_experts(unit, self.rows_of(unit), out_NM)
        _, grad_weight_N, self.pending[unit] = self.plan.modules.experts.input_gradient(
            grad_NM, expert_rows, weight_N, self.hidden_of(unit)
        )
        return grad_weight_N

    def _weights_in_source_order(self) -> None:
        """Puts the gradients of routing weights in the order in which rows arrived, for their message.

        Runs after the last chunk, as a part of its task on the compute lane.
        """
        regroup = self.weight_message.regroup
        if regroup is None:
            self.grad_weight_gathered.copy_(self.grad_weight_rows)
        else:
            self.grad_weight_gathered.index_copy_(0, regroup, self.grad_weight_rows)

    def weights(self, _: int) -> dist.Work | None:
        """Runs P: sends the gradients of routing weights of all chunks back to the ranks of their tokens."""
        return self.plan.modules.scalars.exchange(
            self.grad_weight_leaving,
            self.weight_message.recv,
            self.grad_weight_home,
            self.weight_message.send,
        )

    def wgrad(self, i: int, at: str = "") -> None:
        """Runs W: adds the gradients of parameters from a unit, and frees the unit's T_DI."""
        unit = (i, at)
        self.plan.modules.experts.weight_gradient(self.pending.pop(unit), self.groups(unit), self.sums)
        self.rows.pop(unit, None)

    def gradients(self, _: int) -> dist.Work | None:
        """Runs GAR: starts to reduce the gradients of other layers that hide behind this pass."""
        work: dist.Work | None = self.plan.modules.gradients.inside()
        return work


def gradient_sums(
    parameters: Sequence[Tensor], wanted: Sequence[Any], contributions: int
) -> list[GradientSum | None]:
    """Returns a sum for each parameter whose gradient is wanted, None for the others.

    wanted: for each parameter, whether its gradient is wanted.
    contributions: how many tasks add to each sum.
    """
    pairs = zip(parameters, wanted, strict=True)
    return [GradientSum(parameter, contributions) if wants else None for parameter, wants in pairs]
