"""Makes a layer's gate, experts and ranks from MoELayer's arguments, and checks the arguments.

Functions import the code for rare arguments, such as a user's own expert modules, only if they need it. This
keeps `import pmoe` fast.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pmoe.arguments import check_flag, check_kind, check_not_negative, check_place
from pmoe.call.module_calls import gate_inside
from pmoe.call.modules import LayerModules
from pmoe.call.narrow_pairs import check_narrow
from pmoe.call.options import LayerOptions, Switches
from pmoe.comm.base import Combine, Dispatch, Exchange
from pmoe.comm.failures import publish_construction, sum_between_calls
from pmoe.comm.grid import Grid
from pmoe.comm.ranks import Ranks
from pmoe.experts import ExpertName, initialise, make_stacked
from pmoe.experts.base import Experts
from pmoe.experts.ffn import ActivationName, find_activation
from pmoe.experts.stacked import StackedExperts
from pmoe.gates import GateName, make_gate
from pmoe.gates.base import Gate
from pmoe.ordering.base import Order
from pmoe.schedule.restore import Restore
from pmoe.schedule.wire import AS_THEY_ARE
from pmoe.warn import warn_once

if TYPE_CHECKING:
    from pmoe.engine.plan.callbacks import Callback
    from pmoe.layer.moe_layer import MoELayer


Arguments = ParamSpec("Arguments")


def publishing(build: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Returns a constructor that publishes its error, so that peers which have built the layer do not wait.

    build: the constructor.
    """

    @functools.wraps(build)
    def build_or_publish(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            build(*args, **kwargs)
        except Exception as error:
            publish_construction(error)
            raise

    return build_or_publish


def check_arguments(
    callbacks: Sequence[Callback],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    activation: ActivationName,
    shared_gate: bool,
    z_loss_weight: float,
) -> None:
    """Raises ValueError or TypeError for wrong arguments of `pmoe.MoELayer`.

    Only the arguments in this signature are checked. `LayerOptions` checks the options when it is made.
    """
    check_not_negative(z_loss_weight=z_loss_weight)
    find_activation(activation)
    check_place(device, dtype)
    check_flag("shared_gate", shared_gate)
    check_kind(Sequence, "a list of pmoe.Callback objects", callbacks=callbacks)
    if callbacks:
        from pmoe.engine.plan.callbacks import Callback
    for callback in callbacks:
        check_kind(Callback, "pmoe.Callback objects", callbacks=callback)


def check_together(modules: LayerModules, shared_expert: int | nn.Module | None) -> None:
    """Raises ValueError if a layer's options contradict each other or the layer's modules.

    modules: the layer's modules and options.
    shared_expert: MoELayer's argument ``shared_expert``, which error messages quote.
    """
    options = modules.options
    pair = modules.options.restore
    has_two_degrees = options.pipeline_backward not in (None, options.fixed_degree)
    if has_two_degrees and (modules.hooks is not None or options.send_once):
        cause = "callbacks see chunks" if modules.hooks is not None else "rows travel once (send_once=True)"
        raise ValueError(
            f"pipeline_backward ({options.pipeline_backward}) must be pipeline ({options.pipeline}) or None "
            f"if {cause}"
        )
    if modules.shared_gate is not None and modules.shared_expert is None:
        raise ValueError("shared_gate (True) must be False without a shared_expert")
    if modules.shared_expert is not None and getattr(modules.router, "mixes_tokens", False):
        raise ValueError(f"shared_expert ({shared_expert}) must be None with SoftMoE, which mixes tokens")
    if isinstance(pair, Restore) and pair.offloads:
        from pmoe.engine.variants.offload import check_host_memory

        reference = modules.reference_parameter

        check_host_memory(pair, torch.empty(0).device if reference is None else reference.device)
    if options.wires != AS_THEY_ARE:
        from pmoe.engine.variants.wire import check_wired

        check_wired(modules, options.wires)
    if isinstance(pair, Restore) and pair.is_narrow:
        check_narrow(modules, pair)
    if options.products is not None:
        from pmoe.call.rounded_products import check_rounded

        check_rounded(modules, options.products)
    if options.memory_budget is not None:
        from pmoe.layer.predict_memory import check_budget

        check_budget(modules)
    if options.balance:
        check_balance(modules)
    if modules.experts.is_batch_invariant:
        from pmoe.layer.batch_invariant import check_invariant

        check_invariant(modules)
    if options.pad_to_capacity and (reason := modules.refusal("padded counts")) is not None:
        raise ValueError(f"pad_to_capacity (True) must be False where {reason}")
    recomputes = pair is True or (pair and pair.hidden == "recompute")
    if options.splits_backward and not recomputes and modules.experts.are_modules:
        raise ValueError(
            f"pipeline_backward ({options.pipeline_backward}) must divide pipeline ({options.pipeline}) "
            "if experts are modules and their hidden is kept or offloaded, because a saved graph cannot be "
            "split: "
            'use memory_reuse="S3" or "S4", which recompute it'
        )


def check_balance(modules: LayerModules) -> None:
    """Raises ValueError if a layer has ``balance`` and its experts cannot be copied to other ranks.

    On one rank, or if every rank has a part of every expert, no other rank could use a copy. A warning then
    says that ``balance`` does nothing.

    modules: the layer's modules and options.
    """
    options = modules.options
    balance = options.balance
    if modules.grid.ep.size == 1:
        if modules.grid.is_sharded:
            warn_once(f"balance ({balance}) does nothing where every rank has a part of every expert (mesh)")
        elif not dist.is_initialized() or dist.get_world_size() == 1:
            warn_once(f"balance ({balance}) does nothing on one rank: there is no other rank for a copy")
        return
    reason = modules.refusal("copies")
    if reason is None and modules.experts.are_modules:
        from pmoe.experts.architecture import why_not_copied

        reason = why_not_copied(modules.experts.as_modules()) or None
    elif reason is None and not isinstance(modules.experts, StackedExperts):
        reason = f"experts ({type(modules.experts).__name__}) are no pmoe.experts.StackedExperts"
    if reason is not None:
        raise ValueError(f"balance ({balance}) must be False where {reason}")
    others = options.num_experts - modules.experts.num_local_experts
    if balance is not True and balance > others:
        raise ValueError(
            f"balance ({balance}) must be at most {others}, the number of experts of the other ranks"
        )


SIZES = ("d_model", "d_latent", "d_hidden", "num_experts", "top_k")
"""The options that cannot be set on a built layer, because its modules already have these sizes."""


def set_option(layer: MoELayer, name: str, value: object) -> None:
    """Sets an option of a built layer.

    layer: the layer.
    name: name of the option, an argument of `MoELayer`.
    value: the new value.

    Raises the same errors as building a layer with this option. Raises AttributeError if ``name`` is a switch
    (a field of `Switches`), which is set through ``layer.switches``. If an error is raised, nothing has
    changed.
    """
    if name in Switches.__dataclass_fields__:
        raise AttributeError(
            f"{name} ({value!r}) must be set in layer.switches: layer.switches = Switches({name}={value!r})"
        )
    options_before = layer.options
    options = replace(options_before, **{name: value})  # type: ignore[arg-type]
    if name in SIZES and options != options_before:
        raise ValueError(
            f"{name} ({value!r}) must stay {getattr(options_before, name)}, as the layer was built"
        )
    layer.options = options
    try:
        check_together(layer.layer_modules, layer.shared_expert)
    except ValueError:
        layer.options = options_before
        raise


def check_replacement(layer: MoELayer, name: str, value: object) -> None:
    """Raises TypeError if ``value`` cannot become the layer's order, dispatch or combine.

    A new dispatch or combine also gets the layer's ranks, if the layer is built already.

    layer: the layer, which may be under construction.
    name: name of a field of `LayerModules`. Other fields than these three are not checked.
    value: the value that the field will get. Names such as "flat" are arguments of `MoELayer` only.
    """
    kind = {"order": Order, "dispatch": Dispatch, "combine": Combine}.get(name)
    if kind is None:
        return
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} ({value!r}) must be a pmoe.{kind.__name__} object on a built layer: pass a name when "
            f"the layer is built, MoELayer(..., {name}={value!r})"
        )
    if isinstance(value, Exchange) and "scalars" in vars(layer):
        value.bind(layer.grid.ep, layer.traffic)


def make_layer_gate(
    options: LayerOptions,
    gate: GateName | nn.Module,
    normalize_gate: bool | None,
    z_loss_weight: float,
    factory_options: dict[str, Any],
) -> nn.Module:
    """Makes the gate of a layer, if ``gate`` is a name; otherwise checks the user's module and returns it.

    options: the layer's options.
    gate, normalize_gate, z_loss_weight: arguments of `pmoe.MoELayer`.
    factory_options: device and dtype of the parameters.

    Raises TypeError or ValueError for arguments that do not fit together.
    """
    capacity_factor = options.capacity_factor
    check_flag("normalize_gate", normalize_gate, or_none=True)
    if isinstance(gate, str):
        gate_options = {"normalize": normalize_gate, "z_loss_weight": z_loss_weight or None}
        sizes = (options.d_model, options.num_experts, options.top_k)
        made_gate = make_gate(gate, sizes, capacity_factor, gate_options, factory_options)
        if made_gate.mixes_tokens and capacity_factor is not None:
            raise ValueError(f"capacity_factor ({capacity_factor}) must be None: SoftMoE drops nothing")
        return _with_watched_sums(made_gate)
    from pmoe.decide.custom_gate import check_gate

    check_gate(gate, capacity_factor, normalize_gate, z_loss_weight)
    return _with_watched_sums(gate)


def _with_watched_sums(gate: nn.Module) -> nn.Module:
    """Returns the gate. If it sums its loads over ranks, lets it raise if other ranks do not come to the sum.

    gate: a gate, perhaps inside a wrapper.
    """
    inside = gate_inside(gate)
    if isinstance(inside, Gate) and hasattr(inside, "sum_over_ranks"):  # `DeepSeekGate`
        inside.sum_over_ranks = sum_between_calls
    return gate


def make_experts(
    layer: MoELayer,
    expert: ExpertName | nn.Module | Callable[..., nn.Module],
    activation: ActivationName,
    bias: bool,
    factory_options: dict[str, Any],
) -> Experts:
    """Returns this rank's experts: makes "ffn" or "swiglu" experts, or wraps a user's modules.

    Each expert's initial values depend on torch's seed and on the expert's index among all experts, but not
    on the number of ranks. So a layer over 4 ranks starts with the values of the same layer on one rank.

    layer: the layer that is being built. Only its sizes and its ranks are read.
    expert, activation, bias: arguments of `pmoe.MoELayer`.
    factory_options: device and dtype of the parameters.
    """
    sizes = (layer.options.row_columns, layer.d_hidden, layer.num_local_experts)
    if isinstance(expert, str):
        stacked = make_stacked(expert, *sizes, activation, bias, shard=layer.shard, **factory_options)
        initialise(stacked, first_expert=layer.first_expert)
        return stacked
    from pmoe.experts.modules import given_experts

    return given_experts(expert, sizes, layer.shard, layer.first_expert, factory_options)


def make_grid(
    group: dist.ProcessGroup | Ranks | None,
    mesh: DeviceMesh | None,
    device: torch.device | str | None = None,
) -> Grid:
    """Returns the ranks over which a layer spreads its experts and splits each expert's hidden columns.

    group, mesh: arguments of `pmoe.MoELayer`. If both are None, the default group is used, or this process
        alone if torch.distributed is not initialised.
    device: device of the layer's parameters.

    Warns if a launcher such as torchrun has started several processes, but torch.distributed is not
    initialised, because this process alone is probably not what the user wants.

    Raises ValueError if both arguments are given.
    """
    if mesh is None:
        grid = Grid.of_group(group)
        grid.all.by_default = group is None
        if group is None and grid.all.group is None and not torch.empty(0, device=device).is_meta:
            _warn_of_other_processes()
        return grid
    if group is not None:
        raise ValueError("group and mesh must not both be given: a mesh has its own groups")
    from pmoe.comm.topology import grid_of_mesh

    return grid_of_mesh(mesh)


def _warn_of_other_processes() -> None:
    """Warns if a launcher has set the environment variable WORLD_SIZE to more than 1.

    The caller is building a layer for this process alone, which is probably an oversight. This function is
    not called for layers on the meta device, because these are often spread over ranks later, before they get
    values.
    """
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes.isdecimal() and int(processes) > 1:
        warn_once(
            f"a MoELayer is built in one of {processes} processes (WORLD_SIZE) before torch.distributed is "
            "initialised: this rank holds all of its experts and exchanges nothing. To spread them, call "
            "torch.distributed.init_process_group before the layer is built, or pmoe.parallelize(model, "
            "mesh) later, before the optimizer and wrappers are made. If one rank is intended, build it with "
            "group=pmoe.comm.ranks.Ranks.single()"
        )


def check_fit(num_experts: int, d_hidden: int, grid: Grid, across: str) -> None:
    """Raises ValueError if experts or their hidden columns cannot be divided evenly among the ranks.

    num_experts: number of experts of all ranks; must be divisible by the number of ranks in ``grid.ep``.
    d_hidden: hidden columns of an expert; must be divisible by the number of ranks in ``grid.esp``.
    grid: the layer's ranks.
    across: name of the ranks ``grid.ep`` in the error message, such as "group".
    """
    if num_experts % grid.ep.size:
        size = grid.ep.size
        advice = "" if num_experts > size else '; split fewer by a mesh with "esp"'
        raise ValueError(
            f"num_experts ({num_experts}) must be divisible by the size of {across} ({size}){advice}"
        )
    if d_hidden % grid.esp.size:
        raise ValueError(
            f'd_hidden ({d_hidden}) must be divisible by the size of the mesh\'s "esp" ({grid.esp.size})'
        )
