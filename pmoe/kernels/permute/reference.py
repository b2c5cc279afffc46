"""Permute and unpermute as PyTorch operations, for any device. The operations do not make the host wait."""

from __future__ import annotations

import torch
from torch import Tensor


def permute(x_TM: Tensor, position_TK: Tensor, num_rows: int, weight_TK: Tensor | None) -> Tensor:
    """Returns rows (N, M) with rows[position[t, k]] = weight[t, k] * x[t].

    x_TM: (T, M), T tokens of M columns.
    position_TK: (T, K), the row of each of K choices; outside 0 .. N - 1 if the choice is dropped.
    num_rows: N, the number of rows.
    weight_TK: (T, K), weight of each choice; None means 1.
    """
    rows = x_TM.new_empty(num_rows + 1, x_TM.shape[1])  # dropped slots write to the last row
    for k, position_T in enumerate(position_TK.unbind(1)):
        into_T = torch.where(_in_range(position_T, num_rows), position_T, num_rows).long()
        rows.index_copy_(0, into_T, x_TM if weight_TK is None else _scaled(x_TM, weight_TK, k).to(x_TM.dtype))
    return rows[:num_rows]


def unpermute(rows_NM: Tensor, position_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """Returns y (T, M) with y[t] = sum over k of weight[t, k] * rows[position[t, k]].

    rows_NM: (N, M), N rows of M columns.
    position_TK: (T, K), the row of each of K choices of T tokens; outside 0 .. N - 1 if the choice is
        dropped.
    weight_TK: (T, K), or None for 1.
    """
    num_rows, columns = rows_NM.shape
    y = rows_NM.new_zeros(position_TK.shape[0], columns, dtype=_wide(rows_NM.dtype))
    for k, position_T in enumerate(position_TK.unbind(1) if num_rows else ()):
        term = _scaled(_rows_at(rows_NM, position_T), weight_TK, k)
        y += torch.where(_in_range(position_T, num_rows).unsqueeze(1), term, 0)
    return y.to(rows_NM.dtype)


def dots(of_tokens_TM: Tensor, rows_NM: Tensor, position_TK: Tensor, like_TK: Tensor) -> Tensor:
    """Returns the inner product of each token with the row of each of its choices, (T, K).

        result[t, k] = <of_tokens[t], rows[position[t, k]]>, 0 for dropped choices

    It is the gradient of the routing weights in `permute` and `unpermute`.

    of_tokens_TM: (T, M), T tokens of M columns, or their gradients.
    rows_NM: (N, M), N rows.
    position_TK: (T, K), the row of each of K choices; outside 0 .. N - 1 if the choice is dropped.
    like_TK: a tensor (T, K) with the result's dtype.
    """
    num_rows = rows_NM.shape[0]
    wide = _wide(rows_NM.dtype)
    dot_TK = torch.zeros_like(like_TK, memory_format=torch.contiguous_format)
    for k, position_T in enumerate(position_TK.unbind(1) if num_rows else ()):
        product = of_tokens_TM.to(wide) * _rows_at(rows_NM, position_T).to(wide)
        dot_TK[:, k] = torch.where(_in_range(position_T, num_rows), product.sum(1), 0)
    return dot_TK


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which rows of this dtype are summed: float64 for float64, otherwise float32."""
    return torch.promote_types(dtype, torch.float32)


def _in_range(position_T: Tensor, num_rows: int) -> Tensor:
    """Returns a bool for each position, (T,): whether it is a row index, from 0 to num_rows - 1.

    Any other position stands for a dropped choice.

    position_T: (T,), for each of T tokens the row of one of its choices.
    """
    return (position_T >= 0) & (position_T < num_rows)


def _scaled(rows: Tensor, weight_TK: Tensor | None, k: int) -> Tensor:
    """Returns rows (T, M) times their weights of choice number ``k``, in float32 or wider.

    rows: (T, M), a row of M columns for each of T tokens.
    weight_TK: (T, K), weights of K choices of T tokens; None means 1.
    k: number of the choice.
    """
    wide = rows.to(_wide(rows.dtype))
    return wide if weight_TK is None else wide * weight_TK[:, k : k + 1]


def _rows_at(rows_NM: Tensor, position_T: Tensor) -> Tensor:
    """Returns the row at each position, (T, M); the first or the last row for a position out of range.

    rows_NM: (N, M), N rows of M columns. N must not be 0.
    position_T: (T,), for each of T tokens the index of a row.
    """
    return rows_NM.index_select(0, position_T.long().clamp(0, rows_NM.shape[0] - 1))
