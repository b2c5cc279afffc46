"""Checks of arguments: TypeError or ValueError with the argument's name, its value and the rule."""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

MOST = 2**31 - 1
"""Of a number of anything that is counted: more is a mistake."""


def check_number(**values: object) -> None:
    """TypeError unless each is a number that torch takes: an int below 2**63 or a float; a bool is none."""
    for name, value in values.items():
        is_float = isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational)
        if not is_float and not (is_int(value) and abs(value) < 2**63):
            raise TypeError(f"{name} ({shown(value)}) must be a number, an int below 2**63 or a float")


def is_int(value: object) -> TypeGuard[int]:
    """Whether it is an integer of any library, numpy's say; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def plain_int(value: Any) -> Any:
    """An integer of any library as an int; any other value as it is."""
    return int(value) if is_int(value) else value


def check_int(least: int | None = None, **values: object) -> None:
    """TypeError unless each is an integer, ValueError unless from ``least``, where given, to 2**63."""
    for name, value in values.items():
        rule = f"{name} ({shown(value)}) must be an int{'' if least is None else f' of at least {least}'}"
        if not is_int(value):
            raise TypeError(rule)
        if least is not None and not least <= value < 2**63:
            raise ValueError(rule)


def check_flag(name: str, flag: object, *, or_none: bool = False) -> None:
    """TypeError unless it is True or False, or None where that is allowed."""
    if not isinstance(flag, bool) and not (or_none and flag is None):
        allowed = "None, True or False" if or_none else "True or False"
        raise TypeError(f"{name} ({flag!r}) must be {allowed}")


def check_count(**counts: int) -> None:
    """TypeError unless each is an int, ValueError unless at least 1 and no mistake."""
    for name, count in counts.items():
        check_int(**{name: count})
        if not 1 <= count <= MOST:
            raise ValueError(f"{name} ({count}) must be at least 1, and at most {MOST}")


def check_not_negative(**values: float) -> None:
    """TypeError unless each is a number, ValueError unless finite and at least 0."""
    for name, value in values.items():
        check_number(**{name: value})
        if not 0 <= value < 2**63:
            raise ValueError(f"{name} ({value}) must be a finite number of at least 0, and below 2**63")


def check_positive(**values: float | None) -> None:
    """TypeError unless each is None or a number, ValueError unless finite and above 0."""
    for name, value in values.items():
        if value is None:
            continue
        check_number(**{name: value})
        if not 0 < value < 2**63:
            raise ValueError(f"{name} ({value}) must be None or a positive number, below 2**63")


def shown(value: object) -> str:
    """A value as a message shows it: its text, or its type where that text is long."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else type(value).__name__


def list_of(name: str, values: Any) -> list[Any]:
    """Of an iterable; TypeError for what is none."""
    if (
        isinstance(values, Iterable)
        and not isinstance(values, str | bytes)
        and getattr(values, "ndim", 1) != 0
    ):
        return list(values)
    raise TypeError(f"{name} ({shown(values)}) must be several, as in a list")


def check_kind(kind: type | tuple[type, ...], told: str, **values: object) -> None:
    """TypeError unless each is of that class."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} ({shown(value)}) must be {told}")


def check_path(**paths: object) -> None:
    """TypeError unless each is a string or a path, ValueError where it names nothing."""
    check_kind((str, os.PathLike), "a path", **paths)
    for name, path in paths.items():
        if str(path) == "" or "\0" in str(path):
            raise ValueError(f"{name} ({path!r}) must be the name of a file or folder")


def check_module(**modules: object) -> None:
    """TypeError unless each is a module."""
    check_kind(nn.Module, "a torch.nn.Module", **modules)


def check_tensors(dims: int | None, /, **tensors: Any) -> None:
    """TypeError unless each is a dense tensor, ValueError unless it has ``dims`` dimensions."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_complex():
            raise TypeError(f"{name} ({shown(value)}) must be a tensor, neither sparse nor complex")
        if dims not in (None, value.dim()):
            raise ValueError(f"{name} of shape {tuple(value.shape)} must have {dims} dimensions")


def check_place(device: Any, dtype: object) -> torch.device:
    """TypeError or ValueError for what no floating-point tensor can be made on or of; None is a default.
    Returns the device with its index."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype ({dtype!r}) must be a torch.dtype")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype ({dtype}) must be a floating-point type")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"device ({device!r}) must be a device that is here: {error}") from error


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """ValueError unless ``value`` is one of ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(allowed)}")
