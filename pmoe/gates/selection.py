"""How experts are picked from scores, or drawn without them; never a host synchronisation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pmoe.kernels.route import ROUNDS, top_indices

__all__ = [
    "ROUNDS",
    "attached_zero",
    "distinct",
    "top_indices",
    "rows_for_each_expert",
    "scaled",
]


def scaled(weight_TK: Tensor, normalize: bool) -> Tensor:
    """A token's weights over their sum, where that is asked for."""
    return weight_TK / weight_TK.sum(-1, keepdim=True) if normalize else weight_TK


def distinct(draw_TK: Tensor, num_experts: int) -> Tensor:
    """K distinct experts of each token from K independent draws, non-negative int64 much larger than E.

    Floyd's sampling: each set of K experts is equally likely. The order within a token is not uniform;
    nothing may be read from it. Example: E = 3, draws 7, 8 -> 7 mod 2 = 1, 8 mod 3 = 2.
    """
    top_k = draw_TK.shape[1]
    chosen_TK = torch.empty_like(draw_TK)
    for choice in range(top_k):
        last = num_experts - top_k + choice
        pick_T = draw_TK[:, choice] % (last + 1)
        taken_T = (chosen_TK[:, :choice] == pick_T.unsqueeze(1)).any(1)
        chosen_TK[:, choice] = pick_T.masked_fill(taken_T, last)
    return chosen_TK


def rows_for_each_expert(factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """ceil(factor * T * K / E), the layer's capacity too. Example: (1.25, 16, 2, 8) -> 5."""
    return math.ceil(factor * num_tokens * top_k / num_experts)


def attached_zero(scores: Tensor) -> Tensor:
    """0 on the graph of the scores, also where they are not finite."""
    return scores[:0].sum()
