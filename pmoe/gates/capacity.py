"""Expert capacity: how many rows an expert takes from this rank, and which of them are kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def expert_capacity(factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Returns ceil(factor * T * K / E), the number of rows that each expert takes from this rank.

    Example: (1.25, 16, 2, 8) -> 5.
    """
    return math.ceil(factor * num_tokens * top_k / num_experts)


def within_capacity(expert_TK: Tensor, capacity: int, used_E: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps the first ``capacity`` rows of each expert, in token order.

    expert_TK: (T, K) int64, or of any other shape.
    used_E: (E,) int64, rows that each expert got from earlier parts of the batch.

    Returns (keep, used): keep is bool in the shape of expert_TK. used is used_E plus the rows of this part,
    for the next part. With it, a batch that is gated in parts drops the same rows as if it were gated whole
    (Lancet, section 2.3: capacity passed between partitions).
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
