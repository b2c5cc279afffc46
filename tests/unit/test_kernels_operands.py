"""Operands that a launch would read wrongly raise an error with their name, their value and the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pmoe.kernels.operands import check_memory, check_tensor, memory_misfit, row_stride, strides_fit

LONG = torch.zeros(512)
X = LONG[:48].view(6, 8)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"shape": (6, 7)}, r"x of shape (6, 8) must have the shape (6, 7)"),
        ({"shape": ("T",)}, r"x of shape (6, 8) must have the shape (T,)"),
        ({"shape": ("T", "M", 1)}, r"x of shape (6, 8) must have the shape (T, M, 1)"),
        ({"shape": ()}, r"x of shape (6, 8) must have the shape ()"),
        ({"dtypes": [torch.int32]}, "x of dtype torch.float32 must be torch.int32"),
        (
            {"dtypes": [torch.float16, torch.bfloat16]},
            "x of dtype torch.float32 must be torch.float16 or torch.bfloat16",
        ),
        ({"device": torch.device("meta")}, "x on cpu must be on meta, where the other operands are"),
    ],
)
def test_an_operand_that_is_not_as_asked_is_named_with_its_value(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        check_tensor("x", X, **asked)
    assert str(raised.value) == message


def test_letters_stand_for_any_size_and_what_is_not_asked_is_not_checked() -> None:
    check_tensor("x", X, shape=("T", 8), dtypes=[torch.float32], device=torch.device("cpu"), contiguous=True)
    check_tensor("x", X[:0], shape=("T", "M"))
    check_tensor("x", X.t())
    with pytest.raises(ValueError, match=r"x of shape \(8, 6\) and strides \(1, 8\) must be contiguous"):
        check_tensor("x", X.t(), contiguous=True)


@pytest.mark.parametrize(
    ("rows", "fits"),
    [
        (X, True),
        (LONG[:72].view(6, 12)[:, :8], True),
        (LONG[:60].view(6, 10)[:, :8], False),  # 40 bytes apart
        (X.t(), False),
        (X[:1].expand(6, 8), False),  # one row for all
        (LONG.as_strided((6, 8), (4, 1)), False),  # rows overlap
        (LONG.as_strided((1, 8), (3, 1)), True),  # the stride of a lone row says nothing
        (LONG.as_strided((6, 1), (4, 3)), True),  # nor that of a lone column
    ],
)
def test_rows_lie_side_by_side_and_apart_by_16_bytes(rows: Tensor, fits: bool) -> None:
    assert strides_fit(rows) is fits
    assert (memory_misfit(rows={"rows": rows}) is None) is fits


def test_memory_is_refused_for_the_first_reason() -> None:
    check_memory(rows={"rows": X, "none": None}, dense={"weight": X})
    assert memory_misfit(rows={"rows": LONG[1:49].view(6, 8)}) == (
        f"rows at address {LONG[1:].data_ptr():#x} must be aligned to 16 bytes"
    )
    assert "weight of shape (8, 6)" in str(memory_misfit(rows={"rows": X}, dense={"weight": X.t()}))
    assert memory_misfit(rows={"rows": X.t()[:0]}, dense={"weight": X.t()[:0]}) is None
    with pytest.raises(ValueError, match="of 4 bytes each must have adjacent columns"):
        check_memory(rows={"rows": X.t()})


def test_a_lone_rows_stride_is_its_columns() -> None:
    assert row_stride(LONG.as_strided((1, 8), (3, 1))) == 8
    assert row_stride(LONG[:72].view(6, 12)[:, :8]) == 12
