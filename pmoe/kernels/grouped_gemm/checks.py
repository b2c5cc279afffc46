"""Checks on the operands of grouped products, and the slots by which rows are gathered.

Every check raises ValueError.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pmoe.kernels.operands import MAX_ROWS, check_floating, check_tensor


class RowSlots(NamedTuple):
    """The slot of each of N rows. Slot s belongs to token s // top_k.

    slot_N: (N,) int32, below T*K.
    top_k: K.

    Weights of rows are then given by slot, (T*K,).
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
    """Checks the operands of a product and returns N, the number of rows.

    columns: which dimension of the weight the rows have as columns: 2 for a product, 1 for its input
        gradient.
    slots, gathered: whether rows are tokens, of which ``slots`` says which to gather.
    """
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
        # With slots the scale is by slot. If rows are gathered, it has a number for each slot of the tokens.
        # If they are in place, the number of tokens is unknown, and it must have at least N numbers.
        check_tensor("scale", scale, shape=("N",), device=rows.device)
        check_floating("scale", scale)
        count = rows.shape[0] * slots.top_k if slots is not None and gathered else num_rows
        fits = scale.numel() >= count if slots is not None and not gathered else scale.numel() == count
        if not fits:
            raise ValueError(f"scale of shape {tuple(scale.shape)} must have the shape ({count},)")
    return num_rows


def check_rows(name: str, rows: Tensor, shape: tuple[int | str, int | str], like: Tensor) -> None:
    """Raises ValueError unless rows have this shape, and the dtype and device of ``like``.

    They must be at most 2**31 - 1.
    """
    check_tensor(name, rows, shape=shape, dtypes=[like.dtype], device=like.device)
    if rows.shape[0] > MAX_ROWS:
        raise ValueError(f"{name} of {rows.shape[0]} rows must have at most {MAX_ROWS}: positions are int32")


def hidden_width(num_hidden: int, activation: str) -> int:
    """Returns H from the number of w1's rows, which is H, or 2H for swiglu."""
    if activation != "swiglu":
        return num_hidden
    if num_hidden % 2:
        raise ValueError(
            f"weight has {num_hidden} rows for each expert: swiglu needs an even number, two halves"
        )
    return num_hidden // 2


def weight_gradient_shape(grad: Tensor, rows: Tensor, ends_E: Tensor) -> tuple[int, int, int]:
    """Returns (E, O, I) after checking the operands."""
    check_rows("grad", grad, ("rows", "O"), rows)
    check_rows("rows", rows, ("rows", "I"), grad)
    if grad.shape[0] != rows.shape[0]:
        raise ValueError(f"grad of {grad.shape[0]} rows must have as many as rows ({rows.shape[0]})")
    check_tensor("ends", ends_E, shape=("E",), dtypes=[torch.int32], device=rows.device, contiguous=True)
    return ends_E.numel(), grad.shape[1], rows.shape[1]
