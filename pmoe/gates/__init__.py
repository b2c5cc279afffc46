"""Gates: which experts a token goes to, and with what weight. One gate a file, loaded at its first use.

Unless a gate says otherwise: it computes in float32, or in float64 where the tokens are; its ``partition`` is
"tokens", for each token is routed alone; capacity is the layer's. All raise ValueError for top_k outside
1..num_experts, sizes below 1 and a negative z_loss_weight.

Letters of this folder: T tokens of this rank, K choices a token, E experts of the whole group, M = d_model.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pmoe.gates.base import Gate, Mix, Routing
from pmoe.gates.logits import load_balance_loss, router_z_loss

if TYPE_CHECKING:
    from pmoe.gates.batch_prioritised import BatchPrioritisedGate as BatchPrioritisedGate
    from pmoe.gates.deepseek import DeepSeekGate as DeepSeekGate
    from pmoe.gates.expert_choice import ExpertChoiceGate as ExpertChoiceGate
    from pmoe.gates.external import ExternalGate as ExternalGate
    from pmoe.gates.hash import HashGate as HashGate
    from pmoe.gates.noisy_topk import NoisyTopKGate as NoisyTopKGate
    from pmoe.gates.random import RandomGate as RandomGate
    from pmoe.gates.sigmoid import SigmoidGate as SigmoidGate
    from pmoe.gates.soft import SoftGate as SoftGate
    from pmoe.gates.switch import SwitchGate as SwitchGate
    from pmoe.gates.topk import TopKGate as TopKGate
    from pmoe.gates.xmoe import XMoEGate as XMoEGate

_CLASSES = {
    "topk": "TopKGate",
    "switch": "SwitchGate",
    "noisy_topk": "NoisyTopKGate",
    "sigmoid": "SigmoidGate",
    "deepseek": "DeepSeekGate",
    "xmoe": "XMoEGate",
    "expert_choice": "ExpertChoiceGate",
    "soft": "SoftGate",
    "batch_prioritised": "BatchPrioritisedGate",
    "hash": "HashGate",
    "random": "RandomGate",
}
"""By the name that MoELayer's ``gate`` takes, which is its file's too."""
_FILES = {name: file for file, name in _CLASSES.items()} | {"ExternalGate": "external"}

GATES: Mapping[str, type[Gate]]
"""The gates by name: all are loaded at its first use."""

__all__ = ["GATES", "Gate", "Mix", "Routing", "load_balance_loss", "router_z_loss", *_FILES]


def __getattr__(name: str) -> Any:
    if name == "GATES":
        return {file: __getattr__(kind) for file, kind in _CLASSES.items()}
    if name not in _FILES:
        raise AttributeError(f"module 'pmoe.gates' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pmoe.gates.{_FILES[name]}"), name)


def make_gate(
    name: str,
    sizes: tuple[int, int, int],
    capacity_factor: float | None,
    given: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Gate:
    """The gate of this name with the options of all gates and those that were ``given``, None left out.

    Raises ValueError for an unknown name, and for an option that this gate does not have.
    """
    if name not in _CLASSES:
        raise ValueError(f"gate ({name!r}) must be a module or one of {', '.join(sorted(_CLASSES))}")
    kind: type[Gate] = __getattr__(_CLASSES[name])
    known = inspect.signature(kind).parameters
    asked = {option: value for option, value in given.items() if value is not None}
    for option, value in asked.items():
        if option not in known:
            raise ValueError(
                f"{option} ({value!r}) must be left out with gate={name!r}: it has no such option"
            )
    if kind.decides_capacity:
        asked["capacity_factor"] = capacity_factor
    return kind(*sizes, **options, **asked)
