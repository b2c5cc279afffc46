"""Rows that travel once to a rank that holds several of their token's experts (send_once=True): there they
are replicated, and their partial results are summed before they return.

With each routing weight travels which of the rows that its rank gets in its chunk is its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.counts import RankCounts
from pmoe.engine.backward_pass import Backward
from pmoe.engine.cut import Orders
from pmoe.engine.forward_pass import Forward, Scalars
from pmoe.engine.passes import Pass, split_by_chunk
from pmoe.engine.plan import Modules, WeightJourney
from pmoe.ordering.sorted import SortedRows, Tokens, count_rows, sort_rows
from pmoe.planner.degree import Choice


def carriers(rank_TK: Tensor, keep_TK: Tensor | None) -> tuple[Tensor, Tensor]:
    """(carrier_TK, carries_TK): the first kept choice of the token that has the same rank, which is the slot
    in whose row the token goes there, and whether a slot is such a one itself. Dropped slots carry nothing.

    Example: ranks (2, 0, 2) of one token -> carriers (0, 1, 0), and the first two carry.
    """
    same_TKK = rank_TK.unsqueeze(2) == rank_TK.unsqueeze(1)
    if keep_TK is not None:
        same_TKK = same_TKK & keep_TK.unsqueeze(1)
    carrier_TK = same_TKK.int().argmax(2)  # the first of equals
    carries_TK = carrier_TK == torch.arange(rank_TK.shape[1], device=rank_TK.device)
    return carrier_TK, carries_TK if keep_TK is None else carries_TK & keep_TK


class OnceOrders(Orders):
    """As `pmoe.engine.cut.Orders`; of a token's slots for one rank, the first carries the row."""

    def __init__(self, modules: Modules, expert_TK: Tensor, keep_TK: Tensor | None, tokens: Tokens) -> None:
        super().__init__(modules, expert_TK, keep_TK, tokens)
        self._num_ranks = modules.grid.across.size
        self._rank_TK = expert_TK // modules.experts.num_local_experts
        self._carrier_TK, self._carries_TK = carriers(self._rank_TK, keep_TK)
        self._sent: dict[int, SortedRows] = {}

    def count_once(self, bins: int) -> Tensor:
        """(bins, ranks) rows that travel."""
        return count_rows(self._rank_TK, self._carries_TK, bins, self._num_ranks, self.tokens)

    def sent(self, n: int) -> SortedRows:
        if n not in self._sent:
            ranks, nowhere = self._num_ranks, range(0, 0)
            self._sent[n] = sort_rows(self._rank_TK, self._carries_TK, n, ranks, nowhere, 0, self.tokens)
        return self._sent[n]

    def number_rows(self, n: int, weights: WeightJourney, shared: RankCounts, fine: Tensor) -> MergedRows:
        """Counted from the first row of its chunk and rank. fine: rows by source, chunk, expert and bin."""
        come_nW, tokens = shared.received_once_device, self.tokens
        assert come_nW is not None
        top_k, slot = self.expert_TK.shape[1], weights.slot
        row = self.sent(n).position[slot // top_k * top_k + self._carrier_TK.view(-1)[slot]]
        token = slot // top_k if tokens.of_slot is None else tokens.of_slot[slot]
        # Where the rows of (chunk, rank) begin among all that this rank sends.
        sent = self.count_once(n).view(-1)
        chunk = ((token + 1) * n - 1) // max(tokens.count, 1)
        destination = self._rank_TK.reshape(-1)[slot]
        number = (row - (sent.cumsum(0) - sent)[chunk * self._num_ranks + destination]).int()
        base_Wn = (come_nW.cumsum(1) - come_nW).t().reshape(-1)
        rows_Wn = fine.sum((2, 3)).reshape(-1)
        num_received = int(shared.recv.sum())
        return MergedRows(number=number, base=base_Wn.repeat_interleave(rows_Wn, output_size=num_received))

    def _deep_enough(self, choice: Choice, depth: dict[int, int]) -> tuple[int, int]:
        forward, _ = super()._deep_enough(choice, depth)
        return forward, forward


@dataclass(frozen=True, kw_only=True)
class MergedRows:
    """number: (N,) int32, for each weight that is sent, which of the rows that its rank gets in its chunk is
    its row. base: (N,) where those rows begin among all that a chunk brings its rank, for each weight that
    arrives."""

    number: Tensor
    base: Tensor


class _Once(Pass):
    def put_back(self, leaving_NM: Tensor, regroup: Tensor, rows_NM: Tensor) -> None:
        leaving_NM.zero_().index_add_(0, regroup, rows_NM)


class OnceForward(_Once, Forward):
    number: Scalars
    regroup: tuple[Tensor, ...]

    def make_scalars(self) -> None:
        super().make_scalars()
        assert self.cut.once is not None
        self.number = self.scalar(self.cut.once.number)
        self.scalars.append(self.number)

    def weights(self, _: int) -> dist.Work | None:
        begun = [work for work in map(self.send_scalars, self.scalars) if work is not None]
        waits_for_all: Any = SimpleNamespace(wait=lambda: [work.wait() for work in begun])
        waited: dist.Work | None = waits_for_all if begun else None
        return waited

    def sorted_weights(self) -> Tensor:
        assert self.cut.once is not None
        row, regroup = self.cut.once.base + self.number.arrived, self.journey.regroup
        row = row if regroup is None else row.index_select(0, regroup)
        self.regroup = self.left.regroup = split_by_chunk(row, self.cut)
        return super().sorted_weights()


class OnceBackward(_Once, Backward):
    pass
