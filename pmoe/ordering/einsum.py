"""GShard's ordering: products with matrices of zeros and ones.

It is the readable reference for `SortedOrder`, and costs T times as much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.ordering import Order


class EinsumOrder(Order):
    """Multiplies by matrices of zeros and ones (GShard, arXiv 2006.16668, section 3.2).

    Rows are dispatch x, and results are dispatch^T y, where dispatch (N, T) has a 1 at each row's token.
    A NaN or an infinity of one token reaches all rows of its chunk, because 0 times it is NaN.
    """

    def order(self, tokens_TM: Tensor, token_N: Tensor, out: Tensor) -> None:
        dispatch_NT = _one_hot(token_N, tokens_TM.shape[0]).to(tokens_TM.dtype)
        out.copy_(torch.einsum("nt,tm->nm", dispatch_NT, tokens_TM))

    def restore(self, rows_NM: Tensor, row_SK: Tensor, out: Tensor, token_S: Tensor | None = None) -> None:
        chosen_SN = _one_hot(row_SK, rows_NM.shape[0]).sum(1)
        # Rows of other chunks may not have arrived yet. They may hold NaN, and 0 times NaN is not 0.
        rows_NM = rows_NM.where(chosen_SN.sum(0).unsqueeze(1) > 0, 0)
        combine_SN = chosen_SN.to(rows_NM.dtype)
        if token_S is not None:
            combine_SN = _one_hot(token_S, out.shape[0]).to(rows_NM.dtype).t() @ combine_SN
        out.copy_(torch.einsum("sn,nm->sm", combine_SN, rows_NM))


def _one_hot(index: Tensor, count: int) -> Tensor:
    """Returns index (...) as bool (..., count), True at each index. torch's one_hot refuses count = 0."""
    return index.unsqueeze(-1) == torch.arange(count, device=index.device)
