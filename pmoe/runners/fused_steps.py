"""Finds the fused kernels for a call, COMET's or FlashDMoE's, and the heap on which they run."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from pmoe.comm.agreement import digest, largest, same
from pmoe.comm.heap.providers import heap_for, nvshmem_heap, process_heap
from pmoe.comm.ranks import Ranks
from pmoe.gates.capacity import expert_capacity
from pmoe.kernels import gemm
from pmoe.kernels.comet.backend import Steps
from pmoe.kernels.comet.launcher import Division, FusedKernel, loading_refusal, ranks_refusal
from pmoe.kernels.flashdmoe import TILE_ROWS
from pmoe.kernels.heap import HeapError, HeapShape, host_name
from pmoe.kernels.registry import bucket
from pmoe.measure.block_split import agreed, agreed_layer, fused_layer_sizes
from pmoe.planner.block_split import FusedLayerSizes, kernel_sizes
from pmoe.schedule.tasks import PassDirection


@dataclass(frozen=True, kw_only=True)
class Request:
    """The properties of a call that decide whether fused kernels compute it.

    All but ``device`` are the same on every rank.

    device, dtype: of the rows.
    d_model, d_hidden: M and H.
    activation: as `pmoe.kernels.grouped_gemm` names it.
    experts: experts of one rank.
    top_k: K.
    max_tokens: the largest number of tokens of any rank.
    max_rows: the largest number of rows that any rank receives, if no capacity limits them.
    needs_grad: whether a backward pass may follow.
    slack: the heap's rows, as a multiple of the rows that a rank gets if routing is balanced.
    is_persistent: whether a persistent kernel is asked for.
    capacity_factor: the capacity factor of a cell of the heap; None if an expert may get more rows.
    sends_again: whether backward may send T_DI again, which takes a round of its own.
    """

    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    d_model: int
    d_hidden: int
    activation: str
    experts: int
    top_k: int
    max_tokens: int
    max_rows: int
    needs_grad: bool
    slack: float = 1.25
    is_persistent: bool = False
    capacity_factor: float | None = None
    sends_again: bool = False


_agreed: dict[tuple[object, ...], bool] = {}


def refusal(device: torch.device, dtype: torch.dtype, *, d_model: int, d_hidden: int) -> str | None:
    """Returns why the kernels do not take rows of this type and these sizes on this rank; None if they do.

    Other ranks may refuse for reasons of their own.
    """
    return _captures(device) or gemm.refusal(device, dtype, d_model=d_model, d_hidden=d_hidden)


def _captures(device: torch.device) -> str | None:
    """Returns why a call is not computed during the capture of a CUDA graph; None if none is captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is captured: each launch has a round number, which a replay would use again"
    return None


def steps_for(request: Request) -> Steps | str:
    """Returns the steps of a call, or the reason why none compute it. All ranks get steps, or none.

    Collective the first time for a type and sizes, because the kernels may be missing on some rank.
    """
    device = request.device
    dtype = request.dtype
    experts = request.experts
    if why := _captures(device):
        return why
    why = refusal(device, dtype, d_model=request.d_model, d_hidden=request.d_hidden)
    why = why or ranks_refusal(device, request.ranks.size, experts)
    why = why or loading_refusal(device, request.ranks.size)
    key = ("refused", request.ranks.name, device, dtype, request.d_model, request.d_hidden, experts)
    if key not in _agreed:  # asked once a key, which is new on all ranks at the same time
        refuses = [float(why is not None)]
        (is_any,) = largest(request.ranks, device, refuses, stage="agreeing on fused kernels")
        _agreed[key] = bool(is_any)
    if _agreed[key]:
        return why or "another rank refuses the fused kernels: that rank warns of the reason"
    return _kernel_steps(request)


def _kernel_steps(request: Request) -> Steps | str:
    """Returns the steps on the heap that all layers of this kind share, or why there is no heap.

    Refuses only for numbers that all ranks share, or for an error that all raise.
    """
    ranks = request.ranks
    shape = heap_shape(request)
    room = _room(request)
    if request.max_rows > room:
        return f"more rows arrive at a rank than its heap holds: {request.max_rows} rows, room for {room}"
    make = nvshmem_heap if _spans_nodes(request) else process_heap
    find_heap = functools.partial(heap_for, ranks, request.device, shape, make=make)
    try:
        return Steps(find_heap, lambda kernel, direction: _division(request, kernel, direction))
    except HeapError:
        raise
    except RuntimeError as error:
        return f"there is no heap: {error}"


def _spans_nodes(request: Request) -> bool:
    """Whether the ranks are on several nodes. Compared once for each group."""
    ranks = request.ranks
    key = ("nodes", ranks.name)
    if key not in _agreed:
        node_digest = float(digest([host_name()]))
        (on_one_node,) = same(ranks, request.device, [node_digest], stage="comparing the nodes of ranks")
        _agreed[key] = not on_one_node
    return _agreed[key]


def heap_shape(request: Request) -> HeapShape:
    """Returns the shape of the heap that serves a call.

    Tokens are rounded up to steps of an eighth of a power of two, so that a heap is seldom replaced.

    A heap has room for the rows of the rank with the most tokens, times the slack, at most as many as all
    ranks can send. A pool also has room for tiles that are not full, one a cell. With a capacity each cell
    holds it, in whole tiles, unless that is more than all ranks can send.
    """
    tokens = _tokens(request)
    room = _room(request)
    top_k = request.top_k
    ranks = request.ranks.size
    experts = request.experts
    d_model = request.d_model
    dtype = request.dtype
    if not request.is_persistent:
        return HeapShape(ranks, experts, room, tokens * top_k, d_model, dtype)
    cells = ranks * experts
    factor = request.capacity_factor
    # Depends on the factor, not on numbers of rows: layers share the heap even if their tokens differ.
    if is_pool := factor is None or factor * top_k > ranks * min(top_k, experts):
        rows = room + cells * (TILE_ROWS - 1)
    else:
        rows = min(expert_capacity(factor, tokens, top_k, cells), tokens)
    rows = max(math.ceil(rows / TILE_ROWS), 1) * TILE_ROWS
    d_hidden = request.d_hidden
    sends_again = request.sends_again
    return HeapShape(ranks, experts, rows, tokens, d_model, dtype, d_hidden, sends_again, is_pool)


def _tokens(request: Request) -> int:
    """Returns the largest number of tokens, rounded up."""
    step = max(bucket(request.max_tokens) // 8, 16)
    return math.ceil(request.max_tokens / step) * step


def _room(request: Request) -> int:
    """Returns the rows that may arrive at a rank; with a capacity, all rows that can be sent to it."""
    tokens = _tokens(request)
    all_rows = tokens * min(request.top_k, request.experts) * request.ranks.size
    return (
        all_rows
        if request.capacity_factor
        else min(math.ceil(tokens * request.top_k * request.slack), all_rows)
    )


def _division(request: Request, kernel: FusedKernel, direction: PassDirection) -> Division:
    """Returns how many blocks of a kernel communicate, as all ranks agreed."""
    return agreed(request.ranks, kernel_sizes(layer_sizes_of(request), kernel, direction), request.device)


def is_faster(request: Request) -> bool:
    """Whether a layer of these sizes was measured to be faster fused than in chunks.

    False if nothing was measured. The same on every rank; collective the first time for a size.
    """
    if request.device.type != "cuda":
        return False
    sizes = layer_sizes_of(request)
    seconds = agreed_layer(request.ranks, sizes, request.device)
    return seconds is not None and seconds.fused_is_faster(training=request.needs_grad)


def layer_sizes_of(request: Request) -> FusedLayerSizes:
    """Returns the sizes of a call as the keys of the tables of measured divisions and layers."""
    return fused_layer_sizes(
        request.device,
        d_model=request.d_model,
        d_hidden=request.d_hidden,
        num_experts=request.experts * request.ranks.size,
        tokens=request.max_tokens,
        top_k=request.top_k,
        num_ranks=request.ranks.size,
        gated=request.activation == "swiglu",
        dtype=request.dtype,
    )
