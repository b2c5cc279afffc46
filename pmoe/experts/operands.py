"""The operands of experts: the values that a call computes with, read when the call begins.

They are read by attribute name and not from the list of parameters, because ``experts.w1`` may be computed
from parameters (weight_norm, LoRA, fake quantisation, pruning), quantised, or replaced by another tool's
tensor.

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
"""Endings of parameter names from which a forward pre-hook computes the value.

"_orig" belongs to pruning and to the older spectral_norm, "_g" and "_v" to the older weight_norm.
"""


def value_names(module: nn.Module) -> list[str]:
    """Returns the dotted names of the values that the parameters stand for, in the parameters' order."""
    names = dict.fromkeys(_value_name(module, name) for name, _ in module.named_parameters())
    return list(names)


def _value_name(module: nn.Module, name: str) -> str:
    """Returns the name of the value that the parameter ``name`` stands for; see the table above."""
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
    """Returns whether reading ``module.name`` would give a tensor.

    The attribute itself is not read, because a parametrization may have side effects.
    """
    places = (module._parameters, module._buffers, vars(module))
    if any(place.get(name) is not None for place in places):
        return True
    return parametrize.is_parametrized(module, name)


def read_value(module: nn.Module, name: str) -> Tensor:
    """Returns the present value of ``module.name`` together with its autograd graph.

    Raises ValueError if it is not a tensor, or is one that `dense_value` cannot convert.
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
    """Returns the numbers of a tensor as a plain tensor or DTensor.

    name: how errors call the value. Raises ValueError for a tensor subclass that offers no conversion.
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
    """Raises ValueError if a value is not a plain parameter: only those can be split over ranks."""
    for name in names:
        path, _, attribute = name.rpartition(".")
        if attribute not in experts.get_submodule(path)._parameters:
            raise ValueError(
                f"experts' {name} (parametrized, pruned or replaced) must be a plain parameter to be spread "
                "over ranks: call pmoe.parallelize(model, mesh) before it is changed"
            )
