"""Experts' parameters that `pmoe.parallelize` has laid over ranks, or that were replaced."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pmoe.experts.base import Experts, Reduce, Shard, is_expert, local_part
from pmoe.experts.graphs import changed_in_place, saves_plainly

if TYPE_CHECKING:
    from pmoe.experts.stacked import StackedExperts


@torch.no_grad()
def keep_part(stacked: StackedExperts, experts: slice, shard: Shard) -> None:
    """As `pmoe.experts.base.Experts.keep`."""
    count, width = experts.stop - experts.start, stacked.all_hidden // shard.count
    for name, dim in (stacked.hidden_dims() or {}).items():
        whole = getattr(stacked, name)
        parts = stacked.hidden_factor if dim == 1 else 1
        shape = [count, *whole.shape[1:]]
        if dim is not None:
            shape[dim] = parts * width
        if whole.is_meta:
            kept = whole.new_empty(shape)
        else:
            kept = whole[experts]
            if dim is not None:
                columns = kept.unflatten(dim, (parts, stacked.all_hidden))
                kept = columns.narrow(dim + 1, shard.index * width, width)
            kept = kept.reshape(shape).clone()
        replace_parameter(stacked, name, kept)
    stacked.num_local_experts, stacked.shard = count, shard
    stacked.mark_parameters()


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Puts a new Parameter in the place of the module's own one of that name. The next step of an optimizer
    that has the old one raises ValueError: it would train what no model uses any more."""
    old = module.get_parameter(name)
    setattr(module, name, nn.Parameter(value, requires_grad=old.requires_grad))
    old.is_replaced = True  # type: ignore[attr-defined]
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_check_optimizer)
    register_optimizer_step_post_hook(_count_versions)


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if hasattr(parameter, "is_replaced"):
            raise ValueError(
                f"optimizer ({type(optimizer).__name__} of a parameter of shape {tuple(parameter.shape)} "
                "that the model has no more) must be made after pmoe.parallelize or MoELayer.spread, which "
                "replace experts' parameters"
            )


def _count_versions(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raises the versions of DTensors after a step. With foreach=True or fused=True, a step writes to the
    local parts and leaves the versions of the DTensors as they were."""
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if is_expert(parameter) and hasattr(parameter, "to_local") and parameter.grad is not None:
            increment_version(parameter)


def local_values(experts: Experts, names: Sequence[str], values: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of each value of experts that `pmoe.parallelize` has laid over ranks.

    A parametrization computes a value from DTensors, and the value's placements may differ from those of the
    parameter. It is then redistributed to the parameter's placements, which may be a collective of torch.

    Raises ValueError for a plain tensor where a DTensor must be.
    """
    laid_out = []
    for name, value in zip(names, values, strict=True):
        placements = experts.placements.get(name)
        if placements is not None and not hasattr(value, "redistribute"):
            raise ValueError(
                f"experts' {name} (a plain tensor of shape {tuple(value.shape)}) must be a DTensor, as "
                "pmoe.parallelize made it: put DTensor.from_local(value, mesh, placements) in its place"
            )
        if placements is not None and tuple(value.placements) != placements:  # type: ignore[attr-defined]
            value = value.redistribute(placements=placements)  # type: ignore[attr-defined]
        laid_out.append(value)
    return list(Local.apply(experts.reduce, *laid_out))  # type: ignore[no-untyped-call]


class Local(torch.autograd.Function):
    """This rank's part of parameters. Backward runs once all their gradients are there: they are reduced
    together, in the same order on every rank, and added up over backward passes only then."""

    @staticmethod
    def forward(ctx: Any, reduce: Reduce | None, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.reduce, ctx.parameters = reduce, parameters
        if saves_plainly():
            laid_out = [each for each in parameters if hasattr(each, "to_local")]
            ctx.check_unchanged = functools.partial(_check_unchanged, [(p, p._version) for p in laid_out])
        # New tensors, because autograd changes those that it is handed; they share the parts' versions.
        shown = tuple(local_part(each).detach() for each in parameters)
        ctx.mark_non_differentiable(
            *(local for local, each in zip(shown, parameters, strict=True) if not each.requires_grad)
        )
        return shown

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        if ctx.reduce is not None:
            ctx.reduce([each for each, wants in zip(gradients, wanted, strict=True) if wants])
        laid = zip(ctx.parameters, gradients, wanted, strict=True)
        return None, *(_laid_out(gradient, like) if wants else None for like, gradient, wants in laid)


def _check_unchanged(before: list[tuple[Tensor, int]]) -> None:
    """Raises RuntimeError where a DTensor was changed in place since forward. The backward pass that uses the
    values calls it.

    Autograd saves the local tensor, which has a version of its own that does not show the change.
    """
    for parameter, version in before:
        if parameter._version != version:
            raise changed_in_place(parameter)


def _laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a gradient, as its parameter lies over the ranks."""
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return gradient
    return DTensor.from_local(
        gradient, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
