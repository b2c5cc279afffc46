"""Gradient norm, clipping and float16's loss scale for a model whose parameters are spread over ranks.

`torch.nn.utils.get_total_norm` is not used because it sums in the gradients' own dtype: bfloat16 has three
digits, and float16 overflows. Only the scaling of gradients by the norm is torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pmoe.arguments import check_flag, check_kind, check_number, check_one_of, list_of
from pmoe.comm.failures import at_stage, meet_before_reduction, reduce_to_largest
from pmoe.comm.gradient_sum import sum_over_ranks
from pmoe.comm.ranks import Ranks
from pmoe.experts.base import mark_all
from pmoe.experts.dtensor_layout import hold_own_parts
from pmoe.experts.marks import is_expert, is_flattened
from pmoe.experts.operands import local_part
from pmoe.layer import MoELayer

DEVICES = ("cpu", "cuda")
"""Device types whose tensors can be sent between ranks."""

GradientGroups = dict[tuple[torch.device, torch.dtype, int], list[Tensor]]
"""This rank's gradients, of any shape, by (device, dtype, number of ranks that hold each value)."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Clips gradients as `torch.nn.utils.clip_grad_norm_` does, for a model that is spread over ranks.

    Each value of a gradient counts once, however many ranks hold it. With p = norm_type:

        norm = (sum over ranks and values of abs(value)^p / number of ranks that hold the value)^(1/p)

    Args:
        parameters: a model or its parameters, of any shape:

            - a DTensor may have any mesh and placements;
            - a plain tensor must be the same on all ranks, unless it belongs to an expert;
            - parameters that FullyShardedDataParallel (FSDP1) shards are plain tensors that differ between
              ranks. Pass the model then: only its wrappers know over how many ranks they are split;
            - experts that `pmoe.parallelize` has not made DTensors are plain tensors that differ between
              ranks. Pass the model then: only its layers know how many ranks hold a copy of each expert.
        max_norm: largest norm that gradients may have afterwards, at least 0.
        norm_type: order p of the norm, positive or inf.
        error_if_nonfinite: whether to raise RuntimeError if the norm is not finite.
        foreach: True or None computes with many gradients in one launch; False makes a launch for each
            gradient.
        group: the ranks that hold the model together. None is the default group, or this process.

    Collective: every rank must call it after gradients were reduced. Data-parallel wrappers and
    `pmoe.parallelize` reduce them in backward. Each call makes one all-reduce, of one number (of two numbers
    for norm_type inf).

    Returns the norm before clipping: a scalar of float32 or a wider dtype, equal on every rank. Up to
    rounding it is the norm that one process with the whole model would compute.

    Raises ValueError if a number is out of its range, if a gradient is not reduced yet (a Partial DTensor),
    if the group is too small, or if parameters of experts or of FSDP1 need their model and are passed without
    it. Raises RuntimeError on every rank if error_if_nonfinite is True and the norm is not finite. On the CPU
    it also raises RuntimeError if only some ranks have run the backward pass of a layer, because on the other
    ranks the loss does not depend on the layer's output.
    """
    check_number(max_norm=max_norm, norm_type=norm_type)
    check_flag("error_if_nonfinite", error_if_nonfinite)
    check_flag("foreach", foreach, or_none=True)
    norm_type = float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm ({max_norm}) must be a number of at least 0")
    if not norm_type > 0:
        raise ValueError(f"norm_type ({norm_type}) must be positive, or inf")
    ranks = Ranks(group)
    named = _named(parameters)
    meet_before_reduction(ranks)
    copies = _copies_of_experts(parameters, named, ranks.size)
    copies |= _copies_of_shards(parameters, named, ranks.size)
    gradients = _grouped(named, copies, ranks.size)
    norm = _norm(gradients, norm_type, _scalar_device(named, ranks), ranks, foreach)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of all gradients ({norm.item()}) must be finite, or "
            "error_if_nonfinite False"
        )
    scaled = stand_ins(gradient for tensors in gradients.values() for gradient in tensors)
    torch.nn.utils.clip_grads_with_norm_(scaled, max_norm, norm, foreach)
    return norm


def local_gradient(gradient: Tensor) -> Tensor:
    """Returns this rank's part of a gradient, a plain tensor, and waits until no collective changes it.

    gradient: a plain tensor or a DTensor, of any shape.
    """
    local = local_part(gradient)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def stand_ins(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Returns a plain tensor for each gradient, to be passed to torch's functions in place of a parameter.

    The ``grad`` of each returned tensor is one of the gradients. torch's functions that scale gradients take
    parameters, but fail on DTensors of different meshes. They can scale the ``grad`` of these plain tensors.

    gradients: plain tensors of any shape: the gradient of a plain parameter, or this rank's part of the
        gradient of a DTensor. torch changes them in place.
    """
    holders = []
    for gradient in gradients:
        holders.append(gradient.detach())
        holders[-1].grad = gradient
    return holders


def device_type_of(group: dist.ProcessGroup | None) -> str:
    """Returns the device type, "cuda" or "cpu", of tensors that the group's collectives accept."""
    return "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config(group) else "cpu"


def _named(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    """Returns (name, parameter) pairs of a model, or of a list of parameters.

    Parameters of a list are named by their position: "parameter 0".
    """
    if isinstance(parameters, nn.Module):
        hold_own_parts(parameters)
        mark_all(parameters)
        return list(parameters.named_parameters())
    listed = [parameters] if isinstance(parameters, Tensor) else list_of("parameters", parameters)
    pairs = [(f"parameter {at}", parameter) for at, parameter in enumerate(listed)]
    check_kind(Tensor, "a tensor", **{f"parameters: {name}": parameter for name, parameter in pairs})
    return pairs


def _copies_of_experts(model: object, named: Iterable[tuple[str, Tensor]], num_ranks: int) -> dict[int, int]:
    """Returns how many copies of each expert parameter the ranks hold, by the parameter's ``id()``.

    model: the argument ``parameters`` of `clip_grad_norm_`: a model, or its parameters. The number of copies
        is known only from a model's layers, so parameters without a model give an empty dict.
    named: the same parameters, of any shape, as (name, parameter) pairs.
    num_ranks: number of ranks that hold the model together.

    Raises ValueError if ``named`` has an expert's parameter that is not a DTensor, and ``model`` is not a
    model with this expert. The number of the expert's copies is then unknown.
    """
    copies = dict[int, int]()
    for at, layer in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(layer, MoELayer):
            count = _copies_of(at or "model", layer.ranks.size, num_ranks)
            copies |= {id(parameter): count for parameter in layer.experts.parameters()}
    for name, parameter in named:
        if (
            is_expert(parameter)
            and _lacks_spread(parameter)
            and id(parameter) not in copies
            and num_ranks > 1
        ):
            what = "sharded over its copies only" if isinstance(parameter, DTensor) else "not a DTensor"
            raise ValueError(
                f"parameters ({name} is an expert's and {what}) must be the model, or come from "
                "pmoe.parallelize: otherwise the number of its copies is not known"
            )
    return copies


def _copies_of_shards(model: object, named: Iterable[tuple[str, Tensor]], num_ranks: int) -> dict[int, int]:
    """Returns how many ranks hold each value of a parameter of FSDP1, by the parameter's ``id()``.

    model: the argument ``parameters`` of `clip_grad_norm_`: a model, or its parameters. Only a model has the
        wrappers that know over how many ranks a parameter is split.
    named: the same parameters, of any shape, as (name, parameter) pairs.
    num_ranks: number of ranks that hold the model together.

    Raises ValueError if ``named`` has a parameter that FullyShardedDataParallel manages, and ``model`` does
    not contain its wrapper.
    """
    flattened = {id(parameter): name for name, parameter in named if is_flattened(parameter)}
    if not flattened or num_ranks == 1:
        return {}
    from pmoe.training.fsdp1 import num_parts

    parts = num_parts(model) if isinstance(model, nn.Module) else {}
    for key, name in flattened.items():
        if key not in parts:
            raise ValueError(
                f"parameters ({name} is sharded by FullyShardedDataParallel) must be the model with its "
                "wrapper: otherwise it is not known over how many ranks the parameter is split"
            )
    return {key: _copies_of(name, parts[key], num_ranks) for key, name in flattened.items()}


def _grouped(
    named: Iterable[tuple[str, Tensor]], copies_of: Mapping[int, int], num_ranks: int
) -> GradientGroups:
    """Returns this rank's gradients, grouped by device, dtype and number of ranks that hold each value.

    named: (name, parameter) pairs, with parameters of any shape.
    copies_of: how many ranks hold each value of a parameter of experts or of FSDP1, by its ``id()``.
    num_ranks: number of ranks that hold the model together.
    """
    groups: GradientGroups = {}
    for name, parameter in named:
        if parameter.grad is not None:
            gradient = local_gradient(parameter.grad)
            copies = _num_copies(name, parameter, copies_of, num_ranks)
            groups.setdefault((gradient.device, gradient.dtype, copies), []).append(gradient)
    return groups


def _num_copies(name: str, parameter: Tensor, copies_of: Mapping[int, int], num_ranks: int) -> int:
    """Returns how many ranks hold each single value of a parameter's gradient.

    name: the parameter's name, for errors.
    parameter: a parameter of any shape, with a gradient.
    copies_of: how many ranks hold each value of a parameter of experts or of FSDP1, by its ``id()``.
    num_ranks: number of ranks that hold the model together.

    Raises ValueError if the gradient is not reduced yet, or if num_ranks is not a multiple of the number of
    ranks over which the parameter is split.
    """
    gradient = parameter.grad
    parts = 1
    if is_expert(parameter) and not isinstance(gradient, DTensor):
        inside: int = getattr(parameter, "num_copies", 1)
        return copies_of.get(id(parameter), 1) * inside
    if id(parameter) in copies_of and not isinstance(gradient, DTensor):
        return copies_of[id(parameter)]
    if isinstance(gradient, DTensor):
        for dimension, placement in enumerate(gradient.placements):
            if placement.is_partial():
                raise ValueError(
                    f"the gradient of {name} (a summand on each rank) must be reduced before it is clipped"
                )
            parts *= 1 if placement.is_replicate() else gradient.device_mesh.size(dimension)
        if is_expert(parameter) and _lacks_spread(parameter):
            num_ranks = copies_of.get(id(parameter), num_ranks)
    return _copies_of(name, parts, num_ranks)


def _lacks_spread(parameter: Tensor) -> bool:
    """Returns whether an expert's parameter does not show over which ranks the experts are spread.

    This is so for plain tensors, and for experts that are modules and that FSDP2 shards over their copies.

    parameter: an expert's parameter, of any shape.
    """
    return not isinstance(parameter, DTensor) or hasattr(parameter, "over_copies_only")


def _copies_of(name: str, parts: int, num_ranks: int) -> int:
    """Returns how many copies ``num_ranks`` ranks hold of a parameter that is split over ``parts`` ranks.

        copies = num_ranks / parts

    name: name of the parameter or layer, for the error.
    parts: the number of ranks over which one copy is split.
    num_ranks: the number of ranks that hold the model together.

    Raises ValueError if the number of ranks is not a multiple of ``parts``.
    """
    if num_ranks % parts:
        raise ValueError(
            f"group (of size {num_ranks}) must be all ranks that hold the model together: {name} is in "
            f"{parts} parts"
        )
    return num_ranks // parts


def _scalar_device(named: Sequence[tuple[str, Tensor]], ranks: Ranks) -> torch.device:
    """Returns the device on which the norm is computed and all-reduced: the first parameter's device.

    A gradient's device is not used, because a rank may have no gradient. If there are no parameters, the
    result is a device whose tensors the group's collectives accept.

    named: (name, parameter) pairs, with parameters of any shape.
    ranks: the ranks that hold the model together.
    """
    if named:
        return local_part(named[0][1]).device
    return torch.empty(0, device="cpu" if ranks.group is None else device_type_of(ranks.group)).device


def _norm(
    gradients: GradientGroups, norm_type: float, device: torch.device, ranks: Ranks, foreach: bool | None
) -> Tensor:
    """Returns the norm of all ranks' gradients: a scalar of float32 or a wider dtype, on ``device``.

    gradients: this rank's gradients, by (device, dtype, number of ranks that hold each value).
    norm_type: order of the norm, positive or inf.
    device: the device of the result.
    ranks: the ranks that hold the model together.
    foreach: False computes the norm of each gradient in a launch of its own; True or None computes many norms
        in one launch.
    """
    is_largest = math.isinf(norm_type)
    dtype = torch.float32
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (_, of_dtype, copies), tensors in gradients.items():
        dtype = torch.promote_types(dtype, of_dtype)
        nonempty = [tensor for tensor in tensors if tensor.numel()]
        if not nonempty:
            continue
        wide_dtype = torch.promote_types(of_dtype, torch.float32)
        if foreach is False:
            each_norm = [torch.linalg.vector_norm(tensor, norm_type, dtype=wide_dtype) for tensor in nonempty]
        else:
            each_norm = list(torch._foreach_norm(nonempty, norm_type, dtype=wide_dtype))
        norms = torch.stack(each_norm).to(device, torch.float64)
        if is_largest:
            total = torch.maximum(total, norms.max())
        else:
            total = total + norms.pow(norm_type).sum() / copies
    if ranks.size > 1:
        stage = "taking the norm of all gradients"
        if is_largest:
            # NaN is sent as a flag of its own, because a backend's maximum of NaN and x may be x.
            both = torch.stack([total.nan_to_num(0.0, math.inf), total.isnan().double()])
            with at_stage(stage, ranks):
                reduce_to_largest(both, ranks.group)
            total = both[0].where(both[1] == 0, math.nan)
        else:
            sum_over_ranks(ranks, stage, [total])
    return (total if is_largest else total.pow(1 / norm_type)).to(dtype)


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for a model that is spread over ranks, with the same arguments and methods.

    If a gradient overflows on one rank, for example a gradient of its own experts, then all ranks skip the
    step and all continue with the same scale. One optimizer may have plain tensors and DTensors of any
    meshes.

    Args:
        group: the ranks that hold the model together. None is the default group, or this process.

    Collective: every rank must call ``unscale_`` (or ``step``, which calls it) for the same optimizers, after
    gradients were reduced. Each call sends one all-reduce of one number. A rank may have no gradients.

    On the CPU, ``unscale_`` and ``step`` raise RuntimeError on every rank if only some ranks have run the
    backward pass of a layer, because on the other ranks the loss does not depend on the layer's output.
    """

    def __init__(
        self, device: str = "cuda", *args: Any, group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        check_one_of("device", device, DEVICES)
        super().__init__(device, *args, **options)
        Ranks(group)  # raises if ``group`` is not a process group that this rank belongs to
        self.group = group

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        ranks = Ranks(self.group)
        meet_before_reduction(ranks)
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        gradients = (local_gradient(parameter.grad) for parameter in parameters if parameter.grad is not None)
        local: Any = SimpleNamespace(param_groups=[{"params": stand_ins(gradients)}])
        overflows = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)
        total = torch.stack(
            [found_inf, *(overflow.to(found_inf.device) for overflow in overflows.values())]
        ).amax()
        if ranks.group is not None:
            agreed = total.to(device_type_of(ranks.group))
            with at_stage("agreeing whether gradients overflow", ranks):
                reduce_to_largest(agreed, ranks.group)
            total = agreed.to(total.device)
        return {device: total.to(device) for device in (*overflows, total.device)}
