"""Checks of arguments. A check raises TypeError or ValueError with the argument's name, value and rule.

Most checks take arguments by keyword: the keyword is the name that the error shows.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

MOST = 2**31 - 1
"""The largest count that `check_count` accepts. A larger number can only be a mistake."""


def check_number(**values: object) -> None:
    """Raises TypeError unless each value is a number that torch accepts: an int below 2**63, or a float.

    Numbers of other libraries, such as numpy's, are accepted. A bool is not a number.
    """
    for name, value in values.items():
        is_float = isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational)
        if not is_float and not (is_int(value) and abs(value) < 2**63):
            raise TypeError(f"{name} ({shown(value)}) must be a number: an int below 2**63, or a float")


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether a value is an integer, also an integer of numpy or another library. A bool is not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def plain_int(value: Any) -> Any:
    """Returns an integer of any library (numpy's, for example) as an int, and other values unchanged."""
    return int(value) if is_int(value) else value


def check_int(least: int | None = None, **values: object) -> None:
    """Raises TypeError unless each value is an integer.

    least: if it is not None, ValueError is raised unless least <= value < 2**63.
    """
    for name, value in values.items():
        rule = f"{name} ({shown(value)}) must be an int{'' if least is None else f' of at least {least}'}"
        if not is_int(value):
            raise TypeError(rule)
        if least is not None and not least <= value < 2**63:
            raise ValueError(rule if value < least else f"{rule}, and below 2**63")


def check_flag(name: str, flag: object, *, or_none: bool = False) -> None:
    """Raises TypeError unless a flag is True or False. None is accepted, too, if ``or_none``.

    name: the argument's name, for the error.
    """
    if not isinstance(flag, bool) and not (or_none and flag is None):
        allowed = "None, True or False" if or_none else "True or False"
        raise TypeError(f"{name} ({flag!r}) must be {allowed}")


def check_count(most: int = MOST, /, **counts: int) -> None:
    """Raises TypeError unless each value is an int, and ValueError unless it is between 1 and ``most``."""
    for name, count in counts.items():
        check_int(**{name: count})
        if not 1 <= count <= most:
            raise ValueError(f"{name} ({count}) must be at least 1, and at most {most}")


def check_not_negative(**values: float) -> None:
    """Raises TypeError unless each value is a number, and ValueError unless 0 <= value < 2**63."""
    for name, value in values.items():
        check_number(**{name: value})
        if not 0 <= value < 2**63:
            raise ValueError(f"{name} ({value}) must be a finite number of at least 0, and below 2**63")


def check_positive(**values: float | None) -> None:
    """Raises TypeError unless each value is None or a number, and ValueError unless 0 < value < 2**63."""
    for name, value in values.items():
        if value is None:
            continue
        check_number(**{name: value})
        if not 0 < value < 2**63:
            raise ValueError(f"{name} ({value}) must be None or a positive number, below 2**63")


def shown(value: object) -> str:
    """Returns a value as error messages show it: its repr, or the name of its type if the repr is long."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else type(value).__name__


def list_of(name: str, values: Any) -> list[Any]:
    """Returns the elements of an iterable as a list.

    name: the argument's name, for the error.

    Raises TypeError for a value that is no iterable, and also for strings and scalar tensors.
    """
    if (
        isinstance(values, Iterable)
        and not isinstance(values, str | bytes)
        and getattr(values, "ndim", 1) != 0
    ):
        return list(values)
    raise TypeError(f"{name} ({shown(values)}) must be an iterable, such as a list")


def check_kind(kind: type | tuple[type, ...], words: str, **values: object) -> None:
    """Raises TypeError unless each value is an instance of ``kind``.

    kind: a type or several types, as for isinstance.
    words: ``kind`` in words, for the error.
    """
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} ({shown(value)}) must be {words}")


def check_path(**paths: object) -> None:
    """Raises TypeError unless each value is a string or a path, ValueError unless it can name a file."""
    check_kind((str, os.PathLike), "a path", **paths)
    for name, path in paths.items():
        if str(path) == "" or "\0" in str(path):
            raise ValueError(f"{name} ({path!r}) must be the name of a file or folder")


def check_module(**modules: object) -> None:
    """Raises TypeError unless each value is a torch.nn.Module."""
    check_kind(nn.Module, "a torch.nn.Module", **modules)


def check_tensors(dims: int | None, /, **tensors: Any) -> None:
    """Raises TypeError unless each value is a tensor that is neither sparse nor complex.

    dims: if it is not None, ValueError is raised unless the tensor has this number of dimensions.
    """
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_complex():
            raise TypeError(f"{name} ({shown(value)}) must be a tensor, neither sparse nor complex")
        if dims not in (None, value.dim()):
            raise ValueError(f"{name} of shape {tuple(value.shape)} must have {dims} dimensions")


def check_place(device: Any, dtype: object) -> torch.device:
    """Checks the arguments ``device`` and ``dtype``, and returns the device, with its index.

    device: None means torch's default device.
    dtype: None means torch's default.

    Raises TypeError or ValueError if no floating-point tensor can be made on ``device`` or with ``dtype``.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype ({dtype!r}) must be a torch.dtype")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype ({dtype}) must be a floating-point type")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"device ({device!r}) must be an available device: {error}") from error


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless ``value`` is one of the strings ``allowed``.

    name: the argument's name, for the error.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(allowed)}")


def ranks_in_environment(name: str, default: int) -> int:
    """Returns the number of ranks that a launcher has written into an environment variable.

    name: the variable, such as LOCAL_WORLD_SIZE, which torchrun sets.
    default: the result if the variable is not set.

    Raises ValueError if the variable is not a number of at least 1.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name} ({text!r}) must be a number of ranks, at least 1")
    return int(text)
