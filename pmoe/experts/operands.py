"""The values that a call computes with: weights and biases of experts, read when the call begins.

The values are read by attribute name and not from the list of parameters. The reason: an attribute such as
``experts.w1`` may be computed from parameters (weight_norm, LoRA, fake quantisation, pruning), be quantised,
or be another tool's tensor. `value_names` turns the names of parameters into the names of these attributes:

    named_parameters()                                   value_names()
    w2, parametrizations.w1.original0, ....original1     w2, w1
    w2, w1_orig (and a buffer w1_mask: pruned)           w2, w1
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

DERIVED = ("_orig", "_g", "_v")
"""Endings of the names of parameters from which a forward pre-hook computes a value.

"_orig" belongs to pruning and to the older spectral_norm, "_g" and "_v" to the older weight_norm.
"""


_is_none = functools.partial(operator.is_, None)
"""Returns whether a value is None. It is a C function, so a filter calls it quickly."""


def parameters_own_first(module: nn.Module) -> Iterator[Tensor]:
    """Returns an iterator over a module's parameters that begins with those outside of its submodules.

    The module's own parameters may come twice. Most questions are answered by the first parameter, before a
    walk through submodules begins.

    module: experts, or a wrapper around them.
    """
    own: Iterable[Any] = module._parameters.values()  # a value is None if there is no such parameter
    return itertools.chain(itertools.filterfalse(_is_none, own), module.parameters())


class FrozenRows:
    """A hook of a parameter that sets the gradients of frozen experts to zero (`pmoe.freeze_experts`).

    It runs after backward has added to the parameter's gradient. A copy of the parameter, by copy.deepcopy or
    pickle, does not have it. `FrozenReturnedRows` is for gradients that autograd returns.

    index: the numbers of the frozen experts along dimension 0 of this rank's part of the parameter.
    returned: the handle of the hook for returned gradients.
    """

    def __init__(self, index: Tensor, returned: RemovableHandle) -> None:
        self.index = index
        self.returned = returned

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        local_part(parameter.grad)[self.index] = 0


class FrozenReturnedRows:
    """A hook of a parameter that sets returned gradients of frozen experts to zero.

    torch.autograd.grad returns gradients and adds nothing to ``parameter.grad``, so `FrozenRows` does not
    run. Zero-bubble pipeline schedules call torch.autograd.grad, and add the result to ``grad`` themselves.

    module: the module that has the parameter, under any name: pruning, for example, gives it another one. A
        weak reference to the parameter itself would keep torch from exchanging its tensor
        (torch.utils.swap_tensors).
    index: the numbers of the frozen experts along dimension 0 of this rank's part of the parameter.
    """

    def __init__(self, module: nn.Module, index: Tensor) -> None:
        self.module: weakref.ref[nn.Module] = weakref.ref(module)
        self.index = index

    @torch.no_grad()
    def __call__(self, gradient: Tensor) -> Tensor | None:
        module = self.module()
        parameters = () if module is None else module.parameters()
        leaf = next((each for each in parameters if self in (each._backward_hooks or {}).values()), None)
        if leaf is None or not _is_returned(leaf):
            return None  # `FrozenRows` changes the sum in place, without a copy
        gradient = gradient.clone()
        local_part(gradient)[self.index] = 0
        return gradient


def _is_returned(leaf: Tensor) -> bool:
    """Returns whether the backward call that is now running returns a leaf's gradient to its caller.

    leaf: a parameter of any shape. A call of ``backward()`` adds to its ``grad`` and returns nothing.
    """
    try:
        torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # torch raises this for a leaf whose gradient torch.autograd.grad returns
        return True
    return False


def frozen_rows(parameter: Tensor) -> Tensor | None:
    """Returns the indices of the frozen experts along dimension 0 of a parameter; None if none are frozen.

    The result is a vector. The parameter is this rank's part.
    """
    hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    return next((hook.index for hook in hooks if isinstance(hook, FrozenRows)), None)


def freeze_rows(module: nn.Module, name: str, experts: Tensor) -> None:
    """Gives a parameter the hooks that set the gradients of frozen experts to zero.

    module: the module that has the parameter.
    name: the name of the parameter, (E_local, ...) or a part of it on this rank.
    experts: the numbers of the frozen experts along its dimension 0, a vector.
    """
    parameter = module.get_parameter(name)
    train_frozen_rows(parameter)
    index = experts.to(local_part(parameter).device)
    # torch takes hooks of trained parameters only. This one may be trained later.
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    returned = parameter.register_hook(FrozenReturnedRows(module, index))
    parameter.register_post_accumulate_grad_hook(FrozenRows(index, returned))
    parameter.requires_grad_(is_trained)
    # `model.to` may exchange a parameter's tensor. The hooks are then still listed, but torch calls them only
    # after they are assigned again.
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    parameter._backward_hooks = parameter._backward_hooks


def train_frozen_rows(parameter: Tensor) -> None:
    """Removes the hooks of frozen experts from a parameter, so that all of its experts are trained again.

    parameter: of any shape. Nothing happens if it has no such hooks.
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for key in [key for key, hook in hooks.items() if isinstance(hook, FrozenRows)]:
        hooks.pop(key).returned.remove()


def value_names(module: nn.Module) -> list[str]:
    """Returns the dotted attribute names of the weights and biases that a module computes with.

    An example is "w1". Names are in the order of the parameters. One value may be computed from several
    parameters, for example by a parametrization; its name is then listed once.
    """
    names = dict.fromkeys(_value_name(module, name) for name, _ in module.named_parameters())
    return list(names)


def _value_name(module: nn.Module, name: str) -> str:
    """Returns the name of the attribute that a module reads when it computes with a parameter.

    The attribute is the parameter itself, or is computed from it. Example: "parametrizations.w1.original0" ->
    "w1", and of a pruned module "w1_orig" -> "w1".
    """
    path, _, attribute = name.rpartition(".")
    owner, marker, parametrized = f".{path}".partition(".parametrizations.")
    if marker:  # ".inner.parametrizations.w1" holds the parameters behind inner.w1
        return f"{owner}.{parametrized.partition('.')[0]}".lstrip(".")
    for ending in DERIVED:
        stem = attribute.removesuffix(ending)
        if stem != attribute and isinstance(vars(module.get_submodule(path)).get(stem), Tensor):
            return f"{path}.{stem}".lstrip(".")
    return name


def has_value(module: nn.Module, name: str) -> bool:
    """Returns whether the attribute ``name`` of a module is a tensor, or would be computed as one.

    The attribute itself is not read, because computing a parametrization may have side effects.
    """
    for place in (module._parameters, module._buffers, vars(module)):
        if place.get(name) is not None:
            return True
    return "parametrizations" in module._modules and parametrize.is_parametrized(module, name)


def read_value(module: nn.Module, name: str) -> Tensor:
    """Returns the present value of a module's attribute ``name``, of any shape, with its autograd graph.

    A sparse or quantised value is converted to a dense one.

    Raises ValueError if the value is not a tensor, or is of a tensor subclass that cannot be converted.
    """
    value: object = module
    for part in name.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, Tensor):
        raise ValueError(
            f"experts' {name} ({type(value).__name__}) must be a torch.Tensor: it was removed or replaced "
            "after the layer was built"
        )
    return dense_value(value, f"experts' {name}")


def dense_value(value: Tensor, name: str) -> Tensor:
    """Returns the numbers of a tensor, of any shape, as a plain dense tensor or a DTensor.

    Sparse and quantised tensors are converted.

    value: the tensor.
    name: the value's name in errors.

    Raises ValueError for a tensor subclass that offers no conversion.
    """
    kind = type(value)
    if value.layout is not torch.strided:
        return value.to_dense()
    if value.is_quantized:
        return value.dequantize()
    if kind in (Tensor, nn.Parameter) or hasattr(value, "to_local"):
        return value
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:  # the subclass changes no operation
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    if kind.dequantize is not Tensor.dequantize:  # a quantised weight, such as torchao's
        plain = value.dequantize()
        if type(plain) is Tensor:
            return plain
    raise ValueError(
        f"{name} (a {kind.__module__}.{kind.__qualname__}) must be a plain tensor, or have a dequantize() "
        "that returns one: pmoe's products read the numbers directly"
    )


def check_can_be_spread(experts: nn.Module, names: Iterable[str]) -> None:
    """Raises ValueError if weights or biases cannot be spread over ranks.

    They can be spread if they are plain parameters and `pmoe.freeze_experts` has frozen none of the experts.

    experts: the experts, a module.
    names: attribute names of the values to check.
    """
    names = list(names)
    check_own_parameters(
        experts, names, "be spread over ranks: call pmoe.parallelize(model, mesh) before it is changed"
    )
    check_no_frozen_rows(
        experts, names, "be spread over ranks: call pmoe.freeze_experts after pmoe.parallelize(model, mesh)"
    )


def check_own_parameters(experts: nn.Module, names: Iterable[str], purpose: str) -> None:
    """Raises ValueError if a weight or bias is not a plain parameter.

    It is not plain if it is pruned, parametrized, or replaced by another tool's tensor.

    experts: the experts, a module.
    names: attribute names of the values to check.
    purpose: what the parameter is needed for, and what to do, as the end of the error's text.
    """
    for name in names:
        path, _, attribute = name.rpartition(".")
        if attribute not in experts.get_submodule(path)._parameters:
            raise ValueError(
                f"experts' {name} (parametrized, pruned or replaced) must be a plain parameter to {purpose}"
            )


def check_no_frozen_rows(experts: nn.Module, names: Iterable[str], purpose: str) -> None:
    """Raises ValueError if `pmoe.freeze_experts` has frozen some experts.

    experts: the experts, a module.
    names: names of the parameters to check.
    purpose: what unfrozen experts are needed for, and what to do, as the end of the error's text.
    """
    for name in names:
        if frozen_rows(experts.get_parameter(name)) is not None:
            raise ValueError(
                f"experts' {name} (of which some experts are frozen) must have no frozen experts to {purpose}"
            )


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's local tensor of a DTensor, of any shape, without an autograd graph.

    A tensor that is not a DTensor is returned unchanged.
    """
    # Asks for the method and not isinstance: DTensor's module is slow to import and rarely needed.
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        local: Tensor = to_local()
        return local
