"""What the constructors of gates check alike, and the parameter that most of them have.

Letters: E experts, M = d_model.
"""

from __future__ import annotations

import math
import numbers

import torch
from torch import nn


def check_sizes(d_model: int, num_experts: int, top_k: int) -> None:
    """TypeError unless all are ints, ValueError unless positive and top_k at most num_experts."""
    check_count(d_model=d_model, num_experts=num_experts)
    if not _is_int(top_k):
        raise TypeError(f"top_k ({top_k!r}) must be an int")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be between 1 and num_experts ({num_experts})")


def check_count(**counts: int) -> None:
    """TypeError unless each is an int, ValueError unless at least 1."""
    for name, count in counts.items():
        if not _is_int(count):
            raise TypeError(f"{name} ({count!r}) must be an int")
        if count < 1:
            raise ValueError(f"{name} ({count}) must be at least 1")


def check_int(**values: int) -> None:
    """TypeError unless each is an int."""
    for name, value in values.items():
        if not _is_int(value):
            raise TypeError(f"{name} ({value!r}) must be an int")


def check_not_negative(**values: float) -> None:
    """TypeError unless each is a number, ValueError unless finite and at least 0."""
    for name, value in values.items():
        check_number(**{name: value})
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} ({value}) must be a number of at least 0")


def check_positive(**values: float | None) -> None:
    """TypeError unless each is None or a number, ValueError unless finite and above 0."""
    for name, value in values.items():
        if value is None:
            continue
        check_number(**{name: value})
        if not 0 < value < math.inf:
            raise ValueError(f"{name} ({value}) must be None or a positive number")


def check_normalize(normalize: bool | None) -> None:
    if normalize is not None and not isinstance(normalize, bool):
        raise TypeError(f"normalize ({normalize!r}) must be None, True or False")


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(allowed)}")


def router_weight(
    rows: int, columns: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """(rows, columns), see `draw_router_weight`."""
    weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
    draw_router_weight(weight)
    return weight


def draw_router_weight(weight: nn.Parameter) -> None:
    """Uniform within 1 / sqrt(columns), as `torch.nn.Linear` begins."""
    bound = 1 / math.sqrt(weight.shape[1])
    nn.init.uniform_(weight, -bound, bound)


def check_number(**values: object) -> None:
    """TypeError unless each is a number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} ({value!r}) must be a number")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
