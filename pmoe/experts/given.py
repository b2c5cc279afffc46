"""What a user gives in place of the name of a kind of experts: experts, modules, or what builds them. And the
shared expert, which not every layer has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pmoe.arguments import check_count, is_int
from pmoe.experts import initialise, make_stacked, seeded
from pmoe.experts.base import Experts, Shard
from pmoe.experts.modules import ModuleExperts, build_modules


def given_experts(
    expert: nn.Module | Callable[..., nn.Module],
    sizes: tuple[int, int, int],
    shard: Shard,
    first_expert: int,
    options: dict[str, Any],
) -> Experts:
    """As layers hold them. sizes: d_model, d_hidden, and the number of this rank's experts. Raises ValueError
    or TypeError for what is not this rank's experts."""
    d_model, d_hidden, local = sizes
    if isinstance(expert, Experts | nn.ModuleList):
        given = expert if isinstance(expert, Experts) else ModuleExperts(expert)
        if given.num_local_experts != local:
            raise ValueError(
                f"expert (a {type(expert).__name__} of {given.num_local_experts}) must hold this rank's "
                f"{local} experts"
            )
        if given.shard != shard:
            raise ValueError(
                f"expert (a {type(expert).__name__}, {given.shard}) must hold this rank's part of the "
                f"hidden columns ({shard}), where experts are sharded over the ranks of a node"
            )
        return given
    if shard.count > 1 and callable(expert):
        raise ValueError(
            f"expert ({expert!r}) must be ffn or swiglu, or a pmoe.experts.Experts of this rank's "
            "columns, where experts are sharded over the ranks of a node: a module's hidden is its own"
        )
    if isinstance(expert, nn.Module) or not callable(expert):
        raise TypeError(
            f"expert ({expert!r}) must be a name, a callable that builds one expert, or a "
            f"torch.nn.ModuleList of this rank's {local} experts"
        )
    build = build_modules(expert, d_model, d_hidden)
    modules = seeded(lambda _: build(), first_expert=first_expert, count=local)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"expert ({expert!r}) must build a torch.nn.Module, not {type(module).__name__}")
    return ModuleExperts(module.to(**options) for module in modules)


def shared_experts(
    shared: int | nn.Module,
    kind: str,
    d_model: int,
    activation: str,
    bias: bool,
    first_expert: int,
    options: dict[str, Any],
) -> Experts:
    """The shared expert, of which every rank has the same. shared: its width, or a module. first_expert: a
    number whose seed no routed expert has. Raises ValueError or TypeError for what is none."""
    made: Experts
    if isinstance(shared, nn.Module):
        made = ModuleExperts([shared])
    elif is_int(shared):
        check_count(shared_expert=shared)
        made = make_stacked(kind, d_model, int(shared), 1, activation, bias, **options)
        initialise(made, first_expert=first_expert)
    else:
        raise TypeError(f"shared_expert ({shared!r}) must be None, an int or a torch.nn.Module")
    made.is_parallel = False
    return made
