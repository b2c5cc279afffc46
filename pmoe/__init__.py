"""pmoe: a Mixture-of-Experts layer that hides its all-to-all communication behind its experts."""

import importlib
from typing import TYPE_CHECKING, Any

from pmoe.comm.base import Combine, Dispatch
from pmoe.engine.arena import pool
from pmoe.experts.base import Experts
from pmoe.gates import Gate, Routing
from pmoe.layer import MoELayer
from pmoe.ordering import Order
from pmoe.schedule.restore import Restore

if TYPE_CHECKING:
    from pmoe.engine.callbacks import Callback as Callback
    from pmoe.engine.recompute import checkpoint_contexts as checkpoint_contexts
    from pmoe.engine.recording import recording as recording
    from pmoe.training.clipping import GradScaler as GradScaler
    from pmoe.training.clipping import clip_grad_norm_ as clip_grad_norm_
    from pmoe.training.expert_parallel import expert_parameters as expert_parameters
    from pmoe.training.expert_parallel import parallelize as parallelize
    from pmoe.training.expert_parallel import parameter_groups as parameter_groups
    from pmoe.training.reducer import GradientReducer as GradientReducer
    from pmoe.training.upcycling import copy_into_experts as copy_into_experts

__version__ = "0.1.0"

_LATER = {
    "Callback": "pmoe.engine.callbacks",
    "GradScaler": "pmoe.training.clipping",
    "GradientReducer": "pmoe.training.reducer",
    "checkpoint_contexts": "pmoe.engine.recompute",
    "clip_grad_norm_": "pmoe.training.clipping",
    "copy_into_experts": "pmoe.training.upcycling",
    "expert_parameters": "pmoe.training.expert_parallel",
    "load_checkpoint": "pmoe.training.checkpoint",
    "parallelize": "pmoe.training.expert_parallel",
    "parameter_groups": "pmoe.training.expert_parallel",
    "recording": "pmoe.engine.recording",
    "save_checkpoint": "pmoe.training.checkpoint",
    "stats": "pmoe.integrations.statistics",
}
"""Names whose modules load at their first use: not every layer needs them, and some are slow to import."""

__all__ = ["Combine", "Dispatch", "Experts", "Gate", "MoELayer", "Order", "Restore", "Routing", "pool"]
__all__ += ["__version__", *_LATER]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'pmoe' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
