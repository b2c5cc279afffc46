"""The forward pass in the engine: the methods that run its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from pmoe.engine.passes.base import ForwardState, Inputs, Pass, SavedUnit, Unit, split_by_chunk
from pmoe.engine.plan.plan import Plan
from pmoe.experts.base import ExpertRows, Experts
from pmoe.experts.products import ExpertViews


class Scalars(NamedTuple):
    """The buffers of a message with one number for each row, for all chunks together.

    Routing weights are sent in this way. S is the number of rows that this rank sends, N the number of rows
    that its experts compute.

    sent: (S,), the numbers for the rows that this rank sends.
    own: (rows,), the numbers that the all-to-all brings to this rank.
    arrived: (N,), the numbers for all rows that this rank's experts compute. If experts are sharded, an
        all-gather inside the node brings the numbers that arrived at the other ranks.
    copies: the memory from which that all-gather sends.

    Without sharded experts there is no all-gather, and own, arrived and copies are the same tensor.
    """

    sent: Tensor
    own: Tensor
    arrived: Tensor
    copies: Tensor


NOTHING_KEPT = SavedUnit()
"""The record of a task that saves nothing for backward."""


class Forward(Pass):
    """The forward pass of a call.

    "Sorted rows" are all rows of this rank's tokens, in the order of the pass (`PassPlan`).

    plan: the plan of the call.
    inputs: the tensors of the call.
    keep: whether a backward pass may follow.
    weight: (T * K,), the routing weights of T tokens with K choices each.
    weight_sorted: (rows,), the routing weights of this rank's sorted rows. Set under two conditions: some
        rows are not sent (their experts are on this rank), and no kernel has sorted the weights
        (`PassPlan.by_kernel`).
    saved: the state for backward, which tasks fill while they run.
    has_recipes: whether the experts override `Experts.recipe` and backward may need its result.
    keeps_nothing: whether no task saves anything for backward, because backward makes all of it again. All
        tasks then have the same record, `NOTHING_KEPT`.
    scalars: the messages with one number for each row. The first message carries the routing weights.
    weight_of_chunk: for each chunk (rows,), the routing weights of its received rows. Set when the experts
        compute the first chunk.
    """

    direction: str = "forward"
    received: str = "T_DI"
    sent_back: str = "T_DO"
    home_name: str = "home"
    dispatch_output: str = received
    combine_input: str = sent_back
    inputs: Inputs
    parameters: Sequence[Tensor]
    weight: Tensor
    weight_sorted: Tensor
    saved: ForwardState
    weight_of_chunk: tuple[Tensor, ...]

    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        super().__init__(plan, plan.forward, inputs.x_TM, keep)
        self.inputs = inputs
        self.parameters = inputs.parameters
        self.views: ExpertViews = ExpertViews(self.parameters)
        self.weight = inputs.weight_TK.reshape(-1)
        self.saved = ForwardState(inputs=inputs)
        overrides_recipe = type(plan.modules.experts).recipe is not Experts.recipe
        self.has_recipes: bool = keep and plan.restore.hidden != "keep" and overrides_recipe
        makes_again = plan.restore.dispatched == "communicate" and plan.restore.hidden == "recompute"
        self.keeps_nothing: bool = keep and makes_again and not self.has_recipes
        if self.pass_plan.pieces and self.pass_plan.by_kernel is None:
            self.weight_sorted = self.weight.index_select(0, self.pass_plan.slot)
        self.scalars: list[Scalars] = []
        if self.pass_plan.weights is not None:
            self.make_scalars()

    def make_scalars(self) -> None:
        """Allocates the messages with one number for each row. The first one carries the routing weights."""
        self.scalars.append(self.scalar(self.weight.index_select(0, self.weight_message.slot)))

    def scalar(self, sent: Tensor) -> Scalars:
        """Returns the buffers of a message with one number for each row.

        sent: (S,), the numbers for the S rows that this rank sends.
        """
        arrived = sent.new_empty(self.pass_plan.num_received)
        return Scalars(sent, arrived, arrived, arrived)

    def run(self) -> Tensor:
        """Runs all tasks of the pass. Returns the layer's output T_O, (T, M): T tokens, M = d_model."""
        self.run_schedule()
        return self.result_TM

    def weights(self, _: int) -> dist.Work | None:
        """Starts the message that sends the routing weights of all chunks to the experts' ranks (task P)."""
        return self.send_scalars(self.scalars[0])

    def send_scalars(self, of_rows: Scalars) -> dist.Work | None:
        """Starts the all-to-all of a message with one number for each row; returns its Work.

        of_rows: the buffers of the message.
        """
        weight_message = self.weight_message
        exchange = self.plan.modules.scalars.exchange
        return exchange(of_rows.sent, weight_message.send, of_rows.own, weight_message.recv)

    def local(self, j: int) -> None:
        """Computes block j of the rows that stay on this rank, because their experts are on it (task L).

        The results are written to the home buffer, to which combine also writes the results from other ranks.
        """
        rows = self.pass_plan.pieces[j].rows
        rows_NM = self.gather_local(self.source_TM, self.temporary("T_DI_L", j), j)
        unit = (j, "_L")
        expert_rows = self.for_experts(unit, rows_NM, self.home_rows(j, rows))
        self.compute_unit(unit, expert_rows, self.weight_sorted[rows])

    def compute(self, i: int) -> None:
        """Lets the experts compute the rows that this rank received in chunk i (task C)."""
        if self.saved.weight_received is None:
            self.saved.weight_received = self.sorted_weights()
            self.weight_of_chunk = split_by_chunk(self.saved.weight_received, self.pass_plan)
        arrived = self.arrived(i)
        out_NM = self.result_of(i)
        rows_NM = self.in_expert_order("T_DI", i, arrived)
        unit = (i, "")
        self.compute_unit(unit, self.for_experts(unit, rows_NM, out_NM), self.weight_of_chunk[i])
        self.in_source_order(i, out_NM)

    def sorted_weights(self) -> Tensor:
        """Returns the routing weights of the N received rows, (N,), sorted by chunk, then expert."""
        arrived = self.scalars[0].arrived
        regroup = self.weight_message.regroup
        return arrived if regroup is None else arrived.index_select(0, regroup)

    def compute_unit(self, unit: Unit, expert_rows: ExpertRows, weight_N: Tensor) -> None:
        """Computes the experts' output for the rows of one task, and saves the tensors for backward.

        unit: (i, "") for the rows received in chunk i, or (j, "_L") for block j of the rows that are not
            sent, because their experts are on this rank.
        expert_rows: these N rows (T_DI), with memory for the result (T_DO).
        weight_N: (N,), the routing weight of each row.
        """
        rows_NM = expert_rows.rows_NM
        restore = self.plan.restore
        recipe = self.plan.modules.experts.recipe(rows_NM.device) if self.has_recipes else None
        version = rows_NM._version if recipe is not None else 0
        keeps = self.keep and restore.hidden != "recompute"
        _, hidden = self.experts.compute(expert_rows, weight_N, keep=keeps)
        if self.keeps_nothing:
            self.saved.kept[unit] = NOTHING_KEPT
        elif self.keep:
            changed = recipe is not None and rows_NM._version != version
            if recipe is not None and restore.hidden == "recompute":
                self._check_recipe(recipe, changed)
            kept = SavedUnit(rows_NM if restore.dispatched == "keep" else None, hidden, recipe)
            self.saved.kept[unit] = self.kept_for_backward(unit, kept, rows_NM, changed)

    def kept_for_backward(self, unit: Unit, kept: SavedUnit, rows_NM: Tensor, changed: bool) -> SavedUnit:
        """Returns the tensors of one task that are saved for backward: in this class ``kept`` itself.

        Subclasses override this method. `OffloadingForward` copies tensors to the host, for example.

        unit: (i, "") for the rows received in chunk i, or (j, "_L") for block j of the rows that are not
            sent, because their experts are on this rank.
        kept: the tensors that stay on the device according to the restore pair.
        rows_NM: (N, M), the N rows of T_DI, with M = d_model columns.
        changed: whether a user's module changed rows_NM in place.
        """
        return kept

    def _check_recipe(self, recipe: Any, changed: bool) -> None:
        """Raises RuntimeError if backward could not recompute the hidden activation T_M from the input T_DI.

        Backward could not do this in two cases: a module changed its input; or a module drew random numbers,
        and backward has other chunks than forward.

        recipe: the random states and other values that `Experts.recipe` returned before the computation.
        changed: whether a user's module changed T_DI in place.
        """
        if changed:
            raise RuntimeError(
                "an expert changes its input in place, so its hidden activation (T_M) cannot be recomputed "
                "from that input: let its first operation make a new tensor (inplace=False), or let "
                'memory_reuse keep or offload T_M (hidden="keep" or "offload")'
            )
        if self.plan.rearranged and not self.plan.modules.experts.is_repeatable(recipe):
            raise RuntimeError(
                "an expert draws random numbers, so it can be recomputed only if both passes have the same "
                "number of chunks: set pipeline_backward to None, or let memory_reuse keep or offload T_M "
                '(hidden="keep" or "offload"). Chunks of forward: '
                f"{len(self.plan.forward.chunks)}, of backward: {len(self.plan.backward.chunks)}"
            )
