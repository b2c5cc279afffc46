"""Checks of the operands of grouped products, and `RowSlots`, by which rows are gathered from tokens.

Every check raises ValueError.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pmoe.kernels.operands import MAX_ROWS, check_floating, check_tensor


class RowSlots(NamedTuple):
    """The slot of each of N rows. A slot is one of the T * K (token, choice) pairs.

    slot_N: (N,) int32, from 0 to T * K - 1. The token of a slot is slot // top_k.
    top_k: K, the number of choices of a token.
    position_TK: (T, K) int32, the row of each slot; None if it is not known. If it is set, the function
        `hidden` may first copy the tokens into rows, which is faster for products with many columns. Without
        it, a product reads each row from its token.

    If a product gets a RowSlots, its routing weights are indexed by slot, (T * K,), and not by row.
    """

    slot_N: Tensor
    top_k: int
    position_TK: Tensor | None = None


def check_operands(
    rows: Tensor,
    weight: Tensor,
    ends: Tensor,
    columns: int,
    *,
    slots: RowSlots | None = None,
    gathered: bool = False,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> int:
    """Checks the operands of a grouped product, and returns N, the number of rows that are multiplied.

    rows: (N, I), or the T tokens (T, I) if ``gathered``; (N, O) for the gradient of a product's rows.
    weight: (E, O, I), a matrix of O rows and I columns for each of E experts.
    ends: (E,) int32, the index after each expert's last row.
    columns: the dimension of ``weight`` whose size is the number of columns of ``rows``. 2 for a product:
        rows have I columns. 1 for the gradient of a product's rows: rows have O columns.
    slots: for each row, the index of its (token, choice) pair; or None.
    gathered: whether rows are read from tokens: row r is then a copy of the token of its (token, choice)
        pair.
    bias: (E, O), or None.
    scale: factor of each row, or of each (token, choice) pair if there are slots; or None.

    Raises ValueError if an operand does not fit the others.
    """
    check_tensor("weight", weight, shape=("E", "O", "I"))
    check_floating("weight", weight)
    check_tensor("rows", rows, shape=("rows", "columns"))
    if gathered and slots is None:
        raise ValueError("gathered (True) must be False without slots: they say which rows to gather")
    num_rows = slots.slot_N.numel() if gathered and slots is not None else rows.shape[0]
    check_rows("rows", rows, ("rows", weight.shape[columns]), weight)
    check_tensor(
        "ends", ends, shape=weight.shape[:1], dtypes=[torch.int32], device=rows.device, contiguous=True
    )
    if slots is not None:
        check_slots(slots, num_rows, rows.device)
    if bias is not None:
        check_tensor("bias", bias, shape=weight.shape[:2], dtypes=[weight.dtype], device=weight.device)
    if scale is not None:
        # With slots the scale is indexed by slot. If rows are gathered, it has a number for each slot of the
        # tokens. Otherwise the number of tokens is unknown, and the scale must have at least N numbers.
        check_tensor("scale", scale, shape=("N",), device=rows.device)
        check_floating("scale", scale)
        count = rows.shape[0] * slots.top_k if slots is not None and gathered else num_rows
        fits = scale.numel() >= count if slots is not None and not gathered else scale.numel() == count
        if not fits:
            raise ValueError(f"scale of shape {tuple(scale.shape)} must have the shape ({count},)")
    return num_rows


def check_slots(slots: RowSlots, num_rows: int, device: torch.device) -> None:
    """Raises ValueError unless there is an int32 slot for each row, and at least one choice of a token.

    slots: the slots.
    num_rows: N, the number of rows that are multiplied.
    device: the device of the rows.
    """
    check_tensor(
        "slot", slots.slot_N, shape=(num_rows,), dtypes=[torch.int32], device=device, contiguous=True
    )
    if slots.top_k < 1:
        raise ValueError(f"top_k ({slots.top_k}) must be at least 1")


def check_rows(name: str, rows: Tensor, shape: tuple[int | str, int | str], like: Tensor) -> None:
    """Raises ValueError unless a tensor has this shape, and the dtype and device of ``like``.

    Also raises ValueError for more than 2**31 - 1 rows, because kernels store row indices as int32.

    name: the tensor's name, for the error.
    rows: the tensor to check.
    shape: the required sizes; a string stands for any size.
    like: a tensor with the required dtype and device.
    """
    check_tensor(name, rows, shape=shape, dtypes=[like.dtype], device=like.device)
    if rows.shape[0] > MAX_ROWS:
        raise ValueError(f"{name} of {rows.shape[0]} rows must have at most {MAX_ROWS}: positions are int32")


def hidden_width(num_hidden: int, activation: str) -> int:
    """Returns H, the number of columns of an expert's hidden activation after the nonlinearity.

    num_hidden: number of rows of each expert's first weight: H, or 2H for "swiglu".

    Raises ValueError if num_hidden is odd with "swiglu".
    """
    if activation != "swiglu":
        return num_hidden
    if num_hidden % 2:
        raise ValueError(
            f"weight has {num_hidden} rows for each expert: swiglu needs an even number, two halves"
        )
    return num_hidden // 2


def weight_gradient_shape(
    grad: Tensor, rows: Tensor, ends_E: Tensor, slots: RowSlots | None = None
) -> tuple[int, int, int]:
    """Checks the operands of a weight's gradient, and returns the weight's shape (E, O, I).

    grad: (N, O), gradient of the product, N rows sorted by expert.
    rows: (N, I), the product's rows; the tokens, (T, I), if there are slots.
    ends_E: (E,) int32, for each of E experts the index behind its last row.
    slots: for each row, the index of its (token, choice) pair, if rows are gathered from tokens; else None.

    Raises ValueError if an operand does not fit the others.
    """
    check_rows("grad", grad, ("rows", "O"), rows)
    check_rows("rows", rows, ("rows", "I"), grad)
    if slots is not None:
        check_slots(slots, grad.shape[0], rows.device)
    elif grad.shape[0] != rows.shape[0]:
        raise ValueError(f"grad of {grad.shape[0]} rows must have as many as rows ({rows.shape[0]})")
    check_tensor("ends", ends_E, shape=("E",), dtypes=[torch.int32], device=rows.device, contiguous=True)
    return ends_E.numel(), grad.shape[1], rows.shape[1]
