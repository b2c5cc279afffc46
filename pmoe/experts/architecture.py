"""Describes the architecture of an expert that is a module, and checks whether it can be copied.

With ``balance``, a rank computes rows of another rank's expert: it calls a module of its own with the
parameters and buffers of that expert. So two conditions must hold:

- Experts differ only in the values of their parameters and buffers.
- An expert's output depends only on its rows, parameters and buffers.

The architecture is a list of lines of text: the classes of the module and of all modules inside, their
attributes, and the shapes and dtypes of parameters and buffers. The values of these are not part of it.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MOST_DEPTH = 8
"""The most levels of attributes that are described. Deeper objects are too complicated to be compared."""

OF_MODULE = frozenset(vars(nn.Module()))
"""The attributes that every module has."""

WATCHING = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module with the hooks that run in its passes."""

RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)
"""Classes of modules that draw random numbers in training."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)
"""Types of attribute values that a line of text can represent completely."""


class UnknownAttributeError(ValueError):
    """Raised if a module has an attribute whose value cannot be compared between ranks."""


def why_not_copied(experts: Sequence[nn.Module]) -> str:
    """Returns why a rank's experts cannot be copied to other ranks; "" if they can.

    The text also tells the user what to change.

    experts: the experts of a rank.
    """
    for expert in experts:
        reason = _own_reason(expert)
        if reason:
            return reason
    first = architecture_of(experts[0])
    for number, expert in enumerate(experts[1:], start=1):
        difference = first_difference(first, architecture_of(expert))
        if difference:
            return (
                f"experts are modules that differ: number 0 of this rank has {difference[0]}, number "
                f"{number} has {difference[1]}. Build all experts alike"
            )
    return ""


def _own_reason(expert: nn.Module) -> str:
    """Returns why one module cannot be copied to other ranks; "" if it can.

    The text also tells the user what to change.
    """
    name = type(expert).__name__
    for path, module in expert.named_modules():
        kind = f"{path} ({type(module).__name__})" if path else f"it ({type(module).__name__})"
        if isinstance(module, RANDOM) and getattr(module, "p", 1) > 0:
            return f"expert {name} draws random numbers: {kind} must have p=0, or be outside of the expert"
        if isinstance(module, nn.modules.batchnorm._NormBase):
            return (
                f"expert {name} normalizes over the rows of a batch: {kind} must be a norm of each row, such "
                "as torch.nn.LayerNorm"
            )
        if any(vars(module)[hooks] for hooks in WATCHING):
            return f"expert {name} has hooks, which do not run for copies: remove those of {kind}"
    parameters = list(expert.parameters())
    if not parameters:
        return f"expert {name} has no parameters: nothing would be copied"
    dtypes = sorted({str(parameter.dtype) for parameter in parameters})
    if len(dtypes) > 1:
        return f"expert {name} has parameters of several dtypes ({', '.join(dtypes)}): give them one"
    if any(hasattr(value, "to_local") for value in parameters):
        return f"expert {name} has DTensors: let pmoe.parallelize leave the experts as plain tensors"
    try:
        architecture_of(expert)
    except UnknownAttributeError as error:
        return f"expert {name} {error}"
    return ""


def first_difference(one: Sequence[str], other: Sequence[str]) -> tuple[str, str] | None:
    """Returns the first line of each architecture in which the two differ; None if they are equal."""
    length = max(len(one), len(other))
    for a, b in zip(_padded(one, length), _padded(other, length), strict=True):
        if a != b:
            return a, b
    return None


def _padded(lines: Sequence[str], length: int) -> list[str]:
    return [*lines, *["nothing more"] * (length - len(lines))]


def architecture_of(module: nn.Module) -> list[str]:
    """Returns the architecture of a module as lines of text, the same in every process.

    Raises UnknownAttributeError if an attribute has a value that cannot be compared.
    """
    return list(_lines(module))


def _lines(expert: nn.Module) -> Iterator[str]:
    for path, module in expert.named_modules(remove_duplicate=False):
        name = path or "the expert"
        kind = type(module)
        yield f"{name}: {kind.__module__}.{kind.__qualname__}, training={module.training}"
        for attribute, value in sorted(vars(module).items()):
            if attribute not in OF_MODULE:
                yield f"{name}.{attribute} = {_described(value, f'{path}.{attribute}'.lstrip('.'), {}, 0)}"
    # Without duplicates: a parameter with two names is one parameter.
    for name, value in (*expert.named_parameters(), *expert.named_buffers()):
        yield f"{name}: {tuple(value.shape)} {value.dtype}"


def _described(value: Any, path: str, known: dict[int, str], depth: int) -> str:
    """Returns a text that stands for the value of an attribute, the same in every process.

    value: the value.
    path: the attribute's name, for errors.
    known: for each object that contains the value, a text, by ``id(object)``. If the value is one of these
        objects, its text is returned, which ends the recursion.
    depth: how many objects contain the value.

    Raises UnknownAttributeError if the value has no text that is the same in every process.
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if depth > MOST_DEPTH:
        raise _unknown(value, path)
    if id(value) in known:
        return known[id(value)]
    known = {**known, id(value): path}

    def inner(of: Any, name: object) -> str:
        return _described(of, f"{path}.{name}", known, depth + 1)

    if isinstance(value, type | types.ModuleType):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(inner(of, at) for at, of in enumerate(value))})"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(inner(of, 'set') for of in value))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{inner(key, key)}: {inner(of, key)}' for key, of in value.items())})"
    if isinstance(value, partial):
        return f"partial({inner((value.func, value.args, value.keywords), 'partial')})"
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        others = inner((value.__defaults__, value.__kwdefaults__, cells), "function")
        return f"{value.__module__}.{value.__qualname__}({_code(value.__code__)}, {others})"
    if isinstance(value, types.MethodType):
        return f"{inner(value.__func__, 'method')} of {inner(value.__self__, 'method')}"
    if isinstance(value, types.BuiltinFunctionType | torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__name__', value)}"
    refused = isinstance(value, Tensor | nn.Module | torch.Generator)
    if refused or not hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
        raise _unknown(value, path)
    return f"{type(value).__module__}.{type(value).__qualname__}({inner(vars(value), 'vars')})"


def _code(code: types.CodeType) -> str:
    """Returns a text that stands for the instructions and constants of a function."""
    constants = [_code(of) if isinstance(of, types.CodeType) else repr(of) for of in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _unknown(value: Any, path: str) -> UnknownAttributeError:
    """Returns the error for an attribute that cannot be compared between ranks."""
    cure = "make it a parameter or buffer" if isinstance(value, Tensor) else "make it a plain value"
    if isinstance(value, nn.Module):
        cure = "register it as a module, in a torch.nn.ModuleList for example"
    return UnknownAttributeError(
        f"has the attribute {path} (a {type(value).__name__}), which cannot be compared between ranks: {cure}"
    )
