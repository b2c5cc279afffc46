"""pmoe: a Mixture-of-Experts layer that hides its all-to-all communication behind its experts."""

from pmoe.gates import Gate, Routing
from pmoe.layer import MoELayer

__version__ = "0.1.0"

__all__ = ["Gate", "MoELayer", "Routing", "__version__"]
