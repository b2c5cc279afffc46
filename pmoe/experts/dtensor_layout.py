"""Expert parameters as DTensors on a device mesh, made by `pmoe.parallelize`.

The steps from a parameter to the tensor that a call computes with:

    parameter        a DTensor over the ranks of the mesh; a parametrization may compute another one from it
    `local_values`   redistributes the computed DTensor, if its placements differ from the parameter's
    `Local`          takes this rank's part; its backward reduces the gradients of all parameters together

`replace_parameter` puts a new Parameter in a module. Optimizers that still have the old Parameter then raise
an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pmoe.experts.expert_autograd import changed_in_place, saves_plainly
from pmoe.experts.marks import is_expert
from pmoe.experts.operands import local_part

Reduce = Callable[[Sequence[Tensor]], None]
"""A function that reduces this rank's gradients, of any shape, over ranks, in place.

The function is a collective: every rank calls it with the gradients of the same parameters, in the same
order.
"""


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Replaces a module's parameter ``name`` by a new Parameter that holds ``value``.

    An optimizer that was made before still has the old parameter, and would train it without any effect on
    the model. So the next step of that optimizer raises ValueError.
    """
    old = module.get_parameter(name)
    setattr(module, name, nn.Parameter(value, requires_grad=old.requires_grad))
    old.is_replaced = True  # type: ignore[attr-defined]
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    """Makes every step of every optimizer of this process check and mark the experts' parameters.

    It registers two hooks, once. Before a step, `_check_optimizer` raises if the optimizer still has a
    parameter that `replace_parameter` has replaced. After a step, `_count_versions` increments the version
    counters of the experts' DTensors, so that a step between forward and backward is noticed.
    """
    register_optimizer_step_pre_hook(_check_optimizer)
    register_optimizer_step_post_hook(_count_versions)


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raises ValueError if the optimizer has a parameter that `replace_parameter` has replaced.

    It is a hook that runs before each step of an optimizer.
    """
    for parameter in (tensor for group in optimizer.param_groups for tensor in group["params"]):
        if hasattr(parameter, "is_replaced"):
            raise ValueError(
                f"optimizer ({type(optimizer).__name__}) has a parameter of shape {tuple(parameter.shape)} "
                "that is no longer in the model: pmoe.parallelize or MoELayer.spread has replaced it. Make "
                "the optimizer after that call"
            )


def _count_versions(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Increments the version counters of the experts' DTensors that an optimizer step has changed.

    It is a hook that runs after each step. With foreach=True or fused=True a step writes to the local tensors
    and does not increment the DTensors' counters. Without this hook, `_check_unchanged` would not notice a
    step between forward and backward.
    """
    for parameter in (tensor for group in optimizer.param_groups for tensor in group["params"]):
        if is_expert(parameter) and hasattr(parameter, "to_local") and parameter.grad is not None:
            increment_version(parameter)


def local_values(
    placements: Mapping[str, tuple[Any, ...]],
    reduce: Reduce | None,
    names: Sequence[str],
    values: Sequence[Tensor],
) -> list[Tensor]:
    """Returns this rank's part of each tensor with which experts compute, as plain tensors.

    The tensors are the experts' parameters, which `pmoe.parallelize` has made DTensors, or the results of
    parametrizations of these parameters.

    placements: the DTensor placements that `pmoe.parallelize` chose, by name of the parameter. A parameter
        without placements is a plain tensor.
    reduce: function that reduces the gradients of all tensors in backward; None reduces nothing.
    names: the parameters' names.
    values: DTensors or plain tensors, of any shape, in the order of ``names``.

    The result of a parametrization may have other placements than the parameter. The result is then
    redistributed to the parameter's placements. This may need a collective.

    Raises ValueError if a tensor is plain although ``placements`` has its name.
    """
    laid_out = []
    for name, value in zip(names, values, strict=True):
        wanted = placements.get(name)
        if wanted is not None and not hasattr(value, "redistribute"):
            raise ValueError(
                f"experts' {name} (a plain tensor of shape {tuple(value.shape)}) must be a DTensor, as "
                "pmoe.parallelize made it: assign DTensor.from_local(value, mesh, placements) instead"
            )
        if wanted is not None and tuple(value.placements) != wanted:  # type: ignore[attr-defined]
            value = value.redistribute(placements=wanted)  # type: ignore[attr-defined]
        laid_out.append(value)
    return list(Local.apply(reduce, *laid_out))  # type: ignore[no-untyped-call]


class Local(torch.autograd.Function):
    """Takes this rank's part of each parameter, in one autograd function for all of them.

    Its backward runs once the gradients of all parameters are complete. So the gradients are reduced over
    ranks together and in the same order on every rank, before they are added to the gradients of earlier
    backward passes.
    """

    @staticmethod
    def forward(ctx: Any, reduce: Reduce | None, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.reduce = reduce
        ctx.parameters = parameters
        if saves_plainly():
            own_parts = getattr(reduce, "own_parts", None)
            # Checks the parts on this rank: an optimizer's step changes the parts, and FSDP2 gathers the
            # parameters from them again in backward.
            present = parameters if own_parts is None else own_parts(parameters)
            laid_out = [parameter for parameter in present if hasattr(parameter, "to_local")]
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

    Autograd saves the local tensor, whose version counter does not show a change of the DTensor. So the
    backward pass that uses the local tensor calls this function.

    before: each DTensor, of any shape, with its version counter in forward.
    """
    for parameter, version in before:
        if parameter._version != version:
            raise changed_in_place(parameter)


def _laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """Wraps this rank's gradient in a DTensor with the mesh and placements of the parameter.

    gradient: this rank's part of the gradient, of any shape.
    like: the parameter. If it is no DTensor, the gradient is returned unchanged.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return gradient
    return DTensor.from_local(
        gradient, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_of_other_place(value: Any, parameter: Tensor) -> bool:
    """Returns whether a value to be loaded is a DTensor from a file of a rank at another place of the mesh.

    torch keeps that rank's place in the file, and takes it for this rank's place. So it would load that
    rank's part of the value.

    value: a value of a state dict.
    parameter: the parameter into which the value will be loaded.
    """
    saved_mesh = getattr(value, "device_mesh", None)
    own_mesh = getattr(parameter, "device_mesh", None)
    if saved_mesh is None or own_mesh is None:
        return False
    return bool(saved_mesh.get_coordinate() != own_mesh.get_coordinate())


def hold_own_parts(model: nn.Module) -> None:
    """Makes modules that FSDP2 wraps hold this rank's parts of parameters, in place of gathered parameters.

    Optimizers have the parts. But FSDP2 leaves gathered parameters in a module after a forward pass without a
    backward pass, such as an evaluation: in the outermost module, and with ``reshard_after_forward=False`` in
    others. A gathered parameter has no gradient, is not the optimizer's, and loses its changes when FSDP2
    frees it. So functions that read, change or return a model's parameters call this function first.

    model: the model. Nothing is communicated. The next forward or backward pass gathers the parameters again.
    """
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            module.reshard()  # type: ignore[operator]


def is_gathered(experts: Any) -> bool:
    """Returns whether this rank has whole experts now: they are not sharded, or FSDP2 has gathered them.

    experts: this rank's experts (a `pmoe.Experts`).
    """
    if experts.are_modules:  # they are DTensors only while they are sharded
        return not any(hasattr(experts.get_parameter(name), "to_local") for name in experts.copy_parts)
    return all(
        tuple(getattr(experts, name).placements) == experts.placements[name]
        for name in experts.copy_parts
        if name in experts._parameters  # FSDP2 gathers adapters together with these
    )


def check_gathered(experts: Any, name: str, cure: str) -> None:
    """Raises ValueError if FSDP2 shards the experts and has not gathered their parameters on this rank.

    The rank then has only a part of each parameter.

    experts: this rank's experts (a `pmoe.Experts`).
    name: name of the layer, for the message.
    cure: the end of the message, which tells the user what to do.
    """
    if not is_gathered(experts):
        raise ValueError(f"{name} (with shard_experts) must have whole experts on each rank: {cure}")
