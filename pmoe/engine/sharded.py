"""Passes of experts that are sharded over the ranks of a node (FSMoE's ESP): behind S the ranks inside give
each other what came (AG), before R they sum what each made of it (RS).
"""

from __future__ import annotations

import functools

from torch import Tensor

from pmoe.comm.sharing import Sharing
from pmoe.engine.backward_pass import Backward
from pmoe.engine.forward_pass import Forward, Scalars
from pmoe.engine.passes import Forwarded, Pass
from pmoe.engine.plan import Plan


class _Sharded(Pass):
    brought_by_S: str = "arrived"
    taken_by_R: str = "leaving"

    @functools.cached_property
    def sharing(self) -> Sharing:
        return Sharing(self.plan.modules.grid.inside, self.plan.modules.traffic)

    def make_buffers(self, i: int) -> None:
        super().make_buffers(i)
        self.own_buffer("arrived", i)
        self.own_buffer("copies", i)

    def all_gather(self, i: int) -> None:
        self.gather_inside("arrived", self.received, "copies", i)

    def gather_inside(self, arrived: str, received: str, copies: str, i: int) -> None:
        chunk = self.cut.chunks[i]
        self.sharing.all_gather(
            self.buffer(arrived, i), self.buffer(received, i), chunk.gathered, self.buffer(copies, i)
        )

    def in_source_order(self, i: int, rows_NM: Tensor) -> None:
        super().in_source_order(i, rows_NM)
        self.buffer("leaving", i), self.buffer("parts", i)  # made here, on the compute lane

    def reduce_scatter(self, i: int) -> None:
        chunk = self.cut.chunks[i]
        self.sharing.reduce_scatter(
            self.buffer(self.sent_back, i), self.buffer("leaving", i), chunk.gathered, self.buffer("parts", i)
        )


class ShardedForward(_Sharded, Forward):
    def scalar(self, sent: Tensor) -> Scalars:
        own = sum(self.journey.recv)
        copies = sent.new_empty(self.sharing.copies(own))
        return Scalars(sent, sent.new_empty(own), sent.new_empty(self.cut.num_received), copies)

    def share_weights(self, _: int) -> None:
        for each in self.scalars:
            self.sharing.all_gather(each.own, each.arrived, self.journey.gathered, each.copies)


class ShardedBackward(_Sharded, Backward):
    grad_weight_leaving: Tensor
    grad_weight_parts: Tensor

    brought_by_SI = "arrived_again"

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: Forwarded) -> None:
        super().__init__(plan, grad_TM, saved)
        own = sum(self.journey.recv)
        self.grad_weight_leaving = self.grad_weight_rows.new_empty(own)
        self.grad_weight_parts = self.grad_weight_rows.new_empty(own * self.sharing.inside.size)

    def all_gather_again(self, i: int) -> None:
        self.gather_inside("arrived_again", "T_DI", "copies_again", i)

    def share_weights(self, _: int) -> None:
        """Each shard made a part of the inner products that are the routing weights' gradients."""
        leaving, parts = self.grad_weight_leaving, self.grad_weight_parts
        self.sharing.reduce_scatter(self.grad_weight_gathered, leaving, self.journey.gathered, parts)
