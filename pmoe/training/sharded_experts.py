"""Experts sharded over the ranks that hold copies of them: ``shard_experts`` of `pmoe.parallelize`.

FSDP2 (`torch.distributed.fsdp.fully_shard`) shards the experts. For each layer it is called on
``layer.experts``. With a mesh ("dp", "ep"), dp ranks share each expert's weight:

    between steps       each of these ranks keeps 1 / dp of the weight, the gradient and the optimizer state
    before forward      an all-gather over "dp" makes the whole weight, which is freed after forward
    before backward     another all-gather makes the whole weight again
    after backward      a reduce-scatter over "dp" gives each rank its part of the gradient's mean over "dp"

So pmoe's call always reads whole weights. This also holds for experts that are modules: FSDP2 gathers all
modules of a rank together, before pmoe reads their parameters. Gradients must be means over all ranks of the
mesh. FSDP2 computes the mean over "dp"; `DividedByOwnRanks` divides by the number of ranks along the other
dimensions.

Two dimensions of a mesh may have ranks that hold copies of the same experts, such as "nodes" and "dp" of
("nodes", "dp", "ep"). Experts are then sharded over the inner one ("dp") and replicated over the outer one
("nodes"), as FSDP2 does with a mesh of two dimensions (HSDP).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pmoe.arguments import check_flag, check_kind
from pmoe.comm.failures import at_stage
from pmoe.comm.grid import Grid
from pmoe.comm.ranks import Ranks
from pmoe.comm.topology import ACROSS, INSIDE
from pmoe.experts.base import Experts
from pmoe.experts.base import Shard as Part
from pmoe.experts.modules import ModuleExperts
from pmoe.experts.operands import local_part
from pmoe.experts.stacked import StackedExperts
from pmoe.layer import MoELayer
from pmoe.training.gradient_mean import MeanOverRanks

OPTIONS = ("reshard_after_forward", "mp_policy", "offload_policy")
"""The arguments of fully_shard that ``shard_experts`` may have."""


@dataclass(frozen=True)
class DividedByOwnRanks:
    """Divides experts' gradients by the number of ranks over which one copy of the experts is spread.

    Afterwards FSDP2 averages the gradients over the copies. The result is the mean over all ranks of the
    mesh. If ``set_gradient_divide_factor`` of FSDP2 was called for the experts, FSDP2 divides the sum over
    the copies by this factor in place of the number of copies. The result must then be the sum over all ranks
    divided by the factor, as it is for the dense part, so nothing is divided here.

    num_ranks: the divisor.
    over_copies: one object for each mesh dimension whose ranks hold copies of the same experts. Its
        ``compare`` checks that the copies along this dimension train the same parameters.
    experts: the experts, which FSDP2 shards.
    """

    num_ranks: int
    over_copies: Sequence[MeanOverRanks]
    experts: Experts = field(repr=False, compare=False)

    def own_parts(self, gathered: Sequence[Tensor]) -> list[Tensor]:
        """Returns this rank's parts of parameters that FSDP2 has gathered.

        gathered: the parameters, of any shape. A tensor that FSDP2 has not gathered is returned unchanged.
        """
        records = [record for group in _groups_of(self.experts) for record in group.fsdp_params]
        parts = {id(getattr(one, "_unsharded_param", None)): one.sharded_param for one in records}
        return [parts.get(id(parameter), parameter) for parameter in gathered]

    def with_names(self, names: tuple[str, ...]) -> DividedByOwnRanks:
        """Returns a copy of this object with other names of parameters, which errors show.

        names: names of the parameters with which the experts' calls compute. They change if a call uses
            another adapter.
        """
        return replace(self, over_copies=[replace(mean, names=names) for mean in self.over_copies])

    def compare(self, wanted: Sequence[bool], device: torch.device) -> None:
        """Checks, before a backward pass, that all copies of an expert train the same parameters. Collective.

        wanted: requires_grad of each parameter of the experts on this rank.
        device: device of these parameters.

        Raises ValueError on every rank if requires_grad differs between copies. Raises it also in the first
        half of a backward pass that a pipeline schedule divides.
        """
        _check_undivided()
        for mean in self.over_copies:
            mean.compare(wanted, device)

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Divides gradients, of any shape, in place by the number of ranks. Nothing is communicated."""
        has_factor = any(group.gradient_divide_factor is not None for group in _groups_of(self.experts))
        if gradients and self.num_ranks > 1 and not has_factor:
            torch._foreach_div_(list(gradients), self.num_ranks)


@dataclass
class BeforeGather:
    """A forward pre-hook of sharded experts, which frees tensors that FSDP2 must not use in the pass.

    Without the hook FSDP2 would use two kinds of tensors, and raise no error:

    - Gathered parameters from before an optimizer's step. With ``reshard_after_forward=False`` they stay
      after a forward pass without a backward pass, such as an evaluation.
    - Whole gradients of a backward pass that ended with an error. FSDP2 would add them to the gradients of
      the next backward pass.

    versions: torch's version counter of each sharded parameter at the last call of the experts.
    """

    versions: tuple[int, ...] = ()

    def __call__(self, experts: Any, args: object) -> None:
        """Frees gathered parameters if they are out of date, and the gradients of a pass that has failed.

        experts: this rank's experts.
        args: the arguments of the call; not used.

        Raises RuntimeError if a backward pass of a model in fully_shard has failed, and `reset_iter_state`
        was not called.
        """
        state = experts._get_fsdp_state()
        # FSDP2 resets this flag at the end of a backward pass. If it is still set, the last pass has failed.
        # The second condition leaves out calls within a backward pass (activation checkpointing).
        if state._state_ctx.post_backward_final_callback_queued and torch._C._current_graph_task_id() == -1:
            if not state._is_root:
                raise RuntimeError(
                    "shard_experts: the backward pass before has ended with an error, and FSDP2 would mix "
                    "its gradients with the next ones. Call model.reset_iter_state() of the outermost module "
                    "in fully_shard, and model.zero_grad()"
                )
            experts.reset_iter_state()
            _forget_gradients(experts)
        records = [record for group in _groups_of(experts) for record in group.fsdp_params]
        versions = tuple(record.sharded_param._version for record in records)
        if versions != self.versions:
            experts.reshard()
            self.versions = versions


def _forget_gradients(experts: Any) -> None:
    """Frees whole gradients that FSDP2 has not reduced, because a backward pass has failed.

    experts: this rank's experts.
    """
    for group in _groups_of(experts):
        for record in group.fsdp_params:
            record.unsharded_accumulated_grad = None
            if hasattr(record, "_unsharded_param"):
                record._unsharded_param.grad = None


def _check_undivided() -> None:
    """Raises ValueError if a pipeline schedule now asks for the gradients of a stage's inputs alone.

    In a second call such a schedule asks for the gradients of the stage's parameters. The parameters that it
    finds in the stage are then this rank's parts of the experts, but the autograd graph has the gathered
    weights. So the experts would get no gradients, and no error would be raised.
    """
    backward = sys.modules.get("torch.distributed.pipelining._backward")
    if backward is None:
        return
    first_half = backward.stage_backward_input.__code__
    # Autograd runs this function in a thread of its own if the tensors are on a GPU.
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code is first_half:
                raise ValueError(
                    "shard_experts (True) must be False with a schedule that divides backward passes (zero "
                    "bubble): torch would give sharded experts no gradients. Take Schedule1F1B, or "
                    "ScheduleInterleaved1F1B"
                )
            frame = frame.f_back  # type: ignore[assignment]


def sharding_options(shard_experts: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """Turns the argument ``shard_experts`` of `pmoe.parallelize` into arguments for FSDP2's fully_shard.

    Returns None if experts are not sharded. Otherwise the result has ``reshard_after_forward=True`` (experts
    are freed after forward and gathered again in backward), unless the mapping has another value.

    shard_experts: False; True; or a mapping with some of `OPTIONS`, which means True with these arguments.

    Raises TypeError or ValueError for anything else.
    """
    if not isinstance(shard_experts, Mapping):
        check_flag("shard_experts", shard_experts)
        return {"reshard_after_forward": True} if shard_experts else None
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    unknown = [name for name in shard_experts if name not in OPTIONS]
    if unknown:
        raise ValueError(f"shard_experts (with {unknown[0]!r}) may have only {', '.join(OPTIONS)}")
    options = {"reshard_after_forward": True, **shard_experts}
    check_flag("shard_experts['reshard_after_forward']", options["reshard_after_forward"])
    for name, kind in (("mp_policy", MixedPrecisionPolicy), ("offload_policy", OffloadPolicy)):
        if name in options:
            what = f"a torch.distributed.fsdp.{kind.__name__}"
            check_kind(kind, what, **{f"shard_experts[{name!r}]": options[name]})
    return options


def check_shardable(layer: MoELayer, grid: Grid, count: int) -> None:
    """Raises ValueError or TypeError if the experts of a layer cannot be sharded.

    FSDP2 shards experts over the ranks that hold the same experts.

    layer: the layer.
    grid: the ranks over which `pmoe.parallelize` spreads the layer.
    count: number of ranks over which an expert is sharded.
    """
    experts = layer.layer_modules.experts
    if experts.is_parallelized and not experts.is_sharded:
        raise ValueError(
            "a layer that is parallelized already must not be sharded later: pass shard_experts to its first "
            "pmoe.parallelize"
        )
    if isinstance(experts, ModuleExperts):
        for name, parameter in experts.named_parameters():
            if parameter.is_meta:
                raise ValueError(
                    f"experts' {name} (on the meta device) must have values to be sharded, because "
                    "experts are modules: build the model on a device"
                )
            _even_dimension(name, parameter.shape, count)
        return
    names = {name for name, _ in experts.named_parameters()}
    if not isinstance(experts, StackedExperts) or not names <= experts.all_hidden_dims().keys():
        raise TypeError(
            f"experts ({type(experts).__name__}) must be modules, or ffn or swiglu experts with or without "
            "adapters, to be sharded: leave shard_experts out"
        )
    for name, shape in _shapes(experts, layer.num_experts, grid).items():
        _dimension(experts, name, shape, count, grid.esp.size)


def shard(experts: Experts, mesh: DeviceMesh, copies: Sequence[str], options: dict[str, Any]) -> None:
    """Shards the parameters of experts over the ranks that hold copies of these experts, by fully_shard.

    Before the call, the parameters are DTensors that are Replicate over ``copies``, or plain tensors if
    experts are modules. Afterwards they are DTensors that are Shard over the inner dimension of ``copies``.
    Those of modules are DTensors over ``copies`` only.

    experts: this rank's experts, for which `check_shardable` raises no error.
    mesh: the mesh of the parameters.
    copies: names of one or two mesh dimensions whose ranks hold copies of the same experts. The parameters
        are sharded over the last one (the inner), and stay replicated over the one before it.
    options: arguments for fully_shard.
    """
    from torch.distributed.fsdp import DataParallelMeshDims, fully_shard

    *outer, inner = copies
    count = mesh.size((mesh.mesh_dim_names or ()).index(inner))
    part = Part(mesh.get_local_rank(inner), count)
    dims = dict[Tensor, int]()
    copy_parts = dict[str, tuple[int, Part]]()
    for name, parameter in experts.named_parameters():
        if not isinstance(experts, StackedExperts):
            dims[parameter] = _even_dimension(name, parameter.shape, count)
            copy_parts[name] = dims[parameter], part
            continue
        assert isinstance(parameter, DTensor)
        if parameter.device_mesh is not mesh:
            # torch caches meshes, and may have put an equal mesh of an earlier call into the parameter.
            # fully_shard accepts only the mesh that is passed to it.
            parameter._spec = replace(parameter._spec, mesh=mesh)
        dims[parameter] = _dimension(experts, name, local_part(parameter).shape, count, experts.shard.count)
        copy_parts[name] = dims[parameter], part
    if isinstance(experts, StackedExperts):
        of_copies = DataParallelMeshDims(shard=inner, replicate=outer[0] if outer else None)
        options = {**options, "mesh": mesh, "dp_mesh_dims": of_copies}
    else:
        options = {**options, "mesh": mesh[tuple(copies)]}
    fully_shard(experts, shard_placement_fn=lambda parameter: Shard(dims[parameter]), **options)
    experts.copy_parts = copy_parts
    experts.keeps_gathered = not options["reshard_after_forward"]
    experts.register_forward_pre_hook(BeforeGather(), prepend=True)  # before FSDP2's hook, which gathers
    if "mp_policy" in options:
        experts.gathered_dtype = options["mp_policy"].param_dtype
    experts.mark_parameters()


def leave_out(experts: Experts, module: nn.Module) -> list[Any]:
    """Stops FSDP2 from gathering a module's parameters. Returns FSDP2's records of these parameters.

    fully_shard has no public way to take parameters out, so the function changes the lists in which FSDP2
    keeps its records. Call it on every rank, and while no parameter is gathered (``experts.reshard()``).

    experts: this rank's experts, which FSDP2 shards.
    module: a module inside of ``experts``. Each rank keeps its part of the module's parameters.
    """
    modules = set(module.modules())
    records = list[Any]()
    for group in _groups_of(experts):
        records += [record for record in group.fsdp_params if record._module_info.module in modules]
        group.fsdp_params = [record for record in group.fsdp_params if record not in records]
        for left_out in modules:  # the group must not keep the module in memory
            group._module_to_pre_save_state_dict_hook_handle.pop(left_out, None)
            group._module_to_pre_load_state_dict_hook_handle.pop(left_out, None)
    for record in records:
        if hasattr(record, "_unsharded_param"):
            # The gathered parameter's memory has been freed. Because of the new version, autograd raises an
            # error in a backward pass that still needs the parameter.
            increment_version(record._unsharded_param)
    return records


def take_in(experts: Experts, records: Sequence[Any]) -> None:
    """Makes FSDP2 gather parameters again that `leave_out` has taken out of the same experts.

    Call it on every rank, and while no parameter is gathered (``experts.reshard()``).

    experts: this rank's experts, which FSDP2 shards.
    records: the result of `leave_out`.
    """
    if not records:
        return
    group = _groups_of(experts)[0]
    for record in records:
        # FSDP2 itself does these two steps once, before the first forward pass. If the record was left out at
        # that time, they are missing.
        record.reset_sharded_param()
        record.init_dtype_attrs(group.mp_policy)
    group.fsdp_params += records


def _groups_of(experts: Experts) -> list[Any]:
    """Returns FSDP2's groups of parameters, which are gathered together, of experts that it shards."""
    return list(experts._get_fsdp_state()._fsdp_param_groups)  # type: ignore[operator]


@torch.no_grad()
def whole_parameter(experts: Experts, name: str) -> Tensor:
    """Gathers the whole of a parameter that FSDP2 shards over the ranks with the same experts.

    Collective over these ranks. Returns (E_local, ...), where E_local is the number of this rank's experts.
    The result has the dtype in which the parameter is stored, even if FSDP2 casts it to another dtype for
    computation.

    experts: this rank's experts, while their parameters are sharded.
    name: the parameter's name.
    """
    return whole_value(experts.get_parameter(name), experts.copy_parts[name])


@torch.no_grad()
def whole_value(parameter: Any, cut: tuple[int, Part]) -> Tensor:
    """Gathers the whole of a DTensor that FSDP2 shards over the ranks with the same experts.

    Collective over these ranks.

    parameter: the DTensor, of any shape.
    cut: (the dimension that is sharded, this rank's part of it). If there is only one part, nothing is
        communicated.
    """
    dim, part = cut
    if part.count == 1:
        return local_part(parameter).detach()
    mesh = parameter.device_mesh
    along = next(
        along
        for along, placement in zip(mesh.mesh_dim_names, parameter.placements, strict=True)
        if along not in (ACROSS, INSIDE) and not placement.is_replicate()
    )
    own = local_part(parameter).to(mesh.device_type).contiguous()
    parts = [torch.empty_like(own) for _ in range(part.count)]
    ranks = Ranks(mesh.get_group(along))
    with at_stage("gathering experts from their copies", ranks):
        dist.all_gather(parts, own, group=ranks.group)
    return torch.cat(parts, dim)


def _shapes(experts: StackedExperts, num_experts: int, grid: Grid) -> dict[str, list[int]]:
    """Returns the shape of a rank's part of each parameter after experts are spread over ``grid``.

    experts: this rank's experts, before or after they are spread.
    num_experts: number of experts of all ranks.
    grid: the ranks along "ep" and along "esp".
    """
    shapes = {}
    for name, dim in experts.all_hidden_dims().items():
        shape = list(experts.get_parameter(name).shape)
        if name not in experts.replicated_dims:
            shape[0] = num_experts // grid.ep.size
        if dim is not None:
            factor = experts.hidden_factor if dim == _rows_dim(experts, name) else 1
            shape[dim] = factor * experts.all_hidden // grid.esp.size
        shapes[name] = shape
    return shapes


def _rows_dim(experts: StackedExperts, name: str) -> int:
    """Returns the dimension of a parameter that indexes the rows of a matrix.

    It is 1, because dimension 0 indexes experts. In parameters that all experts share it is 0.
    """
    return 0 if name in experts.replicated_dims else 1


def _dimension(experts: StackedExperts, name: str, shape: Sequence[int], count: int, num_parts: int) -> int:
    """Returns the first dimension of a parameter that can be cut into ``count`` equal parts.

    Dimension 0 indexes experts. It is tried first for two reasons: each rank then has whole experts, and for
    any other dimension FSDP2 makes one more copy of the parameter.

    experts: this rank's experts.
    name: name of the parameter.
    shape: shape of the rank's part of it.
    count: number of equal parts.
    num_parts: number of ranks ("esp") that share each expert's hidden columns. If there are several, a rank's
        part of a gated w1 or b1 is two separate blocks: some rows of the gate projection, and some rows of
        the up projection. The dimension of these rows is not cut once more.

    Raises ValueError if no dimension can be cut.
    """
    rows_dim = _rows_dim(experts, name)
    in_blocks = num_parts > 1 and experts.hidden_factor > 1 and experts.all_hidden_dims()[name] == rows_dim
    return _even_dimension(name, shape, count, rows_dim if in_blocks else None)


def _even_dimension(name: str, shape: Sequence[int], count: int, other_than: int | None = None) -> int:
    """Returns the first dimension of a parameter that can be cut into ``count`` equal parts.

    name: name of the parameter.
    shape: shape of the rank's part of it.
    count: number of equal parts.
    other_than: a dimension that is not cut; None if every dimension may be cut.

    Raises ValueError if no dimension can be cut.
    """
    for dim, length in enumerate(shape):
        if length % count == 0 and dim != other_than:
            return dim
    raise ValueError(
        f"experts' {name} (of shape {tuple(shape)} on a rank) must have a dimension that the {count} copies "
        "divide to be sharded over them: leave shard_experts out, or take another mesh"
    )
