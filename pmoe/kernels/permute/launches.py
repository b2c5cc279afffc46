"""Launches of the permute kernels (cuda/permute) into tensors of the caller, without a torch operator.

This saves the host time that a custom operator takes. `pmoe.kernels.permute.operators` has the operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.operands import VECTOR_BYTES, address, check_memory, check_tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of the dtypes of rows that the kernels take: `RowType` of cuda/permute/launch.h."""

MAX_CHOICES = 256
"""The most choices of a token (K) that the kernels take: kMostChoices of cuda/permute/kernel.cuh."""

PARTS = 0
"""Setting for benchmarks: number of thread groups that split the columns of a token among them.

0 lets cuda/permute/layout.h choose.
"""


def refusal(device: torch.device, dtype: torch.dtype, top_k: int) -> str | None:
    """Returns why the kernels cannot permute rows of this dtype on this device; None if they can.

    top_k: number of choices of a token.
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
    """Launches one of four kernels. It writes the last tensor of its line below, and d_weight_TK if not None.

        permute(x, rows)                       rows[position] = weight * x
        unpermute(rows, y)                     y = sum over k of weight * rows[position]
        permute_backward(x, d_rows, d_x)       d_x = sum over k of weight * d_rows[position]
                                               d_weight = <x, d_rows[position]>
        unpermute_backward(d_y, rows, d_rows)  d_rows[position] = weight * d_y
                                               d_weight = <d_y, rows[position]>

    kernel: name of the kernel.
    position_TK: (T, K) int32, row of each of the K choices of T tokens. A position outside 0 .. num_rows - 1
        means that the choice is dropped.
    weight_TK: (T, K) float32, or None for 1.
    num_rows: number of rows that are sorted by expert.
    d_weight_TK: (T, K) float32, memory for the gradient of the weights, which is 0 for dropped choices; None
        if it is not needed.
    rows: the kernel's other tensors by the names above, with M columns each. If a name ends with "rows", the
        tensor has the rows that are sorted by expert, (num_rows, M); otherwise a row for each token, (T, M).

    Rows to which no position points are not written. If there are no tokens, choices or columns, everything
    that the kernel would write becomes 0.

    Raises ValueError for tensors that the kernels cannot read.
    """
    first, *_, last = rows.values()
    check_slots_memory(position_TK, weight=weight_TK, d_weight=d_weight_TK)
    check_rows_memory(**rows)
    tokens, top_k = position_TK.shape
    for name, tensor in rows.items():
        shape = (num_rows if name.endswith("rows") else tokens, first.shape[1])
        check_tensor(name, tensor, shape=shape, dtypes=[first.dtype], device=position_TK.device)
    check_tensor("rows", first, dtypes=TYPES)
    written = [] if d_weight_TK is None else [d_weight_TK]
    if not tokens or not top_k or not first.shape[1]:  # nothing to launch; sums over no rows are 0
        for tensor in (last, *written):
            tensor.zero_()
        return
    launch_move(kernel, position_TK, weight_TK, num_rows, *written, **rows)


def launch_move(
    kernel: str,
    position_TK: Tensor,
    weight_TK: Tensor | None,
    num_rows: int,
    *written: Tensor,
    **rows: Tensor,
) -> None:
    """Launches one of the kernels of `move` on tensors that have been checked and are not empty.

    kernel: name of the kernel.
    position_TK: (T, K) int32, row of each of the K choices of T tokens; outside 0 .. num_rows - 1 if dropped.
    weight_TK: (T, K) float32, or None for 1.
    num_rows: number of rows that are sorted by expert.
    written: (T, K) float32, memory for the gradient of the weights; left out if it is not needed.
    rows: the kernel's other tensors, by the names that `move` lists.
    """
    first = next(iter(rows.values()))
    tokens, top_k = position_TK.shape
    size = first.element_size()
    row_bytes = first.shape[1] * size
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
    places = []
    for tensor in rows.values():
        places += [tensor.data_ptr(), tensor.stride(0) * size]
    getattr(extension.module(), kernel)(moving, *places, *map(address, written))


# ---- checks of strides and addresses, without which the kernels would read other memory


def check_slots_memory(position_TK: Tensor, **weights: Tensor | None) -> None:
    """Raises ValueError unless kernels can read positions and weights of (token, choice) pairs.

    position_TK: must be contiguous int32, (T, K) for K choices of T tokens.
    weights: tensors by name. Each must be contiguous float32 of the same shape, or None.
    """
    check_tensor("position", position_TK, dtypes=[torch.int32], contiguous=True)
    for name, weight in weights.items():
        if weight is not None:
            check_tensor(name, weight, shape=position_TK.shape, dtypes=[torch.float32], contiguous=True)


def check_rows_memory(**rows: Tensor) -> None:
    """Raises ValueError unless kernels can read tensors (rows, columns) with their strides and addresses.

    The bytes of a row, the row stride and the address must be multiples of 16 bytes, and columns adjacent.

    rows: the tensors by name.
    """
    for name, tensor in rows.items():
        columns = tensor.shape[1]
        size = tensor.element_size()
        if columns * size % VECTOR_BYTES:
            raise ValueError(
                f"{name}: a row's bytes ({columns} x {size} = {columns * size}) must be a multiple of "
                f"{VECTOR_BYTES}"
            )
    check_memory(rows=rows)
