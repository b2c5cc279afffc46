"""The options of a layer in words, by which ranks compare them and stored degrees are found again."""

from __future__ import annotations

from dataclasses import fields

import torch

from pmoe.call.modules import Parts

COMPARED = ("gate", "experts", "shared_expert", "order", "dispatch", "combine", "shared_gate")
"""The modules of `Parts` whose classes and settings must be the same on every rank."""

PLAIN = (bool, int, float, str, torch.dtype)
"""Types of the attributes of a module that describe it."""

NO_SETTINGS = ("training", "is_parallelized", "built", "was_loaded", "may_be_equal", "are_equal")
"""Attributes of modules that change neither results nor times."""


def options_in_words(parts: Parts, *, of_users: bool = False) -> dict[str, str]:
    """Every option of the spec by its name, and of every module its class and settings. of_users: also those
    of classes that are not pmoe's, where ranks may differ."""
    spec = {field.name: getattr(parts.spec, field.name) for field in fields(parts.spec)}
    others = {
        "callbacks": f"{'without' if parts.hooks is None else 'with'} hooks inside the layer",
        "a GradientReducer": parts.gradients is not None,
    }
    modules = {name: _described(getattr(parts, name), of_users) for name in COMPARED}
    return {name: str(value) for name, value in (spec | modules | others).items()}


def _described(module: object, of_users: bool) -> str:
    """Its class; its plain attributes, and the types of its own parameters: no address, nothing random.

    Example: "TopKGate(normalize=True, top_k=2, weight=torch.float32, z_loss_weight=0.0)"
    """
    kind = type(module)
    if module is None:
        return "None"
    if not (of_users or kind.__module__.startswith("pmoe.")):
        return kind.__name__
    parameters = vars(module).get("_parameters", {}).items()
    own = vars(module) | {name: each.dtype for name, each in parameters if each is not None}
    plain = [name for name in sorted(own) if isinstance(own[name], PLAIN) and name[0] != "_"]
    settings = ", ".join(f"{name}={own[name]!r}" for name in plain if name not in NO_SETTINGS)
    return f"{kind.__name__}({settings})"
