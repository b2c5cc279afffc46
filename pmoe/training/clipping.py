"""The norm of a model's gradients, which ranks hold together, and gradients scaled by it.

Letters: P ranks that hold the model together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from pmoe.experts.base import is_expert
from pmoe.layer import MoELayer


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
    """`torch.nn.utils.clip_grad_norm_`, with its signature, of the model that the ranks hold together: each
    value of a gradient counts once, however many ranks hold it. Every rank must call it, once gradients are
    reduced, as data-parallel wrappers and `pmoe.parallelize` leave them.

    parameters: a model, or parameters, any of them plain tensors that all ranks hold alike, DTensors of any
        meshes (FSDP2's, `parallelize`'s), or experts of layers that were not parallelized: how many copies of
        these there are only their model tells.
    group: the ranks that hold the model together; None is the default group, or this process alone where
        there is none.

    Returns the norm before clipping, the same on every rank and, to rounding, that of one process; in float32
    or wider. One all-reduce of a scalar or two. Raises ValueError where a gradient is a summand still
    (Partial) or the group too small, and with error_if_nonfinite RuntimeError on every rank.
    """
    norm_type = checked_norm(max_norm, norm_type)
    copies = dict[int, int]()
    if isinstance(parameters, nn.Module):
        named = list(parameters.named_parameters())
    else:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        named = [(f"parameter {at}", each) for at, each in enumerate(given)]  # type: ignore[misc]
    is_alone = not (dist.is_available() and dist.is_initialized())
    group = None if is_alone else group or dist.group.WORLD
    num_ranks = 1 if is_alone else dist.get_world_size(group)
    if isinstance(parameters, nn.Module):
        layers = ((at, each) for at, each in parameters.named_modules() if isinstance(each, MoELayer))
        for at, layer in layers:
            count = _copies_of(at or "model", layer.ranks.size, num_ranks)
            copies |= {id(each): count for each in layer.experts.parameters()}
    for name, each in named:
        if is_expert(each) and not isinstance(each, DTensor) and id(each) not in copies and num_ranks > 1:
            raise ValueError(
                f"parameters ({name} is an expert's that is no DTensor) must be the model, or come from "
                "pmoe.parallelize: else the number of its copies is not known"
            )
    device = device_of((each for _, each in named), "cpu" if is_alone else device_type_of(group))
    return Clipped(named, num_ranks, copies).clip(
        max_norm, norm_type, device, group, error_if_nonfinite, foreach
    )


def checked_norm(max_norm: float, norm_type: float) -> float:
    if not max_norm >= 0:
        raise ValueError(f"max_norm ({max_norm}) must be a number of at least 0")
    if not float(norm_type) > 0:
        raise ValueError(f"norm_type ({float(norm_type)}) must be positive, or inf")
    return float(norm_type)


class Clipped:
    """This rank's parts of all gradients, by device, type and the number of ranks that hold each value.

    experts: by id of those that are plain tensors, how many copies of their layer there are.
    """

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], num_ranks: int, experts: Mapping[int, int]
    ) -> None:
        self.gradients: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = {}
        for name, parameter in named:
            if parameter.grad is not None:
                gradient, copies = memory_of(parameter.grad), _num_copies(name, parameter, num_ranks, experts)
                self.gradients.setdefault((gradient.device, gradient.dtype, copies), []).append(gradient)

    def clip(
        self,
        max_norm: float,
        norm_type: float,
        device: torch.device,
        group: dist.ProcessGroup | None,
        error_if_nonfinite: bool,
        foreach: bool | None = None,
    ) -> Tensor:
        """device: where scalars are reduced. group: None is this process alone."""
        norm = _norm(self.gradients, norm_type, device, group, foreach)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the norm of order {norm_type} of all gradients ({norm.item()}) must be finite, or "
                "error_if_nonfinite False"
            )
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for (on, *_), tensors in self.gradients.items():
            if foreach is False:
                for each in tensors:
                    each.mul_(scale.to(on))
            else:
                torch._foreach_mul_(tensors, scale.to(on))
        return norm


def memory_of(tensor: Tensor) -> Tensor:
    """The memory of this rank behind a DTensor and behind a collective under way."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    return tensor


def _num_copies(name: str, parameter: Tensor, num_ranks: int, experts: Mapping[int, int]) -> int:
    """How many ranks hold each value of this gradient."""
    gradient, parts = parameter.grad, 1
    if is_expert(parameter) and not isinstance(gradient, DTensor):
        inside: int = getattr(parameter, "num_copies", 1)
        return experts.get(id(parameter), 1) * inside
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


def _norm(
    gradients: dict[tuple[torch.device, torch.dtype, int], list[Tensor]],
    norm_type: float,
    device: torch.device,
    group: dist.ProcessGroup | None,
    foreach: bool | None,
) -> Tensor:
    """Over all ranks of the group, in float32 or wider."""
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
    if group is not None and is_largest:
        # Apart from NaN, of which a backend's maximum may be the other operand.
        both = torch.stack([total.nan_to_num(0.0, math.inf), total.isnan().double()])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        total = both[0].where(both[1] == 0, math.nan)
    elif group is not None:
        dist.all_reduce(total, group=group)
    return (total if is_largest else total.pow(1 / norm_type)).to(dtype)


def device_of(parameters: Iterable[Tensor], device_type: str) -> torch.device:
    """Where scalars are reduced. Not the first gradient's: a rank may have none."""
    first = next(iter(parameters), None)
    return torch.empty(0, device=device_type).device if first is None else memory_of(first).device


def device_type_of(group: dist.ProcessGroup | None) -> str:
    """Of the tensors that the group's collectives take."""
    return "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config(group) else "cpu"
