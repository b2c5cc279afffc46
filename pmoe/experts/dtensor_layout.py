"""Experts' parameters that were replaced, or laid out on a device mesh by `pmoe.parallelize`.

From a parameter to the tensor that a call computes with:

    parameter        a DTensor over the ranks of the mesh
    `local_values`   redistributes values whose placements differ from the parameter's
    `Local`          gives this rank's part; its backward reduces the gradients of all parameters together
"""

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
from pmoe.experts.expert_autograd import changed_in_place, saves_plainly

if TYPE_CHECKING:
    from pmoe.experts.stacked import StackedExperts


@torch.no_grad()
def keep_part(stacked: StackedExperts, experts: slice, shard: Shard) -> None:
    """Keeps a range of stacked experts and one shard of their hidden columns; see `Experts.keep`.

    A gated w1 holds two halves, gate and up. A shard takes the same columns of both (H = 6, shard 1 of 3):

        rows of w1    gate 0 1 2 3 4 5 | up 0 1 2 3 4 5
        kept               . . x x . . |    . . x x . .
    """
    num_experts = experts.stop - experts.start
    num_columns = stacked.all_hidden // shard.count
    for name, dim in (stacked.hidden_dims() or {}).items():
        parameter = getattr(stacked, name)
        parts = stacked.hidden_factor if dim == 1 else 1
        shape = [num_experts, *parameter.shape[1:]]
        if dim is not None:
            shape[dim] = parts * num_columns
        if parameter.is_meta:
            part = parameter.new_empty(shape)
        else:
            part = parameter[experts]
            if dim is not None:
                columns = part.unflatten(dim, (parts, stacked.all_hidden))
                part = columns.narrow(dim + 1, shard.index * num_columns, num_columns)
            part = part.reshape(shape).clone()
        replace_parameter(stacked, name, part)
    stacked.num_local_experts = num_experts
    stacked.shard = shard
    stacked.mark_parameters()


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Replaces a module's parameter ``name`` by a new Parameter that holds ``value``.

    An optimizer that still has the old one would train a parameter that no model uses. Its next step
    therefore raises ValueError.
    """
    old = module.get_parameter(name)
    setattr(module, name, nn.Parameter(value, requires_grad=old.requires_grad))
    old.is_replaced = True  # type: ignore[attr-defined]
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    """Registers two hooks on the steps of all optimizers of this process, once."""
    register_optimizer_step_pre_hook(_check_optimizer)
    register_optimizer_step_post_hook(_count_versions)


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raises ValueError if the optimizer has a parameter that `replace_parameter` has replaced."""
    for parameter in (tensor for group in optimizer.param_groups for tensor in group["params"]):
        if hasattr(parameter, "is_replaced"):
            raise ValueError(
                f"optimizer ({type(optimizer).__name__}) has a parameter of shape {tuple(parameter.shape)} "
                "that is no longer in the model: pmoe.parallelize or MoELayer.spread has replaced it. Make "
                "the optimizer after that call"
            )


def _count_versions(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raises the versions of the DTensors that an optimizer step has changed.

    With foreach=True or fused=True a step writes to the local parts and leaves the DTensors' versions as they
    were. `_check_unchanged` would then miss a step between forward and backward.
    """
    for parameter in (tensor for group in optimizer.param_groups for tensor in group["params"]):
        if is_expert(parameter) and hasattr(parameter, "to_local") and parameter.grad is not None:
            increment_version(parameter)


def local_values(experts: Experts, names: Sequence[str], values: Sequence[Tensor]) -> list[Tensor]:
    """Returns this rank's part of each value of experts that `pmoe.parallelize` has laid out.

    names: the operands' names. values: DTensors, or plain tensors that are on no mesh.

    A parametrization computes a value from DTensors, and the value's placements may differ from the
    parameter's. It is then redistributed to the parameter's placements, which may need a collective.

    Raises ValueError for a plain tensor in the place of a DTensor.
    """
    laid_out = []
    for name, value in zip(names, values, strict=True):
        placements = experts.placements.get(name)
        if placements is not None and not hasattr(value, "redistribute"):
            raise ValueError(
                f"experts' {name} (a plain tensor of shape {tuple(value.shape)}) must be a DTensor, as "
                "pmoe.parallelize made it: assign DTensor.from_local(value, mesh, placements) instead"
            )
        if placements is not None and tuple(value.placements) != placements:  # type: ignore[attr-defined]
            value = value.redistribute(placements=placements)  # type: ignore[attr-defined]
        laid_out.append(value)
    return list(Local.apply(experts.reduce, *laid_out))  # type: ignore[no-untyped-call]


class Local(torch.autograd.Function):
    """Gives this rank's part of each parameter, in an autograd function of its own.

    Its backward runs once the gradients of all parameters are complete. So they are reduced together, in the
    same order on every rank, before they are added to earlier backward passes' gradients.
    """

    @staticmethod
    def forward(ctx: Any, reduce: Reduce | None, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.reduce = reduce
        ctx.parameters = parameters
        if saves_plainly():
            laid_out = [parameter for parameter in parameters if hasattr(parameter, "to_local")]
            ctx.check_unchanged = functools.partial(_check_unchanged, [(p, p._version) for p in laid_out])
        # detach(): autograd changes the tensors that forward returns, which must not be the parameters. The
        # new tensors share the version counters of the local parts.
        local_tensors = tuple(local_part(parameter).detach() for parameter in parameters)
        ctx.mark_non_differentiable(
            *(
                local
                for local, parameter in zip(local_tensors, parameters, strict=True)
                if not parameter.requires_grad
            )
        )
        return local_tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needs_gradient = ctx.needs_input_grad[1:]
        if ctx.reduce is not None:
            ctx.reduce([grad for grad, needs in zip(gradients, needs_gradient, strict=True) if needs])
        by_parameter = zip(ctx.parameters, gradients, needs_gradient, strict=True)
        return None, *(
            _laid_out(gradient, parameter) if needs else None for parameter, gradient, needs in by_parameter
        )


def _check_unchanged(before: list[tuple[Tensor, int]]) -> None:
    """Raises RuntimeError if a DTensor was changed in place since forward.

    before: each DTensor with its version in forward. The backward pass that uses the values calls this.

    Autograd saves the local tensor. That one has a version of its own, which does not show the change.
    """
    for parameter, version in before:
        if parameter._version != version:
            raise changed_in_place(parameter)


def _laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's part of a gradient as a DTensor with the mesh and placements of its parameter."""
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return gradient
    return DTensor.from_local(
        gradient, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
