"""The tensors with which experts compute a call: values of their parameters, read when it begins.

Values are read by name, not from the list of parameters: behind ``experts.w1`` there may be a parametrization
(weight_norm, LoRA, fake quantisation), a pruned or a quantised weight, or a tensor that a tool has put there.

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
"""Name endings of parameters from which a forward pre-hook computes the value: "_orig" of pruning and of the
older spectral_norm, "_g" and "_v" of the older weight_norm."""


def value_names(module: nn.Module) -> list[str]:
    """Dotted names of the values that a module's parameters stand for, in the order of the parameters."""
    names = dict.fromkeys(_value_name(module, name) for name, _ in module.named_parameters())
    return list(names)


def _value_name(module: nn.Module, name: str) -> str:
    path, _, own = name.rpartition(".")
    owner, marker, parametrized = f".{path}".partition(".parametrizations.")
    if marker:  # ".inner.parametrizations.w1" holds the parameters behind inner.w1
        return f"{owner}.{parametrized.partition('.')[0]}".lstrip(".")
    for ending in DERIVED:
        stem = own.removesuffix(ending)
        if stem != own and isinstance(vars(module.get_submodule(path)).get(stem), Tensor):
            return f"{path}.{stem}".lstrip(".")
    return name


def has_value(module: nn.Module, name: str) -> bool:
    """Whether reading ``module.name`` would give a tensor. The name is not read, because a parametrization
    may have side effects."""
    places = (module._parameters, module._buffers, vars(module))
    if any(place.get(name) is not None for place in places):
        return True
    return parametrize.is_parametrized(module, name)


def read_value(module: nn.Module, name: str) -> Tensor:
    """The present value of ``module.name``, with its graph. Raises ValueError where it is no tensor, or one
    that `dense_value` cannot convert."""
    value: object = module
    for part in name.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, Tensor):
        raise ValueError(
            f"experts' {name} ({type(value).__name__}) must be a torch.Tensor: it was removed or replaced"
        )
    return dense_value(value, f"experts' {name}")


def dense_value(value: Tensor, name: str) -> Tensor:
    """The same numbers in a plain tensor or a DTensor. Raises ValueError for a type without a conversion."""
    kind = type(value)
    if value.layout is not torch.strided:
        return value.to_dense()
    if value.is_quantized:
        return value.dequantize()
    if kind in (Tensor, nn.Parameter) or hasattr(value, "to_local"):
        return value
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:  # its class changes no operation
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    if kind.dequantize is not Tensor.dequantize:  # a quantised weight, as torchao puts it in a weight's place
        plain = value.dequantize()
        if type(plain) is Tensor:
            return plain
    raise ValueError(
        f"{name} (a {kind.__module__}.{kind.__qualname__}) must be a plain tensor, or have a dequantize() "
        "that gives one: pmoe's products read the numbers themselves"
    )


def check_own_parameters(experts: nn.Module, names: Iterable[str]) -> None:
    """Raises ValueError where a value is no longer the module's own plain parameter, because it cannot be cut
    into parts for ranks."""
    for name in names:
        path, _, own = name.rpartition(".")
        if own not in experts.get_submodule(path)._parameters:
            raise ValueError(
                f"experts' {name} (parametrized, pruned or replaced) must be a plain parameter to be spread "
                "over ranks: call pmoe.parallelize(model, mesh) before it is changed"
            )
