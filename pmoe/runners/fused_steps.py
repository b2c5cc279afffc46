"""Finds the fused kernels for a call, COMET's or FlashDMoE's, and the heap on which they run.

A heap is memory of every rank to which all ranks of a group can write. Layers of the same sizes share a heap.
"""

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
    """The properties of a call that decide whether fused kernels can compute it.

    All fields but ``device`` are the same on every rank. A heap is memory of each rank to which all ranks can
    write.

    ranks: the ranks of the layer.
    device, dtype: device and dtype of the rows.
    d_model, d_hidden: columns of a token, and of an expert's hidden activation.
    activation: name of the experts' nonlinearity in `pmoe.kernels.grouped_gemm`.
    experts: number of experts of one rank.
    top_k: number of experts of a token.
    max_tokens: the largest number of tokens of any rank.
    max_rows: the largest number of rows that any rank receives. With a capacity factor it may be 0, which
        stands for "unknown", because the capacity then limits the rows.
    needs_grad: whether a backward pass may follow.
    slack: size of the heap in rows, as a multiple of the rows that a rank receives if routing is balanced.
    is_persistent: whether FlashDMoE's persistent kernel is asked for, and not COMET's.
    capacity_factor: capacity factor that limits the rows of one source rank for one expert; None for no
        limit.
    sends_again: whether backward may send T_DI (the dispatched rows) again, which takes one more exchange on
        the heap.
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


# Answers to two questions, on which all ranks have agreed: whether any rank refuses the kernels, and whether
# the ranks are on several nodes. The first part of a key says which question was asked.
_agreed: dict[tuple[object, ...], bool] = {}


def refusal(device: torch.device, dtype: torch.dtype, *, d_model: int, d_hidden: int) -> str | None:
    """Returns why the kernels cannot compute rows of this dtype and these sizes on this rank.

    d_model: columns of a token.
    d_hidden: columns of an expert's hidden activation.

    Returns None if they can. Ranks may get different answers. `steps_for` lets them agree: kernels are used
    only if no rank has a reason against them.
    """
    return _captures(device) or gemm.refusal(device, dtype, d_model=d_model, d_hidden=d_hidden)


def _captures(device: torch.device) -> str | None:
    """Returns why a call cannot run while a CUDA graph is captured; None if none is captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is captured: each launch has a round number, which a replay would use again"
    return None


def steps_for(request: Request) -> Steps | str:
    """Returns the fused kernels for a call, ready to run, or the reason why it cannot use any.

    Either all ranks get kernels or none does. Collective the first time for each dtype and sizes, because the
    kernels may be missing on some ranks.
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
    if key not in _agreed:  # one agreement for each key: a key is new on all ranks at the same time
        refuses = [float(why is not None)]
        (is_any,) = largest(request.ranks, device, refuses, stage="agreeing on fused kernels")
        _agreed[key] = bool(is_any)
    if _agreed[key]:
        return why or "another rank refuses the fused kernels: that rank warns of the reason"
    return _kernel_steps(request)


def _kernel_steps(request: Request) -> Steps | str:
    """Returns the kernels with the heap that all layers of these sizes share, or why there is no heap.

    A heap is memory to which all ranks can write. All ranks get the same answer: it follows from numbers that
    all ranks share, or from an error that all ranks raise.
    """
    ranks = request.ranks
    shape = heap_shape(request)
    room = room_for_rows(request)
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
    """Whether the ranks are on several nodes. Collective the first time for each group of ranks."""
    ranks = request.ranks
    key = ("nodes", ranks.name)
    if key not in _agreed:
        node_digest = float(digest([host_name()]))
        (on_one_node,) = same(ranks, request.device, [node_digest], stage="comparing the nodes of ranks")
        _agreed[key] = not on_one_node
    return _agreed[key]


def heap_shape(request: Request) -> HeapShape:
    """Returns the shape of the heap that a call needs. A heap is memory to which all ranks can write.

    The number of tokens T is rounded up to a multiple of p / 8, where p is the smallest power of two of at
    least T. So a heap is seldom replaced by a larger one. The heap's rows on each rank are

        COMET                      slack * T * top_k, but at most the rows that all ranks can send to one rank
        FlashDMoE, no capacity     COMET's number of rows in one pool, and almost one tile more for each pair
                                   of source rank and expert, because a pair's last tile may not be full
        FlashDMoE with a capacity  a range of rows (a cell) for each pair of source rank and expert, with room
                                   for the capacity or for all tokens of a rank, if these are fewer, in whole
                                   tiles

    If the capacity is so large that the cells would hold more rows than all ranks can send, a pool with room
    for all these rows is used instead.
    """
    tokens = most_tokens(request)
    room = room_for_rows(request)
    top_k = request.top_k
    ranks = request.ranks.size
    experts = request.experts
    d_model = request.d_model
    dtype = request.dtype
    if not request.is_persistent:
        return HeapShape(ranks, experts, room, tokens * top_k, d_model, dtype)
    cells = ranks * experts
    factor = request.capacity_factor
    # Whether cells share a pool follows from the capacity factor, not from numbers of rows, so that layers
    # share the heap even if their numbers of tokens differ.
    if is_pool := factor is None or factor * top_k > ranks * min(top_k, experts):
        rows = room + cells * (TILE_ROWS - 1)
    else:
        rows = min(expert_capacity(factor, tokens, top_k, cells), tokens)
    rows = max(math.ceil(rows / TILE_ROWS), 1) * TILE_ROWS
    d_hidden = request.d_hidden
    sends_again = request.sends_again
    return HeapShape(ranks, experts, rows, tokens, d_model, dtype, d_hidden, sends_again, is_pool)


def most_tokens(request: Request) -> int:
    """Returns the number of tokens for which a heap is made: T rounded up to a multiple of p / 8.

    T is the largest number of tokens of any rank, and p the smallest power of two of at least T. If p / 8 is
    below 16, T is rounded up to a multiple of 16. A heap is memory to which all ranks can write. Because of
    the rounding, the heap need not be replaced by a larger one if a later call has a few tokens more.

    Example: T = 1000 -> p = 1024, a multiple of 128 -> 1024.
    """
    step = max(bucket(request.max_tokens) // 8, 16)
    return math.ceil(request.max_tokens / step) * step


def room_for_rows(request: Request) -> int:
    """Returns the number of rows that a rank's heap must hold. A heap is memory to which all ranks can write.

        without a capacity   min(T * K * slack, R)
        with a capacity      R

    T is the number of tokens for which the heap is made (`most_tokens`), K is ``top_k``, and R the most rows
    that all ranks together can send to one rank.

    request: the call, from which the sizes are taken.
    """
    tokens = most_tokens(request)
    all_rows = tokens * min(request.top_k, request.experts) * request.ranks.size
    return (
        all_rows
        if request.capacity_factor
        else min(math.ceil(tokens * request.top_k * request.slack), all_rows)
    )


def _division(request: Request, kernel: FusedKernel, direction: PassDirection) -> Division:
    """Returns how a kernel's thread blocks are divided between communication and computation.

    All ranks get the same division.

    request: the call, from which the sizes are taken.
    kernel: name of the fused kernel.
    direction: "forward" or "backward".
    """
    return agreed(request.ranks, kernel_sizes(layer_sizes_of(request), kernel, direction), request.device)


def is_faster(request: Request) -> bool:
    """Returns whether a layer of these sizes was measured to be faster with fused kernels than without.

    Returns False if nothing was measured. All ranks get the same answer. Collective at the first call for
    each set of sizes.
    """
    if request.device.type != "cuda":
        return False
    sizes = layer_sizes_of(request)
    seconds = agreed_layer(request.ranks, sizes, request.device)
    return seconds is not None and seconds.fused_is_faster(training=request.needs_grad)


def layer_sizes_of(request: Request) -> FusedLayerSizes:
    """Returns the sizes of a call in the form in which measured times of fused layers are stored."""
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
