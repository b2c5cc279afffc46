"""Permute and unpermute as ``torch.library`` operators; each is used for the other's gradient.

Most layers do not call the operators, and registering them takes time. So files that every layer needs import
`pmoe.kernels.permute.launches` instead of this file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmoe.kernels.operands import VECTOR_BYTES, check_floating, check_tensor, strides_fit
from pmoe.kernels.permute import reference
from pmoe.kernels.permute.launches import TYPES, check_rows_memory, check_slots_memory, move, refusal
from pmoe.warn import warn_of_fallback

# ---- checks on rows, positions and weights. Each raises ValueError


def check_given(
    position_TK: Tensor, weight_TK: Tensor | None, num_rows: int | None = None, **rows: Tensor
) -> None:
    """Raises ValueError unless the tensors have matching shapes, dtypes and devices.

    position_TK: (T, K) int32 or int64, the row of each of the K choices of T tokens.
    weight_TK: (T, K), float32, or float64 if the rows are float64; or None.
    num_rows: number of rows that are sorted by expert, from 0 to T * K; None checks no number.
    rows: tensors by name. All must have the dtype and the number of columns of the first tensor. Tensors with
        names that end with "rows" may have any number of rows; the other tensors must have T rows.
    """
    first = next(iter(rows.values()))
    check_tensor("position", position_TK, shape=("T", "K"), dtypes=[torch.int32, torch.int64])
    tokens = position_TK.shape[0]
    device = position_TK.device
    if weight_TK is not None:
        dtypes = dict.fromkeys([torch.float32, torch.promote_types(first.dtype, torch.float32)])
        check_tensor("weight", weight_TK, shape=position_TK.shape, dtypes=dtypes, device=device)
    for name, tensor in rows.items():
        shape: tuple[int | str, int | str] = (
            "rows" if name.endswith("rows") else tokens,
            "M" if tensor is first else first.shape[1],
        )
        check_tensor(name, tensor, shape=shape, device=device)
        check_floating(name, tensor)
        check_tensor(name, tensor, dtypes=[first.dtype])
    if num_rows is not None and not 0 <= num_rows <= position_TK.numel():
        raise ValueError(
            f"num_rows ({num_rows}) must be from 0 to {position_TK.numel()}, the number of positions"
        )


# ---- without operators: no gradients, and no dispatch by torch, which takes longer than a launch


def permute_directly(
    x_TM: Tensor, position_TK: Tensor, num_rows: int, weight_TK: Tensor | None = None
) -> Tensor:
    """Does what `permute` does, but without gradients. Shapes, dtypes and devices must have been checked.

    The arguments are those of `permute`.
    """
    if not (x_TM.is_cuda and _runs_kernel(position_TK, weight_TK, x=x_TM)):
        return reference.permute(x_TM, position_TK, num_rows, weight_TK)
    rows_NM = x_TM.new_empty(num_rows, x_TM.shape[1])
    move("permute", position_TK, weight_TK, num_rows, x=x_TM, rows=rows_NM)
    return rows_NM


def unpermute_directly(rows_NM: Tensor, position_TK: Tensor, weight_TK: Tensor | None = None) -> Tensor:
    """Does what `unpermute` does, but without gradients. Shapes, dtypes and devices must have been checked.

    The arguments are those of `unpermute`.
    """
    if not (rows_NM.is_cuda and _runs_kernel(position_TK, weight_TK, rows=rows_NM)):
        return reference.unpermute(rows_NM, position_TK, weight_TK)
    y_TM = rows_NM.new_empty(position_TK.shape[0], rows_NM.shape[1])
    move("unpermute", position_TK, weight_TK, rows_NM.shape[0], rows=rows_NM, y=y_TM)
    return y_TM


# ---- operators


def permute(x_TM: Tensor, position_TK: Tensor, num_rows: int, weight_TK: Tensor | None = None) -> Tensor:
    """Returns rows (N, M) with rows[position[t, k]] = weight[t, k] * x[t], rounded once.

    x_TM: (T, M), T tokens of M columns. On CUDA the bytes of a row, the address and the row stride must be
        multiples of 16 bytes, and the column stride must be 1. Strides may exceed 2**31.
    position_TK: (T, K) int32, contiguous, the row of each of the K choices of a token. On the CPU int64 and
        other strides are allowed, too. A position outside 0 .. N - 1 means that the choice is dropped.
    num_rows: N, the number of rows.
    weight_TK: (T, K), contiguous on CUDA: float32, or float64 if the rows are float64. None copies x[t] bit
        by bit.

    x and weight get gradients. Raises ValueError before any launch if a tensor does not meet these
    conditions. The error has the tensor's name and the wrong value.

    Example: x = [[1], [2]], position = [[1, 0], [2, 5]], num_rows = 3 -> [[1], [1], [2]]. Choice 1 of token 1
    has position 5, so it is dropped.
    """
    rows: Tensor = _permute(x_TM, position_TK, num_rows, weight_TK)
    return rows


def unpermute(rows_NM: Tensor, position_TK: Tensor, weight_TK: Tensor | None = None) -> Tensor:
    """Returns y (T, M) with y[t] = sum over k of weight[t, k] * rows[position[t, k]], in the order of k.

    rows_NM: (N, M), N rows of M columns. On CUDA the bytes of a row, the address and the row stride must be
        multiples of 16 bytes, and the column stride must be 1.
    position_TK: (T, K) int32, contiguous on CUDA, the row of each of the K choices of a token. A position
        outside 0 .. N - 1 means that the choice is dropped.
    weight_TK: (T, K), contiguous on CUDA: float32, or float64 if the rows are float64. None means 1.

    A token whose choices are all dropped gets 0. Rows and weight get gradients. Raises ValueError before any
    launch if a tensor does not meet these conditions. The error has the tensor's name and the wrong value.

    Example: rows = [[1], [10], [99]], position = [[1, 0], [2, 3]], weight = [[2, 3], [4, 5]] -> [[23], [396]]
    """
    y: Tensor = _unpermute(rows_NM, position_TK, weight_TK)
    return y


def _runs_kernel(position: Tensor, weight: Tensor | None, **rows: Tensor) -> bool:
    """Returns whether the kernels can be used; if not, warns once for each reason.

    position, weight: (T, K), row and weight of each of the K choices of T tokens.
    rows: the operator's other tensors by name.

    Raises ValueError for tensors with strides or an address that the kernels could not read. The error is
    also raised if the kernels cannot be used on this machine, so that a script raises on all machines or on
    none.
    """
    first = next(iter(rows.values()))
    reason = refusal(first.device, first.dtype, position.shape[1])
    if reason is None:
        return True
    if first.dtype in TYPES:
        check_slots_memory(position, weight=weight)
        check_rows_memory(**rows)
    warn_of_fallback("rows are copied and summed", reason)
    return False


@torch.library.custom_op("pmoe::permute", mutates_args=(), device_types=("cpu", "cuda"))
def _permute(x: Tensor, position: Tensor, num_rows: int, weight: Tensor | None) -> Tensor:
    check_given(position, weight, num_rows, x=x)
    return permute_directly(x, position, num_rows, weight)


@_permute.register_fake
def _(x: Tensor, position: Tensor, num_rows: int, weight: Tensor | None) -> Tensor:
    check_given(position, weight, num_rows, x=x)
    return x.new_empty(num_rows, x.shape[1])


@torch.library.custom_op("pmoe::unpermute", mutates_args=(), device_types=("cpu", "cuda"))
def _unpermute(rows: Tensor, position: Tensor, weight: Tensor | None) -> Tensor:
    check_given(position, weight, rows=rows)
    return unpermute_directly(rows, position, weight)


@_unpermute.register_fake
def _(rows: Tensor, position: Tensor, weight: Tensor | None) -> Tensor:
    check_given(position, weight, rows=rows)
    return rows.new_empty(position.shape[0], rows.shape[1])


@torch.library.custom_op("pmoe::permute_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _permute_backward(d_rows: Tensor, x: Tensor, position: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients (d_x, d_weight) of `permute`. The kernel reads d_rows only once.

    d_rows: (N, M), gradient of the N rows.
    x: (T, M), T tokens of M columns.
    position, weight: (T, K), for K choices of each token.
    """
    check_given(position, weight, d_rows=d_rows, x=x)
    if not (x.is_cuda and _runs_kernel(position, weight, x=x, d_rows=d_rows)):
        d_weight = reference.dots(x, d_rows, position, weight)
        return reference.unpermute(d_rows, position, weight), d_weight
    d_x = x.new_empty(x.shape)
    d_weight = weight.new_empty(weight.shape)
    moved = {"x": x, "d_rows": d_rows, "d_x": d_x}
    move("permute_backward", position, weight, d_rows.shape[0], d_weight, **moved)
    return d_x, d_weight


@torch.library.custom_op("pmoe::unpermute_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _unpermute_backward(d_y: Tensor, rows: Tensor, position: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients (d_rows, d_weight) of `unpermute`. The kernel reads rows only once.

    d_y: (T, M), gradient of the result, for T tokens of M columns.
    rows: (N, M), the N rows.
    position, weight: (T, K), for K choices of each token.
    """
    check_given(position, weight, rows=rows, d_y=d_y)
    if not (rows.is_cuda and _runs_kernel(position, weight, d_y=d_y, rows=rows)):
        d_rows = reference.permute(d_y, position, rows.shape[0], weight)
        return d_rows, reference.dots(d_y, rows, position, weight)
    d_rows = rows.new_empty(rows.shape)
    d_weight = weight.new_empty(weight.shape)
    moved = {"d_y": d_y, "rows": rows, "d_rows": d_rows}
    move("unpermute_backward", position, weight, rows.shape[0], d_weight, **moved)
    return d_rows, d_weight


@_permute_backward.register_fake
@_unpermute_backward.register_fake
def _(grad: Tensor, rows: Tensor, position: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape)


# ---- autograd. If the weights need a gradient, one launch computes the gradients of weights and rows


def _readable(grad: Tensor) -> Tensor:
    """Returns a gradient in memory that kernels can read: a copy if its strides or address do not suit.

    Autograd may pass an expanded tensor with stride 0, for example.
    """
    offset_bytes = grad.storage_offset() * grad.element_size()
    if not grad.is_cuda or (strides_fit(grad) and offset_bytes % VECTOR_BYTES == 0):
        return grad
    return grad.clone(memory_format=torch.contiguous_format)


def _save_permute(ctx: Any, inputs: tuple[Tensor, Tensor, int, Tensor | None], output: Tensor) -> None:
    x, position, _, weight = inputs
    ctx.save_for_backward(position, weight, x if ctx.needs_input_grad[3] else None)


def _differentiate_permute(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
    position, weight, x = ctx.saved_tensors
    d_rows = _readable(d_rows)
    if x is not None:
        d_x, d_weight = _permute_backward(d_rows, x, position, weight)
        return d_x, None, None, d_weight
    return _unpermute(d_rows, position, weight), None, None, None


def _save_unpermute(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    rows, position, weight = inputs
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(position, weight, rows if ctx.needs_input_grad[2] else None)


def _differentiate_unpermute(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    position, weight, rows = ctx.saved_tensors
    d_y = _readable(d_y)
    if rows is not None:
        d_rows, d_weight = _unpermute_backward(d_y, rows, position, weight)
        return d_rows, None, d_weight
    return _permute(d_y, position, ctx.num_rows, weight), None, None


_permute.register_autograd(_differentiate_permute, setup_context=_save_permute)
_unpermute.register_autograd(_differentiate_unpermute, setup_context=_save_unpermute)
