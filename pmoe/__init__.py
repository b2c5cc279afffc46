"""pmoe: a Mixture-of-Experts layer that hides its all-to-all communication behind its experts."""

from pmoe.gates import Gate, Routing
from pmoe.layer import MoELayer
from pmoe.pipeline.buffers import pool
from pmoe.planner.restore import Restore

__version__ = "0.1.0"

__all__ = ["Gate", "MoELayer", "Restore", "Routing", "__version__", "pool"]
