"""Gates: which experts a token goes to, and with what weight. One gate a file, loaded at its first use.

Letters of this folder: T tokens of this rank, K choices a token, E experts of the whole group, M = d_model.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pmoe.gates.base import Gate, Mix, Routing
from pmoe.gates.logits import load_balance_loss, router_z_loss

if TYPE_CHECKING:
    from pmoe.gates.batch_prioritised import BatchPrioritisedGate
    from pmoe.gates.deepseek import DeepSeekGate
    from pmoe.gates.expert_choice import ExpertChoiceGate
    from pmoe.gates.external import ExternalGate
    from pmoe.gates.hash import HashGate
    from pmoe.gates.noisy_topk import NoisyTopKGate
    from pmoe.gates.random import RandomGate
    from pmoe.gates.sigmoid import SigmoidGate
    from pmoe.gates.soft import SoftGate
    from pmoe.gates.switch import SwitchGate
    from pmoe.gates.topk import TopKGate
    from pmoe.gates.xmoe import XMoEGate

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

__all__ = [
    "GATES",
    "BatchPrioritisedGate",
    "DeepSeekGate",
    "ExpertChoiceGate",
    "Gate",
    "ExternalGate",
    "HashGate",
    "Mix",
    "NoisyTopKGate",
    "RandomGate",
    "Routing",
    "SigmoidGate",
    "SoftGate",
    "SwitchGate",
    "TopKGate",
    "XMoEGate",
    "load_balance_loss",
    "make_gate",
    "router_z_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'pmoe.gates' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pmoe.gates.{_FILES[name]}"), name)


class _Gates(Mapping[str, type[Gate]]):
    """The gates by name."""

    def __getitem__(self, name: str) -> type[Gate]:
        found: type[Gate] = __getattr__(_CLASSES[name])
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)


GATES: Mapping[str, type[Gate]] = _Gates()


def make_gate(
    name: str,
    sizes: tuple[int, int, int],
    capacity_factor: float | None,
    given: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Gate:
    """``GATES[name](*sizes)`` with the options of all gates and those that were ``given``, None left out.

    Raises ValueError for an unknown name, and for an option that this gate does not have.
    """
    if name not in GATES:
        raise ValueError(f"gate ({name!r}) must be a module or one of {', '.join(sorted(GATES))}")
    kind = GATES[name]
    chosen = dict(options)
    if kind.decides_capacity:
        chosen["capacity_factor"] = capacity_factor
    known = inspect.signature(kind).parameters
    for option, value in given.items():
        if value is None:
            continue
        if option not in known:
            raise ValueError(
                f"{option} ({value!r}) must be left out with gate={name!r}: it has no such option"
            )
        chosen[option] = value
    return kind(*sizes, **chosen)
