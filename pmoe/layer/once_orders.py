"""The rows of a call in which a token goes once to each rank (send_once=True), sorted by chunk."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pmoe.engine.cut import Ordered
from pmoe.layer.orders import Orders
from pmoe.layer.parts import Parts
from pmoe.ordering.sorted import Tokens, count_rows, sort_rows


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
    """As `pmoe.layer.orders.Orders`; of a token's slots for one rank, the first carries the row."""

    def __init__(self, parts: Parts, expert_TK: Tensor, keep_TK: Tensor | None, tokens: Tokens) -> None:
        super().__init__(parts, expert_TK, keep_TK, tokens)
        self._num_ranks = parts.grid.across.size
        self._rank_TK = expert_TK // parts.num_local_experts
        self._carrier_TK, self._carries_TK = carriers(self._rank_TK, keep_TK)

    def count_once(self, bins: int) -> Tensor:
        """(bins, ranks) rows that travel."""
        return count_rows(self._rank_TK, self._carries_TK, bins, self._num_ranks, self.tokens)

    def _sort(self, n: int) -> Ordered:
        ranks, tokens, nowhere = self._num_ranks, self.tokens, range(0, 0)
        return replace(
            super()._sort(n),
            sent=sort_rows(self._rank_TK, self._carries_TK, n, ranks, nowhere, 0, tokens),
            carrier_TK=self._carrier_TK,
            sent_nP=self.count_once(n),
        )
