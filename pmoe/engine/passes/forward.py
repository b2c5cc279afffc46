"""The forward pass by the engine: one method for each kind of task in its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pmoe.engine.passes.base import ForwardState, Inputs, Pass, SavedUnit, Unit, split_by_chunk
from pmoe.engine.plan.plan import Plan


@dataclass(frozen=True)
class Scalars:
    """One number for each row that travels, sent in one message for all chunks.

    sent: (S,) the numbers of the rows that this rank sends.
    own: (rows,) the numbers that this rank receives.
    arrived: (N,) the numbers of all rows that its experts compute, after the all-gather inside the node.
    copies: memory from which that all-gather sends.

    If experts are not sharded, own, arrived and copies are one tensor.
    """

    sent: Tensor
    own: Tensor
    arrived: Tensor
    copies: Tensor


class Forward(Pass):
    """The forward pass of a call.

    inputs: the tensors of the call.
    weight: (T * K,) the routing weights.
    left: the state for backward, filled while tasks run.
    scalars: the messages of one number a row; the routing weights come first.
    weight_of_chunk: the routing weights of received rows by chunk, known once the first chunk is computed.
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
    left: ForwardState
    weight_of_chunk: tuple[Tensor, ...]

    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        super().__init__(plan, plan.forward, inputs.x_TM, keep)
        self.inputs = inputs
        self.parameters = inputs.parameters
        self.weight = inputs.weight_TK.reshape(-1)
        self.left = ForwardState(inputs=inputs)
        self.scalars: list[Scalars] = []
        if self.cut.weights is not None:
            self.make_scalars()

    def make_scalars(self) -> None:
        """Makes the messages of one number a row. The first carries the routing weights."""
        self.scalars.append(self.scalar(self.weight.index_select(0, self.weight_message.slot)))

    def scalar(self, sent: Tensor) -> Scalars:
        """Returns memory for a message that sends the numbers ``sent`` (S,)."""
        arrived = sent.new_empty(self.cut.num_received)
        return Scalars(sent, arrived, arrived, arrived)

    def run(self) -> Tensor:
        """Runs all tasks and returns T_O (T, M)."""
        self.run_schedule()
        return self.result_TM

    def weights(self, _: int) -> dist.Work | None:
        """Runs P: sends the routing weights of all chunks."""
        return self.send_scalars(self.scalars[0])

    def send_scalars(self, of_rows: Scalars) -> dist.Work | None:
        """Starts one message of one number a row."""
        weight_message = self.weight_message
        exchange = self.plan.modules.scalars.exchange
        return exchange(of_rows.sent, weight_message.send, of_rows.own, weight_message.recv)

    def local(self, j: int) -> None:
        """Runs L: computes piece j, whose rows stay on this rank."""
        piece = self.cut.pieces[j]
        weight_N = self.weight.index_select(0, self.cut.slot[piece.rows])
        rows_NM = self.gather_local(self.source_TM, self.temporary("T_DI_L", j), j)
        self._compute((j, "_L"), rows_NM, weight_N, self.home_rows(j, piece.rows))

    def compute(self, i: int) -> None:
        """Runs C: computes the rows received in chunk i."""
        if self.left.weight_received is None:
            self.left.weight_received = self.sorted_weights()
            self.weight_of_chunk = split_by_chunk(self.left.weight_received, self.cut)
        arrived = self.arrived(i)
        out_NM = self.result_of(i)
        rows_NM = self.in_expert_order("T_DI", i, arrived)
        self._compute((i, ""), rows_NM, self.weight_of_chunk[i], out_NM)
        self.in_source_order(i, out_NM)

    def sorted_weights(self) -> Tensor:
        """Returns the routing weights of the received rows, (N,), by chunk and in expert order."""
        arrived = self.scalars[0].arrived
        regroup = self.weight_message.regroup
        return arrived if regroup is None else arrived.index_select(0, regroup)

    def _compute(self, unit: Unit, rows_NM: Tensor, weight_N: Tensor, out_NM: Tensor) -> None:
        """Computes T_DO of a unit into out_NM (N, M), and puts away what backward needs of it."""
        experts = self.plan.modules.experts
        restore = self.plan.restore
        remakes = self.keep and restore.hidden != "keep"
        recipe = experts.recipe(rows_NM.device) if remakes else None
        version = rows_NM._version if recipe is not None else 0
        keeps = self.keep and restore.hidden != "recompute"
        _, hidden = experts.compute(self.for_experts(unit, rows_NM, out_NM), weight_N, keep=keeps)
        if self.keep:
            changed = recipe is not None and rows_NM._version != version
            if recipe is not None and restore.hidden == "recompute":
                self._check_recipe(recipe, changed)
            kept = self.left.kept[unit] = SavedUnit(hidden=hidden, recipe=recipe)
            self.save_for_backward(unit, kept, rows_NM, changed)

    def save_for_backward(self, unit: Unit, kept: SavedUnit, rows_NM: Tensor, changed: bool) -> None:
        """Stores T_DI of a unit for backward if it is kept. Subclasses move tensors to the host.

        kept: the unit's record, which has T_M already.
        rows_NM: (N, M), T_DI of the unit.
        changed: whether modules changed rows_NM in place.
        """
        if self.plan.restore.dispatched == "keep":
            kept.rows_NM = rows_NM

    def _check_recipe(self, recipe: Any, changed: bool) -> None:
        """Raises RuntimeError if the experts cannot be recomputed in backward.

        recipe: the random states and the like before the computation.
        changed: whether modules changed T_DI in place.
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
