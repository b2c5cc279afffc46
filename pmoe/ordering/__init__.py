"""Ordering: copies tokens into rows before dispatch, and sums each token's rows after combine.

A row is the copy of one token for one of its experts. `sorted` also computes the order in which rows are
dispatched and the number of rows of each expert.

Letters: T tokens, K experts of each token, N rows, M = d_model.
"""

from __future__ import annotations

from typing import Literal

from pmoe.ordering.base import Order
from pmoe.ordering.sorted import SortedOrder

__all__ = ["Order", "SortedOrder", "make_order"]

OrderName = Literal["sorted", "einsum"]
"""Names of orderings, which MoELayer's argument ``order`` accepts. It also accepts an `Order`."""


def make_order(order: str | Order) -> Order:
    """Returns the `Order` for MoELayer's argument ``order``, which is a name or an `Order`.

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
