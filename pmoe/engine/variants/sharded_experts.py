"""Passes of a layer whose experts are sharded over the ranks of a node (ESP in FSMoE).

Each rank of a node holds a part of the hidden columns of the same experts. So each rank needs the rows of all
ranks of its node:

    task                  what it does                                               its result
    all-to-all (S)        brings rows from one rank of each node                     arrived
    all-gather (AG)       the ranks of a node send each other these rows             T_DI
    experts (C)           each rank computes a partial sum of every result           T_DO
    reduce-scatter (RS)   each rank gets the sums for the rows that S brought it     leaving
    all-to-all (R)        sends these results back to their tokens' ranks            home
"""

from __future__ import annotations

import functools

from torch import Tensor

from pmoe.comm.expert_sharding import ShardCollectives
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import ForwardState, Pass
from pmoe.engine.passes.forward import Forward, Scalars
from pmoe.engine.plan.plan import Plan


class _Sharded(Pass):
    """A pass with two more collectives, inside the node: an all-gather and a reduce-scatter.

    The all-gather comes after the all-to-all to the experts, the reduce-scatter before the all-to-all back.
    """

    dispatch_output: str = "arrived"
    combine_input: str = "leaving"

    @functools.cached_property
    def sharing(self) -> ShardCollectives:
        """The collectives of the ranks that share these experts, inside the node."""
        return ShardCollectives(self.plan.modules.grid.esp, self.plan.modules.traffic)

    def make_buffers(self, i: int) -> None:
        super().make_buffers(i)
        self.own_buffer("arrived", i)
        self.own_buffer("copies", i)

    def all_gather(self, i: int) -> None:
        """Gathers the rows of chunk i from all ranks inside the node (task AG)."""
        self.gather_inside("arrived", self.received, "copies", i)

    def gather_inside(self, arrived: str, received: str, copies: str, i: int) -> None:
        """Gathers a buffer of chunk i from all ranks inside the node into another buffer.

        arrived: the name of the buffer with this rank's rows.
        received: the name of the buffer for the rows of all ranks.
        copies: the name of a scratch buffer, from which rows are sent.
        i: the number of the chunk.
        """
        chunk = self.pass_plan.chunks[i]
        self.sharing.all_gather(
            self.buffer(arrived, i), self.buffer(received, i), chunk.gathered, self.buffer(copies, i)
        )

    def in_source_order(self, i: int, rows_NM: Tensor) -> None:
        super().in_source_order(i, rows_NM)
        # Allocates them here, on the compute lane. RS uses them on another lane (see `Pass.__init__`).
        self.buffer("leaving", i)
        self.buffer("parts", i)

    def reduce_scatter(self, i: int) -> None:
        """Sums the partial results of chunk i over the ranks inside the node (task RS).

        Each rank gets the sums for the rows that the all-to-all had brought to it.
        """
        chunk = self.pass_plan.chunks[i]
        self.sharing.reduce_scatter(
            self.buffer(self.sent_back, i), self.buffer("leaving", i), chunk.gathered, self.buffer("parts", i)
        )


class ShardedForward(_Sharded, Forward):
    """A forward pass with sharded experts. It also gathers routing weights inside the node."""

    def scalar(self, sent: Tensor) -> Scalars:
        own_rows = sum(self.weight_message.recv)
        copies = sent.new_empty(self.sharing.copies(own_rows))
        return Scalars(sent, sent.new_empty(own_rows), sent.new_empty(self.pass_plan.num_received), copies)

    def share_weights(self, _: int) -> None:
        """Gathers the routing weights of all chunks from all ranks inside the node (task PG)."""
        for scalars in self.scalars:
            self.sharing.all_gather(
                scalars.own, scalars.arrived, self.weight_message.gathered, scalars.copies
            )


class ShardedBackward(_Sharded, Backward):
    """A backward pass with sharded experts. It also sums the gradients of routing weights inside the node."""

    grad_weight_leaving: Tensor
    grad_weight_parts: Tensor

    brought_by_SI = "arrived_again"

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: ForwardState) -> None:
        super().__init__(plan, grad_TM, saved)
        own_rows = sum(self.weight_message.recv)
        self.grad_weight_leaving = self.grad_weight_rows.new_empty(own_rows)
        self.grad_weight_parts = self.grad_weight_rows.new_empty(own_rows * self.sharing.esp.size)

    def all_gather_again(self, i: int) -> None:
        """Gathers from all ranks inside the node the rows of chunk i that were sent again (task AGI)."""
        self.gather_inside("arrived_again", "T_DI", "copies_again", i)

    def share_weights(self, _: int) -> None:
        """Sums the gradients of routing weights over the ranks inside the node (task PG).

        The gradient of a row's routing weight is an inner product over hidden columns. Each rank of the node
        has some of these columns, and has computed the sum over them.
        """
        leaving = self.grad_weight_leaving
        parts = self.grad_weight_parts
        self.sharing.reduce_scatter(self.grad_weight_gathered, leaving, self.weight_message.gathered, parts)
