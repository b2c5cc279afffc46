"""Experts that are drawn without scores; never a host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor


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
