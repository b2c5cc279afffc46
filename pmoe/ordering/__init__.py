"""Ordering: arranges routed rows for dispatch, and sums each token's rows after combine.

Letters: T tokens, N rows, S slots of K choices, M = d_model.
"""

from __future__ import annotations

import abc
from typing import Literal

from torch import Tensor

__all__ = ["Order", "SortedOrder", "make_order"]

OrderName = Literal["sorted", "einsum"]
"""Names that MoELayer's argument ``order`` accepts. It also accepts a module."""


class Order(abc.ABC):
    """Copies tokens into rows, and sums rows into tokens: FSMoE's modules Order and I-Order.

    An Order decides nothing: `pmoe.ordering.sorted` has decided which row goes where. It is called once for
    each chunk.

    Both methods are linear, and each is the transpose of the other. So backward uses `order` for the
    gradients of the tokens' results, and `restore` for the gradients of the rows.
    """

    @abc.abstractmethod
    def order(self, tokens_TM: Tensor, token_N: Tensor, out: Tensor) -> None:
        """Copies tokens into rows: out[i] = tokens[token_N[i]].

        Args:
            tokens_TM: (T, M), the tokens.
            token_N: (N,) int64, the token of each row.
            out: (N, M), takes the rows.
        """

    @abc.abstractmethod
    def restore(self, rows_NM: Tensor, row_SK: Tensor, out: Tensor, token_S: Tensor | None = None) -> None:
        """Sums rows into tokens: out[s] = sum_k rows[row_SK[s, k]], in the order of k.

        Args:
            rows_NM: (N, M), the rows. Rows that row_SK does not name may hold anything.
            row_SK: (S, K) int64, the rows of each token; S is T unless there is token_S.
            out: (T, M), takes the sums.
            token_S: (S,) int64 ascending, for gates that give tokens different numbers of rows. Then K is 1,
                and out[t] is the sum of rows[row_SK[s, 0]] over all s with token_S[s] = t: 0 for none.
        """


from pmoe.ordering.sorted import SortedOrder  # noqa: E402 - it takes Order from here


def make_order(order: str | Order) -> Order:
    """Returns the module for MoELayer's argument ``order``, which is a name or a module.

    Raises ValueError for an unknown name, and TypeError for a value that is neither.
    """
    if isinstance(order, Order):
        return order
    if isinstance(order, str) and order == "sorted":
        return SortedOrder()
    if isinstance(order, str) and order == "einsum":
        from pmoe.ordering.einsum import EinsumOrder

        return EinsumOrder()
    error = ValueError if isinstance(order, str) else TypeError
    raise error(f"order ({order!r}) must be a pmoe.Order or one of sorted, einsum")
