"""`Order`, the interface of modules that copy tokens into rows and sum rows into tokens.

Letters: T tokens, N rows, S entries with K rows each (S = T unless tokens have different numbers of rows), M
= d_model.
"""

from __future__ import annotations

import abc

from torch import Tensor


class Order(abc.ABC):
    """Base class of orderings, which copy tokens into rows before dispatch and sum rows after combine.

    FSMoE calls the two operations Order and I-Order. An `Order` gets the index of each row's token as an
    argument; `pmoe.ordering.sorted` computes these indices. The layer calls both methods for one chunk
    (micro-batch) at a time.

    Both methods are linear, and each is the transpose of the other. So in backward, `order` computes the
    gradients of experts' results from those of tokens' results, and `restore` computes the gradients of
    tokens from those of rows.
    """

    @abc.abstractmethod
    def order(self, tokens_TM: Tensor, token_N: Tensor, out: Tensor) -> None:
        """Copies tokens into rows: out[i] = tokens[token_N[i]].

        Args:
            tokens_TM: (T, M), T tokens of M = d_model columns.
            token_N: (N,) int64, the token of each of N rows.
            out: (N, M), memory for the rows.
        """

    @abc.abstractmethod
    def restore(self, rows_NM: Tensor, row_SK: Tensor, out: Tensor, token_S: Tensor | None = None) -> None:
        """Sums rows into tokens: out[t] = sum_k rows[row_SK[t, k]], added in the order of k.

        Args:
            rows_NM: (N, M), N rows of M = d_model columns. Rows to which row_SK does not point may hold
                anything, also NaN.
            row_SK: (S, K) int64, the K rows of each token, with S = T. If token_S is given: (S, 1), one row
                for each entry of token_S.
            out: (T, M), memory for the sums.
            token_S: (S,) int64 ascending, a token for each row in row_SK; for gates that give tokens
                different numbers of rows. out[t] is then the sum of rows[row_SK[s, 0]] over all s with
                token_S[s] = t, and 0 if there are none.
        """
