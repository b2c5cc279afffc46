"""Expert capacity: the most rows that an expert takes from this rank, and which choices are kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def expert_capacity(factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Returns ceil(factor * T * K / E), the most rows that each of E experts takes from this rank.

    factor: the capacity factor.
    num_tokens: T, the number of tokens of this rank.
    top_k: K, the number of experts of a token.
    num_experts: E.

    Example: (1.25, 16, 2, 8) -> 5.
    """
    return math.ceil(factor * num_tokens * top_k / num_experts)


def within_capacity(expert_TK: Tensor, capacity: int, used_E: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps the first ``capacity`` choices of each expert in token order, and drops the others.

    expert_TK: (T, K) int64, the K choices of T tokens; other shapes are allowed.
    capacity: the most choices of each expert for the whole batch.
    used_E: (E,) int64, for each of E experts, how many choices it got from earlier parts of the batch.

    A batch may be routed in parts, one after the other. Then ``used_E`` is 0 for the first part, and the
    second result of each call is passed to the next one. So the same choices are dropped as if the whole
    batch were routed at once (Lancet, section 2.3).

    Returns two tensors: which choices are kept, bool in the shape of expert_TK; and used_E plus the number of
    choices in this part that fell on each expert.
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
