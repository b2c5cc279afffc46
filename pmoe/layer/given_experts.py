"""Experts that a user gives: `pmoe.experts.Experts`, modules, or a callable that builds one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pmoe.experts import seeded
from pmoe.experts.base import Experts
from pmoe.experts.modules import ModuleExperts, build_modules
from pmoe.layer.build import Place
from pmoe.layer.spec import LayerSpec


def given_experts(
    spec: LayerSpec, place: Place, expert: nn.Module | Callable[..., nn.Module], options: dict[str, Any]
) -> Experts:
    """As layers hold them. Raises ValueError or TypeError for what is not this rank's experts."""
    local = place.num_experts
    if isinstance(expert, Experts | nn.ModuleList):
        given = expert if isinstance(expert, Experts) else ModuleExperts(expert)
        if given.num_local_experts != local:
            raise ValueError(
                f"expert (a {type(expert).__name__} of {given.num_local_experts}) must hold this rank's "
                f"{local} experts"
            )
        if given.shard != place.shard:
            raise ValueError(
                f"expert (a {type(expert).__name__}, {given.shard}) must hold this rank's part of the "
                f"hidden columns ({place.shard}), where experts are sharded over the ranks of a node"
            )
        return given
    if place.shard.count > 1 and callable(expert):
        raise ValueError(
            f"expert ({expert!r}) must be ffn or swiglu, or a pmoe.experts.Experts of this rank's "
            "columns, where experts are sharded over the ranks of a node: a module's hidden is its own"
        )
    if isinstance(expert, nn.Module) or not callable(expert):
        raise TypeError(
            f"expert ({expert!r}) must be a name, a callable that builds one expert, or a "
            f"torch.nn.ModuleList of this rank's {local} experts"
        )
    build = build_modules(expert, spec.d_model, spec.d_hidden)
    modules = seeded(lambda _: build(), first_expert=place.first_expert, count=local)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"expert ({expert!r}) must build a torch.nn.Module, not {type(module).__name__}")
    return ModuleExperts(module.to(**options) for module in modules)
