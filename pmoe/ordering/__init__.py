"""Ordering: arranges routed rows for dispatch, and sums each token's rows after combine.

Letters: T tokens, N rows, S slots of K choices, M = d_model.
"""

from __future__ import annotations

from typing import Literal

from pmoe.ordering.base import Order
from pmoe.ordering.sorted import SortedOrder

__all__ = ["Order", "SortedOrder", "make_order"]

OrderName = Literal["sorted", "einsum"]
"""Names that MoELayer's argument ``order`` accepts. It also accepts a module."""


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
