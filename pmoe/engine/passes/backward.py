"""The backward pass in the engine: the methods that run its tasks.

For each chunk, backward first restores the experts' input T_DI and hidden activation T_M. The plan's restore
pair says how: each is kept, offloaded to the host, or made again. Then backward computes gradients, in two
tasks. Task C computes the gradients of the rows, for which other ranks wait. Task W computes the gradients of
the parameters, for which no rank waits. So W runs while the gradients of rows are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.engine.passes.base import ForwardState, Pass, SavedUnit, Unit, split_by_chunk
from pmoe.engine.plan.plan import Plan
from pmoe.experts.base import Hidden, Runs
from pmoe.experts.products import ExpertViews, GradientSum
from pmoe.schedule.restore import GATHERED_AGAIN


class Backward(Pass):
    """The backward pass of a call.

    T_DI is the experts' input, T_M their hidden activation. N is the number of rows that this rank's experts
    receive. "Sorted rows" are all rows of this rank's tokens, in the order of the pass (`PassPlan`).

    plan: the plan of the call.
    grad_TM: (T, M), the gradient of the layer's output, for T tokens with M = d_model columns.
    saved: the state that the forward pass left.
    kept: the saved T_DI and T_M, for each set of rows that forward's experts computed in one task.
    sums, shared_sums: for each parameter of the experts (sums) and of the shared expert (shared_sums), the
        gradient summed over chunks; None for a parameter that needs no gradient.
    weight: (T * K,), the routing weights of T tokens with K choices each.
    weight_of_chunk: for each chunk (rows,), the routing weights of its received rows, sorted by expert.
    weight_sorted, grad_weight_sorted: (rows,), the routing weights of this rank's sorted rows and their
        gradients. Set under two conditions: some rows are not sent (their experts are on this rank), and no
        kernel has sorted the weights (`PassPlan.by_kernel`). Only the values for rows that are not sent are
        used.
    grad_weight: (T * K,), the gradients of the routing weights. The gradients for received rows return to the
        tokens' ranks in one message. They pass through these tensors, in this order:

        grad_weight_rows       (N,)  sorted by chunk and expert, as the tasks of the chunks compute them
        grad_weight_gathered   (N,)  in the order of arrival; grad_weight_rows itself if both orders are equal
        grad_weight_leaving          the numbers to send: after a reduce-scatter if experts are sharded, else
                                     the tensor grad_weight_gathered
        grad_weight_home       (S,)  the S numbers that return to this rank

    rows, hidden: the restored T_DI (rows) and T_M (hidden) that later tasks need. The key is a `Unit`, which
        names the set of rows of one task.
    pending: for each `Unit`, the result of `Experts.input_gradient` that `Experts.weight_gradient` needs.
    grad_hooks: the gradients of the parameters of hooks, summed so far; None for a parameter without a
        gradient yet.
    chunks_done: the number of chunks whose gradients have been computed so far.
    """

    direction: str = "backward"
    received: str = "dT_DO"
    sent_back: str = "dT_DI"
    home_name: str = "dhome"
    dispatch_output: str = received
    combine_input: str = sent_back
    brought_by_SI = "T_DI"
    """The name of the buffer that is filled when backward sends the experts' input again (task SI)."""

    saved: ForwardState
    kept: dict[Unit, SavedUnit]
    parameters: Sequence[Tensor]
    regroup: Sequence[Tensor | None]
    sums: list[GradientSum | None]
    shared_sums: list[GradientSum | None]
    weight: Tensor
    weight_sorted: Tensor
    grad_weight_sorted: Tensor
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
        self.views: ExpertViews = ExpertViews(self.parameters)
        self.regroup = saved.regroup or self.regroup  # with send_once=True forward computed it, not the plan
        wanted = saved.inputs.like(saved.wanted)
        new = self.pool.new
        self.sums = gradient_sums(self.parameters, wanted.parameters, self.schedule.num_weight_gradients, new)
        self.shared_sums = gradient_sums(saved.inputs.shared_parameters, wanted.shared_parameters, 1, new)
        self.grad_shared_weight: Tensor | None = None
        self.grad_hooks: list[Tensor | None] = [None] * len(saved.inputs.hook_parameters)
        self.rows: dict[Unit, Tensor] = {}
        self.hidden: dict[Unit, Hidden] = {}
        self.pending: dict[Unit, Any] = {}
        weight = saved.inputs.weight_TK
        self.weight = weight.reshape(-1)
        # Zeros if a (token, choice) pair may be dropped: it has no row, and no task writes its gradient.
        new_memory = weight.new_zeros if self.pass_plan.has_drops else weight.new_empty
        self.grad_weight = new_memory(weight.numel())
        if self.pass_plan.pieces and self.pass_plan.by_kernel is None:
            self.weight_sorted = self.weight.index_select(0, self.pass_plan.slot)
            self.grad_weight_sorted = torch.empty_like(self.weight_sorted)
        self.chunks_done = 0
        if self.pass_plan.weights is not None:
            self.grad_weight_rows = weight.new_empty(self.pass_plan.num_received)
            self.grad_weight_of_chunk = split_by_chunk(self.grad_weight_rows, self.pass_plan)
            received = saved.weight_received
            assert received is not None
            if plan.joined is not None:
                received = received.index_select(0, plan.joined.weight_map)
            self.weight_of_chunk = split_by_chunk(received, self.pass_plan)
            self.grad_weight_gathered = self.grad_weight_rows
            if self.weight_message.regroup is not None:
                self.grad_weight_gathered = torch.empty_like(self.grad_weight_rows)
            # One tensor, unless experts are sharded: `ShardedBackward` then replaces grad_weight_leaving.
            self.grad_weight_leaving = self.grad_weight_gathered
            self.grad_weight_home = weight.new_empty(self.weight_message.slot.shape[0])

    def run(self) -> list[Tensor | None]:
        """Runs all tasks. Returns the gradient of each tensor of ``inputs.all``; None if it is not needed."""
        gradients = self.plan.modules.gradients
        if gradients is not None:
            gradients.begins()
        self.run_schedule()
        if gradients is not None:
            gradients.ends()
        if self.pass_plan.pieces and self.pass_plan.by_kernel is None:
            # The gradients for rows that were sent have no values yet. The next lines write them.
            self.grad_weight[self.pass_plan.slot] = self.grad_weight_sorted
        if self.pass_plan.weights is not None and self.pass_plan.by_kernel is None:
            self.grad_weight[self.weight_message.slot] = self.grad_weight_home
        grad_weight_TK = self.grad_weight.view_as(self.saved.inputs.weight_TK)
        grads: list[Tensor | None] = [self.result_TM, grad_weight_TK, self.grad_shared_weight]
        for sums in (self.sums, self.shared_sums):
            while sums:  # frees each float32 sum as soon as it is rounded to the parameter's dtype
                total = sums.pop(0)
                grads.append(None if total is None else total.result())
        return [*grads, *self.grad_hooks]

    # ---- Restores the experts' input T_DI and the hidden activation T_M

    def gather_again(self, i: int) -> None:
        """Copies the tokens of chunk i from the layer's input, so that they can be sent again (task GI)."""
        self.gather_rows(self.saved.inputs.x_TM, self.buffer("send_again", i), i)

    def dispatch_again(self, i: int) -> dist.Work | None:
        """Starts the all-to-all that sends the experts' input (T_DI) of chunk i again (task SI)."""
        return self.send_rows("send_again", self.brought_by_SI, i)

    def arrived_again(self, i: int) -> Tensor:
        """Returns the rows of chunk i that arrived again in backward, sorted by source rank."""
        return self.buffer("T_DI", i)

    def parts(self, unit: Unit) -> list[tuple[SavedUnit, Runs]]:
        """Returns the saved tensors of forward from which one backward task restores its T_DI and T_M.

        Each entry has the saved tensors of one forward task, and pairs (slice of the forward task's rows,
        slice of the backward task's rows to which they are copied). In this class both passes have the same
        chunks, so there is one entry with all rows. The subclass `OffloadingBackward` handles different
        chunks.

        unit: (i, "") for the rows received in chunk i, or (j, "_L") for block j of the rows that are not
            sent, because their experts are on this rank.
        """
        whole = slice(0, self.groups(unit).num_rows)
        return [(self.kept[unit], ((whole, whole),))]

    def rows_of(self, unit: Unit) -> Tensor:
        """Returns the experts' input (T_DI) for one task, sorted by expert. The first call restores it.

        unit: (i, "") for the rows received in chunk i, or (j, "_L") for block j of the rows that are not
            sent, because their experts are on this rank.
        """
        if unit not in self.rows:
            i, place = unit
            if self.plan.restore.dispatched not in GATHERED_AGAIN:
                rows_NM = self.kept[unit].rows_NM
                assert rows_NM is not None
                self.rows[unit] = rows_NM
            elif place:
                self.rows[unit] = self.gather_local(self.saved.inputs.x_TM, self.temporary("T_DI_L", i), i)
            else:
                self.rows[unit] = self.in_expert_order("T_DI", i, self.arrived_again(i))
        return self.rows[unit]

    def recompute(self, i: int, place: str = "") -> None:
        """Recomputes the hidden activation T_M from the experts' input T_DI (task M).

        i: the number of a chunk; with place="_L", the number of a block of rows.
        place: "" for the rows that this rank received in chunk i; "_L" for block i of the rows that are not
            sent, because their experts are on this rank.
        """
        unit = (i, place)
        recipe = next((kept.recipe for kept, _ in self.parts(unit)), None)
        expert_rows = self.for_experts(unit, self.rows_of(unit))
        self.hidden[unit] = self.experts.recompute(expert_rows, recipe)

    def hidden_of(self, unit: Unit) -> Hidden:
        """Returns the hidden activation T_M for one task; recomputes it if no earlier task restored it.

        unit: (i, "") for the rows received in chunk i, or (j, "_L") for block j of the rows that are not
            sent, because their experts are on this rank.
        """
        if unit not in self.hidden:
            if self.plan.restore.hidden == "keep" and not self.plan.rearranged:
                kept = self.kept[unit].hidden
                assert kept is not None
                return kept
            self.recompute(*unit)
        return self.hidden.pop(unit)

    # ---- gradients

    def local(self, j: int) -> None:
        """Computes the gradients of block j of the rows that stay on this rank (task L).

        A row stays if its expert is on this rank. The task computes the gradients of the rows and of their
        routing weights, but not the gradients of parameters.
        """
        rows = self.pass_plan.pieces[j].rows
        unit = (j, "_L")
        grad_NM = self.gather_local(self.source_TM, self.temporary("dT_DO_L", j), j)
        self._input_gradient(
            unit, grad_NM, self.weight_sorted[rows], self.home_rows(j, rows), self.grad_weight_sorted[rows]
        )

    def compute(self, i: int) -> None:
        """Computes the gradients of the rows received in chunk i, and of their routing weights (task C).

        After the last chunk, the gradients of all routing weights are ready to be sent.
        """
        out_NM = self.result_of(i)
        grad_NM = self.in_expert_order("dT_DO", i, self.arrived(i))
        self._input_gradient((i, ""), grad_NM, self.weight_of_chunk[i], out_NM, self.grad_weight_of_chunk[i])
        self.in_source_order(i, out_NM)
        self.chunks_done += 1
        if self.chunks_done == len(self.pass_plan.chunks):
            self._weights_in_source_order()

    def _input_gradient(
        self, unit: Unit, grad_NM: Tensor, weight_N: Tensor, out_NM: Tensor, grad_weight_N: Tensor
    ) -> None:
        """Computes the gradients of one task's N rows (inputs of experts) and of their routing weights.

        unit: (i, "") for the rows received in chunk i, or (j, "_L") for block j of the rows that are not
            sent, because their experts are on this rank.
        grad_NM: (N, M), the gradient of the experts' output, with M = d_model columns.
        weight_N: (N,), the routing weights.
        out_NM: (N, M), memory for the gradient of the rows.
        grad_weight_N: (N,), memory for the gradient of the routing weights.
        """
        expert_rows = self.for_experts(unit, self.rows_of(unit), out_NM, grad_weight_N)
        _, computed_N, self.pending[unit] = self.experts.input_gradient(
            grad_NM, expert_rows, weight_N, self.hidden_of(unit)
        )
        if computed_N.data_ptr() != grad_weight_N.data_ptr():
            grad_weight_N.copy_(computed_N)

    def _weights_in_source_order(self) -> None:
        """Sorts the gradients of the routing weights into the order of arrival, in which they are sent back.

        The task of the last chunk calls this method, because the gradients of all chunks are then ready.
        """
        regroup = self.weight_message.regroup
        if regroup is not None:
            self.grad_weight_gathered.index_copy_(0, regroup, self.grad_weight_rows)

    def weights(self, _: int) -> dist.Work | None:
        """Starts the message that returns the gradients of routing weights to the tokens' ranks (task P).

        One message carries the gradients of all chunks.
        """
        return self.plan.modules.scalars.exchange(
            self.grad_weight_leaving,
            self.weight_message.recv,
            self.grad_weight_home,
            self.weight_message.send,
        )

    def wgrad(self, i: int, place: str = "") -> None:
        """Computes the gradients of the experts' parameters from the rows of one task (task W).

        The gradients are added to the sums over chunks. Then the experts' input (T_DI) of these rows is
        freed.

        i: the number of a chunk; with place="_L", the number of a block of rows.
        place: "" for the rows that this rank received in chunk i; "_L" for block i of the rows that are not
            sent, because their experts are on this rank.
        """
        unit = (i, place)
        self.experts.weight_gradient(self.pending.pop(unit), self.groups(unit), self.sums)
        self.rows.pop(unit, None)

    def gradients(self, _: int) -> dist.Work | None:
        """Starts the all-reduce of other layers' gradients that runs during this backward pass (task GAR)."""
        work: dist.Work | None = self.plan.modules.gradients.inside()
        return work


def gradient_sums(
    parameters: Sequence[Tensor], wanted: Sequence[Any], contributions: int, new: Callable[..., Tensor]
) -> list[GradientSum | None]:
    """Returns a `GradientSum` for each parameter that needs a gradient, and None for the others.

    A `GradientSum` adds up the gradients that several tasks compute for a parameter.

    parameters: the parameters.
    wanted: for each parameter, whether it needs a gradient.
    contributions: how many tasks will add to each sum.
    new: the function that allocates memory for the sums. The sums become the parameters' gradients.
    """
    pairs = zip(parameters, wanted, strict=True)
    return [GradientSum(parameter, contributions, new) if wants else None for parameter, wants in pairs]
