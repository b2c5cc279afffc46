"""pmoe: a Mixture-of-Experts layer that hides its all-to-all communication behind its experts."""

import importlib
from typing import TYPE_CHECKING, Any

import torch

from pmoe.warn import warn_of_untested_release

if TYPE_CHECKING:
    # `_PARTS` has these modules, so pmoe.gates.TopKGate works. Type checkers learn it from these lines.
    from pmoe import arguments as arguments
    from pmoe import call as call
    from pmoe import checkpointing as checkpointing
    from pmoe import comm as comm
    from pmoe import decide as decide
    from pmoe import engine as engine
    from pmoe import experts as experts
    from pmoe import gates as gates
    from pmoe import kernels as kernels
    from pmoe import layer as layer
    from pmoe import ordering as ordering
    from pmoe import planner as planner
    from pmoe import runners as runners
    from pmoe import schedule as schedule
    from pmoe import settings as settings
    from pmoe import text as text
    from pmoe.checkpointing.contexts import checkpoint_contexts
    from pmoe.comm.base import Combine, Dispatch
    from pmoe.convert.fewer_experts import (
        busiest_experts,
        group_experts,
        merge_experts,
        prune_experts,
        restore_experts,
    )
    from pmoe.convert.upcycling import copy_into_experts
    from pmoe.engine.buffers.arena import pool
    from pmoe.engine.lanes.recorder import recording
    from pmoe.engine.plan.callbacks import Callback
    from pmoe.experts.base import Experts
    from pmoe.gates import Gate, Routing
    from pmoe.integrations.expert_usage import ExpertUsage
    from pmoe.integrations.routing_replay import engine_routing, replay_routing
    from pmoe.integrations.routing_trace import read_routing, record_routing
    from pmoe.integrations.statistics import stats
    from pmoe.layer import MoELayer
    from pmoe.layer.run_experts import run_experts
    from pmoe.ordering import Order
    from pmoe.schedule.restore import Restore
    from pmoe.training.balance import BalanceLoss, StepTotals
    from pmoe.training.batch_invariant import make_batch_invariant
    from pmoe.training.bounded_steps import BoundedSteps
    from pmoe.training.checkpoint import load_checkpoint, save_checkpoint
    from pmoe.training.clipping import GradScaler, clip_grad_norm_
    from pmoe.training.expert_parallel import expert_parameters, parallelize, parameter_groups
    from pmoe.training.export import export_weights, save_weights
    from pmoe.training.frozen_experts import freeze_experts
    from pmoe.training.lora import (
        add_lora,
        disable_lora,
        lora_adapters,
        merge_lora,
        remove_lora,
        unmerge_lora,
        use_lora,
    )
    from pmoe.training.lora_files import load_lora, save_lora
    from pmoe.training.muon import ExpertMuon
    from pmoe.training.reducer import GradientReducer

__version__ = "0.1.0"

warn_of_untested_release("torch", torch.__version__)

_LATER = {
    "BalanceLoss": "pmoe.training.balance",
    "BoundedSteps": "pmoe.training.bounded_steps",
    "Callback": "pmoe.engine.plan.callbacks",
    "Combine": "pmoe.comm.base",
    "Dispatch": "pmoe.comm.base",
    "ExpertMuon": "pmoe.training.muon",
    "ExpertUsage": "pmoe.integrations.expert_usage",
    "Experts": "pmoe.experts.base",
    "Gate": "pmoe.gates",
    "GradScaler": "pmoe.training.clipping",
    "GradientReducer": "pmoe.training.reducer",
    "MoELayer": "pmoe.layer",
    "Order": "pmoe.ordering",
    "Restore": "pmoe.schedule.restore",
    "Routing": "pmoe.gates",
    "StepTotals": "pmoe.training.balance",
    "add_lora": "pmoe.training.lora",
    "busiest_experts": "pmoe.convert.fewer_experts",
    "checkpoint_contexts": "pmoe.checkpointing.contexts",
    "clip_grad_norm_": "pmoe.training.clipping",
    "copy_into_experts": "pmoe.convert.upcycling",
    "disable_lora": "pmoe.training.lora",
    "engine_routing": "pmoe.integrations.routing_replay",
    "expert_parameters": "pmoe.training.expert_parallel",
    "export_weights": "pmoe.training.export",
    "freeze_experts": "pmoe.training.frozen_experts",
    "group_experts": "pmoe.convert.fewer_experts",
    "load_checkpoint": "pmoe.training.checkpoint",
    "load_lora": "pmoe.training.lora_files",
    "lora_adapters": "pmoe.training.lora",
    "make_batch_invariant": "pmoe.training.batch_invariant",
    "merge_experts": "pmoe.convert.fewer_experts",
    "merge_lora": "pmoe.training.lora",
    "parallelize": "pmoe.training.expert_parallel",
    "parameter_groups": "pmoe.training.expert_parallel",
    "pool": "pmoe.engine.buffers.arena",
    "prune_experts": "pmoe.convert.fewer_experts",
    "read_routing": "pmoe.integrations.routing_trace",
    "record_routing": "pmoe.integrations.routing_trace",
    "recording": "pmoe.engine.lanes.recorder",
    "remove_lora": "pmoe.training.lora",
    "replay_routing": "pmoe.integrations.routing_replay",
    "restore_experts": "pmoe.convert.fewer_experts",
    "run_experts": "pmoe.layer.run_experts",
    "save_checkpoint": "pmoe.training.checkpoint",
    "save_lora": "pmoe.training.lora_files",
    "save_weights": "pmoe.training.export",
    "stats": "pmoe.integrations.statistics",
    "unmerge_lora": "pmoe.training.lora",
    "use_lora": "pmoe.training.lora",
}
"""Public names and their modules. A module is imported when one of its names is first used.

So `import pmoe` takes a few milliseconds: programs that import pmoe need not use a layer, and not every model
needs all of these modules.
"""

_PARTS = (
    "arguments",
    "call",
    "checkpointing",
    "comm",
    "decide",
    "engine",
    "experts",
    "gates",
    "kernels",
    "layer",
    "ordering",
    "planner",
    "runners",
    "schedule",
    "settings",
    "text",
)
"""Parts of pmoe that `import pmoe` gives without an import of their own, as in pmoe.gates.TopKGate.

The first use of one imports `pmoe.layer`, which imports all of them.
"""

# The list is written out, not derived from _LATER, because type checkers read it without running the file.
__all__ = [
    "BalanceLoss",
    "BoundedSteps",
    "Callback",
    "Combine",
    "Dispatch",
    "ExpertMuon",
    "ExpertUsage",
    "Experts",
    "Gate",
    "GradScaler",
    "GradientReducer",
    "MoELayer",
    "Order",
    "Restore",
    "Routing",
    "StepTotals",
    "__version__",
    "add_lora",
    "busiest_experts",
    "checkpoint_contexts",
    "clip_grad_norm_",
    "copy_into_experts",
    "disable_lora",
    "engine_routing",
    "expert_parameters",
    "export_weights",
    "freeze_experts",
    "group_experts",
    "load_checkpoint",
    "load_lora",
    "lora_adapters",
    "make_batch_invariant",
    "merge_experts",
    "merge_lora",
    "parallelize",
    "parameter_groups",
    "pool",
    "prune_experts",
    "read_routing",
    "record_routing",
    "recording",
    "remove_lora",
    "replay_routing",
    "restore_experts",
    "run_experts",
    "save_checkpoint",
    "save_lora",
    "save_weights",
    "stats",
    "unmerge_lora",
    "use_lora",
]

# Hidden from type checkers: with a __getattr__ they would accept every mistyped name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Returns the value of a name in `_LATER` or `_PARTS`, after importing its module.

        The value then becomes an attribute of pmoe, so this function is called once for each name.
        """
        if name in _PARTS:
            importlib.import_module("pmoe.layer")
            return importlib.import_module(f"pmoe.{name}")
        if name not in _LATER:
            raise AttributeError(f"module 'pmoe' has no attribute {name!r}")
        value = getattr(importlib.import_module(_LATER[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Returns the module's names, including those in `_LATER` and `_PARTS` that were not imported yet."""
    return sorted({*globals(), *_LATER, *_PARTS})
