"""Adds low-rank adapters (LoRA) to the experts of a model, chooses, merges and removes them.

A model may have several adapters. Its layers use at most one at a time, the active adapter.

    add_lora        gives the experts of a model's layers an adapter, and freezes their weights
    use_lora        makes one of several adapters the active one
    disable_lora    a context without adapters, for the reference model of DPO
    merge_lora      adds an adapter to the weights and removes it; the layers are plain again
    unmerge_lora    subtracts a merged adapter from the weights, and makes it an adapter again
    remove_lora     removes an adapter
    lora_adapters   the adapters as one module: for an optimizer, and for checkpoints of adapters alone

The computation of a layer with adapters is in `pmoe.experts.lora`, PEFT's files in `lora_files`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pmoe.arguments import (
    check_count,
    check_flag,
    check_kind,
    check_module,
    check_positive,
    list_of,
    plain_int,
)
from pmoe.comm.agreement import all_fail_together, check_same
from pmoe.comm.ranks import Ranks
from pmoe.comm.topology import ACROSS
from pmoe.experts import seeded
from pmoe.experts.dtensor_layout import hold_own_parts
from pmoe.experts.lora import (
    ADAPTERS,
    CLASSES,
    WEIGHTS,
    Adapter,
    LoraExperts,
    with_adapters,
    without_adapters,
)
from pmoe.experts.operands import check_no_frozen_rows, check_own_parameters, local_part, train_frozen_rows
from pmoe.experts.stacked import UNCUT, StackedExperts, part_of_cut
from pmoe.layer import MoELayer
from pmoe.layer.reshard import share_ranks
from pmoe.training.checkpoint_state import unwrapped
from pmoe.training.expert_parallel import lay_out, take_first
from pmoe.training.gradient_mean import MeanOverRanks
from pmoe.training.sharded_experts import DividedByOwnRanks, leave_out, take_in, whole_value

DEFAULT = "default"
"""The name of an adapter to which the user gave no name."""


def add_lora(
    model: nn.Module,
    *,
    rank: int,
    alpha: float | None = None,
    targets: Iterable[str] = WEIGHTS,
    shared: bool = False,
    name: str = DEFAULT,
) -> nn.Module:
    """Gives the experts of each `MoELayer` of a model a low-rank adapter (LoRA, arXiv 2106.09685).

    Args:
        model: the model, or a layer. Layers inside it must have "ffn" or "swiglu" experts.
        rank: R, the rank of the matrix that is added to each weight, at least 1.
        alpha: the change is alpha / rank * B @ A. None means ``rank``, so that the factor is 1.
        targets: the weights that are changed: "w1", "w2" or both.
        shared: whether all experts of a layer share one adapter. By default each expert has its own.
        name: the name of the adapter. A model may have several, of which one is used at a time.

    The new adapter is active: the layers use it from now on. Its matrices are parameters of
    ``layer.experts.adapters[name]``, and may be trained. The experts' own weights and biases, and other
    adapters, are frozen (``requires_grad`` is False). Nothing else is frozen: to train adapters alone, call
    ``model.requires_grad_(False)`` before this function.

    Adapters are marked as parameters of experts, so data-parallel wrappers and `pmoe.GradientReducer` leave
    them alone. Their initial values do not depend on the number of ranks. Call the function before or after
    `pmoe.parallelize`, but before the optimizer is made.

    Returns the new adapters as one module (`lora_adapters`). Collective: every rank must call it with the
    same arguments.

    Raises ValueError or TypeError on every rank, before anything is changed, if an argument is wrong, if
    arguments differ between ranks, or if a layer cannot have adapters.
    """
    layers = all_moe_layers(model)
    rank = plain_int(rank)
    ranks = _most_ranks(layers)
    with all_fail_together(ranks, stage="comparing the arguments of add_lora"):
        check_count(rank=rank)
        check_flag("shared", shared)
        check_positive(alpha=alpha)
        names = _checked_targets(targets)
        check_adapter_name(name)
        for layer_name, layer in layers:
            _check_not_sharded(layer_name, layer)
            _check_layer(layer_name, layer, rank, shared, names, name)
        alpha = float(rank if alpha is None else alpha)
    arguments = {"rank": rank, "alpha": alpha, "targets": names, "shared": shared, "name": name}
    check_same(
        ranks,
        {f"add_lora's {argument}": value for argument, value in arguments.items()},
        stage="comparing the arguments of add_lora",
        cure="Pass the same arguments on all ranks",
    )
    for _, layer in layers:
        _add(layer, rank, alpha, names, shared, name)
    return lora_adapters(model, name)


def use_lora(model: nn.Module, name: str = DEFAULT) -> None:
    """Makes one adapter active: the layers of a model use it from now on, and only it is trained.

    All other adapters are frozen. So run the backward passes of earlier calls first: a backward pass gives
    no gradients to an adapter that was frozen after the forward pass. Every rank must call this function
    before the same call of the model.

    name: the name of the adapter.

    Raises ValueError if a layer has no adapter of this name.
    """
    for layer_name, layer in all_moe_layers(model):
        _adapted(layer_name, layer, name)
    for layer_name, layer in all_moe_layers(model):
        _use(layer, _adapted(layer_name, layer, name), name)


@contextlib.contextmanager
def disable_lora(model: nn.Module) -> Iterator[None]:
    """A context in which a model computes without adapters, for example as the reference model of DPO.

    No copy of the model is needed. Layers without adapters are not changed. Every rank must enter the context
    before the same call of the model. If the code inside the context chooses, adds or removes an adapter,
    this change remains after the context.
    """
    layers = [
        (layer, experts)
        for _, layer in all_moe_layers(model)
        if (experts := _lora_experts(layer)) is not None
    ]
    before = [experts.active for _, experts in layers]
    try:
        for layer, experts in layers:
            _activate(layer, experts, "")
        yield
    finally:
        for (layer, experts), name in zip(layers, before, strict=True):
            has_adapter = isinstance(experts, LoraExperts) and name in experts.adapters
            if has_adapter and not experts.active:
                _activate(layer, experts, name)


@dataclass(frozen=True)
class MergedLora:
    """The adapters that `merge_lora` has added to the weights. `unmerge_lora` subtracts them again.

    name: the name of the adapter.
    adapters: the adapter of each layer, by the layer's name in the model.
    versions: for each adapter, the versions that torch counted for its parameters when they were merged. An
        optimizer that changes a parameter raises its version.
    """

    name: str
    adapters: Mapping[str, Adapter]
    versions: Mapping[str, tuple[int, ...]]


@torch.no_grad()
def merge_lora(model: nn.Module, name: str | None = None) -> MergedLora:
    """Adds an adapter to the weights of the experts, and removes it: W[e] += scale * B[e] @ A[e].

    W[e] is a weight of expert e; A and B are the matrices of the adapter, and scale is its factor. A layer
    without further adapters is then a plain layer, which fused kernels, exports and checkpoints accept. If
    FSDP2 shards the experts, they stay `LoraExperts`, the class of experts with adapters, but FSDP2 no longer
    gathers the removed adapter. The weights stay frozen. The sums are rounded to the dtype of the weights.

    The gradients of the adapter's parameters are set to None, so that an optimizer no longer changes these
    parameters. To train the weights from now on, call ``layer.experts.requires_grad_(True)`` and make another
    optimizer.

    model: the model, with adapters of `add_lora`.
    name: the name of the adapter; None merges the active adapter.

    Returns the adapters, for `unmerge_lora`. Every rank must call it.

    Raises ValueError if a layer has no adapter of this name. If name is None, raises ValueError if a layer
    has no active adapter, or if the layers have different active adapters.
    """
    taken: dict[str, Adapter] = {}
    found = [
        (layer_name, layer, _named(layer_name, layer, name)) for layer_name, layer in all_moe_layers(model)
    ]
    if len({own_name for _, _, (_, own_name) in found}) > 1:
        raise ValueError("name (None) must be given, because the layers use different adapters")
    for layer_name, layer, (experts, own_name) in found:
        taken[layer_name] = experts.adapter(own_name)
        _add_to_weights(experts, taken[layer_name], 1)
        _remove(layer, experts, own_name)
        for parameter in taken[layer_name].parameters():
            parameter.grad = None
    versions = {layer_name: _versions(adapter) for layer_name, adapter in taken.items()}
    return MergedLora(found[0][2][1], taken, versions)


@torch.no_grad()
def unmerge_lora(model: nn.Module, merged: MergedLora) -> None:
    """Undoes `merge_lora`: subtracts the adapters from the weights, and makes them active again.

    The weights are as before, up to rounding.

    merged: the result of `merge_lora` for this model.

    Collective: every rank must call it.

    Raises ValueError in three cases: the model does not have the layers whose adapters were merged; a layer
    has another adapter with the name of the merged one; the merged adapter was changed since `merge_lora`, so
    that the weights have its old values.
    """
    check_kind(MergedLora, "what pmoe.merge_lora returned", merged=merged)
    layers = all_moe_layers(model)
    with all_fail_together(_most_ranks(layers), stage="checking the arguments of unmerge_lora"):
        _check_merged(layers, merged)
    for layer_name, layer in layers:
        experts = with_adapters(layer.layer_modules.experts)
        _add_to_weights(experts, merged.adapters[layer_name], -1)
        _attach(layer, experts, merged.adapters[layer_name], merged.name)


def remove_lora(model: nn.Module, name: str | None = None) -> None:
    """Removes an adapter from the layers of a model.

    The layers then use no adapter, and a layer without further adapters is a plain layer. If FSDP2 shards the
    experts, they stay `LoraExperts`, the class of experts with adapters, but FSDP2 no longer gathers the
    removed adapter. The weights stay frozen. Run the backward passes of earlier calls first. Every rank must
    call this function.

    name: the name of the adapter; None removes the active adapter.

    Raises ValueError if a layer has no adapter of this name, or if name is None and no adapter is active.
    """
    found = [(layer, _named(layer_name, layer, name)) for layer_name, layer in all_moe_layers(model)]
    for layer, (experts, own_name) in found:
        _remove(layer, experts, own_name)


def lora_adapters(model: nn.Module, name: str | None = None) -> nn.Module:
    """Returns one module with the adapters of a model's layers. Parameters are shared, not copied.

    Pass the module's ``parameters()`` to an optimizer. If `pmoe.save_checkpoint` and `pmoe.load_checkpoint`
    get the module in place of the model, they save and load only the adapters. Parameters have the same names
    as in the model.

    name: the name of the adapter; None takes the active adapter, which the layers use.

    Raises ValueError if a layer has no adapter of this name, or if name is None and no adapter is active.
    """
    check_module(model=model)
    hold_own_parts(model)
    root = nn.Module()
    for layer_name, layer in all_moe_layers(model):
        experts, own_name = _named(layer_name, layer, name)
        path = "" if layer is model else f"{unwrapped(model, _path(model, layer))}."
        *parents, last = f"{path}experts.{ADAPTERS}{own_name}".split(".")
        owner = root
        for part in parents:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.add_module(last, experts.adapter(own_name))
    return root


# ---- layers and their adapters


def all_moe_layers(model: nn.Module) -> list[tuple[str, MoELayer]]:
    """Returns the MoE layers of a model with their names; "model" for a model that is itself a layer.

    Raises TypeError if it is no module, ValueError if it has no layer.
    """
    check_module(model=model)
    layers = [
        (name or "model", module) for name, module in model.named_modules() if isinstance(module, MoELayer)
    ]
    if not layers:
        raise ValueError(
            f"model ({type(model).__name__}) must have a pmoe.MoELayer, whose experts get adapters"
        )
    return layers


def _most_ranks(layers: Sequence[tuple[str, MoELayer]]) -> Ranks:
    """Returns the largest group of ranks over which the experts of a layer are spread.

    layers: the layers of a model with their names.
    """
    return max((layer.ranks for _, layer in layers), key=lambda ranks: ranks.size)


def adapted_layers(model: nn.Module, name: str | None) -> dict[str, tuple[MoELayer, Adapter]]:
    """Returns the MoE layers of a model with their adapters, by the name of the layer.

    name: the name of the adapter; None takes the active adapter.

    Raises ValueError if a layer has no adapter of this name, or if name is None and no adapter is active.
    """
    found: dict[str, tuple[MoELayer, Adapter]] = {}
    for layer_name, layer in all_moe_layers(model):
        experts, own_name = _named(layer_name, layer, name)
        found[layer_name] = layer, experts.adapter(own_name)
    return found


def _path(model: nn.Module, layer: MoELayer) -> str:
    """Returns the name of a layer in a model."""
    names: list[str] = [name for name, module in model.named_modules() if module is layer]
    return names[0]


def _lora_experts(layer: MoELayer) -> LoraExperts | None:
    """Returns the experts of a layer if they have adapters; else None."""
    experts = layer.layer_modules.experts
    return experts if isinstance(experts, LoraExperts) else None


def _adapted(layer_name: str, layer: MoELayer, name: str) -> LoraExperts:
    """Returns the experts of a layer that must have the adapter called ``name``.

    layer_name, layer: the layer, and its name for the message.
    name: the name of the adapter.

    Raises TypeError if the name is no text, ValueError if the experts have no such adapter.
    """
    check_kind(str, "the name of an adapter", name=name)
    experts = _lora_experts(layer)
    names = [] if experts is None else list(experts.adapters)
    if experts is None or name not in names:
        raise ValueError(
            f"name ({name!r}) must be an adapter of {layer_name}, which has {', '.join(names) or 'none'}: "
            f"call pmoe.add_lora(model, rank=..., name={name!r})"
        )
    return experts


def _named(layer_name: str, layer: MoELayer, name: str | None) -> tuple[LoraExperts, str]:
    """Returns the experts of a layer, and the name of one of their adapters.

    layer_name, layer: the layer, and its name for the message.
    name: the name that is returned; None takes the name of the active adapter.

    Raises ValueError if the layer has no adapter of this name, or if name is None and no adapter is active.
    """
    if name is not None:
        return _adapted(layer_name, layer, name), name
    experts = _lora_experts(layer)
    if experts is None or not experts.active:
        raise ValueError(
            f"name (None) must be given where no adapter is in use: {layer_name} has "
            f"{', '.join([] if experts is None else experts.adapters) or 'none'} (pmoe.add_lora makes one)"
        )
    return experts, experts.active


# ---- checks


def _checked_targets(targets: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of the weights that get an adapter, "w1" before "w2".

    Raises ValueError or TypeError if there are none, or other names than "w1" and "w2".
    """
    chosen = [targets] if isinstance(targets, str) else list_of("targets", targets)
    unknown = [target for target in chosen if target not in WEIGHTS]
    if unknown or not chosen:
        raise ValueError(
            f"targets ({targets!r}) must be some of {', '.join(WEIGHTS)}, the weights of experts: pass "
            f"targets={WEIGHTS}"
        )
    return tuple(weight for weight in WEIGHTS if weight in chosen)


def _versions(adapter: Adapter) -> tuple[int, ...]:
    """Returns the versions of an adapter's parameters: how many in-place changes torch has counted."""
    return tuple(local_part(parameter)._version for parameter in adapter.parameters())


def check_adapter_name(name: object) -> None:
    """Raises TypeError or ValueError if an adapter's name cannot be a part of its parameters' names."""
    check_kind(str, "a string", name=name)
    if not str(name).isidentifier() or hasattr(nn.ModuleDict, str(name)):
        raise ValueError(
            f"name ({name!r}) must be a Python identifier, and no attribute of torch.nn.ModuleDict"
        )


def _check_layer(
    layer_name: str, layer: MoELayer, rank: int, shared: bool, targets: Iterable[str], name: str
) -> None:
    """Raises ValueError or TypeError if the experts of a layer cannot have an adapter with these settings.

    layer_name, layer: the layer, and its name for the message.
    rank: the number of rows of the adapter's matrix A.
    shared: whether all experts would share the adapter.
    targets: the weights that the adapter would change.
    name: the name of the adapter.
    """
    experts = layer.layer_modules.experts
    is_known_class = experts.is_sharded or type(experts) in (
        *CLASSES,
        *CLASSES.values(),
    )  # FSDP2 replaces the class of sharded experts by a subclass, so any class is allowed for these
    if not isinstance(experts, StackedExperts) or not is_known_class:
        raise TypeError(
            f"{layer_name} (experts {type(experts).__name__}) must have plain ffn or swiglu experts to get "
            "adapters: call pmoe.add_lora before tools that change the class of experts (parametrizations, "
            "fully_shard); experts that are modules get adapters by peft.get_peft_model"
        )
    if layer.layer_modules.experts_module is not experts:
        raise TypeError(
            f"{layer_name} (experts in a {type(layer.experts).__name__}) must have no wrapper around its "
            "experts: call pmoe.add_lora before they are wrapped"
        )
    check_own_parameters(experts, targets, "get an adapter: call pmoe.add_lora before it is changed")
    check_no_frozen_rows(
        experts,
        targets,
        "get an adapter: call pmoe.freeze_experts after pmoe.add_lora and pmoe.unmerge_lora, or call "
        "remove() on what pmoe.freeze_experts returned",
    )
    if layer.products is not None:
        raise ValueError(
            f"products ({layer.products!r}) must be None in a layer with adapters: set layer.products = None"
        )
    if isinstance(experts, LoraExperts) and name in experts.adapters:
        raise ValueError(
            f"name ({name!r}) must not be that of an adapter of {layer_name}: pass another name, or call "
            f"pmoe.remove_lora(model, {name!r}) first"
        )
    widths = {weight: min(experts.whole_shapes()[weight][1:]) for weight in targets}
    narrow = {weight: width for weight, width in widths.items() if rank > width}
    if narrow:
        weight, width = next(iter(narrow.items()))
        raise ValueError(
            f"rank ({rank}) must be at most {width}, the smaller side of {weight} of {layer_name}: a change "
            "of full rank would train more numbers than the weight has"
        )


def _check_merged(layers: Sequence[tuple[str, MoELayer]], merged: MergedLora) -> None:
    """Raises ValueError or TypeError if adapters cannot be subtracted from the weights of layers again.

    layers: the layers of the model with their names.
    merged: the result of `merge_lora`.
    """
    if [name for name, _ in layers] != list(merged.adapters):
        raise ValueError(
            f"merged (of layers {', '.join(merged.adapters)}) must be of this model, whose layers are "
            f"{', '.join(name for name, _ in layers)}"
        )
    for layer_name, layer in layers:
        adapter = merged.adapters[layer_name]
        _check_layer(layer_name, layer, adapter.rank, adapter.shared, adapter.targets, merged.name)
        if _versions(adapter) != merged.versions[layer_name]:
            raise ValueError(
                f"merged has an adapter of {layer_name} that was changed since merge_lora, for example by an "
                "optimizer that still has its parameters: make another optimizer after merge_lora, and save "
                "adapters before it"
            )


def _check_not_sharded(layer_name: str, layer: MoELayer) -> None:
    """Raises TypeError if FSDP2 shards the experts of a layer: they can get no further parameters then.

    layer_name, layer: the layer, and its name for the message.
    """
    if layer.layer_modules.experts.is_sharded:
        raise TypeError(
            f"{layer_name} (experts sharded over their copies) must have its adapters before they are "
            "sharded: call pmoe.add_lora, then pmoe.parallelize(model, mesh, shard_experts=True)"
        )


# ---- changes


def _add(layer: MoELayer, rank: int, alpha: float, targets: tuple[str, ...], shared: bool, name: str) -> None:
    """Gives the experts of a layer a new adapter with random values, and makes it active. Collective.

    layer: the layer.
    rank: the number of rows of the adapter's matrix A.
    alpha: the factor of the adapter is alpha / rank.
    targets: the weights that the adapter changes.
    shared: whether all experts share the adapter.
    name: the name of the adapter.
    """
    experts = with_adapters(layer.layer_modules.experts)
    like = local_part(experts.w1)
    shapes = experts.shapes()
    adapter = Adapter(
        {weight: shapes[weight] for weight in targets},
        rank=rank, alpha=alpha, shared=shared, shard=experts.shard, device=like.device, dtype=like.dtype,
    )  # fmt: skip
    if shared:
        seeded(lambda _: adapter.initialise(None), first_expert=0, count=1)
    else:
        seeded(adapter.initialise, first_expert=layer.first_expert, count=experts.num_local_experts)
    _attach(layer, experts, adapter, name)


def _attach(layer: MoELayer, experts: LoraExperts, adapter: Adapter, name: str) -> None:
    """Gives the experts of a layer an adapter that has its values already, and makes it active. Collective.

    The adapter's copies on other ranks get equal values. If `pmoe.parallelize` has made the weights DTensors,
    the adapter's parameters become DTensors on the same mesh.

    layer: the layer.
    experts: the layer's experts.
    adapter: the adapter.
    name: the name of the adapter.
    """
    experts.adapters[name] = adapter
    # An adapter that FSDP2 shards was merged before: each rank has kept its part of it since (`_remove`).
    of_adapter = {f"{ADAPTERS}{name}.{own}": cut for own, cut in adapter.copy_parts.items()}
    experts.copy_parts = {**experts.copy_parts, **of_adapter}
    share_ranks(experts, layer.grid)
    experts.note_operands()
    if not experts.is_sharded:
        _lay_out_adapter(layer, experts, adapter, name)
    hold_own_parts(experts)
    take_in(experts, adapter.left_out)
    adapter.left_out = ()
    for parameter in adapter.parameters():
        train_frozen_rows(parameter)  # it may have been frozen before it was merged
    for _, parameter in experts.own_parameters():
        parameter.requires_grad_(False)
    _use(layer, experts, name)


def _lay_out_adapter(layer: MoELayer, experts: LoraExperts, adapter: Adapter, name: str) -> None:
    """Makes all copies of an adapter equal, and spreads the adapter over ranks like the experts' weights.

    All copies get the values of the first copy.

    Collective.

    layer: the layer.
    experts: the layer's experts.
    adapter: the adapter.
    name: the name of the adapter.
    """
    names = tuple(f"{ADAPTERS}{name}.{own}" for own, _ in adapter.named_parameters())
    take_first(experts, Ranks.single(), layer.grid.esp, names)
    take_first(experts, layer.grid.ep, Ranks.single(), experts.replicated_dims)
    if experts.is_parallelized:
        mesh = experts.w1.device_mesh  # type: ignore[attr-defined]
        copies = next((along for along in mesh.mesh_dim_names if along not in (ACROSS, "esp")), None)
        if copies is not None:
            take_first(experts, Ranks(mesh.get_group(copies)), Ranks.single(), names)
        if not hasattr(adapter.of(adapter.targets[0])[0], "to_local"):
            lay_out(experts, mesh, names)


def _use(layer: MoELayer, experts: LoraExperts, name: str) -> None:
    """Makes an adapter of a layer active and trainable, and freezes the layer's other adapters.

    layer: the layer.
    experts: the layer's experts.
    name: the name of the adapter.
    """
    hold_own_parts(experts)
    for other in experts.adapters:
        experts.adapter(other).requires_grad_(other == name)
    _activate(layer, experts, name)


def _activate(layer: MoELayer, experts: LoraExperts, name: str) -> None:
    """Sets the active adapter of a layer: the adapter that the layer uses from now on.

    layer: the layer.
    experts: the layer's experts.
    name: the name of the adapter; "" for no adapter.
    """
    experts.activate_adapter(name)
    reduce = experts.reduce
    if isinstance(reduce, MeanOverRanks | DividedByOwnRanks):
        experts.reduce = reduce.with_names(experts.call_names)
    # The layer caches properties of its modules. Assigning a module makes the layer compute them again.
    layer.experts = layer.experts


def _remove(layer: MoELayer, experts: LoraExperts, name: str) -> None:
    """Removes an adapter from the experts of a layer. No adapter of the layer is active then.

    layer: the layer.
    experts: the layer's experts.
    name: the name of the adapter.
    """
    hold_own_parts(experts)
    adapter = experts.adapter(name)
    if experts.is_sharded:
        adapter.left_out = leave_out(experts, adapter)
    del experts.adapters[name]
    experts.frozen_experts = {
        own: rows for own, rows in experts.frozen_experts.items() if not own.startswith(f"{ADAPTERS}{name}.")
    }
    for placed in [placed for placed in experts.placements if placed.startswith(f"{ADAPTERS}{name}.")]:
        del experts.placements[placed]
    experts.copy_parts = {
        own: cut for own, cut in experts.copy_parts.items() if not own.startswith(f"{ADAPTERS}{name}.")
    }
    _activate(layer, experts, "")
    # Sharded experts keep the class of experts with adapters, because FSDP2 has made a subclass of it.
    if not experts.adapters and not experts.is_sharded:
        without_adapters(experts)
        layer.experts = layer.experts


def _add_to_weights(experts: LoraExperts, adapter: Adapter, sign: int) -> None:
    """Adds sign * scale * B @ A to the weights of experts, in place.

    B and A are the matrices of the adapter, scale is its factor.

    Collective if FSDP2 shards the experts over the ranks that hold copies of them.

    experts: the experts of this rank.
    adapter: the adapter.
    sign: 1 to merge the adapter into the weights, -1 to undo it.
    """
    hold_own_parts(experts)
    for weight in adapter.targets:
        down, up = (
            whole_value(parameter, adapter.copy_parts.get(f"{weight}_{letter}", UNCUT))
            for letter, parameter in zip("AB", adapter.of(weight), strict=True)
        )
        value = local_part(experts.get_parameter(weight))
        dim, own = experts.copy_parts.get(weight, UNCUT)
        if dim == 1:  # FSDP2 has left some rows of each matrix on this rank
            up = part_of_cut(up, (up.dim() - 2, own))
        elif dim == 2:
            down = part_of_cut(down, (down.dim() - 1, own))
        elif not adapter.shared:
            down = part_of_cut(down, (0, own))
            up = part_of_cut(up, (0, own))
        for expert in range(value.shape[0]):  # one at a time: a product is as large as a weight
            own_down, own_up = (down, up) if adapter.shared else (down[expert], up[expert])
            value[expert].addmm_(own_up.to(value.dtype), own_down.to(value.dtype), alpha=sign * adapter.scale)
