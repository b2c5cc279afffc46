"""GShard's ordering: products with matrices of zeros and ones. The readable reference; it costs T times
more."""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.ordering import Order


class EinsumOrder(Order):
    """Rows are dispatch_NT x, results dispatch_NT^T y (GShard, arXiv 2006.16668, section 3.2). A NaN or an
    infinity of one token reaches all rows of its chunk, as it does there."""

    def order(self, tokens_TM: Tensor, token_N: Tensor, out: Tensor) -> None:
        dispatch_NT = _one_hot(token_N, tokens_TM.shape[0]).to(tokens_TM.dtype)
        out.copy_(torch.einsum("nt,tm->nm", dispatch_NT, tokens_TM))

    def restore(self, rows_NM: Tensor, row_SK: Tensor, out: Tensor, token_S: Tensor | None = None) -> None:
        chosen_SN = _one_hot(row_SK, rows_NM.shape[0]).sum(1)
        # Rows of other chunks may not have arrived yet, and 0 times anything is not always 0.
        rows_NM = rows_NM.where(chosen_SN.sum(0).unsqueeze(1) > 0, 0)
        combine_SN = chosen_SN.to(rows_NM.dtype)
        if token_S is not None:
            combine_SN = _one_hot(token_S, out.shape[0]).to(rows_NM.dtype).t() @ combine_SN
        out.copy_(torch.einsum("sn,nm->sm", combine_SN, rows_NM))


def _one_hot(index: Tensor, count: int) -> Tensor:
    """As torch's, which refuses to count to 0."""
    return index.unsqueeze(-1) == torch.arange(count, device=index.device)
