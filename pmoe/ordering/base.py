"""`Order`, the interface of modules that copy tokens into rows and sum rows into tokens.

A row is the copy of one token for one of its experts. Letters: T tokens, K experts of each token, N rows, M =
d_model.
"""

from __future__ import annotations

import abc

from torch import Tensor


class Order(abc.ABC):
    """Base class of orderings, which copy tokens into rows before dispatch and sum rows after combine.

    A row is the copy of one token for one of its experts. FSMoE calls the two operations Order and I-Order.
    An `Order` does not choose the order of the rows: it gets the index of each row's token as an argument,
    which `pmoe.ordering.sorted` has computed. The layer calls both methods for one chunk (micro-batch) at a
    time.

    Both methods are linear, and each is the transpose of the other. So backward calls them, too: `order`
    copies the gradient of each token's output to the token's rows, and `restore` sums the gradients of a
    token's rows into the gradient of the token.
    """

    @abc.abstractmethod
    def order(self, tokens_TM: Tensor, token_N: Tensor, out: Tensor) -> None:
        """Copies tokens into rows: out[i] = tokens_TM[token_N[i]].

        Args:
            tokens_TM: (T, M), the T tokens of a chunk, of M = d_model columns.
            token_N: (N,) int64, for each of N rows the index of its token, below T.
            out: (N, M), memory for the rows.
        """

    @abc.abstractmethod
    def restore(self, rows_NM: Tensor, row_SK: Tensor, out: Tensor, token_S: Tensor | None = None) -> None:
        """Sums the rows of each token: out[t] = sum_k rows_NM[row_SK[t, k]], added in the order of k.

        row_SK has one of two forms:

        - Every token has K rows: S = T, and out[t] is the sum above. token_S is None.
        - Some gates give tokens different numbers of rows: K = 1, and row_SK[s, 0] is a row of token
          token_S[s]. Then out[t] is the sum of all rows of token t, in the order of s; 0 if t has no row.

        Args:
            rows_NM: (N, M), N rows of M = d_model columns. Rows to which row_SK does not point may hold
                anything, also NaN.
            row_SK: (S, K) int64, indices of rows, below N. The entry of a dropped choice, which has no row,
                points to a row of zeros.
            out: (T, M), memory for the sums of T tokens.
            token_S: (S,) int64 ascending, the token of each line of row_SK; or None.
        """
