"""An ordering that sums the rows of a token by additions in the order of the token's choices."""

from __future__ import annotations

from torch import Tensor

from pmoe.ordering.sorted import SortedOrder

BLOCK_TOKENS = 1024
"""Rows narrower than float32 are summed for this number of tokens at a time, to save memory."""


class InTurnOrder(SortedOrder):
    """Sums the rows of a token one after the other, in the order of its choices, for batch invariance.

    `SortedOrder` uses operations that sum in an order of their own, which may depend on the number of tokens.
    Here every sum is one addition of two numbers, in float32 at least. So its bits depend on nothing else.
    """

    def restore(self, rows_NM: Tensor, row_SK: Tensor, out: Tensor, token_S: Tensor | None = None) -> None:
        if token_S is not None:
            raise ValueError(
                "a batch-invariant layer must have a gate that gives each token the same number of experts"
            )
        size = row_SK.shape[0] if rows_NM.element_size() >= 4 else BLOCK_TOKENS
        for row_BK, out_BM in zip(row_SK.split(max(size, 1)), out.split(max(size, 1)), strict=True):
            total_BM = out_BM if rows_NM.element_size() >= 4 else out_BM.float()
            total_BM.copy_(rows_NM.index_select(0, row_BK[:, 0]))
            for choice in range(1, row_BK.shape[1]):
                total_BM.add_(rows_NM.index_select(0, row_BK[:, choice]))
            if total_BM is not out_BM:
                out_BM.copy_(total_BM)
