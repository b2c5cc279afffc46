"""What a user gives in place of a name: a gate, experts, modules as experts. And the shared expert, which not
every layer has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from pmoe.arguments import check_count, is_int
from pmoe.experts import initialise, make_stacked, seeded
from pmoe.experts.base import Experts
from pmoe.experts.modules import ModuleExperts, build_modules

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


def check_gate(
    gate: nn.Module, capacity_factor: float | None, normalize_gate: bool | None, z_loss_weight: float
) -> None:
    """Raises TypeError for no module, ValueError for options that a gate of one's own has itself."""
    if not isinstance(gate, nn.Module):
        raise TypeError(f"gate ({gate!r}) must be a name or a torch.nn.Module")
    if normalize_gate is not None or z_loss_weight:
        raise ValueError(
            f"normalize_gate ({normalize_gate}) and z_loss_weight ({z_loss_weight}) must be left out "
            "where gate is a module: it normalises and adds losses itself"
        )
    if capacity_factor is not None and getattr(gate, "decides_capacity", False):
        raise ValueError(
            f"capacity_factor ({capacity_factor}) must be given to the gate ({type(gate).__name__}): it "
            "decides itself what is kept"
        )


def given_experts(
    layer: MoELayer, expert: nn.Module | Callable[..., nn.Module], options: dict[str, Any]
) -> Experts:
    """As layers hold them. Raises ValueError or TypeError for what is not this rank's experts."""
    local, shard = layer.num_local_experts, layer.shard
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
    build = build_modules(expert, layer.d_model, layer.d_hidden)
    modules = seeded(lambda _: build(), first_expert=layer.first_expert, count=local)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"expert ({expert!r}) must build a torch.nn.Module, not {type(module).__name__}")
    return ModuleExperts(module.to(**options) for module in modules)


def make_shared(
    layer: MoELayer,
    shared: int | nn.Module,
    expert: object,
    activation: str,
    bias: bool,
    options: dict[str, Any],
) -> Experts:
    """The shared expert, of which every rank has the same. Raises ValueError or TypeError for no such one."""
    if getattr(layer.gate, "mixes_tokens", False):
        raise ValueError(f"shared_expert ({shared}) must be None with SoftMoE, which mixes tokens")
    made: Experts
    if isinstance(shared, nn.Module):
        made = ModuleExperts([shared])
    elif is_int(shared):
        check_count(shared_expert=shared)
        kind = expert if isinstance(expert, str) else "ffn"
        made = make_stacked(kind, layer.d_model, int(shared), 1, activation, bias, **options)
        initialise(made, first_expert=layer.num_experts)  # a seed that no routed expert has
    else:
        raise TypeError(f"shared_expert ({shared!r}) must be None, an int or a torch.nn.Module")
    made.is_parallel = False
    return made
