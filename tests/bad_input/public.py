"""What is public: the names that the reference describes, with the arguments of each."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from pmoe.gates import GATES
from tests.spec.test_99_public import public_modules

HEAVY = {"pmoe.integrations", "pmoe.integrations.transformers.layers"}
"""Modules that are slow to import: their functions are named by hand."""

LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(
        ("Combine", "Dispatch", "Exchange", "Experts", "Gate", "Order", "Callback", "StackedExperts"),
        "to be subclassed: made without arguments, or by a subclass",
    ),
    **dict.fromkeys(
        (
            "Journal",
            "Span",
            "Stats",
            "LayerStats",
            "LayerUsage",
            "PredictedMemory",
            "Loaded",
            "Traffic",
            "Meshes",
            "MergedLora",
            "FrozenExperts",
        ),
        "a record that pmoe makes",
    ),
    "CheckpointError": "an error",
    "BoundedSteps.step": "it hands its argument to a function of the user",
    "Shard.of": "the layer calls it",
    "ExternalGate.forward": "the layer calls it",
    "ExternalGate.weights_of": "replay_routing calls it",
    **dict.fromkeys(("ForcedGate.choices", "ReplayGate.choices"), "the gate calls it"),
}
"""What users do not call with arguments of theirs, and why."""

CALLED_BY_THE_LAYER = {
    *("Callback", "Exchange", "Experts", "StackedExperts", "FFNExperts", "SwiGLUExperts", "ModuleExperts"),
    *("Order", "SortedOrder", "EinsumOrder", "Traffic", "Gate", "TopKRouter", "DrawnGate", "Journal"),
    "OverridingGate",
    *(kind.__name__ for kind in GATES.values()),
}
"""Classes whose methods the layer calls, with what it has checked; docs/reference.rst says so."""


SELF = ("self", "layer")
"""The first argument of methods; the pmoe backend puts a forward of its own into the class."""


def arguments(function: Any) -> set[str]:
    """Those that have names of their own."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.name not in SELF and each.kind not in (2, 4)}


def public() -> dict[str, set[str]]:
    """By function, class and method, the arguments; what has none is left out."""
    found = {}
    for module, names in public_modules().items():
        if module in HEAVY:
            continue
        home = importlib.import_module(module)
        for name in names or home.__all__:
            for shown, function in _callables(getattr(home, name)):
                if shown not in LEFT_OUT and (given := arguments(function)):
                    found[shown] = given
    return found


def _callables(value: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isfunction(value):
        yield value.__name__, value
    if not inspect.isclass(value):
        return
    if value.__name__ not in LEFT_OUT:
        yield value.__name__, value
    for name in (name for name in dir(value) if not name.startswith("_")):
        owner = next(each for each in value.__mro__ if name in vars(each))
        method = inspect.unwrap(getattr(value, name)) if callable(getattr(value, name)) else None
        is_own = owner.__module__.startswith("pmoe.") and owner.__name__ not in CALLED_BY_THE_LAYER
        if is_own and inspect.isfunction(method):
            yield f"{owner.__name__}.{name}", method
