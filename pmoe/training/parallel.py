"""Device meshes for DP x MP x EP x ESP, and the reduction of gradients after backward.

The meshes are the same as in the paper on FSMoE (Section 2.2 and Fig. 2):

- the ranks hold DP copies of the dense part; MP ranks together hold one copy;
- they hold EDP copies of the experts; each copy is spread over EP groups of ESP ranks, and the ESP ranks of a
  group split every expert's hidden columns.

The same P ranks form two meshes:

    dense part   ("dp", "mp")           P = DP * MP
    experts      ("edp", "ep", "esp")   P = EDP * EP * ESP

The dense part uses the model parallelism of `torch.distributed.tensor.parallel`, over
``meshes.dense["mp"]``. Experts are spread by `MoELayer(mesh=meshes.experts)`. A token must enter the MoE
layer on one rank only. If the ranks of "mp" hold the same tokens, split the tokens among these ranks first
(the ReduceScatter of Fig. 2).

A table in docs/flexible.md shows what backward leaves in ``.grad`` and over which ranks it is summed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from pmoe import arguments
from pmoe.comm.failures import meet_before_reduction
from pmoe.comm.gradient_sum import sum_over_ranks
from pmoe.comm.group_options import share_timeout
from pmoe.comm.ranks import Ranks
from pmoe.comm.topology import ACROSS, INSIDE
from pmoe.experts.base import mark_all
from pmoe.experts.marks import is_expert
from pmoe.layer import MoELayer
from pmoe.training.clipping import DEVICES, device_type_of, local_gradient

__all__ = ["Meshes", "is_expert", "make_meshes", "reduce_gradients"]

DP, MP, EDP = "dp", "mp", "edp"
"""Names of dimensions of the meshes. The other two names are "ep" and "esp"."""

BUCKET_BYTES = 32 << 20
"""Largest number of bytes of gradients that share one all-reduce.

Reducing needs additional memory for one such bucket.
"""


@dataclass(frozen=True)
class Meshes:
    """Two device meshes over the same P ranks: one for the dense part, one for the experts.

    `make_meshes` makes them. The dimensions:

        dp     copies of the dense part
        mp     ranks that share one copy of the dense part (tensor parallelism)
        edp    copies of the experts
        ep     ranks over which experts are spread
        esp    ranks over which each expert's hidden columns are split
    """

    dense: DeviceMesh
    """Mesh with the dimensions ("dp", "mp")."""
    sparse: DeviceMesh
    """Mesh with the dimensions ("edp", "ep", "esp")."""

    @property
    def experts(self) -> DeviceMesh:
        """This rank's mesh ("ep", "esp"), over which one copy of the experts is spread.

        Pass it to a layer: `MoELayer(mesh=...)`.
        """
        return self.sparse[ACROSS, INSIDE]

    @property
    def num_ranks(self) -> int:
        """Number of ranks in each of the two meshes, P = DP * MP = EDP * EP * ESP."""
        return self.dense.size()

    def size(self, name: str) -> int:
        """Returns the number of ranks along the dimension "dp", "mp", "edp", "ep" or "esp"."""
        return dist.get_world_size(self.group(name))

    def group(self, name: str) -> dist.ProcessGroup:
        """Returns this rank's process group along the dimension "dp", "mp", "edp", "ep" or "esp"."""
        arguments.check_one_of("name", name, (DP, MP, EDP, ACROSS, INSIDE))
        return (self.dense if name in (DP, MP) else self.sparse).get_group(name)


def make_meshes(*, mp: int = 1, ep: int = 1, esp: int = 1, device_type: str | None = None) -> Meshes:
    """Makes the meshes ("dp", "mp") and ("edp", "ep", "esp") over the P ranks of the default group.

    Args:
        mp: number of ranks that share a dense layer.
        ep: number of ranks over which experts are spread.
        esp: number of ranks over which each expert's hidden columns are split.
        device_type: device type of the meshes, "cuda" or "cpu". None takes the type that the
            default group's backend uses.

    Gradients are averaged over DP = P / mp copies of the dense part and EDP = P / (ep * esp) copies of the
    experts. Ranks along "mp" and along "esp" have consecutive numbers, so that they are in one node.

    Example from the paper on FSMoE, Fig. 2, with P = 4 and mp = ep = esp = 2:

    - "mp" and "esp": ranks (0, 1) and (2, 3)
    - "dp" and "ep": ranks (0, 2) and (1, 3)
    - "edp": each rank by itself

    The new groups have the default group's timeout. Collective: every rank must call it with the same
    arguments. A second call with the same arguments returns the same meshes.

    Raises ValueError if the sizes do not divide P, RuntimeError without a process group.
    """
    arguments.check_count(mp=mp, ep=ep, esp=esp)
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed must be initialised (init_process_group) before make_meshes")
    num_ranks = dist.get_world_size()
    if num_ranks % mp:
        raise ValueError(f"mp ({mp}) must divide the number of ranks ({num_ranks})")
    if num_ranks % (ep * esp):
        raise ValueError(f"ep * esp ({ep} * {esp}) must divide the number of ranks ({num_ranks})")
    if device_type is None:
        device_type = device_type_of(None)
    arguments.check_one_of("device_type", device_type, DEVICES)
    world = dist.group.WORLD
    assert world is not None
    meshes_of_group = _made.setdefault(world, {})
    key = (mp, ep, esp, device_type)
    if key not in meshes_of_group:
        dense = init_device_mesh(device_type, (num_ranks // mp, mp), mesh_dim_names=(DP, MP))
        shape = (num_ranks // (ep * esp), ep, esp)
        experts = init_device_mesh(device_type, shape, mesh_dim_names=(EDP, ACROSS, INSIDE))
        share_timeout(world, [*dense.get_all_groups(), *experts.get_all_groups()])
        meshes_of_group[key] = Meshes(dense, experts)
    return meshes_of_group[key]


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], Meshes]]
_made = weakref.WeakKeyDictionary()
"""Meshes that `make_meshes` made before, by default group.

A process may destroy its default group and make another one, which needs meshes of its own.
"""


@torch.no_grad()
def reduce_gradients(
    model: nn.Module,
    meshes: Meshes,
    *,
    divide_by: float | Tensor | None = None,
    experts_only: bool = False,
    replicated: Iterable[nn.Parameter] = (),
) -> None:
    """Sums gradients over ranks after backward: each becomes the gradient of sum(losses) / divide_by.

    Args:
        model: its parameters may have any shape.
        meshes: the meshes of `make_meshes`.
        divide_by: divisor of the sum of losses. It depends on the losses:

            - None means P, the number of ranks. Use it if each rank computes a loss of its own tokens: the
              gradients are those of the mean of the P losses.
            - DP, the number of copies of the dense part. Use it if all ranks of "mp" compute the same loss,
              from an output that is a gathered DTensor. torch then counts the gradient of this loss once,
              not once for each rank of "mp", so there are DP losses to average.
            - 1 for the sum of the losses. The gradients are then not divided. If each rank divides its loss
              by P before backward, the sum is the mean of the losses.
            - The number of all ranks' tokens, possibly a scalar tensor, if each loss is a sum over tokens.
        experts_only: True reduces the experts' gradients only. Use it if something else, for example
            DistributedDataParallel, reduces the dense part. DistributedDataParallel must then ignore the
            parameters for which `is_expert` is True.
        replicated: plain dense parameters that have the same whole gradient on every rank of "mp", because
            their module gets the same tokens and the same output gradients on these ranks. Do not list:

            - parameters of modules that get only this rank's part of the tokens, such as the gate: each
              rank's gradient comes from its own tokens;
            - parameters of modules whose output is then split by plain indexing: the gradient that flows
              back is 0 for the tokens of the other ranks;
            - DTensors: their placements show whether they are replicated.

    Gradients change in place, in few all-reduces, which are the same on every rank. A gradient that is None
    counts as zero and becomes zero, even if it is None on every rank. Set requires_grad=False on parameters
    that are not trained.

    Raises ValueError if a `MoELayer` of the model has other meshes, a DTensor is not on
    ``meshes.dense["mp"]``, a gradient is sparse, or ``replicated`` or ``divide_by`` are wrong.
    On the CPU, raises RuntimeError on every rank if only some ranks have run the backward pass of a layer,
    because on the other ranks the loss does not depend on the layer's output.
    """
    arguments.check_module(model=model)
    arguments.check_kind(Meshes, "a pmoe.training.parallel.Meshes", meshes=meshes)
    arguments.check_flag("experts_only", experts_only)
    divide_by = _checked_divisor(meshes.num_ranks if divide_by is None else divide_by)
    _check_layers(model, meshes)
    mark_all(model)
    replicated_ids = _checked_replicated(model, replicated)
    meet_before_reduction(Ranks(dist.group.WORLD))
    groups = {"all": dist.group.WORLD, DP: meshes.group(DP), EDP: meshes.group(EDP)}
    scaled: dict[tuple[int, object, object], list[Tensor]] = {}
    summed: dict[tuple[str, object, object], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (experts_only and not is_expert(parameter)):
            continue
        over, copies, gradient = _summand(name, parameter, meshes, id(parameter) in replicated_ids)
        scaled.setdefault((copies, gradient.device, gradient.dtype), []).append(gradient)
        summed.setdefault((over, gradient.device, gradient.dtype), []).append(gradient)
    for (copies, _, _), gradients in scaled.items():
        divisor = divide_by * copies
        # A division by 1 would read and write every gradient for nothing. A scalar on a GPU is not compared
        # with 1, because the host would wait for its value.
        if isinstance(divisor, Tensor) or divisor != 1:
            torch._foreach_div_(gradients, divisor)
    for (over, _, _), gradients in summed.items():
        if dist.get_world_size(groups[over]) > 1:
            _all_reduce(gradients, groups[over])


def _summand(
    name: str, parameter: nn.Parameter, meshes: Meshes, is_replicated: bool
) -> tuple[str, int, Tensor]:
    """Returns the group that sums a parameter's gradient, a divisor, and this rank's gradient.

    The three values are:

    - the group over which to sum: "all" (all ranks), "dp" (copies of the dense part) or "edp" (copies of the
      experts);
    - a number by which the gradient must be divided before the sum: how many ranks of the group have the same
      gradient, which would otherwise be counted several times;
    - this rank's gradient, of any shape. It is the memory of ``parameter.grad``, which is summed in place.

    A gradient that is None is first replaced by zeros.

    name: the parameter's name, for errors.
    parameter: the parameter.
    meshes: the meshes of the dense part and of the experts.
    is_replicated: True if this is a plain dense parameter with the same whole gradient on every rank of "mp".
    """
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    if gradient.layout != torch.strided:
        raise ValueError(f"the gradient of {name} ({gradient.layout}) must be dense (torch.strided)")
    if is_expert(parameter):
        return EDP, 1, local_gradient(gradient)
    if not isinstance(parameter, DTensor):
        return "all", meshes.size(MP) if is_replicated else 1, local_gradient(gradient)
    assert isinstance(gradient, DTensor)
    mesh = parameter.device_mesh
    if mesh != meshes.dense[MP]:
        raise ValueError(
            f'{name} (a DTensor over ranks {mesh.mesh.tolist()}) must be on meshes.dense["mp"]; where a '
            "wrapper reduces its gradient, use experts_only=True"
        )
    (wanted_placement,), (gradient_placement,) = parameter.placements, gradient.placements
    if wanted_placement.is_replicate() and gradient_placement == Partial():
        # A Partial gradient must still be summed. `redistribute` would do so now, in one collective for this
        # gradient alone. It is summed later, together with the other gradients of its bucket.
        local = local_gradient(gradient)
        parameter.grad = DTensor.from_local(local, mesh, (wanted_placement,), run_check=False)
        return "all", 1, local
    if gradient_placement != wanted_placement:
        # If an embedding is split by rows, torch leaves its whole gradient on each rank. The gradient is
        # brought to the parameter's placement, so that all ranks reduce gradients of the same size.
        parameter.grad = gradient = gradient.redistribute(placements=(wanted_placement,))
    if wanted_placement.is_replicate():
        return "all", meshes.size(MP), local_gradient(gradient)
    return DP, 1, local_gradient(gradient)


def _all_reduce(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sums gradients over the group, in place, in buckets of `BUCKET_BYTES`.

    gradients: tensors of any shapes and one dtype.
    group: the ranks whose gradients are summed.
    """
    for bucket in _take_tensors(gradients, BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        sum_over_ranks(Ranks(group), "reducing gradients", [flat])
        torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))


def _checked_divisor(divide_by: float | Tensor) -> float | Tensor:
    """Returns the divisor of the sum of losses: a positive number, or a scalar tensor on a GPU.

    Raises ValueError or TypeError for anything else. The value of a tensor on a GPU is not checked, because
    reading it would make the host wait.
    """
    if isinstance(divide_by, Tensor):
        arguments.check_tensors(0, divide_by=divide_by)
        if divide_by.device.type not in ("cpu", "meta"):
            return divide_by  # its value stays on its device
    number: Any = divide_by.item() if isinstance(divide_by, Tensor) and not divide_by.is_meta else divide_by
    arguments.check_positive(divide_by=number)
    return number  # type: ignore[no-any-return]


def _checked_replicated(model: nn.Module, replicated: Iterable[nn.Parameter]) -> set[int]:
    """Returns the ids of the parameters that the user has listed as ``replicated``.

    Raises ValueError if one of them is not a plain dense parameter of the model.
    """
    parameters = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
    ids = {id(parameter) for parameter in arguments.list_of("replicated", replicated)}
    if not ids <= set(parameters):
        raise ValueError(
            f"replicated ({len(ids - set(parameters))} of {len(ids)} unknown) must be parameters of the model"
        )
    for name, parameter in (parameters[key] for key in ids):
        if is_expert(parameter) or isinstance(parameter, DTensor):
            kind = "an expert's" if is_expert(parameter) else "a DTensor"
            raise ValueError(f"replicated ({name}, {kind}) must be plain dense parameters")
    return ids


def _check_layers(model: nn.Module, meshes: Meshes) -> None:
    """Raises ValueError if an MoE layer has other sizes of "ep" and "esp" than ``meshes``.

    Also raises ValueError if a layer reduces its experts' gradients itself (`pmoe.parallelize` with
    reduce=True), because they would be reduced twice.
    """
    wanted_sizes = (meshes.size(ACROSS), meshes.size(INSIDE))
    for name, layer in model.named_modules():
        if not isinstance(layer, MoELayer):
            continue
        sizes = (layer.grid.ep.size, layer.grid.esp.size)
        if sizes != wanted_sizes:
            raise ValueError(
                f"{name or 'model'} (a MoELayer of ep {sizes[0]}, esp {sizes[1]}) must be built with "
                f"mesh=meshes.experts (ep {wanted_sizes[0]}, esp {wanted_sizes[1]})"
            )
        if layer.layer_modules.experts.reduce is not None:
            raise ValueError(
                f"{name or 'model'} (parallelized) reduces its experts' gradients in backward: use "
                "pmoe.parallelize(..., reduce=False) to have them reduced here"
            )
