"""Ordering: how routed rows are arranged for their journey.

Letters: T tokens, N rows, S slots of K choices, M = d_model.
"""

from __future__ import annotations

import abc
from typing import Literal

from torch import Tensor

__all__ = ["Order", "SortedOrder", "make_order"]

OrderName = Literal["sorted", "einsum"]
"""What MoELayer's argument ``order`` takes, beside a module."""


class Order(abc.ABC):
    """What arranges tokens as rows, and gives each token the sum of its rows again (FSMoE's Order and
    I-Order). Both are linear and each is the other's transpose: backward orders the gradients of the tokens'
    results, and sums those of their rows.

    Which row goes where has been decided (`pmoe.ordering.sorted`); an Order only moves rows, chunk by chunk.
    """

    @abc.abstractmethod
    def order(self, tokens_TM: Tensor, token_N: Tensor, out: Tensor) -> None:
        """out (N, M): row i is tokens[token_N[i]]."""

    @abc.abstractmethod
    def restore(self, rows_NM: Tensor, row_SK: Tensor, out: Tensor, token_S: Tensor | None = None) -> None:
        """out (S, M): out[s] = sum_k rows[row_SK[s, k]], in the order of k. With token_S, ascending, K is 1,
        out is (T, M), and out[t] the sum of the rows of all s with token_S[s] = t, none maybe."""


from pmoe.ordering.sorted import SortedOrder  # noqa: E402 - it takes Order from here


def make_order(order: str | Order) -> Order:
    """The module of MoELayer's argument ``order``. Raises ValueError or TypeError for others."""
    if isinstance(order, Order):
        return order
    if isinstance(order, str) and order == "sorted":
        return SortedOrder()
    if isinstance(order, str) and order == "einsum":
        from pmoe.ordering.einsum import EinsumOrder

        return EinsumOrder()
    error = ValueError if isinstance(order, str) else TypeError
    raise error(f"order ({order!r}) must be a pmoe.Order or one of sorted, einsum")
