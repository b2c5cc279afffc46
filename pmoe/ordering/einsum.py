"""GShard's ordering: copies tokens and sums rows by products with matrices of zeros and ones.

It is a readable reference for `SortedOrder`, which copies rows by index. For T tokens, the products take T
times as many operations as the copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.ordering.base import Order


class EinsumOrder(Order):
    """Copies and sums rows by products with matrices of zeros and ones (arXiv 2006.16668, section 3.2).

    For N rows of T tokens, let D be the (N, T) matrix with D[i, t] = 1 if row i is a copy of token t, and 0
    elsewhere. `order` computes the rows D @ x from tokens x, (T, M) with M = d_model. `restore` computes the
    tokens' results D^T @ y from the rows' results y, (N, M).

    If element j of a token is NaN or infinite, column j becomes NaN in all rows of the chunk, because 0 times
    NaN or infinity is NaN.
    """

    def order(self, tokens_TM: Tensor, token_N: Tensor, out: Tensor) -> None:
        dispatch_NT = _one_hot(token_N, tokens_TM.shape[0]).to(tokens_TM.dtype)
        out.copy_(torch.einsum("nt,tm->nm", dispatch_NT, tokens_TM))

    def restore(self, rows_NM: Tensor, row_SK: Tensor, out: Tensor, token_S: Tensor | None = None) -> None:
        chosen_SN = _one_hot(row_SK, rows_NM.shape[0]).sum(1)
        # Memory of rows that have not arrived yet may hold NaN, and 0 * NaN is not 0: rows that no token
        # sums are set to 0.
        rows_NM = rows_NM.where(chosen_SN.sum(0).unsqueeze(1) > 0, 0)
        combine_SN = chosen_SN.to(rows_NM.dtype)
        if token_S is not None:
            combine_SN = _one_hot(token_S, out.shape[0]).to(rows_NM.dtype).t() @ combine_SN
        out.copy_(torch.einsum("sn,nm->sm", combine_SN, rows_NM))


def _one_hot(index: Tensor, count: int) -> Tensor:
    """Returns the one-hot encoding of indices, a bool tensor (..., count): [..., c] is True if index is c.

    index: (...), integers below ``count``.

    torch.nn.functional.one_hot is not used, because it refuses count = 0.
    """
    return index.unsqueeze(-1) == torch.arange(count, device=index.device)
