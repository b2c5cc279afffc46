"""The journey of a rank's rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Journey:
    """Where the rows of a rank's tokens go, and what comes to it. All tensors are int32.

    expert_TK: (T, K), of all ranks' experts.
    position_TK: (T, K), where each slot's row stands among the rows that this rank sends, which are sorted by
        expert, then by token; -1 where it is dropped.
    slot_S: (S,), the slot of each of these rows.
    send_WE: (W, E), rows for each rank's experts, where the rows are.
    recv_WE: (W, E), rows from each rank for this one's experts, where the rows are.
    num_received: N, or more.

    The tensors by token may be those of several ranks, of which this rank's are the num_tokens from
    first_token on; positions then begin at first_row, as `pmoe.kernels.route` numbers them with a chunk a
    rank.
    """

    rank: int
    expert_TK: Tensor
    position_TK: Tensor
    slot_S: Tensor
    send_WE: Tensor
    recv_WE: Tensor
    num_received: int
    first_token: int = 0
    num_tokens: int | None = None
    first_row: int = 0

    @property
    def top_k(self) -> int:
        return self.expert_TK.shape[1]

    @property
    def ends_E(self) -> Tensor:
        """int32, the running sum of the rows that arrive, by expert."""
        return self.recv_WE.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)
