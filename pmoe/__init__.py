"""pmoe: a Mixture-of-Experts layer that hides its all-to-all communication behind its experts."""

from pmoe.comm.base import Combine, Dispatch
from pmoe.experts.base import Experts
from pmoe.gates import Gate, Routing
from pmoe.layer import MoELayer
from pmoe.ordering.base import Order
from pmoe.pipeline.buffers import pool
from pmoe.pipeline.callbacks import Callback
from pmoe.planner.restore import Restore
from pmoe.reducer import GradientReducer

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Combine",
    "Dispatch",
    "Experts",
    "Gate",
    "GradientReducer",
    "MoELayer",
    "Order",
    "Restore",
    "Routing",
    "__version__",
    "pool",
]
