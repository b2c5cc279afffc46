"""Rows to where their experts read them (permute), and back, summed with their weights (unpermute).

Both go by ``position_TK``: where in the routed rows the row of slot (t, k) stands. A position outside
0 .. num_rows - 1 is a dropped slot, whose row is neither read nor written. The positions in range are
distinct and cover 0 .. num_rows - 1; that is the caller's to see to, nothing checks it.

Each is a ``torch.library.custom_op`` (``torch.ops.pmoe.permute``, ...) with a fake, autograd, the kernels of
cuda/permute on CUDA, and PyTorch operations on the CPU. Where the kernels are missing or refuse (`refusal`),
the PyTorch operations run on CUDA, too, and a warning says so once. Sums are in float32 or wider, in the
order of k, and rounded once. The order of no kernel's sum depends on the number of tokens: a token gets the
same bits in any batch.

Letters: T tokens, K choices, N routed rows (num_rows), M columns.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pmoe.kernels import extension

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the kernels move, by the numbers of RowType (cuda/permute/launch.h)."""

VECTOR_BYTES = 16
MOST_CHOICES = 256
"""Of a token: kMostChoices of cuda/permute/kernel.cuh."""


def permute(x_TM: Tensor, position_TK: Tensor, num_rows: int, weight_TK: Tensor | None = None) -> Tensor:
    """rows (N, M), of x's type: rows[position[t, k]] = weight[t, k] * x[t], rounded once; x[t] itself, bit by
    bit, without weights.

    Gradients of x and weight. position: (T, K) int32, contiguous; int64 and any strides on the CPU, too.
    weight: (T, K) float32, contiguous on CUDA; float64 is taken with float64 rows. x on CUDA: a row's bytes,
    the address and the row stride are multiples of 16, columns stand side by side; strides may exceed 2**31.

    Raises ValueError naming the tensor and the number, before any launch, where one of this does not hold.
    Example: x = [[1], [2]], position = [[1, 0], [2, 5]], num_rows = 3 -> [[1], [1], [2]]; slot (1, 1) is
    dropped.
    """
    rows: Tensor = _permute(x_TM, position_TK, num_rows, weight_TK)
    return rows


def unpermute(rows_NM: Tensor, position_TK: Tensor, weight_TK: Tensor | None = None) -> Tensor:
    """y (T, M), of the rows' type: y[t] = sum of weight[t, k] * rows[position[t, k]], in the order of k; 0
    where all slots of t are dropped.

    Gradients of rows and weight. Tensors and errors as in `permute`.
    Example: rows = [[1], [10], [99]], position = [[1, 0], [2, 3]], weight = [[2, 3], [4, 5]] -> [[23], [396]]
    """
    y: Tensor = _unpermute(rows_NM, position_TK, weight_TK)
    return y


def refusal(device: torch.device, dtype: torch.dtype, top_k: int) -> str | None:
    """Why the kernels do not move rows of this type, of ``top_k`` choices a token, there; None if they do."""
    if device.type != "cuda":
        return f"device {device.type}: the kernels are for CUDA"
    if dtype not in TYPES:
        return f"dtype {dtype}: the kernels move {_listed(TYPES)}"
    if top_k > MOST_CHOICES:
        return f"top_k ({top_k}): the kernels take {MOST_CHOICES} choices a token at most"
    return _missing(device)


@cache
def _missing(device: torch.device) -> str | None:
    if extension.load() is None:
        return extension.status().reason
    found = extension.on_device(torch.cuda.current_device() if device.index is None else device.index)
    return None if found.kernels else f"device {found.index}: {found.reason}"


@cache  # once for each
def _say_plain(name: str, reason: str) -> None:
    warnings.warn(f"pmoe: {name} runs as PyTorch operations: {reason}", stacklevel=2)


def _listed(values: Any) -> str:
    return ", ".join(str(value) for value in values)


# ---- what is refused before anything runs


def _check_shapes(position_TK: Tensor, weight_TK: Tensor | None, dtype: torch.dtype) -> None:
    if position_TK.dim() != 2:
        raise ValueError(f"position must have the shape (T, K), not {tuple(position_TK.shape)}")
    if position_TK.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"position must be int32, not {position_TK.dtype}")
    if weight_TK is None:
        return
    if weight_TK.shape != position_TK.shape:
        raise ValueError(
            f"weight {tuple(weight_TK.shape)} and position {tuple(position_TK.shape)} must have equal shapes"
        )
    if weight_TK.dtype not in (torch.float32, torch.promote_types(dtype, torch.float32)):
        raise ValueError(f"weight must be float32, not {weight_TK.dtype}")


def _check_rows(name: str, rows: Tensor, position_TK: Tensor, num_rows: int | None = None) -> None:
    """num_rows: how many there must be."""
    if rows.dim() != 2 or not rows.dtype.is_floating_point:
        raise ValueError(
            f"{name} must be floating-point rows (rows, M), not {rows.dtype} {tuple(rows.shape)}"
        )
    if num_rows is not None and rows.shape[0] != num_rows:
        raise ValueError(f"{name} has {rows.shape[0]} rows, and there must be {num_rows}")
    if rows.device != position_TK.device:
        raise ValueError(
            f"{name} is on {rows.device} and position on {position_TK.device}: must be one device"
        )


def _check_alike(name: str, rows: Tensor, like_name: str, like: Tensor) -> None:
    if rows.dtype != like.dtype or rows.shape[1] != like.shape[1]:
        raise ValueError(
            f"{name} ({rows.dtype}, {rows.shape[1]} columns) and {like_name} ({like.dtype}, {like.shape[1]} "
            "columns) must be alike"
        )


def _check_weight_device(weight_TK: Tensor | None, position_TK: Tensor) -> None:
    if weight_TK is not None and weight_TK.device != position_TK.device:
        raise ValueError(
            f"weight is on {weight_TK.device} and position on {position_TK.device}: must be one device"
        )


def _check_permute(x_TM: Tensor, position_TK: Tensor, num_rows: int, weight_TK: Tensor | None) -> None:
    _check_shapes(position_TK, weight_TK, x_TM.dtype)
    _check_rows("x", x_TM, position_TK, position_TK.shape[0])
    _check_weight_device(weight_TK, position_TK)
    if not 0 <= num_rows <= position_TK.numel():
        raise ValueError(
            f"num_rows ({num_rows}) must be from 0 to {position_TK.numel()}, as many as there are positions"
        )


def _check_unpermute(rows_NM: Tensor, position_TK: Tensor, weight_TK: Tensor | None) -> None:
    _check_shapes(position_TK, weight_TK, rows_NM.dtype)
    _check_rows("rows", rows_NM, position_TK)
    _check_weight_device(weight_TK, position_TK)


def _check_backward(
    token_name: str, of_tokens_TM: Tensor, rows_name: str, rows_NM: Tensor, position: Tensor, weight: Tensor
) -> None:
    _check_shapes(position, weight, rows_NM.dtype)
    _check_rows(token_name, of_tokens_TM, position, position.shape[0])
    _check_rows(rows_name, rows_NM, position)
    _check_weight_device(weight, position)
    _check_alike(token_name, of_tokens_TM, rows_name, rows_NM)


def _check_slots_memory(position_TK: Tensor, weight_TK: Tensor | None) -> None:
    """As the kernels read them."""
    if position_TK.dtype != torch.int32:
        raise ValueError(f"position must be int32 on CUDA, not {position_TK.dtype}")
    for name, tensor in (("position", position_TK), ("weight", weight_TK)):
        if tensor is None:
            continue
        if tensor.shape != position_TK.shape:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} must be shaped as position, {(*position_TK.shape,)}"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous on CUDA; strides of {tuple(tensor.shape)} are {tensor.stride()}"
            )
    if weight_TK is not None and weight_TK.dtype != torch.float32:
        raise ValueError(f"weight must be float32 on CUDA, not {weight_TK.dtype}")


def _check_rows_memory(name: str, rows: Tensor) -> None:
    """As the kernels read and write them. Strides of a dimension with one entry say nothing."""
    count, columns = rows.shape
    size = rows.element_size()
    if columns * size % VECTOR_BYTES:
        raise ValueError(
            f"{name}: a row's bytes ({columns} x {size} = {columns * size}) must be a multiple of "
            f"{VECTOR_BYTES}"
        )
    if not rows.numel():
        return
    if columns > 1 and rows.stride(1) != 1:
        raise ValueError(f"{name}: the column stride ({rows.stride(1)}) must be 1")
    if count > 1 and (rows.stride(0) < columns or rows.stride(0) * size % VECTOR_BYTES):
        raise ValueError(
            f"{name}: the row stride ({rows.stride(0)} x {size} bytes) must be at least {columns} columns "
            f"and a multiple of {VECTOR_BYTES} bytes"
        )
    if rows.data_ptr() % VECTOR_BYTES:
        raise ValueError(f"{name}: the address ({rows.data_ptr():#x}) must be a multiple of {VECTOR_BYTES}")


# ---- launches: into given tensors, on the current stream, without the cost of a custom op


def _moving(
    position_TK: Tensor, weight_TK: Tensor | None, num_rows: int, parts: int, **rows: Tensor
) -> tuple[Any, list[int]] | None:
    """What a launch takes: what it has in common with others, and address and row stride of each of ``rows``,
    which are routed rows where they are named so, else one a token. None where there is nothing to move.
    Raises ValueError as in `permute`."""
    first = next(iter(rows.values()))
    _check_slots_memory(position_TK, weight_TK)
    for name, tensor in rows.items():
        _check_rows_memory(name, tensor)
        shape = (num_rows if name.endswith("rows") else position_TK.shape[0], first.shape[1])
        if tensor.shape != shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} must have the shape {shape}")
        if tensor.device != position_TK.device:
            raise ValueError(
                f"{name} is on {tensor.device} and position on {position_TK.device}: must be one device"
            )
        if tensor.dtype != first.dtype or tensor.dtype not in TYPES:
            raise ValueError(f"{name} is {tensor.dtype}: all rows must be one of {_listed(TYPES)}")
    tokens, top_k = position_TK.shape
    size = first.element_size()
    row_bytes = first.shape[1] * size
    if not tokens or not top_k or not row_bytes:
        return None
    module = extension.load()
    assert module is not None, "refusal() comes first"
    device = first.device
    common = module.Moving(
        device.index,
        torch.cuda.current_stream(device).cuda_stream,
        TYPES[first.dtype],
        tokens,
        top_k,
        num_rows,
        row_bytes,
        position_TK.data_ptr(),
        0 if weight_TK is None else weight_TK.data_ptr(),
        parts,
    )
    places = [number for tensor in rows.values() for number in (tensor.data_ptr(), tensor.stride(0) * size)]
    return common, places


def _launch_permute(
    x_TM: Tensor, position_TK: Tensor, weight_TK: Tensor | None, rows_NM: Tensor, *, parts: int = 0
) -> None:
    """rows[position] = weight * x. Rows that no slot names stay as they are. parts: warps that share a token,
    0 leaves it to cuda/permute/layout.h."""
    if work := _moving(position_TK, weight_TK, rows_NM.shape[0], parts, x=x_TM, rows=rows_NM):
        _module().permute(work[0], *work[1])


def _launch_unpermute(
    rows_NM: Tensor, position_TK: Tensor, weight_TK: Tensor | None, y_TM: Tensor, *, parts: int = 0
) -> None:
    """y = sum over k of weight * rows[position]."""
    if work := _moving(position_TK, weight_TK, rows_NM.shape[0], parts, rows=rows_NM, y=y_TM):
        _module().unpermute(work[0], *work[1])
    else:
        y_TM.zero_()


def _launch_permute_backward(
    d_rows_NM: Tensor,
    x_TM: Tensor,
    position_TK: Tensor,
    weight_TK: Tensor,
    d_x_TM: Tensor,
    d_weight_TK: Tensor,
    *,
    parts: int = 0,
) -> None:
    """d_x = sum over k of weight * d_rows[position], d_weight = <x, d_rows[position]>; 0 of dropped slots."""
    _check_slots_memory(position_TK, d_weight_TK)
    if work := _moving(
        position_TK, weight_TK, d_rows_NM.shape[0], parts, x=x_TM, d_rows=d_rows_NM, d_x=d_x_TM
    ):
        _module().permute_backward(work[0], *work[1], d_weight_TK.data_ptr())
    else:
        d_x_TM.zero_()
        d_weight_TK.zero_()


def _launch_unpermute_backward(
    d_y_TM: Tensor,
    rows_NM: Tensor,
    position_TK: Tensor,
    weight_TK: Tensor,
    d_rows_NM: Tensor,
    d_weight_TK: Tensor,
    *,
    parts: int = 0,
) -> None:
    """d_rows[position] = weight * d_y, d_weight = <d_y, rows[position]>, 0 for dropped slots."""
    _check_slots_memory(position_TK, d_weight_TK)
    if work := _moving(
        position_TK, weight_TK, rows_NM.shape[0], parts, d_y=d_y_TM, rows=rows_NM, d_rows=d_rows_NM
    ):
        _module().unpermute_backward(work[0], *work[1], d_weight_TK.data_ptr())
    else:
        d_weight_TK.zero_()


def _module() -> Any:
    return extension.load()


# ---- the same as PyTorch operations, on any device and without a host synchronisation


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _kept(position_T: Tensor, num_rows: int) -> Tensor:
    return (position_T >= 0) & (position_T < num_rows)


def _scaled(rows: Tensor, weight_TK: Tensor | None, k: int) -> Tensor:
    """weight[:, k] * rows in float32 or wider."""
    wide = rows.to(_wide(rows.dtype))
    return wide if weight_TK is None else wide * weight_TK[:, k : k + 1]


def _chosen(rows_NM: Tensor, position_T: Tensor) -> Tensor:
    """The row of each position, some row for a dropped one; N is not 0."""
    return rows_NM.index_select(0, position_T.long().clamp(0, rows_NM.shape[0] - 1))


def _permute_plain(x_TM: Tensor, position_TK: Tensor, num_rows: int, weight_TK: Tensor | None) -> Tensor:
    rows = x_TM.new_empty(num_rows + 1, x_TM.shape[1])  # the last is where dropped slots go
    for k, position_T in enumerate(position_TK.unbind(1)):
        into_T = torch.where(_kept(position_T, num_rows), position_T, num_rows).long()
        rows.index_copy_(0, into_T, x_TM if weight_TK is None else _scaled(x_TM, weight_TK, k).to(x_TM.dtype))
    return rows[:num_rows]


def _unpermute_plain(rows_NM: Tensor, position_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    num_rows, columns = rows_NM.shape
    y = rows_NM.new_zeros(position_TK.shape[0], columns, dtype=_wide(rows_NM.dtype))
    for k, position_T in enumerate(position_TK.unbind(1) if num_rows else ()):
        term = _scaled(_chosen(rows_NM, position_T), weight_TK, k)
        y += torch.where(_kept(position_T, num_rows).unsqueeze(1), term, 0)
    return y.to(rows_NM.dtype)


def _dots_plain(of_tokens_TM: Tensor, rows_NM: Tensor, position_TK: Tensor, like_TK: Tensor) -> Tensor:
    """<of_tokens[t], rows[position[t, k]]>, (T, K), 0 for dropped slots."""
    num_rows, wide = rows_NM.shape[0], _wide(rows_NM.dtype)
    dots = torch.zeros_like(like_TK, memory_format=torch.contiguous_format)
    for k, position_T in enumerate(position_TK.unbind(1) if num_rows else ()):
        product = of_tokens_TM.to(wide) * _chosen(rows_NM, position_T).to(wide)
        dots[:, k] = torch.where(_kept(position_T, num_rows), product.sum(1), 0)
    return dots


# ---- the operators


def _runs_kernel(name: str, position: Tensor, weight: Tensor | None, **rows: Tensor) -> bool:
    """Whether the kernels take this; a warning says once why not. Bad memory is refused in either case."""
    first = next(iter(rows.values()))
    reason = refusal(first.device, first.dtype, position.shape[1])
    if reason is None:
        return True
    if first.dtype in TYPES:
        _check_slots_memory(position, weight)
        for each, tensor in rows.items():
            _check_rows_memory(each, tensor)
    _say_plain(name, reason)
    return False


def _readable(grad: Tensor) -> Tensor:
    """An incoming gradient, in a layout that the kernels read: autograd may hand over an expanded one."""
    if not grad.is_cuda:
        return grad
    if strides_fit(grad) and grad.storage_offset() * grad.element_size() % VECTOR_BYTES == 0:
        return grad
    return grad.clone(memory_format=torch.contiguous_format)


def strides_fit(rows: Tensor) -> bool:
    """Whether kernels read rows that lie so: neighbouring columns, rows apart and on 16-byte boundaries."""
    columns_fit = rows.shape[1] <= 1 or rows.stride(1) == 1
    stride = rows.stride(0)
    apart = stride >= rows.shape[1] and stride * rows.element_size() % VECTOR_BYTES == 0
    return columns_fit and (rows.shape[0] <= 1 or apart)


@torch.library.custom_op(
    "pmoe::permute",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, Tensor position, SymInt num_rows, Tensor? weight) -> Tensor",
)
def _permute(x: Tensor, position: Tensor, num_rows: int, weight: Tensor | None) -> Tensor:
    _check_permute(x, position, num_rows, weight)
    return _permute_plain(x, position, num_rows, weight)


@_permute.register_kernel("cuda")
def _permute_cuda(x: Tensor, position: Tensor, num_rows: int, weight: Tensor | None) -> Tensor:
    _check_permute(x, position, num_rows, weight)
    if not _runs_kernel("permute", position, weight, x=x):
        return _permute_plain(x, position, num_rows, weight)
    rows = x.new_empty(num_rows, x.shape[1])
    _launch_permute(x, position, weight, rows)
    return rows


@_permute.register_fake
def _permute_fake(x: Tensor, position: Tensor, num_rows: int, weight: Tensor | None) -> Tensor:
    _check_permute(x, position, num_rows, weight)
    return x.new_empty(num_rows, x.shape[1])


@torch.library.custom_op(
    "pmoe::unpermute",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor rows, Tensor position, Tensor? weight) -> Tensor",
)
def _unpermute(rows: Tensor, position: Tensor, weight: Tensor | None) -> Tensor:
    _check_unpermute(rows, position, weight)
    return _unpermute_plain(rows, position, weight)


@_unpermute.register_kernel("cuda")
def _unpermute_cuda(rows: Tensor, position: Tensor, weight: Tensor | None) -> Tensor:
    _check_unpermute(rows, position, weight)
    if not _runs_kernel("unpermute", position, weight, rows=rows):
        return _unpermute_plain(rows, position, weight)
    y = rows.new_empty(position.shape[0], rows.shape[1])
    _launch_unpermute(rows, position, weight, y)
    return y


@_unpermute.register_fake
def _unpermute_fake(rows: Tensor, position: Tensor, weight: Tensor | None) -> Tensor:
    _check_unpermute(rows, position, weight)
    return rows.new_empty(position.shape[0], rows.shape[1])


@torch.library.custom_op(
    "pmoe::permute_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor d_rows, Tensor x, Tensor position, Tensor weight) -> (Tensor, Tensor)",
)
def _permute_backward(d_rows: Tensor, x: Tensor, position: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(d_x, d_weight) in one pass over d_rows."""
    _check_backward("x", x, "d_rows", d_rows, position, weight)
    return _unpermute_plain(d_rows, position, weight), _dots_plain(x, d_rows, position, weight)


@_permute_backward.register_kernel("cuda")
def _permute_backward_cuda(
    d_rows: Tensor, x: Tensor, position: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    _check_backward("x", x, "d_rows", d_rows, position, weight)
    if not _runs_kernel("permute_backward", position, weight, x=x, d_rows=d_rows):
        return _unpermute_plain(d_rows, position, weight), _dots_plain(x, d_rows, position, weight)
    d_x, d_weight = x.new_empty(x.shape), weight.new_empty(weight.shape)
    _launch_permute_backward(d_rows, x, position, weight, d_x, d_weight)
    return d_x, d_weight


@_permute_backward.register_fake
def _permute_backward_fake(
    d_rows: Tensor, x: Tensor, position: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    _check_backward("x", x, "d_rows", d_rows, position, weight)
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@torch.library.custom_op(
    "pmoe::unpermute_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor d_y, Tensor rows, Tensor position, Tensor weight) -> (Tensor, Tensor)",
)
def _unpermute_backward(d_y: Tensor, rows: Tensor, position: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(d_rows, d_weight) in one pass over rows."""
    _check_backward("d_y", d_y, "rows", rows, position, weight)
    d_rows = _permute_plain(d_y, position, rows.shape[0], weight)
    return d_rows, _dots_plain(d_y, rows, position, weight)


@_unpermute_backward.register_kernel("cuda")
def _unpermute_backward_cuda(
    d_y: Tensor, rows: Tensor, position: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    _check_backward("d_y", d_y, "rows", rows, position, weight)
    if not _runs_kernel("unpermute_backward", position, weight, d_y=d_y, rows=rows):
        d_rows = _permute_plain(d_y, position, rows.shape[0], weight)
        return d_rows, _dots_plain(d_y, rows, position, weight)
    d_rows, d_weight = rows.new_empty(rows.shape), weight.new_empty(weight.shape)
    _launch_unpermute_backward(d_y, rows, position, weight, d_rows, d_weight)
    return d_rows, d_weight


@_unpermute_backward.register_fake
def _unpermute_backward_fake(
    d_y: Tensor, rows: Tensor, position: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    _check_backward("d_y", d_y, "rows", rows, position, weight)
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape)


# ---- autograd: each is the other's gradient, and the weights' comes with it where it is asked for


def _keep_permute(ctx: Any, inputs: tuple[Tensor, Tensor, int, Tensor | None], output: Tensor) -> None:
    x, position, _, weight = inputs
    ctx.save_for_backward(position, weight, x if ctx.needs_input_grad[3] else None)


def _differentiate_permute(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
    position, weight, x = ctx.saved_tensors
    d_rows = _readable(d_rows)
    if x is not None:
        d_x, d_weight = _permute_backward(d_rows, x, position, weight)
        return d_x, None, None, d_weight
    return _unpermute(d_rows, position, weight), None, None, None


def _keep_unpermute(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
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


_permute.register_autograd(_differentiate_permute, setup_context=_keep_permute)
_unpermute.register_autograd(_differentiate_unpermute, setup_context=_keep_unpermute)
