"""Expert parallelism beside DistributedDataParallel or FSDP2, which manage the dense part of a model.

docs/training.md explains how to use it. Every rank is a data-parallel rank with its own tokens. As with
DistributedDataParallel, the loss is the mean of the ranks' losses:

    gradient = sum of the ranks' gradients / number of ranks
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parallel import DistributedDataParallel

from pmoe.arguments import check_flag, check_module, check_not_negative, check_tensors, list_of
from pmoe.comm.agreement import all_fail_together
from pmoe.comm.failures import at_stage
from pmoe.comm.grid import Grid
from pmoe.comm.mesh_agreement import agree_on_mesh
from pmoe.comm.ranks import Ranks
from pmoe.comm.topology import ACROSS, INSIDE, dimensions_of, grid_of_mesh
from pmoe.experts.base import Experts
from pmoe.experts.dtensor_layout import hold_own_parts, replace_parameter
from pmoe.experts.marks import is_expert
from pmoe.experts.operands import check_can_be_spread, local_part
from pmoe.layer import MoELayer
from pmoe.training.gradient_mean import MeanOverRanks
from pmoe.training.parameter_kinds import grouped_by_kind
from pmoe.training.sharded_experts import DividedByOwnRanks, check_shardable, shard, sharding_options

M = TypeVar("M", bound=nn.Module)

WRAPPERS = {"DistributedDataParallel", "FSDPModule"}
"""Names of classes that manage parameters for data parallelism.

Classes are compared by name, so that torch's FSDP is not imported needlessly.
"""

DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module from which DistributedDataParallel reads which tensors to ignore."""


def parallelize(
    model: M, mesh: DeviceMesh, *, reduce: bool = True, shard_experts: bool | Mapping[str, Any] = False
) -> M:
    """Makes every `MoELayer` of ``model`` expert-parallel over ``mesh``. Returns the model.

    Args:
        model: the model, with parameters of any shape. It may be on the meta device and then stays there.
        mesh: device mesh with the dimension "ep", over which experts are spread. It may also have "esp", over
            which each expert's hidden columns are split, and one more dimension, over which experts are
            copied.
        reduce: whether each backward pass reduces the experts' gradients: it sums them over the copies of the
            experts and divides by the number of the mesh's ranks. Then it adds them to the gradients of
            earlier passes. False leaves the reduction to `pmoe.training.parallel.reduce_gradients`.
        shard_experts: whether FSDP2 shards experts over the ranks that hold copies of them. Each of these
            ranks then keeps an equal part of the parameters, gradients and optimizer states. A mapping
            stands for True, with arguments for `torch.distributed.fsdp.fully_shard`:
            "reshard_after_forward" (True or False; True if it is missing), "mp_policy", "offload_policy". The
            mesh may then have two dimensions whose ranks hold copies of the same experts: experts are sharded
            over the inner one and copied over the outer one.

    What becomes of a layer depends on how it was built:

    - for one rank, so that every rank has all experts: it is spread over the mesh (`MoELayer.spread`);
    - for the ranks of the mesh's "ep" (and "esp"): it is not changed;
    - on the meta device: it may have been built for other ranks, and is then spread over the mesh.

    All copies of an expert get the values of the first copy.

    What becomes of the parameters:

    - "ffn" and "swiglu" experts have one tensor for a weight of all experts of the rank. Their parameters
      become DTensors on ``mesh``: Shard(0) over "ep", split along the hidden columns over "esp" (the bias b2
      is Replicate), and Replicate over the ranks that hold copies. With shard_experts they are Shard over
      these ranks, along the first dimension whose size is a multiple of the number of copies.
    - Experts that are a user's modules keep plain parameters. With shard_experts the parameters become
      DTensors that are Shard over the ranks with copies. Modules cannot be split over "esp".
    - All parameters and buffers of experts are added to the list of names that `DistributedDataParallel`
      ignores.
    - The dense part does not change.

    Collective: every rank of the mesh must call it with the same mesh, before optimizers and data-parallel
    wrappers are made. An optimizer that was made before the call raises ValueError at its next step, because
    it has parameters that were replaced. A second call with the same mesh only updates the list of names that
    `DistributedDataParallel` ignores; that wrapper also does this itself.

    Raises RuntimeError if a rank of the mesh does not call it with this mesh within the group's timeout.

    Raises ValueError or TypeError, before any weight is changed, in the following cases. If a layer is the
    cause, the message names it.

    - The model has no layer.
    - A layer was built for other ranks, cannot be spread, or is in a data-parallel wrapper.
    - The mesh has other dimensions.
    - Experts cannot be sharded.
    """
    inner = _agreed_experts_mesh(mesh, may_replicate=shard_experts is not False)
    grid = grid_of_mesh(inner)
    others = [name for name in mesh.mesh_dim_names or () if name not in (ACROSS, INSIDE)]
    # The ranks along each mesh dimension whose ranks hold copies of the same experts, the inner one first.
    of_copies = [Ranks(mesh.get_group(name)) for name in reversed(others)] or [Ranks.single()]
    with ExitStack() as together:
        for ranks in (*of_copies, grid.all):
            together.enter_context(all_fail_together(ranks, stage="comparing the arguments of parallelize"))
        sharding = sharding_options(shard_experts)
        layers = _checked_layers(model, reduce, inner, grid, sharding, of_copies if others else ())
    for name, layer in layers:
        if layer.layer_modules.experts.is_parallelized:
            continue
        if not _is_over(layer, grid):
            layer.spread(inner)
        layer.ranks.layer = name
        layer.ranks.takes_default = False  # DTensors stay on the mesh's groups
        experts = layer.layer_modules.experts
        for ranks in of_copies:
            take_first(experts, ranks, grid.esp, names_of(experts))
        take_first(experts, grid.ep, Ranks.single(), experts.replicated_dims)
        lay_out(experts, mesh, names_of(experts))
        experts.is_parallelized = True
        names = experts.call_names
        means = [MeanOverRanks(mesh.size(), ranks.of_layer(name), layer.ranks, names) for ranks in of_copies]
        if sharding is not None:
            experts.reduce = DividedByOwnRanks(layer.ranks.size, means, experts)
            shard(experts, mesh, others, sharding)
        elif reduce:
            experts.reduce = means[0]
    _mark_experts(model)
    for module in model.modules():
        _leave_to_experts(module)
    _watch_ddp()
    return model


def _checked_layers(
    model: nn.Module,
    reduce: bool,
    inner: DeviceMesh,
    grid: Grid,
    sharding: Mapping[str, Any] | None,
    of_copies: Sequence[Ranks],
) -> list[tuple[str, MoELayer]]:
    """Returns the (name, layer) pairs of the model's MoE layers, after all checks of `parallelize`.

    model: the model.
    reduce: whether each backward pass reduces the experts' gradients.
    inner: the part of the mesh with the dimensions "ep" and "esp".
    grid: this rank's groups of ranks along "ep" and along "esp".
    sharding: arguments for fully_shard if FSDP2 shards experts over the ranks with copies of them; else None.
    of_copies: for each mesh dimension along which experts are copied, the ranks that hold copies of this
        rank's experts; the inner dimension first.

    Raises ValueError or TypeError, with the layer's name, if a layer or an argument is wrong.
    """
    check_module(model=model)
    check_flag("reduce", reduce)
    if sharding is not None and not reduce:
        raise ValueError(
            "reduce (False) must be True with shard_experts: FSDP2 reduces gradients in backward"
        )
    if sharding is not None and not of_copies:
        raise ValueError(
            f"shard_experts needs a mesh (dimensions {inner.mesh_dim_names}) with a further dimension, over "
            'which experts are copied: init_device_mesh(..., mesh_dim_names=("dp", "ep"))'
        )
    layers = [
        (name or "model", module) for name, module in model.named_modules() if isinstance(module, MoELayer)
    ]
    if not layers:
        raise ValueError(f"model ({type(model).__name__}) must have a pmoe.MoELayer to be parallelized")
    owners = dict[Experts, str]()
    for name, layer in layers:
        owner = owners.setdefault(layer.layer_modules.experts, name)
        if owner != name and not _is_over(layer, grid):
            raise ValueError(
                f"{name}: experts (those of {owner}) must belong to one layer, or be built for the ranks of "
                'the mesh before several layers share them: pmoe.MoELayer(..., mesh=mesh["ep"])'
            )
        try:
            _check_layer(layer, inner, grid)
            if sharding is not None:
                check_shardable(layer, grid, of_copies[0].size)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{name}: {error}") from None
    _check_wrappers(model)
    return layers


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters, of any shape, of this rank's routed experts, without those of shared experts.

    Pass the result to FSDP2 as ``ignored_params``: ``fully_shard(model, ignored_params=...)``. FSDP2 must not
    shard these parameters, because each rank holds different experts.
    """
    check_module(model=model)
    hold_own_parts(model)
    _mark_experts(model)
    return {parameter for parameter in model.parameters() if is_expert(parameter)}


def parameter_groups(
    parameters: nn.Module | Iterable[Tensor] | Iterable[Mapping[str, Any]],
    *,
    lr: float | Tensor | None = None,
    weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Returns parameter groups for any optimizer of torch, also with foreach=True and fused=True.

    With one of these two options, one operation computes all tensors of a group. It cannot mix plain tensors
    with DTensors, nor DTensors of different meshes. So plain tensors, and the DTensors of each mesh, get
    groups of their own.

    Args:
        parameters: a model, its parameters (of any shape), or groups as optimizers accept them. A group is
            split, and its parts keep all its options. Groups and parameters keep their order; plain tensors
            come first in a group that is split.
        lr, weight_decay: options for the parameters of a model. If either is not None, parameters are also
            grouped by kind. The number of dimensions does not show the kind: the biases of all experts are
            one tensor of two dimensions. Each group then has the two options and two further entries:
            "stacked" is True if dimension 0 indexes experts, and "kind" is one of:

            - "matrices": weights of two or more dimensions; stacked: experts' w1 and w2, a matrix for each
              expert;
            - "embeddings": weights of `torch.nn.Embedding` and `torch.nn.EmbeddingBag`;
            - "gates": parameters of gates and shared gates;
            - "biases": biases, norms and other vectors; stacked: experts' b1 and b2, a bias for each expert.

            Biases, and vectors of gates, get weight_decay 0.

    Raises TypeError if ``parameters`` is none of these. Also raises TypeError if lr or weight_decay is passed
    and ``parameters`` is not a model, and ValueError if one of them is passed and FullyShardedDataParallel
    manages a parameter of the model.
    """
    if lr is not None or weight_decay is not None:
        return parameter_groups(_groups_by_kind(parameters, lr, weight_decay))
    if isinstance(parameters, nn.Module):
        hold_own_parts(parameters)
        parameters = parameters.parameters()
    entries: list[Any] = [parameters] if isinstance(parameters, Tensor) else list_of("parameters", parameters)
    groups = entries if entries and isinstance(entries[0], Mapping) else [{"params": entries}]
    split_groups = []
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        kinds: dict[object, list[Any]] = {None: []}
        for entry in members:
            # Optimizers take (name, parameter) pairs too.
            parameter = entry[1] if isinstance(entry, tuple) else entry
            if not isinstance(parameter, Tensor):
                raise TypeError(f"parameters ({parameter!r} among them) must be tensors")
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            kinds.setdefault(mesh, []).append(entry)
        split_groups += [{**group, "params": of_kind} for of_kind in kinds.values() if of_kind]
    return split_groups


def _groups_by_kind(model: object, lr: object, weight_decay: object) -> list[dict[str, Any]]:
    """Returns parameter groups of a model, one for each kind (matrices, embeddings, gates, biases).

    model: the model.
    lr, weight_decay: the learning rate and the weight decay; None leaves them to the optimizer.

    Raises TypeError or ValueError if ``model`` is not a module, or if lr or weight_decay is negative or is
    not a number.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"parameters ({type(model).__name__}) must be a model where lr or weight_decay is given: its "
            "modules say which parameters are matrices, biases and gates"
        )
    options: dict[str, Any] = {"weight_decay": weight_decay}
    if isinstance(lr, Tensor):
        check_tensors(0, lr=lr)
    else:
        options["lr"] = lr
    check_not_negative(**{name: value for name, value in options.items() if value is not None})
    hold_own_parts(model)
    return grouped_by_kind(model, lr, weight_decay)  # type: ignore[arg-type]


def _agreed_experts_mesh(mesh: DeviceMesh, *, may_replicate: bool) -> DeviceMesh:
    """Checks that all ranks have passed the same mesh, and returns its part with "ep" and "esp".

    mesh: the mesh that the user passed to `parallelize`.
    may_replicate: whether the mesh may have two further dimensions beside "ep" and "esp". If False, it may
        have one.

    Collective over the ranks of the mesh.

    Raises ValueError on all these ranks if their meshes differ.
    """
    check = functools.partial(_experts_mesh, mesh, may_replicate=may_replicate)
    if not dist.is_initialized() or not isinstance(mesh, DeviceMesh):
        return check()
    text = f"{dimensions_of(mesh) or 'without names'} {mesh.mesh.tolist()} on {mesh.device_type}"
    return agree_on_mesh(text, mesh.mesh.flatten().tolist(), check)


def _experts_mesh(mesh: DeviceMesh, *, may_replicate: bool) -> DeviceMesh:
    """Returns the part of ``mesh`` over which one copy of the experts is spread: "ep" and "esp".

    mesh: the mesh that the user passed to `parallelize`.
    may_replicate: whether the mesh may have two further dimensions beside "ep" and "esp". If False, it may
        have one. Ranks that differ only in further dimensions hold the same experts.

    Raises ValueError if the mesh has no "ep", has too many further dimensions, or lacks this rank.
    """
    names = dimensions_of(mesh)
    of_experts = tuple(name for name in names if name in (ACROSS, INSIDE))
    if ACROSS not in names or len(names) - len(of_experts) > 1 + may_replicate:
        raise ValueError(
            f'mesh (dimensions {names or "without names"}) must have the dimension "{ACROSS}", may have '
            f'"{INSIDE}", and one more, over which experts are copied (with shard_experts two)'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh ({mesh}) must contain this rank ({dist.get_rank()})")
    return mesh if of_experts == names else mesh[of_experts]


def _check_layer(layer: MoELayer, inner: DeviceMesh, grid: Grid) -> None:
    """Raises ValueError or TypeError if `parallelize` cannot spread this layer over the mesh ``inner``.

    layer: the layer.
    inner: the part of the mesh with the dimensions "ep" and "esp".
    grid: this rank's groups of ranks along "ep" and along "esp".
    """
    coordinates = dict(zip(inner.mesh_dim_names or (), inner.get_coordinate() or (), strict=True))
    for name, ranks in ((ACROSS, grid.ep), (INSIDE, grid.esp)):
        # A process group sorts its ranks, a DTensor does not: with another order, parts would be swapped.
        if coordinates.get(name, 0) != ranks.rank:
            raise ValueError(f'mesh (ranks {inner.mesh.tolist()}) must be in ascending order along "{name}"')
    if not layer.layer_modules.experts.is_parallelized:
        check_can_be_spread(layer.layer_modules.experts, layer.layer_modules.experts.hidden_dims() or ())
    if not _is_over(layer, grid):
        if layer.layer_modules.experts.is_parallelized:
            raise ValueError("a layer that is parallelized already must not be parallelized over other ranks")
        layer.check_spread(inner)


def _check_wrappers(model: nn.Module) -> None:
    """Raises ValueError if a data-parallel wrapper manages parameters that `parallelize` would replace.

    The wrappers are DistributedDataParallel and FSDP2. They must be put around the model afterwards.
    """
    for name, module in model.named_modules():
        if WRAPPERS.isdisjoint(kind.__name__ for kind in type(module).__mro__):
            continue
        routed = [part for part in module.modules() if isinstance(part, Experts) and part.is_parallel]
        if not all(experts.is_parallelized for experts in routed):
            raise ValueError(
                f"{name or 'model'} (a {type(module).__name__}) must be wrapped after pmoe.parallelize"
            )


def _is_over(layer: MoELayer, grid: Grid) -> bool:
    """Returns whether the layer's experts are spread over exactly the ranks of ``grid``."""
    pairs = ((layer.grid.ep, grid.ep), (layer.grid.esp, grid.esp))
    return all(own.size == wanted.size == 1 or own.members == wanted.members for own, wanted in pairs)


def names_of(experts: Experts) -> tuple[str, ...]:
    """Returns the names of all parameters and buffers of experts."""
    return tuple(name for name, _ in (*experts.named_parameters(), *experts.named_buffers()))


@torch.no_grad()
def take_first(experts: Experts, copies: Ranks, inside: Ranks, names: Collection[str]) -> None:
    """Makes the copies of experts equal by broadcasts from the first rank that holds a copy.

    DistributedDataParallel does the same for dense parameters.

    experts: this rank's experts.
    copies: the ranks that hold copies of this rank's experts.
    inside: the ranks that share each expert's hidden columns. They hold the same values of parameters that
        are not split, such as b2.
    names: the parameters and buffers that are made equal.
    """
    for ranks in (inside, copies):
        if ranks.size == 1:
            continue
        dims = experts.all_hidden_dims()
        for name, tensor in (*experts.named_parameters(), *experts.named_buffers()):
            if name not in names or tensor.is_meta or (ranks is inside and dims.get(name) is not None):
                continue
            whole = local_part(tensor).contiguous()
            with at_stage("taking the values of the first copy of experts", ranks):
                dist.broadcast(whole, group=ranks.group, group_src=0)
            local_part(tensor).copy_(whole)


def lay_out(experts: Experts, mesh: DeviceMesh, names: Collection[str]) -> None:
    """Replaces parameters of experts, (E_local, ...) for E_local experts of this rank, by DTensors.

    Experts that are a user's modules are not changed.

    experts: this rank's experts.
    mesh: the mesh of the DTensors, with "ep", over which experts are spread, and maybe "esp", over which each
        expert's hidden columns are split.
    names: the names of the parameters that are replaced. Only names in `Experts.hidden_dims` and
        `Experts.replicated_dims` (parameters that all experts share) count; other names are ignored.
    """
    dims = experts.all_hidden_dims()
    for name, hidden_dim in dims.items():
        if name not in names:
            continue
        parameter = experts.get_parameter(name)
        expert_dim = None if name in experts.replicated_dims else 0
        rows_dim = 0 if expert_dim is None else 1
        placements: list[Placement] = []
        for along in mesh.mesh_dim_names or ():
            split = {ACROSS: expert_dim, INSIDE: hidden_dim}.get(along)
            if split is None:
                placements.append(Replicate())
                continue
            # In w1 of gated experts, gate rows and up rows are two halves, and each half is split.
            is_halved = along == INSIDE and split == rows_dim
            halves = getattr(experts, "hidden_factor", 1) if is_halved else 1
            placements.append(Shard(split) if halves == 1 else _StridedShard(split, split_factor=halves))
        laid = DTensor.from_local(parameter.detach(), mesh, placements, run_check=False)
        module, _, own = name.rpartition(".")
        replace_parameter(experts.get_submodule(module), own, laid)
        experts.placements[name] = tuple(placements)
    experts.mark_parameters()


@functools.cache
def _watch_ddp() -> None:
    """Makes `DistributedDataParallel` ignore parallelized experts in all modules that it wraps from now on.

    torch reads the names to ignore from the module that it wraps. That module may be a parent of the model
    that was parallelized, for example a LightningModule or a module that adds the loss. So the constructor is
    replaced by one that first writes the names into the module.
    """
    wrap: Callable[..., None] = DistributedDataParallel.__init__

    @functools.wraps(wrap)
    def wrap_with_experts(
        self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        if any(isinstance(part, Experts) and part.is_parallelized for part in module.modules()):
            _mark_experts(module)
            _leave_to_experts(module)
        wrap(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = wrap_with_experts  # type: ignore[method-assign]


def _mark_experts(model: nn.Module) -> None:
    """Sets the attribute ``allreduce = False`` on all parameters of parallelized experts.

    pmoe and some data-parallel wrappers skip parameters with this mark. Each call sets the marks again,
    because parametrizations and adapters may have added parameters since the last call.
    """
    for layer in model.modules():
        if isinstance(layer, MoELayer) and layer.layer_modules.experts.is_parallelized:
            for parameter in layer.experts.parameters():
                parameter.allreduce = False  # type: ignore[attr-defined]


def _leave_to_experts(module: nn.Module) -> None:
    """Makes DistributedDataParallel ignore the parameters and buffers of experts when it wraps ``module``.

    Their names are added to the attribute of ``module`` from which DistributedDataParallel reads the names to
    ignore. torch.compile puts "_orig_mod." in front of names, so each name is also added with this prefix.
    """
    names = [
        name for name, parameter in module.named_parameters(remove_duplicate=False) if is_expert(parameter)
    ]
    for at, submodule in module.named_modules(remove_duplicate=False):
        if isinstance(submodule, Experts) and submodule.is_parallelized:
            names += [f"{at}.{name}".lstrip(".") for name, _ in submodule.named_buffers()]
    if names:
        names += [f"_orig_mod.{name}" for name in names]
        ignored = list(getattr(module, DDP_IGNORES, ()))
        setattr(module, DDP_IGNORES, ignored + [name for name in names if name not in ignored])
