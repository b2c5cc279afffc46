"""Permute and unpermute as ``torch.library`` operators; each computes the other's gradient.

`move` launches the kernels of cuda/permute into given tensors, without the cost of a custom operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.operands import (
    VECTOR_BYTES,
    address,
    check_floating,
    check_memory,
    check_tensor,
    strides_fit,
)
from pmoe.kernels.permute import reference
from pmoe.warn import warn_once

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of the dtypes that the kernels move: `RowType` of cuda/permute/launch.h."""

MAX_CHOICES = 256
"""The most choices of a token: kMostChoices of cuda/permute/kernel.cuh."""

PARTS = 0
"""Thread groups that share a token; 0 leaves it to cuda/permute/layout.h. Benchmarks set it."""


def refusal(device: torch.device, dtype: torch.dtype, top_k: int) -> str | None:
    """Returns why the kernels would not move rows of this dtype on this device; None if they would.

    top_k: choices of a token.
    """
    if dtype not in TYPES:
        return f"dtype {dtype}: the kernels move {', '.join(map(str, TYPES))}"
    if top_k > MAX_CHOICES:
        return f"top_k ({top_k}): the kernels take {MAX_CHOICES} choices a token at most"
    return extension.path(device)[1]


def move(
    kernel: str,
    position_TK: Tensor,
    weight_TK: Tensor | None,
    num_rows: int,
    d_weight_TK: Tensor | None = None,
    **rows: Tensor,
) -> None:
    """Launches one kernel. It writes the last of ``rows``, and d_weight if it computes gradients:

        permute(x, rows)                       rows[position] = weight * x
        unpermute(rows, y)                     y = sum over k of weight * rows[position]
        permute_backward(x, d_rows, d_x)       d_x = sum over k of weight * d_rows[position]
                                               d_weight = <x, d_rows[position]>
        unpermute_backward(d_y, rows, d_rows)  d_rows[position] = weight * d_y
                                               d_weight = <d_y, rows[position]>

    Rows that no slot names are left alone. d_weight is 0 for dropped slots. Without any slot or column
    everything that the kernel writes is 0.

    kernel: one of the four names.
    position_TK: (T, K) int32. weight_TK, d_weight_TK: (T, K) float32.
    rows: operands by name. Names that end with "rows" are routed rows, (num_rows, M); the others are by
        token, (T, M).
    """
    first, *_, last = rows.values()
    check_slots_memory(position_TK, weight=weight_TK, d_weight=d_weight_TK)
    check_rows_memory(**rows)
    tokens, top_k = position_TK.shape
    for name, tensor in rows.items():
        shape = (num_rows if name.endswith("rows") else tokens, first.shape[1])
        check_tensor(name, tensor, shape=shape, dtypes=[first.dtype], device=position_TK.device)
    check_tensor("rows", first, dtypes=TYPES)
    size = first.element_size()
    row_bytes = first.shape[1] * size
    written = [] if d_weight_TK is None else [d_weight_TK]
    if not tokens or not top_k or not row_bytes:  # nothing to launch; sums over no rows are 0
        for tensor in (last, *written):
            tensor.zero_()
        return
    moving = extension.module().Moving(
        first.device.index,
        torch.cuda.current_stream(first.device).cuda_stream,
        TYPES[first.dtype],
        tokens,
        top_k,
        num_rows,
        row_bytes,
        position_TK.data_ptr(),
        address(weight_TK),
        PARTS,
    )
    places = [number for tensor in rows.values() for number in (tensor.data_ptr(), tensor.stride(0) * size)]
    getattr(extension.module(), kernel)(moving, *places, *map(address, written))


# ---- checks on rows, positions and weights. Each raises ValueError


def check_given(
    position_TK: Tensor, weight_TK: Tensor | None, num_rows: int | None = None, **rows: Tensor
) -> None:
    """Checks shapes, dtypes and devices; the first of ``rows`` says the columns and dtype of the others.

    rows: as for `move`.
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


# ---- checks on memory, as the kernels read and write it


def check_slots_memory(position_TK: Tensor, **weights: Tensor | None) -> None:
    """Checks that positions are contiguous int32, and weights contiguous float32 of the same shape."""
    check_tensor("position", position_TK, dtypes=[torch.int32], contiguous=True)
    for name, weight in weights.items():
        if weight is not None:
            check_tensor(name, weight, shape=position_TK.shape, dtypes=[torch.float32], contiguous=True)


def check_rows_memory(**rows: Tensor) -> None:
    """Checks that each row is a multiple of 16 bytes, and that kernels can read the rows' memory."""
    for name, tensor in rows.items():
        columns = tensor.shape[1]
        size = tensor.element_size()
        if columns * size % VECTOR_BYTES:
            raise ValueError(
                f"{name}: a row's bytes ({columns} x {size} = {columns * size}) must be a multiple of "
                f"{VECTOR_BYTES}"
            )
    check_memory(rows=rows)


# ---- operators


def permute(x_TM: Tensor, position_TK: Tensor, num_rows: int, weight_TK: Tensor | None = None) -> Tensor:
    """Returns rows (N, M) with rows[position[t, k]] = weight[t, k] * x[t], rounded once.

    x_TM: (T, M). On CUDA a row's bytes, the address and the row stride must be multiples of 16, and columns
        adjacent. Strides may exceed 2**31.
    position_TK: (T, K) int32, contiguous. On the CPU int64 and other strides are allowed too.
    num_rows: N.
    weight_TK: (T, K) float32, contiguous on CUDA; float64 with float64 rows. None copies x[t] bit by bit.

    Gradients are those of x and weight. Raises ValueError, naming the tensor and the number, before any
    launch.

    Example: x = [[1], [2]], position = [[1, 0], [2, 5]], num_rows = 3 -> [[1], [1], [2]]; slot (1, 1) is
        dropped.
    """
    rows: Tensor = _permute(x_TM, position_TK, num_rows, weight_TK)
    return rows


def unpermute(rows_NM: Tensor, position_TK: Tensor, weight_TK: Tensor | None = None) -> Tensor:
    """Returns y (T, M) with y[t] = sum over k of weight[t, k] * rows[position[t, k]], in the order of k.

    A token whose slots are all dropped gets 0. Gradients are those of rows and weight. Operands and errors
    are as in `permute`.

    Example: rows = [[1], [10], [99]], position = [[1, 0], [2, 3]], weight = [[2, 3], [4, 5]] -> [[23], [396]]
    """
    y: Tensor = _unpermute(rows_NM, position_TK, weight_TK)
    return y


def _runs_kernel(name: str, position: Tensor, weight: Tensor | None, **rows: Tensor) -> bool:
    """Returns whether the kernels run; warns once why not.

    Memory that kernels could not read raises ValueError in either case, so that a script fails
    with the same error everywhere.
    """
    first = next(iter(rows.values()))
    reason = refusal(first.device, first.dtype, position.shape[1])
    if reason is None:
        return True
    if first.dtype in TYPES:
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
    move("permute", position, weight, num_rows, x=x, rows=rows)
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
    move("unpermute", position, weight, rows.shape[0], rows=rows, y=y)
    return y


@_unpermute.register_fake
def _(rows: Tensor, position: Tensor, weight: Tensor | None) -> Tensor:
    check_given(position, weight, rows=rows)
    return rows.new_empty(position.shape[0], rows.shape[1])


@torch.library.custom_op("pmoe::permute_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _permute_backward(d_rows: Tensor, x: Tensor, position: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (d_x, d_weight) in one pass over d_rows."""
    check_given(position, weight, d_rows=d_rows, x=x)
    if not (x.is_cuda and _runs_kernel("permute_backward", position, weight, x=x, d_rows=d_rows)):
        d_weight = reference.dots(x, d_rows, position, weight)
        return reference.unpermute(d_rows, position, weight), d_weight
    d_x = x.new_empty(x.shape)
    d_weight = weight.new_empty(weight.shape)
    moved = {"x": x, "d_rows": d_rows, "d_x": d_x}
    move("permute_backward", position, weight, d_rows.shape[0], d_weight, **moved)
    return d_x, d_weight


@torch.library.custom_op("pmoe::unpermute_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _unpermute_backward(d_y: Tensor, rows: Tensor, position: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (d_rows, d_weight) in one pass over rows."""
    check_given(position, weight, rows=rows, d_y=d_y)
    if not (rows.is_cuda and _runs_kernel("unpermute_backward", position, weight, d_y=d_y, rows=rows)):
        d_rows = reference.permute(d_y, position, rows.shape[0], weight)
        return d_rows, reference.dots(d_y, rows, position, weight)
    d_rows = rows.new_empty(rows.shape)
    d_weight = weight.new_empty(weight.shape)
    moved = {"d_y": d_y, "rows": rows, "d_rows": d_rows}
    move("unpermute_backward", position, weight, rows.shape[0], d_weight, **moved)
    return d_rows, d_weight


@_permute_backward.register_fake
@_unpermute_backward.register_fake
def _(grad: Tensor, given: Tensor, position: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return given.new_empty(given.shape), weight.new_empty(weight.shape)


# ---- autograd: one launch computes the gradients of rows and weights, if those of weights are needed


def _readable(grad: Tensor) -> Tensor:
    """Returns an incoming gradient in a layout that kernels read; autograd may pass an expanded tensor."""
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
