"""Passes with experts that are sharded over the ranks of a node (FSMoE's ESP).

Each rank of a node has a part of the hidden columns of the same experts, so each needs the rows of all:

    S    brings rows from one rank of each node               arrived
    AG   the ranks of a node send each other these rows       T_DI
    C    each rank computes its part of every result          T_DO
    RS   each rank gets the sums of the parts of its rows     leaving
    R    sends them back
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
    """A pass with AG behind S and RS before R."""

    dispatch_output: str = "arrived"
    combine_input: str = "leaving"

    @functools.cached_property
    def sharing(self) -> ShardCollectives:
        """The collectives inside the node."""
        return ShardCollectives(self.plan.modules.grid.esp, self.plan.modules.traffic)

    def make_buffers(self, i: int) -> None:
        super().make_buffers(i)
        self.own_buffer("arrived", i)
        self.own_buffer("copies", i)

    def all_gather(self, i: int) -> None:
        """Runs AG of chunk i."""
        self.gather_inside("arrived", self.received, "copies", i)

    def gather_inside(self, arrived: str, received: str, copies: str, i: int) -> None:
        """Gathers buffer ``arrived`` of chunk i inside the node into buffer ``received``.

        copies: the buffer that is sent from.
        """
        chunk = self.cut.chunks[i]
        self.sharing.all_gather(
            self.buffer(arrived, i), self.buffer(received, i), chunk.gathered, self.buffer(copies, i)
        )

    def in_source_order(self, i: int, rows_NM: Tensor) -> None:
        super().in_source_order(i, rows_NM)
        # Allocates them on the compute lane, before RS uses them on another.
        self.buffer("leaving", i)
        self.buffer("parts", i)

    def reduce_scatter(self, i: int) -> None:
        """Runs RS of chunk i."""
        chunk = self.cut.chunks[i]
        self.sharing.reduce_scatter(
            self.buffer(self.sent_back, i), self.buffer("leaving", i), chunk.gathered, self.buffer("parts", i)
        )


class ShardedForward(_Sharded, Forward):
    """A forward pass with sharded experts, which gathers routing weights inside the node too."""

    def scalar(self, sent: Tensor) -> Scalars:
        own_rows = sum(self.weight_message.recv)
        copies = sent.new_empty(self.sharing.copies(own_rows))
        return Scalars(sent, sent.new_empty(own_rows), sent.new_empty(self.cut.num_received), copies)

    def share_weights(self, _: int) -> None:
        """Runs PG: gathers the routing weights of all chunks inside the node."""
        for scalars in self.scalars:
            self.sharing.all_gather(
                scalars.own, scalars.arrived, self.weight_message.gathered, scalars.copies
            )


class ShardedBackward(_Sharded, Backward):
    """A backward pass with sharded experts, which sums gradients of routing weights inside the node too."""

    grad_weight_leaving: Tensor
    grad_weight_parts: Tensor

    brought_by_SI = "arrived_again"

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: ForwardState) -> None:
        super().__init__(plan, grad_TM, saved)
        own_rows = sum(self.weight_message.recv)
        self.grad_weight_leaving = self.grad_weight_rows.new_empty(own_rows)
        self.grad_weight_parts = self.grad_weight_rows.new_empty(own_rows * self.sharing.esp.size)

    def all_gather_again(self, i: int) -> None:
        """Runs AGI of chunk i: gathers T_DI that was sent again."""
        self.gather_inside("arrived_again", "T_DI", "copies_again", i)

    def share_weights(self, _: int) -> None:
        """Runs PG: sums the gradients of routing weights, of which each rank inside has a part.

        A gradient is an inner product over hidden columns, and each rank has a part of these columns.
        """
        leaving = self.grad_weight_leaving
        parts = self.grad_weight_parts
        self.sharing.reduce_scatter(self.grad_weight_gathered, leaving, self.weight_message.gathered, parts)
