"""Launches of cuda/permute into given tensors, on the current stream; without a custom op's cost.

position_TK: (T, K) int32, weight_TK: (T, K) float32, both contiguous. Raises ValueError as `permute` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.operands import VECTOR_BYTES, address, check_floating, check_memory, check_tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the kernels move, by the numbers of RowType (cuda/permute/launch.h)."""

MAX_CHOICES = 256
"""Of a token: kMostChoices of cuda/permute/kernel.cuh."""

PARTS = 0
"""Warps that share a token; 0 leaves it to cuda/permute/layout.h. For benchmarks."""


def refusal(device: torch.device, dtype: torch.dtype, top_k: int) -> str | None:
    """Why the kernels do not move rows of this type, of ``top_k`` choices a token, there; None if they do."""
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
    """One kernel, which writes the last of ``rows``, and d_weight where it computes gradients.

        permute(x, rows)         rows[position] = weight * x; rows that no slot names stay as they are
        unpermute(rows, y)       y = sum over k of weight * rows[position]
        permute_backward(x, d_rows, d_x)         d_x = sum over k of weight * d_rows[position]
                                                 d_weight = <x, d_rows[position]>, 0 for dropped slots
        unpermute_backward(d_y, rows, d_rows)    d_rows[position] = weight * d_y
                                                 d_weight = <d_y, rows[position]>, 0 for dropped slots

    Where nothing moves, all that it writes is 0.

    rows: those whose name ends with "rows" are routed, (num_rows, M); the others are by token, (T, M).
    """
    first, *_, last = rows.values()
    check_slots_memory(position_TK, weight=weight_TK, d_weight=d_weight_TK)
    check_rows_memory(**rows)
    tokens, top_k = position_TK.shape
    for name, each in rows.items():
        shape = (num_rows if name.endswith("rows") else tokens, first.shape[1])
        check_tensor(name, each, shape=shape, dtypes=[first.dtype], device=position_TK.device)
    check_tensor("rows", first, dtypes=TYPES)
    size = first.element_size()
    row_bytes = first.shape[1] * size
    written = [] if d_weight_TK is None else [d_weight_TK]
    if not tokens or not top_k or not row_bytes:  # sums of nothing
        for each in (last, *written):
            each.zero_()
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
    places = [number for each in rows.values() for number in (each.data_ptr(), each.stride(0) * size)]
    getattr(extension.module(), kernel)(moving, *places, *map(address, written))


# ---- what rows, positions and weights must be. Every check raises ValueError


def check_given(
    position_TK: Tensor, weight_TK: Tensor | None, num_rows: int | None = None, **rows: Tensor
) -> None:
    """rows: as for `move`. The first of them says the others' columns and type."""
    first = next(iter(rows.values()))
    check_tensor("position", position_TK, shape=("T", "K"), dtypes=[torch.int32, torch.int64])
    tokens, device = position_TK.shape[0], position_TK.device
    if weight_TK is not None:
        dtypes = dict.fromkeys([torch.float32, torch.promote_types(first.dtype, torch.float32)])
        check_tensor("weight", weight_TK, shape=position_TK.shape, dtypes=dtypes, device=device)
    for name, each in rows.items():
        shape: tuple[int | str, int | str] = (
            "rows" if name.endswith("rows") else tokens,
            "M" if each is first else first.shape[1],
        )
        check_tensor(name, each, shape=shape, device=device)
        check_floating(name, each)
        check_tensor(name, each, dtypes=[first.dtype])
    if num_rows is not None and not 0 <= num_rows <= position_TK.numel():
        raise ValueError(
            f"num_rows ({num_rows}) must be from 0 to {position_TK.numel()}, as many as there are positions"
        )


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
