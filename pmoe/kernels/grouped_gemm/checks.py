"""Which rows a grouped product takes, and what its operands must be. Every check raises ValueError."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pmoe.kernels.operands import MAX_ROWS, check_floating, check_tensor


class RowSlots(NamedTuple):
    """Which slot each of N rows is; slot s is of token s // top_k. Weights of rows are then by slot, (T*K,).

    slot_N: (N,) int32, below T*K.
    """

    slot_N: Tensor
    top_k: int


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
    """N, the number of rows. columns: which of the weight's dimensions the rows have as columns."""
    check_tensor("weight", weight, shape=("E", "O", "I"))
    check_floating("weight", weight)
    check_tensor("rows", rows, shape=("rows", "columns"))
    if gathered and slots is None:
        raise ValueError("gathered (True) must be False without slots: they say which rows to gather")
    num_rows = slots.slot_N.numel() if gathered and slots is not None else rows.shape[0]
    check_rows("rows", rows, ("rows", weight.shape[columns]), weight)
    check_places = partial(check_tensor, dtypes=[torch.int32], device=rows.device, contiguous=True)
    check_places("ends", ends, shape=weight.shape[:1])
    if slots is not None:
        check_places("slot", slots.slot_N, shape=(num_rows,))
        if slots.top_k < 1:
            raise ValueError(f"top_k ({slots.top_k}) must be at least 1")
    if bias is not None:
        check_tensor("bias", bias, shape=weight.shape[:2], dtypes=[weight.dtype], device=weight.device)
    if scale is not None:
        # By slot where there are slots: one for every slot of the tokens, or for N at least.
        check_tensor("scale", scale, shape=("N",), device=rows.device)
        check_floating("scale", scale)
        count = rows.shape[0] * slots.top_k if slots is not None and gathered else num_rows
        fits = scale.numel() >= count if slots is not None and not gathered else scale.numel() == count
        if not fits:
            raise ValueError(f"scale of shape {tuple(scale.shape)} must have the shape ({count},)")
    return num_rows


def check_rows(name: str, rows: Tensor, shape: tuple[int | str, int | str], like: Tensor) -> None:
    """Rows of the type and on the device of ``like``, at most 2**31 - 1 of them."""
    check_tensor(name, rows, shape=shape, dtypes=[like.dtype], device=like.device)
    if rows.shape[0] > MAX_ROWS:
        raise ValueError(f"{name} of {rows.shape[0]} rows must have at most {MAX_ROWS}: places are int32")


def hidden_width(num_hidden: int, activation: str) -> int:
    """H of w1's H or 2H rows."""
    if activation != "swiglu":
        return num_hidden
    if num_hidden % 2:
        raise ValueError(f"weight of {num_hidden} rows an expert must have an even number for swiglu")
    return num_hidden // 2


def weight_gradient_shape(grad: Tensor, rows: Tensor, ends_E: Tensor) -> tuple[int, int, int]:
    """(E, O, I), of checked operands."""
    check_rows("grad", grad, ("rows", "O"), rows)
    check_rows("rows", rows, ("rows", "I"), grad)
    if grad.shape[0] != rows.shape[0]:
        raise ValueError(f"grad of {grad.shape[0]} rows must have as many as rows ({rows.shape[0]})")
    check_tensor("ends", ends_E, shape=("E",), dtypes=[torch.int32], device=rows.device, contiguous=True)
    return ends_E.numel(), grad.shape[1], rows.shape[1]
