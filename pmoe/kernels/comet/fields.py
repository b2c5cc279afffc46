"""Fields of a launch: addresses and sizes of a journey, and of where rows leave and arrive.

Each function raises ValueError, naming the tensor, for what the kernels would not read right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.kernels.comet.launcher import DivisionPoint, HeapView
from pmoe.kernels.comet.steps import Journey
from pmoe.kernels.operands import check_memory, check_tensor

MAX_CHUNKS = 64
"""Of columns, as in cuda/comet/layout.h."""


def journey_fields(heap: HeapView, journey: Journey) -> dict[str, int]:
    """Where rows go."""
    shape, device = heap.shape, heap.device
    if journey.num_received > shape.rows:
        raise ValueError(
            f"num_received ({journey.num_received}) must be at most the heap's {shape.rows} rows"
        )
    sent = journey.slot_S.shape[0]
    if journey.num_tokens is not None:
        sent = min(sent, journey.num_tokens * journey.top_k)
    if sent > shape.home_rows:
        raise ValueError(
            f"rows that may be sent ({sent}) must be at most the heap's home_rows ({shape.home_rows})"
        )
    sizes = (shape.num_ranks, shape.experts)
    check_tensor("send_WE", journey.send_WE, shape=sizes)
    for name in ("expert_TK", "position_TK", "slot_S", "send_WE"):
        check_tensor(name, getattr(journey, name), dtypes=[torch.int32], device=device, contiguous=True)
    recv_WE = journey.recv_WE
    check_tensor("recv_WE", recv_WE, dtypes=[torch.int32], device=device)
    if recv_WE.stride(1) != 1:
        raise ValueError(f"recv_WE of strides {recv_WE.stride()} must have a rank's counts side by side")
    return {
        "send_counts": journey.send_WE.data_ptr(),
        "recv_counts": recv_WE.data_ptr(),
        "recv_stride": recv_WE.stride(0),
        "expert": journey.expert_TK.data_ptr(),
        "position": journey.position_TK.data_ptr(),
        "slot": journey.slot_S.data_ptr(),
        "first_row": journey.first_row,
        "top_k": journey.top_k,
        "computes": 1,
    }


def dispatch_fields(heap: HeapView, journey: Journey, source_TM: Tensor, weight_TK: Tensor) -> dict[str, int]:
    """Rows of tokens leave, and arrive as A of the product."""
    shape = heap.shape
    wanted = (journey.expert_TK.shape[0], shape.d_model)
    check_tensor("rows", source_TM, shape=wanted, dtypes=[shape.dtype], device=heap.device)
    check_memory(dense={"rows": source_TM})
    check_tensor(
        "weight", weight_TK, shape=journey.expert_TK.shape, dtypes=[torch.float32], device=heap.device,
        contiguous=True,
    )  # fmt: skip
    places = shape.places
    return {
        **journey_fields(heap, journey),
        "source": source_TM.data_ptr(),
        "source_stride": shape.row_bytes,
        "weight": weight_TK.data_ptr(),
        "a": heap.base + places["inbox"],
        "a_rows": max(shape.rows, 1),  # a heap without rows has an address, a missing a has none
        "a_stride": shape.d_model,
        "row_weight": heap.base + places["weights"],
        "k": shape.d_model,
    }


def combine_fields(
    heap: HeapView, journey: Journey, a: Tensor, result_TM: Tensor, *, chunk_columns: int
) -> dict[str, int]:
    """Products of A's rows are written where dispatched rows lay, summed, and sent to their tokens."""
    shape = heap.shape
    check_tensor("rows", a, dtypes=[shape.dtype], device=heap.device)
    check_memory(dense={"rows": a, "result": result_TM})
    return {
        **journey_fields(heap, journey),
        "a": a.data_ptr(),
        "a_rows": a.shape[0],
        "a_stride": a.shape[1],
        "rows": a.shape[0],
        "d": heap.base + shape.places["inbox"],
        "d_stride": shape.d_model,
        "n": shape.d_model,
        "k": a.shape[1],
        "columns": shape.d_model,
        "chunk_columns": chunk_columns,
        "result": result_TM.data_ptr(),
        "result_stride": shape.row_bytes,
        "first_token": journey.first_token,
        "tokens": journey.expert_TK.shape[0] if journey.num_tokens is None else journey.num_tokens,
    }


def chunk_columns(division: DivisionPoint, columns: int, tile_columns: int) -> int:
    """Columns that are sent at a time: whole tiles, and at most 64 chunks.

    Example: chunks of 200 of 600 columns, in tiles of 128 -> 256; of 1000 -> 640, all that there are.
    """
    every = -(-columns // tile_columns) * tile_columns
    min_columns = max(division.chunk_columns, -(-every // MAX_CHUNKS))
    return min(-(-min_columns // tile_columns) * tile_columns, every)


def check_expert_weight(
    name: str, weight: Tensor, bias: Tensor | None, heap: HeapView, *, columns: int
) -> tuple[int, int, int]:
    """Its shape. columns: which of its dimensions is d_model."""
    check_memory(dense={name: weight, "bias": bias})
    shape = heap.shape
    wanted: list[int | str] = [shape.experts, "columns", "columns"]
    wanted[columns] = shape.d_model
    check_tensor(name, weight, shape=wanted, dtypes=[shape.dtype], device=heap.device)
    if bias is not None:
        check_tensor("bias", bias, shape=weight.shape[:2], dtypes=[shape.dtype], device=heap.device)
    first, second, third = weight.shape
    return first, second, third
