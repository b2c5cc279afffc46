"""Rows that travel once: a token that several experts of one rank want goes there in one row (FSMoE's systems
send it as often as it was chosen). There it is replicated, and its partial results are summed before they
return.

Letters: T tokens, K choices.
"""

from __future__ import annotations

import torch
from torch import Tensor


def carriers(rank_TK: Tensor, keep_TK: Tensor | None) -> tuple[Tensor, Tensor]:
    """(carrier_TK, carries_TK): the first kept choice of the token that has the same rank, which is the slot
    in whose row the token goes there, and whether a slot is such a one itself. Dropped slots carry nothing.

    Example: ranks (2, 0, 2) of one token -> carriers (0, 1, 0), and the first two carry.
    """
    same_TKK = rank_TK.unsqueeze(2) == rank_TK.unsqueeze(1)
    if keep_TK is not None:
        same_TKK = same_TKK & keep_TK.unsqueeze(1)
    carrier_TK = same_TKK.int().argmax(2)  # the first of equals
    carries_TK = carrier_TK == torch.arange(rank_TK.shape[1], device=rank_TK.device)
    return carrier_TK, carries_TK if keep_TK is None else carries_TK & keep_TK
