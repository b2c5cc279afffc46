"""The norm of a model's gradients that ranks hold together, gradients scaled by it, and float16's loss scale.

The norm is not `torch.nn.utils.get_total_norm`, which adds up in the gradients' own type: bfloat16 has
three digits, and float16 overflows. The scaling is torch's.
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
from pmoe.comm.ranks import Ranks, at_stage
from pmoe.experts.base import is_expert, local_part
from pmoe.layer import MoELayer

DEVICES = ("cpu", "cuda")
"""Types of devices whose tensors ranks send."""

Grouped = dict[tuple[torch.device, torch.dtype, int], list[Tensor]]
"""This rank's gradients by device, type and the number of ranks that hold each value."""


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
    """`torch.nn.utils.clip_grad_norm_`, with its signature, of a model that the ranks hold together.

    Each value of a gradient counts once, however many ranks hold it. Every rank must call it, once gradients
    are reduced, as data-parallel wrappers and `pmoe.parallelize` leave them.

    Args:
        parameters: a model or parameters. Plain tensors are the same on all ranks; DTensors may be of any
            meshes. Experts of layers that were not parallelized need the model: only it says how many copies
            of them there are.
        max_norm: at least 0.
        norm_type: the order, positive or inf.
        group: the ranks that hold the model together. None is the default group, or this process alone.

    Returns the norm before clipping, a scalar of float32 or wider: the same on every rank and, to rounding,
    that of one process. One all-reduce of one number, or of two for norm_type inf.

    Raises ValueError where a number is out of its range, a gradient is still a summand (Partial), the group
    is too small, or experts come without their model; with error_if_nonfinite RuntimeError on every rank.
    """
    check_number(max_norm=max_norm, norm_type=norm_type)
    check_flag("error_if_nonfinite", error_if_nonfinite)
    check_flag("foreach", foreach, or_none=True)
    norm_type = float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm ({max_norm}) must be a number of at least 0")
    if not norm_type > 0:
        raise ValueError(f"norm_type ({norm_type}) must be positive, or inf")
    ranks, named = Ranks(group), _named(parameters)
    gradients = _grouped(named, _copies_of_experts(parameters, named, ranks.size), ranks.size)
    norm = _norm(gradients, norm_type, _scalar_device(named, ranks), ranks, foreach)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of all gradients ({norm.item()}) must be finite, or "
            "error_if_nonfinite False"
        )
    scaled = stand_ins(each for tensors in gradients.values() for each in tensors)
    torch.nn.utils.clip_grads_with_norm_(scaled, max_norm, norm, foreach)
    return norm


def local_gradient(gradient: Tensor) -> Tensor:
    """This rank's memory of a gradient, be it a DTensor. Waits for a collective that is under way."""
    local = local_part(gradient)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def stand_ins(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Tensors whose ``grad`` these are, for torch's functions that take parameters."""
    holders = []
    for gradient in gradients:
        holders.append(gradient.detach())
        holders[-1].grad = gradient
    return holders


def device_type_of(group: dist.ProcessGroup | None) -> str:
    """The type of device, "cuda" or "cpu", whose tensors the group's collectives take."""
    return "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config(group) else "cpu"


def _named(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    if isinstance(parameters, nn.Module):
        return list(parameters.named_parameters())
    listed = [parameters] if isinstance(parameters, Tensor) else list_of("parameters", parameters)
    found = [(f"parameter {at}", each) for at, each in enumerate(listed)]
    check_kind(Tensor, "a tensor", **{f"parameters: {name}": each for name, each in found})
    return found


def _copies_of_experts(model: object, named: Iterable[tuple[str, Tensor]], num_ranks: int) -> dict[int, int]:
    """By id of an expert's parameter, how many copies of its layer there are."""
    found = dict[int, int]()
    for at, layer in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(layer, MoELayer):
            count = _copies_of(at or "model", layer.ranks.size, num_ranks)
            found |= {id(each): count for each in layer.experts.parameters()}
    for name, each in named:
        if is_expert(each) and not isinstance(each, DTensor) and id(each) not in found and num_ranks > 1:
            raise ValueError(
                f"parameters ({name} is an expert's that is no DTensor) must be the model, or come from "
                "pmoe.parallelize: else the number of its copies is not known"
            )
    return found


def _grouped(
    named: Iterable[tuple[str, Tensor]], copies_of_experts: Mapping[int, int], num_ranks: int
) -> Grouped:
    found: Grouped = {}
    for name, parameter in named:
        if parameter.grad is not None:
            gradient = local_gradient(parameter.grad)
            copies = _num_copies(name, parameter, copies_of_experts, num_ranks)
            found.setdefault((gradient.device, gradient.dtype, copies), []).append(gradient)
    return found


def _num_copies(name: str, parameter: Tensor, copies_of_experts: Mapping[int, int], num_ranks: int) -> int:
    """How many ranks hold each value of this gradient."""
    gradient, parts = parameter.grad, 1
    if is_expert(parameter) and not isinstance(gradient, DTensor):
        inside: int = getattr(parameter, "num_copies", 1)
        return copies_of_experts.get(id(parameter), 1) * inside
    if isinstance(gradient, DTensor):
        for dimension, placement in enumerate(gradient.placements):
            if placement.is_partial():
                raise ValueError(
                    f"the gradient of {name} (a summand on each rank) must be reduced before it is clipped"
                )
            parts *= 1 if placement.is_replicate() else gradient.device_mesh.size(dimension)
    return _copies_of(name, parts, num_ranks)


def _copies_of(name: str, parts: int, num_ranks: int) -> int:
    if num_ranks % parts:
        raise ValueError(
            f"group (of size {num_ranks}) must be all ranks that hold the model together: {name} is in "
            f"{parts} parts"
        )
    return num_ranks // parts


def _scalar_device(named: Sequence[tuple[str, Tensor]], ranks: Ranks) -> torch.device:
    """Where the norm is reduced. Not the first gradient's device: a rank may have no gradient."""
    if named:
        return local_part(named[0][1]).device
    return torch.empty(0, device="cpu" if ranks.group is None else device_type_of(ranks.group)).device


def _norm(
    gradients: Grouped, norm_type: float, device: torch.device, ranks: Ranks, foreach: bool | None
) -> Tensor:
    """Over all ranks, in float32 or wider."""
    is_largest, dtype = math.isinf(norm_type), torch.float32
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (_, of_dtype, copies), tensors in gradients.items():
        dtype = torch.promote_types(dtype, of_dtype)
        filled = [each for each in tensors if each.numel()]
        if not filled:
            continue
        wide = torch.promote_types(of_dtype, torch.float32)
        if foreach is False:
            each_norm = [torch.linalg.vector_norm(each, norm_type, dtype=wide) for each in filled]
        else:
            each_norm = list(torch._foreach_norm(filled, norm_type, dtype=wide))
        norms = torch.stack(each_norm).to(device, torch.float64)
        if is_largest:
            total = torch.maximum(total, norms.max())
        else:
            total = total + norms.pow(norm_type).sum() / copies
    if ranks.size > 1:
        with at_stage("taking the norm of all gradients", ranks):
            if is_largest:
                # Apart from NaN, of which a backend's maximum may be the other operand.
                both = torch.stack([total.nan_to_num(0.0, math.inf), total.isnan().double()])
                dist.all_reduce(both, dist.ReduceOp.MAX, group=ranks.group)
                total = both[0].where(both[1] == 0, math.nan)
            else:
                dist.all_reduce(total, group=ranks.group)
    return (total if is_largest else total.pow(1 / norm_type)).to(dtype)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, with its arguments and methods, of a model that the ranks hold together.

    A gradient that overflows on one rank, say of its own experts, skips the step on all ranks, and all go on
    with the same scale. One optimizer may have plain tensors and DTensors of any meshes.

    group: the ranks that hold the model together. None is the default group, or this process alone.

    Every rank must call ``unscale_`` (or `step`, which does it) for the same optimizers, once gradients are
    reduced: one all-reduce of one number each. A rank may have no gradients.
    """

    def __init__(
        self, device: str = "cuda", *args: Any, group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        check_one_of("device", device, DEVICES)
        super().__init__(device, *args, **options)
        Ranks(group)  # refuses what is none
        self.group = group

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        gradients = (local_gradient(each.grad) for each in parameters if each.grad is not None)
        local: Any = SimpleNamespace(param_groups=[{"params": stand_ins(gradients)}])
        found = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)
        total = torch.stack([found_inf, *(each.to(found_inf.device) for each in found.values())]).amax()
        if dist.is_available() and dist.is_initialized():
            agreed = total.to(device_type_of(self.group))
            with at_stage("telling gradients that overflow", Ranks(self.group)):
                dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.group)
            total = agreed.to(total.device)
        return {device: total.to(device) for device in (*found, total.device)}
