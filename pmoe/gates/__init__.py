"""Gates decide to which experts each token goes, and with which routing weights.

Each gate is in a file of its own, which is imported when the gate is first used. Unless a gate's docstring
says otherwise:

- It computes in float32, or in float64 if the tokens are float64.
- Its ``partition`` is "tokens": it routes each token independently of the others, so a batch may be routed in
  parts.
- It does not drop choices. The layer does, if it has a capacity factor.
- It raises ValueError for top_k outside 1..num_experts, sizes below 1 and a negative z_loss_weight.

Letters in this folder: T tokens of this rank, K choices of a token (top_k), E experts of all ranks, M =
d_model.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pmoe.gates.base import Gate, Mix, Routing
from pmoe.gates.logits import load_balance_loss, router_z_loss

if TYPE_CHECKING:
    from pmoe.gates.batch_prioritised import BatchPrioritisedGate
    from pmoe.gates.deepseek import DeepSeekGate
    from pmoe.gates.expert_choice import ExpertChoiceGate
    from pmoe.gates.external import ExternalGate
    from pmoe.gates.forced import ForcedGate
    from pmoe.gates.hash import HashGate
    from pmoe.gates.noisy_topk import NoisyTopKGate
    from pmoe.gates.random import RandomGate
    from pmoe.gates.replay import ReplayGate
    from pmoe.gates.sigmoid import SigmoidGate
    from pmoe.gates.soft import SoftGate
    from pmoe.gates.switch import SwitchGate
    from pmoe.gates.topk import TopKGate
    from pmoe.gates.xmoe import XMoEGate

GateName = Literal[
    "topk",
    "switch",
    "noisy_topk",
    "sigmoid",
    "deepseek",
    "xmoe",
    "expert_choice",
    "soft",
    "batch_prioritised",
    "hash",
    "random",
]
"""Names of gates, which MoELayer's argument ``gate`` accepts; the keys of `GATES`.

The argument also accepts a module.
"""

_CLASSES: dict[GateName, str] = {
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
"""Class of each gate name. The gate's name is also the name of its file."""
_FILES: dict[str, str] = {name: file for file, name in _CLASSES.items()} | {
    "ExternalGate": "external",
    "ForcedGate": "forced",
    "ReplayGate": "replay",
}
"""File of each gate class, without ".py"."""

GATES: Mapping[GateName, type[Gate]]
"""Gate classes by name. Its first use imports all of them."""

# A literal list instead of one computed from _FILES, because type checkers read it without running the file.
__all__ = [
    "GATES",
    "BatchPrioritisedGate",
    "DeepSeekGate",
    "ExpertChoiceGate",
    "ExternalGate",
    "ForcedGate",
    "Gate",
    "HashGate",
    "Mix",
    "NoisyTopKGate",
    "RandomGate",
    "ReplayGate",
    "Routing",
    "SigmoidGate",
    "SoftGate",
    "SwitchGate",
    "TopKGate",
    "XMoEGate",
    "load_balance_loss",
    "router_z_loss",
]


def _load(name: str) -> type[Gate]:
    """Imports a gate's file and returns the class.

    name: name of the class.
    """
    gate: type[Gate] = getattr(importlib.import_module(f"pmoe.gates.{_FILES[name]}"), name)
    return gate


if not TYPE_CHECKING:  # if type checkers saw __getattr__, they would accept every mistyped name

    def __getattr__(name: str) -> Any:
        if name == "GATES":
            return {file: _load(kind) for file, kind in _CLASSES.items()}
        if name not in _FILES:
            raise AttributeError(f"module 'pmoe.gates' has no attribute {name!r}")
        return _load(name)


def make_gate(
    name: GateName,
    sizes: tuple[int, int, int],
    capacity_factor: float | None,
    gate_options: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Gate:
    """Returns a new gate for the arguments of MoELayer.

    name: name of the gate.
    sizes: d_model, num_experts and top_k.
    capacity_factor: passed on to gates that apply the capacity themselves (`Gate.decides_capacity`).
    gate_options: options that only some gates have, by name, as the user passed them to MoELayer. None means
        that the user did not set the option.
    options: options that all gates have, by name: device and dtype.

    Raises ValueError for an unknown name, and for an option in ``gate_options`` that is set although this
    gate does not have it.
    """
    if name not in _CLASSES:
        raise ValueError(f"gate ({name!r}) must be a module or one of {', '.join(sorted(_CLASSES))}")
    kind = _load(_CLASSES[name])
    known = inspect.signature(kind).parameters
    asked = {option: value for option, value in gate_options.items() if value is not None}
    for option, value in asked.items():
        if option not in known:
            raise ValueError(
                f"{option} ({value!r}) must be left out with gate={name!r}, which has no such option"
            )
    if kind.decides_capacity:
        asked["capacity_factor"] = capacity_factor
    return kind(*sizes, **options, **asked)
