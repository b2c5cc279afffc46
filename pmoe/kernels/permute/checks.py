"""What rows, positions and weights must be to be moved. Every check raises ValueError."""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.kernels.operands import VECTOR_BYTES, check_floating, check_memory, check_tensor


def check_permute(x_TM: Tensor, position_TK: Tensor, num_rows: int, weight_TK: Tensor | None) -> None:
    _check_slots(position_TK, weight_TK, x_TM.dtype)
    _check_rows("x", x_TM, (position_TK.shape[0], "M"), position_TK)
    if not 0 <= num_rows <= position_TK.numel():
        raise ValueError(
            f"num_rows ({num_rows}) must be from 0 to {position_TK.numel()}, as many as there are positions"
        )


def check_unpermute(rows_NM: Tensor, position_TK: Tensor, weight_TK: Tensor | None) -> None:
    _check_slots(position_TK, weight_TK, rows_NM.dtype)
    _check_rows("rows", rows_NM, ("rows", "M"), position_TK)


def check_permute_backward(position_TK: Tensor, weight_TK: Tensor, **rows: Tensor) -> None:
    """rows: by name, first the rows by token, then the routed rows."""
    (token_name, of_tokens_TM), (rows_name, rows_NM) = rows.items()
    _check_slots(position_TK, weight_TK, rows_NM.dtype)
    _check_rows(rows_name, rows_NM, ("rows", "M"), position_TK)
    _check_rows(token_name, of_tokens_TM, (position_TK.shape[0], rows_NM.shape[1]), position_TK)
    check_tensor(token_name, of_tokens_TM, dtypes=[rows_NM.dtype])


def _check_slots(position_TK: Tensor, weight_TK: Tensor | None, dtype: torch.dtype) -> None:
    check_tensor("position", position_TK, shape=("T", "K"), dtypes=[torch.int32, torch.int64])
    if weight_TK is not None:
        dtypes = dict.fromkeys([torch.float32, torch.promote_types(dtype, torch.float32)])
        check_tensor("weight", weight_TK, shape=position_TK.shape, dtypes=dtypes, device=position_TK.device)


def _check_rows(name: str, rows: Tensor, shape: tuple[int | str, int | str], position_TK: Tensor) -> None:
    check_tensor(name, rows, shape=shape, device=position_TK.device)
    check_floating(name, rows)


# ---- as the kernels read and write them


def check_slots_memory(position_TK: Tensor, **weights: Tensor | None) -> None:
    """weights: by name, a number a slot."""
    check_tensor("position", position_TK, dtypes=[torch.int32], contiguous=True)
    for name, each in weights.items():
        if each is not None:
            check_tensor(name, each, shape=position_TK.shape, dtypes=[torch.float32], contiguous=True)


def check_rows_memory(**rows: Tensor) -> None:
    for name, each in rows.items():
        columns, size = each.shape[1], each.element_size()
        if columns * size % VECTOR_BYTES:
            raise ValueError(
                f"{name}: a row's bytes ({columns} x {size} = {columns * size}) must be a multiple of "
                f"{VECTOR_BYTES}"
            )
    check_memory(rows=rows)
