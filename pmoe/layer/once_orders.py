"""The rows of a call in which a token goes once to each rank (send_once=True), sorted by chunk."""

from __future__ import annotations

from torch import Tensor

from pmoe.engine.cut import Ordered
from pmoe.layer.orders import Orders
from pmoe.layer.parts import Parts
from pmoe.ordering.once import carriers
from pmoe.ordering.sorted import LocalExperts, Tokens, count_rows, sort_rows


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
        ranks, tokens, nowhere = self._num_ranks, self.tokens, LocalExperts(0, 0)
        return Ordered(
            slots=self.sort_slots(n),
            sent=sort_rows(self._rank_TK, self._carries_TK, n, ranks, nowhere, 0, tokens),
            carrier_TK=self._carrier_TK,
            sent_nP=self.count_once(n),
        )
