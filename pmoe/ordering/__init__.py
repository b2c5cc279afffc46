"""Ordering: how routed rows are arranged for their journey, and which of them capacity drops."""

from __future__ import annotations

import importlib

from pmoe.ordering.base import Order

__all__ = ["Order", "make_order"]

ORDERS = {"sorted": "SortedOrder", "einsum": "EinsumOrder"}
"""Classes by the name that MoELayer's ``order`` takes, which is their file's too."""


def make_order(order: str | Order) -> Order:
    """The module of MoELayer's argument ``order``. Raises ValueError or TypeError for others."""
    if isinstance(order, Order):
        return order
    if not isinstance(order, str):
        raise TypeError(f"order ({order!r}) must be a pmoe.Order or one of {', '.join(ORDERS)}")
    if order not in ORDERS:
        raise ValueError(f"order ({order!r}) must be a pmoe.Order or one of {', '.join(ORDERS)}")
    made: Order = getattr(importlib.import_module(f"pmoe.ordering.{order}"), ORDERS[order])()
    return made
