"""Rows that travel once to a rank that holds several of their token's experts (`pmoe.layer.once_orders`):
there they are replicated, and their partial results are summed before they return.

With each routing weight travels which of the rows that its rank gets in its chunk is its row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pmoe.comm.counts import RankCounts
from pmoe.engine.backward_pass import Backward
from pmoe.engine.cut import Ordered
from pmoe.engine.forward_pass import Forward
from pmoe.engine.passes import Pass, split_by_chunk
from pmoe.engine.plan import WeightJourney


@dataclass(frozen=True, kw_only=True)
class MergedRows:
    """number: (N,) int32, for each weight that is sent, which of the rows that its rank gets in its chunk is
    its row. base: (N,) where those rows begin among all that a chunk brings its rank, for each weight that
    arrives."""

    number: Tensor
    base: Tensor


def number_rows(weights: WeightJourney, order: Ordered, shared: RankCounts, fine: Tensor) -> MergedRows:
    """Which row carries each weight's token, counted from the first row of its chunk and rank. fine: rows by
    source, chunk, expert and bin."""
    come_nW = shared.received_once_device
    assert come_nW is not None and order.carrier_TK is not None and order.sent_nP is not None
    expert_TK, tokens = order.expert_TK, order.tokens
    top_k, slot = expert_TK.shape[1], weights.slot
    n, num_across = order.sent_nP.shape
    row = order.sent.position[slot // top_k * top_k + order.carrier_TK.view(-1)[slot]]
    token = slot // top_k if tokens.of_slot is None else tokens.of_slot[slot]
    # Where the rows of (chunk, rank) begin among all that this rank sends.
    sent = order.sent_nP.view(-1)
    chunk = ((token + 1) * n - 1) // max(tokens.count, 1)
    destination = expert_TK.reshape(-1)[slot] // shared.send.shape[2]
    number = (row - (sent.cumsum(0) - sent)[chunk * num_across + destination]).int()
    base_Wn = (come_nW.cumsum(1) - come_nW).t().reshape(-1)
    rows_Wn = fine.sum((2, 3)).reshape(-1)
    num_received = int(shared.recv.sum())
    return MergedRows(number=number, base=base_Wn.repeat_interleave(rows_Wn, output_size=num_received))


class _Once(Pass):
    def put_back(self, leaving_NM: Tensor, regroup: Tensor, rows_NM: Tensor) -> None:
        leaving_NM.zero_().index_add_(0, regroup, rows_NM)


class OnceForward(_Once, Forward):
    def make_scalars(self) -> None:
        super().make_scalars()
        assert self.cut.once is not None
        self.number = self.scalar(self.cut.once.number)
        self.scalars.append(self.number)

    def sorted_weights(self) -> Tensor:
        assert self.cut.once is not None
        row, regroup = self.cut.once.base + self.number.arrived, self.journey.regroup
        row = row if regroup is None else row.index_select(0, regroup)
        self.regroup = self.left.regroup = split_by_chunk(row, self.cut)
        return super().sorted_weights()


class OnceBackward(_Once, Backward):
    pass
