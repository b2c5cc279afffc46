"""Ordering: how routed rows are arranged for their journey, and which of them capacity drops."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pmoe.ordering.base import Order

if TYPE_CHECKING:
    from pmoe.ordering.einsum import EinsumOrder
    from pmoe.ordering.sorted import SortedOrder

__all__ = ["EinsumOrder", "Order", "SortedOrder", "make_order"]

ORDERS = {"sorted": "SortedOrder", "einsum": "EinsumOrder"}
"""Classes by the name that MoELayer's ``order`` takes, which is their file's too."""
_FILES = {name: file for file, name in ORDERS.items()}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'pmoe.ordering' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pmoe.ordering.{_FILES[name]}"), name)


def make_order(order: str | Order) -> Order:
    """The module of MoELayer's argument ``order``. Raises ValueError or TypeError for others."""
    if isinstance(order, Order):
        return order
    if not isinstance(order, str):
        raise TypeError(f"order ({order!r}) must be a pmoe.Order or one of {', '.join(ORDERS)}")
    if order not in ORDERS:
        raise ValueError(f"order ({order!r}) must be a pmoe.Order or one of {', '.join(ORDERS)}")
    made: Order = __getattr__(ORDERS[order])()
    return made
