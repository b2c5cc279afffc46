"""An ordering that sums the rows of a token by additions in the order of the token's choices."""

from __future__ import annotations

from torch import Tensor

from pmoe.ordering.sorted import SortedOrder

BLOCK_TOKENS = 1024
"""Number of tokens whose rows are summed at a time if rows are narrower than float32, to save memory.

Their float32 copies then exist only for that number of tokens.
"""


class InTurnOrder(SortedOrder):
    """Sums the rows of a token one after the other, in the order of its choices, for batch invariance.

    `SortedOrder` uses operations that sum in an order of their own, which may depend on the number of tokens.
    This class adds two numbers at a time, in float32 at least. So the bits of a sum depend on nothing but the
    token's rows.
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
