"""Permute and unpermute as PyTorch operations, on any device, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def permute(x_TM: Tensor, position_TK: Tensor, num_rows: int, weight_TK: Tensor | None) -> Tensor:
    """Returns rows (N, M) with rows[position[t, k]] = weight[t, k] * x[t]."""
    rows = x_TM.new_empty(num_rows + 1, x_TM.shape[1])  # dropped slots write to the last row
    for k, position_T in enumerate(position_TK.unbind(1)):
        into_T = torch.where(_in_range(position_T, num_rows), position_T, num_rows).long()
        rows.index_copy_(0, into_T, x_TM if weight_TK is None else _scaled(x_TM, weight_TK, k).to(x_TM.dtype))
    return rows[:num_rows]


def unpermute(rows_NM: Tensor, position_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """Returns y (T, M) with y[t] = sum over k of weight[t, k] * rows[position[t, k]]."""
    num_rows, columns = rows_NM.shape
    y = rows_NM.new_zeros(position_TK.shape[0], columns, dtype=_wide(rows_NM.dtype))
    for k, position_T in enumerate(position_TK.unbind(1) if num_rows else ()):
        term = _scaled(_rows_at(rows_NM, position_T), weight_TK, k)
        y += torch.where(_in_range(position_T, num_rows).unsqueeze(1), term, 0)
    return y.to(rows_NM.dtype)


def dots(of_tokens_TM: Tensor, rows_NM: Tensor, position_TK: Tensor, like_TK: Tensor) -> Tensor:
    """Returns <of_tokens[t], rows[position[t, k]]>: (T, K) of the dtype of like_TK, 0 for dropped slots."""
    num_rows = rows_NM.shape[0]
    wide = _wide(rows_NM.dtype)
    dot_TK = torch.zeros_like(like_TK, memory_format=torch.contiguous_format)
    for k, position_T in enumerate(position_TK.unbind(1) if num_rows else ()):
        product = of_tokens_TM.to(wide) * _rows_at(rows_NM, position_T).to(wide)
        dot_TK[:, k] = torch.where(_in_range(position_T, num_rows), product.sum(1), 0)
    return dot_TK


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums: float32, or float64 for float64 rows."""
    return torch.promote_types(dtype, torch.float32)


def _in_range(position_T: Tensor, num_rows: int) -> Tensor:
    """Returns which positions are those of rows; the others are dropped slots."""
    return (position_T >= 0) & (position_T < num_rows)


def _scaled(rows: Tensor, weight_TK: Tensor | None, k: int) -> Tensor:
    """Returns weight[:, k] * rows in float32 or wider."""
    wide = rows.to(_wide(rows.dtype))
    return wide if weight_TK is None else wide * weight_TK[:, k : k + 1]


def _rows_at(rows_NM: Tensor, position_T: Tensor) -> Tensor:
    """Returns the row at each position; for a dropped slot any row. N must not be 0."""
    return rows_NM.index_select(0, position_T.long().clamp(0, rows_NM.shape[0] - 1))
