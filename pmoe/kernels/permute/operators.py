"""Permute and unpermute as ``torch.library`` operators. Each is the other's gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmoe.kernels.operands import VECTOR_BYTES, strides_fit
from pmoe.kernels.permute import launch, reference
from pmoe.kernels.permute.launch import check_given, check_rows_memory, check_slots_memory
from pmoe.warn import warn_once


def permute(x_TM: Tensor, position_TK: Tensor, num_rows: int, weight_TK: Tensor | None = None) -> Tensor:
    """rows (N, M), of x's type: rows[position[t, k]] = weight[t, k] * x[t], rounded once.

    Without weights a row is x[t] itself, bit by bit. Gradients of x and weight.

    x: (T, M). On CUDA a row's bytes, the address and the row stride are multiples of 16, and columns stand
        side by side; strides may exceed 2**31.
    position: (T, K) int32, contiguous; int64 and any strides on the CPU, too.
    weight: (T, K) float32, contiguous on CUDA; float64 is taken with float64 rows.

    Raises ValueError naming the tensor and the number, before any launch, where one of these does not hold.
    Example: x = [[1], [2]], position = [[1, 0], [2, 5]], num_rows = 3 -> [[1], [1], [2]]; slot (1, 1) is
    dropped.
    """
    rows: Tensor = _permute(x_TM, position_TK, num_rows, weight_TK)
    return rows


def unpermute(rows_NM: Tensor, position_TK: Tensor, weight_TK: Tensor | None = None) -> Tensor:
    """y (T, M), of the rows' type: y[t] = sum over k of weight[t, k] * rows[position[t, k]].

    Added in the order of k; 0 where all slots of t are dropped. Gradients of rows and weight. Tensors and
    errors as in `permute`.

    Example: rows = [[1], [10], [99]], position = [[1, 0], [2, 3]], weight = [[2, 3], [4, 5]] -> [[23], [396]]
    """
    y: Tensor = _unpermute(rows_NM, position_TK, weight_TK)
    return y


def _runs_kernel(name: str, position: Tensor, weight: Tensor | None, **rows: Tensor) -> bool:
    """Whether the kernels take this; warns once why not. Bad memory is refused in either case."""
    first = next(iter(rows.values()))
    reason = launch.refusal(first.device, first.dtype, position.shape[1])
    if reason is None:
        return True
    if first.dtype in launch.TYPES:
        check_slots_memory(position, weight=weight)
        check_rows_memory(**rows)
    warn_once(f"{name} runs as PyTorch operations: {reason}", for_each_reason=True)
    return False


@torch.library.custom_op("pmoe::permute", mutates_args=(), device_types=("cpu", "cuda"))
def _permute(x: Tensor, position: Tensor, num_rows: int, weight: Tensor | None) -> Tensor:
    check_given(position, weight, num_rows, x=x)
    if not (x.is_cuda and _runs_kernel("permute", position, weight, x=x)):
        return reference.permute(x, position, num_rows, weight)
    rows = x.new_empty(num_rows, x.shape[1])
    launch.move("permute", position, weight, num_rows, x=x, rows=rows)
    return rows


@_permute.register_fake
def _(x: Tensor, position: Tensor, num_rows: int, weight: Tensor | None) -> Tensor:
    check_given(position, weight, num_rows, x=x)
    return x.new_empty(num_rows, x.shape[1])


@torch.library.custom_op("pmoe::unpermute", mutates_args=(), device_types=("cpu", "cuda"))
def _unpermute(rows: Tensor, position: Tensor, weight: Tensor | None) -> Tensor:
    check_given(position, weight, rows=rows)
    if not (rows.is_cuda and _runs_kernel("unpermute", position, weight, rows=rows)):
        return reference.unpermute(rows, position, weight)
    y = rows.new_empty(position.shape[0], rows.shape[1])
    launch.move("unpermute", position, weight, rows.shape[0], rows=rows, y=y)
    return y


@_unpermute.register_fake
def _(rows: Tensor, position: Tensor, weight: Tensor | None) -> Tensor:
    check_given(position, weight, rows=rows)
    return rows.new_empty(position.shape[0], rows.shape[1])


@torch.library.custom_op("pmoe::permute_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _permute_backward(d_rows: Tensor, x: Tensor, position: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(d_x, d_weight) in one pass over d_rows."""
    check_given(position, weight, d_rows=d_rows, x=x)
    if not (x.is_cuda and _runs_kernel("permute_backward", position, weight, x=x, d_rows=d_rows)):
        d_weight = reference.dots(x, d_rows, position, weight)
        return reference.unpermute(d_rows, position, weight), d_weight
    d_x, d_weight = x.new_empty(x.shape), weight.new_empty(weight.shape)
    moved = {"x": x, "d_rows": d_rows, "d_x": d_x}
    launch.move("permute_backward", position, weight, d_rows.shape[0], d_weight, **moved)
    return d_x, d_weight


@torch.library.custom_op("pmoe::unpermute_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _unpermute_backward(d_y: Tensor, rows: Tensor, position: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(d_rows, d_weight) in one pass over rows."""
    check_given(position, weight, rows=rows, d_y=d_y)
    if not (rows.is_cuda and _runs_kernel("unpermute_backward", position, weight, d_y=d_y, rows=rows)):
        d_rows = reference.permute(d_y, position, rows.shape[0], weight)
        return d_rows, reference.dots(d_y, rows, position, weight)
    d_rows, d_weight = rows.new_empty(rows.shape), weight.new_empty(weight.shape)
    moved = {"d_y": d_y, "rows": rows, "d_rows": d_rows}
    launch.move("unpermute_backward", position, weight, rows.shape[0], d_weight, **moved)
    return d_rows, d_weight


@_permute_backward.register_fake
@_unpermute_backward.register_fake
def _(grad: Tensor, given: Tensor, position: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return given.new_empty(given.shape), weight.new_empty(weight.shape)


# ---- autograd: the weights' gradient comes with the rows' where it is asked for


def _readable(grad: Tensor) -> Tensor:
    """An incoming gradient, in a layout that the kernels read: autograd may hand over an expanded one."""
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
