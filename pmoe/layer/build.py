"""Parts of a layer made from its arguments, and checks of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pmoe.arguments import check_count
from pmoe.comm.grid import Grid
from pmoe.engine.arena import pool
from pmoe.experts import Experts, ModuleExperts, make_stacked
from pmoe.experts.initial import initialise, seeded
from pmoe.experts.modules import build_modules
from pmoe.gates import GATES, SoftGate
from pmoe.gates.make import make_gate
from pmoe.layer.route import decides_capacity
from pmoe.schedule.restore import Restore

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


def make_layer_gate(
    layer: MoELayer,
    gate: str | nn.Module,
    normalize_gate: bool | None,
    z_loss_weight: float,
    options: dict[str, Any],
) -> nn.Module:
    capacity_factor = layer.capacity_factor
    if isinstance(gate, str):
        given = {"normalize": normalize_gate, "z_loss_weight": z_loss_weight or None}
        sizes = (layer.d_model, layer.num_experts, layer.top_k)
        made = make_gate(GATES, gate, sizes, capacity_factor, given, options)
        if isinstance(made, SoftGate) and capacity_factor is not None:
            raise ValueError(f"capacity_factor ({capacity_factor}) must be None: SoftMoE drops nothing")
        return made
    if not isinstance(gate, nn.Module):
        raise TypeError(f"gate ({gate!r}) must be a name or a torch.nn.Module")
    if normalize_gate is not None or z_loss_weight:
        raise ValueError(
            f"normalize_gate ({normalize_gate}) and z_loss_weight ({z_loss_weight}) must be left out "
            "where gate is a module: it normalises and adds losses itself"
        )
    if capacity_factor is not None and decides_capacity(gate):
        raise ValueError(
            f"capacity_factor ({capacity_factor}) must be given to the gate ({type(gate).__name__}): it "
            "decides itself what is kept"
        )
    return gate


def make_experts(
    layer: MoELayer,
    expert: str | nn.Module | Callable[..., nn.Module],
    activation: str,
    bias: bool,
    options: dict[str, Any],
) -> Experts:
    local = layer.num_local_experts
    if isinstance(expert, str):
        stacked = make_stacked(
            expert, layer.d_model, layer.d_hidden, local, activation, bias, shard=layer.shard, **options
        )
        initialise(stacked, first_expert=layer.first_expert)
        return stacked
    if isinstance(expert, Experts | nn.ModuleList):
        given = expert if isinstance(expert, Experts) else ModuleExperts(expert)
        if given.num_local_experts != local:
            raise ValueError(
                f"expert (a {type(expert).__name__} of {given.num_local_experts}) must hold this rank's "
                f"{local} experts"
            )
        if given.shard != layer.shard:
            raise ValueError(
                f"expert (a {type(expert).__name__}, {given.shard}) must hold this rank's part of the "
                f"hidden columns ({layer.shard}), where experts are sharded over the ranks of a node"
            )
        return given
    if layer.grid.is_sharded and callable(expert):
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
    modules = seeded(build, first_expert=layer.first_expert, count=local)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"expert ({expert!r}) must build a torch.nn.Module, not {type(module).__name__}")
    return ModuleExperts(module.to(**options) for module in modules)


def make_shared(
    layer: MoELayer,
    shared: int | nn.Module | None,
    expert: object,
    activation: str,
    bias: bool,
    options: dict[str, Any],
) -> Experts | None:
    if shared is None:
        return None
    if isinstance(shared, nn.Module):
        made: Experts = ModuleExperts([shared])
        made.is_parallel = False
        return made
    if not isinstance(shared, int) or isinstance(shared, bool):
        raise TypeError(f"shared_expert ({shared!r}) must be None, an int or a torch.nn.Module")
    check_count(shared_expert=shared)
    kind = expert if isinstance(expert, str) else "ffn"
    stacked = make_stacked(kind, layer.d_model, shared, 1, activation, bias, **options)
    stacked.is_parallel = False
    initialise(stacked, first_expert=layer.num_experts)  # a seed that no routed expert has
    return stacked


def check_fit(num_experts: int, d_hidden: int, grid: Grid, across: str) -> None:
    if num_experts % grid.across.size:
        size = grid.across.size
        advice = "" if num_experts > size else '; split fewer by a mesh with "esp"'
        raise ValueError(
            f"num_experts ({num_experts}) must be divisible by the size of {across} ({size}){advice}"
        )
    if d_hidden % grid.inside.size:
        raise ValueError(
            f'd_hidden ({d_hidden}) must be divisible by the size of the mesh\'s "esp" ({grid.inside.size})'
        )


def check_host_memory(restore: Restore, like: Tensor | None, device: torch.device | str | None) -> None:
    where = torch.empty(0, device=device).device if like is None else like.device
    if where.type == "meta":
        return  # it is not known yet where the layer will run
    host = pool(where).host
    if not host.free_bytes:
        raise ValueError(
            f"memory_reuse ({restore}) must not offload with no host memory left: {host.free_bytes} of "
            f"{host.limit_bytes} bytes are left"
        )
