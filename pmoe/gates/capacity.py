"""Expert capacity: which of the routed rows are kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def expert_capacity(factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """ceil(factor * T * K / E) rows for each expert from this rank. Example: (1.25, 16, 2, 8) -> 5."""
    return math.ceil(factor * num_tokens * top_k / num_experts)


def within_capacity(expert_TK: Tensor, capacity: int, used_E: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps the first rows of each expert, in token order; later tokens are dropped first.

    used_E: (E,) rows that earlier micro-batches already gave each expert. Returns (keep, used): keep is
    (T, K) bool, used is used_E with these tokens counted, for the next micro-batch. A batch gated in parts
    so drops exactly what it would drop whole (Lancet, section 2.3: capacity passed between partitions).
    """
    flat = expert_TK.reshape(-1)
    order = flat.argsort(stable=True)
    counts_E = torch.zeros_like(used_E).scatter_add_(0, flat, torch.ones_like(flat))
    first_E = counts_E.cumsum(0) - counts_E
    position = torch.empty_like(flat)
    ascending = torch.arange(flat.numel(), device=flat.device)
    position[order] = ascending - first_E[flat[order]]
    keep = position + used_E[flat] < min(capacity, 2**62)
    return keep.view_as(expert_TK), used_E + counts_E
