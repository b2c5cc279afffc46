"""The values that a call computes with: weights and biases of experts, read when the call begins.

The values are read by attribute name and not from the list of parameters. The reason: an attribute such as
``experts.w1`` may be computed from parameters (weight_norm, LoRA, fake quantisation, pruning), be quantised,
or be another tool's tensor. The names of parameters and of the values that they stand for:

    named_parameters()                                   value_names()
    w2, parametrizations.w1.original0, ....original1     w2, w1
    w2, w1_orig (and a buffer w1_mask: pruned)           w2, w1
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

DERIVED = ("_orig", "_g", "_v")
"""Endings of the names of parameters from which a forward pre-hook computes a value.

"_orig" belongs to pruning and to the older spectral_norm, "_g" and "_v" to the older weight_norm.
"""


class FrozenRows:
    """A hook of a parameter that sets the gradients of frozen experts to zero (`pmoe.freeze_experts`).

    It runs after backward has added to the parameter's gradient. A copy of the parameter, by copy.deepcopy or
    pickle, does not have it.

    index: the numbers of the frozen experts along dimension 0 of this rank's part of the parameter.
    """

    def __init__(self, index: Tensor) -> None:
        self.index = index

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        local_part(parameter.grad)[self.index] = 0


def frozen_rows(parameter: Tensor) -> Tensor | None:
    """Returns the numbers of a parameter's frozen experts, a vector; None if none are frozen."""
    hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    return next((hook.index for hook in hooks if isinstance(hook, FrozenRows)), None)


def freeze_rows(parameter: Tensor, experts: Tensor) -> None:
    """Gives a parameter the hook that sets the gradients of frozen experts to zero.

    parameter: this rank's part of a parameter, (E_local, ...) or a part of it.
    experts: the numbers of the frozen experts along its dimension 0, a vector.
    """
    train_frozen_rows(parameter)
    hook = FrozenRows(experts.to(local_part(parameter).device))
    # torch takes hooks of trained parameters only. This one may be trained later.
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(is_trained)
    # `model.to` may exchange a parameter's tensor. The hooks are then still listed, but torch calls them only
    # after they are assigned again.
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def train_frozen_rows(parameter: Tensor) -> None:
    """Removes the hook that keeps a parameter's frozen experts, if it has one.

    parameter: of any shape.
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for key in [key for key, hook in hooks.items() if isinstance(hook, FrozenRows)]:
        del hooks[key]


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
    places = (module._parameters, module._buffers, vars(module))
    if any(place.get(name) is not None for place in places):
        return True
    return parametrize.is_parametrized(module, name)


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


def check_own_parameters(experts: nn.Module, names: Iterable[str]) -> None:
    """Raises ValueError if a weight or bias is not a plain parameter: only plain parameters can be split.

    It is not plain if it is pruned, parametrized, or replaced by another tool's tensor.

    experts: the experts, a module.
    names: attribute names of the values to check.
    """
    for name in names:
        path, _, attribute = name.rpartition(".")
        if attribute not in experts.get_submodule(path)._parameters:
            raise ValueError(
                f"experts' {name} (parametrized, pruned or replaced) must be a plain parameter to be spread "
                "over ranks: call pmoe.parallelize(model, mesh) before it is changed"
            )
        if frozen_rows(experts.get_parameter(name)) is not None:
            raise ValueError(
                f"experts' {name} (of which some experts are frozen) must be spread over ranks before: call "
                "pmoe.freeze_experts after pmoe.parallelize(model, mesh)"
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
