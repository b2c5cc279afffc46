"""Ordering: how routed rows are arranged for their journey, and which of them capacity drops."""

from __future__ import annotations

from pmoe.ordering.base import Order
from pmoe.ordering.sorted import SortedOrder

__all__ = ["Order", "SortedOrder", "make_order"]

ORDERS = ("sorted", "einsum")
"""What MoELayer's ``order`` takes; each is the name of its file too."""


def make_order(order: str | Order) -> Order:
    """The module of MoELayer's argument ``order``. Raises ValueError or TypeError for others."""
    if isinstance(order, Order):
        return order
    if not isinstance(order, str):
        raise TypeError(f"order ({order!r}) must be a pmoe.Order or one of {', '.join(ORDERS)}")
    if order == "sorted":
        return SortedOrder()
    if order == "einsum":
        from pmoe.ordering.einsum import EinsumOrder

        return EinsumOrder()
    raise ValueError(f"order ({order!r}) must be a pmoe.Order or one of {', '.join(ORDERS)}")
