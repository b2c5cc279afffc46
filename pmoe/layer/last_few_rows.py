"""Statistics of small calls that `run_experts` computes itself, without running its `MoELayer`.

The record of the call is stored in the layer nevertheless. So the layer's statistics show the call as if the
layer had run it.

Letters: T tokens, K experts of a token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.call.decision import LastCall, RunReport
from pmoe.comm.counts import RankCounts


@dataclass(frozen=True)
class FewRowCounts:
    """The row counts of a small call on one rank, computed only when statistics read them.

    Implements the interface `LastRowCounts`.

    index_TK: (T, K) integers, the K experts of each of T tokens; E means no expert.
    num_experts: E.
    """

    index_TK: Tensor
    num_experts: int

    @property
    def max_tokens(self) -> int:
        return self.index_TK.shape[0]

    def kept_E(self) -> Tensor:
        return torch.bincount(self.index_TK.reshape(-1), minlength=self.num_experts)[: self.num_experts]

    def rows(self) -> RankCounts:
        counts_E = self.kept_E().view(1, 1, -1)
        return RankCounts(
            send=counts_E,
            recv=counts_E,
            recv_device=counts_E,
            max_tokens=self.max_tokens,
            needs_grad=False,
        )


def last_call(index_TK: Tensor, num_experts: int, x_TM: Tensor) -> LastCall:
    """Returns the record of a small call that `run_experts` has computed without running the layer.

    The caller stores the record in the layer. The layer's statistics then show the call as if the layer had
    run it. The call had no gradients.

    index_TK: (T, K) integers, the K experts of each of T tokens; E means no expert. It is copied, because the
        caller may overwrite it.
    num_experts: E.
    x_TM: (T, M), the tokens, M = d_model.
    """
    ran = RunReport(
        path="few rows",
        num_tokens=index_TK.shape[0],
        num_slots=index_TK.numel(),
        dtype=x_TM.dtype,
        device=x_TM.device,
    )
    return LastCall(l_aux=_no_loss(x_TM.dtype), counts=FewRowCounts(index_TK.clone(), num_experts), ran=ran)


def _no_loss(dtype: torch.dtype) -> Tensor:
    """Returns a scalar 0: the auxiliary loss of a call whose routing comes from the caller."""
    return torch.zeros((), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
