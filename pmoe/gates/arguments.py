"""What the constructors of several gates check, and the parameter that most of them have.

Letters: E experts, M = d_model.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from pmoe.arguments import check_count, check_int


def check_sizes(d_model: int, num_experts: int, top_k: int) -> None:
    """TypeError unless all are ints, ValueError unless positive and top_k at most num_experts."""
    check_count(d_model=d_model, num_experts=num_experts)
    check_int(top_k=top_k)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be between 1 and num_experts ({num_experts})")


def check_normalize(normalize: bool | None) -> None:
    if normalize is not None and not isinstance(normalize, bool):
        raise TypeError(f"normalize ({normalize!r}) must be None, True or False")


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
