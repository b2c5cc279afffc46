"""Seconds of one launch of a fused kernel, on random experts and evenly routed rows.

The ranks are processes, or virtual ranks of one process that share a device: then all ranks' tokens are rows
of one tensor, rank r's from floor(r T / W) on, as `pmoe.kernels.route` cuts chunks.

Letters: T tokens of all ranks, K choices, W ranks, E experts of a rank, M = d_model, H = d_hidden, G = H or
2H rows of w1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.comm.heap import HeapShape, process_heap, virtual_heaps
from pmoe.comm.ranks import Ranks
from pmoe.kernels import comet
from pmoe.kernels.comet import Journey, Launcher
from pmoe.kernels.route import Routes
from pmoe.measure.rounds import event_seconds, median_seconds
from pmoe.ordering.sorted import LocalExperts, chunk_bounds, sort_rows
from pmoe.planner.division import Division, FusedKernelSizes

WARM_UP, ROUNDS = 2, 7


@dataclass(frozen=True, kw_only=True)
class FusedParameters:
    """The experts of all ranks, by rank: w1 (E, G, M), w2 (E, M, H), b1 (E, G) and b2 (E, M) or None."""

    w1: Sequence[Tensor]
    w2: Sequence[Tensor]
    b1: Sequence[Tensor | None]
    b2: Sequence[Tensor | None]
    activation: str

    @classmethod
    def random(
        cls,
        num_ranks: int,
        experts: int,
        d_model: int,
        d_hidden: int,
        activation: str,
        *,
        bias: bool,
        like: Tensor,
    ) -> FusedParameters:
        """Scaled so that hidden and output are about as large as their input. like: their type and device."""
        width = 2 * d_hidden if activation == "swiglu" else d_hidden

        def made(*shape: int) -> list[Tensor]:
            scale = shape[-1] ** -0.5
            return [
                torch.randn(shape, dtype=torch.float32, device=like.device).mul_(scale).to(like.dtype)
                for _ in range(num_ranks)
            ]

        nothing: list[Tensor | None] = [None] * num_ranks
        return cls(
            w1=made(experts, width, d_model),
            w2=made(experts, d_model, d_hidden),
            b1=made(experts, width) if bias else nothing,
            b2=made(experts, d_model) if bias else nothing,
            activation=activation,
        )


def journeys_of(routes: Routes, shape: HeapShape, ranks: Iterable[int]) -> list[Journey]:
    """The journeys of these ranks' rows, for a routing of all ranks' tokens with a chunk a rank.

    num_received is the heap's rows.
    """
    experts, top_k = shape.experts, routes.expert_TK.shape[1]
    first = chunk_bounds(routes.expert_TK.shape[0], shape.num_ranks)
    return [
        Journey(
            rank=rank,
            expert_TK=routes.expert_TK,
            position_TK=routes.position_TK,
            slot_S=routes.slot_N,
            send_WE=routes.counts_nE[rank].view(shape.num_ranks, experts),
            recv_WE=routes.counts_nE[:, rank * experts : (rank + 1) * experts],
            num_received=shape.rows,
            first_token=first[rank],
            num_tokens=first[rank + 1] - first[rank],
            first_row=first[rank] * top_k,
        )
        for rank in ranks
    ]


def routes_of(expert_TK: Tensor, keep_TK: Tensor | None, num_ranks: int, num_experts: int) -> Routes:
    """The routes that `pmoe.kernels.route` would make of choices, with weights of 1.

    expert_TK (T, K) int: of all ranks' tokens. keep_TK (T, K) bool: None keeps all. Dropped rows have
    position -1, and rows of a rank begin where they would if all were kept.
    """
    num_tokens, top_k = expert_TK.shape
    position_TK = torch.full_like(expert_TK, -1, dtype=torch.int32)
    slot_N = torch.zeros(num_tokens * top_k, dtype=torch.int32, device=expert_TK.device)
    counts = torch.zeros(num_ranks, num_experts, dtype=torch.int32, device=expert_TK.device)
    bounds = chunk_bounds(num_tokens, num_ranks)
    for rank, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        kept = torch.ones_like(expert_TK[begin:end], dtype=torch.bool)
        kept = kept if keep_TK is None else keep_TK[begin:end]
        rows = sort_rows(expert_TK[begin:end].long(), kept, 1, num_experts, LocalExperts(0, 0), 0)
        first, count = begin * top_k, int(kept.sum())
        slot_N[first : first + count] = rows.slot[:count].int() + first
        own = rows.position.view(end - begin, top_k).int() + first
        position_TK[begin:end] = own.masked_fill(~kept, -1)
        counts[rank] = expert_TK[begin:end][kept].bincount(minlength=num_experts).int()
    return Routes(
        weight_TK=torch.ones(num_tokens, top_k, device=expert_TK.device),
        expert_TK=expert_TK.int(),
        position_TK=position_TK,
        slot_N=slot_N,
        counts_nE=counts,
        ends_nE=counts.flatten().cumsum(0, dtype=torch.int32).view_as(counts),
        l_aux=torch.zeros((), device=expert_TK.device),
    )


def even_choices(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Tensor:
    """(T, K) int32: every expert as often as every other, by tokens of every rank."""
    slot = torch.arange(num_tokens * top_k, dtype=torch.int32, device=device)
    return (slot % num_experts).view(num_tokens, top_k)


# ---- timing a division point


def time_division(
    kernel: FusedKernelSizes, division: Division, *, top_k: int, device: torch.device, group: Ranks
) -> float:
    """Seconds of one fused kernel with a division of its blocks: the median of some rounds.

    Rows are random and their routing is even. Collective over ``group``, whose ranks share nothing but the
    heap, or of one process for virtual ranks.

    Raises as `pmoe.comm.heap.process_heap` and `virtual_heaps` do, and HeapError where a rank waits in vain.
    """
    dtype: torch.dtype = getattr(torch, kernel.dtype)
    ranks = kernel.num_ranks
    tokens, num_experts = max(kernel.rows // top_k, 1), ranks * kernel.experts
    like = torch.empty(0, dtype=dtype, device=device)
    sizes = HeapShape(ranks, kernel.experts, 2 * kernel.rows, kernel.rows, kernel.d_model, dtype)
    heaps = virtual_heaps(sizes, device) if kernel.virtual else [process_heap(group, sizes, device)]
    try:
        launcher = Launcher(heaps, lambda kernel, direction: division)
        routes = routes_of(even_choices(ranks * tokens, top_k, num_experts, device), None, ranks, num_experts)
        journeys = journeys_of(routes, sizes, [heap.rank for heap in heaps])
        kind = "swiglu" if kernel.gated else "gelu"
        given = FusedParameters.random(
            len(heaps), kernel.experts, kernel.d_model, kernel.d_hidden, kind, bias=False, like=like
        )
        x_TM = torch.randn(ranks * tokens, kernel.d_model, dtype=torch.float32, device=device).to(dtype)
        return _median_seconds(_pieces(kernel, launcher, journeys, given, x_TM, routes.weight_TK))
    finally:
        for heap in heaps:
            heap.close()


def _pieces(
    kernel: FusedKernelSizes,
    launcher: Launcher,
    journeys: Sequence[Journey],
    given: FusedParameters,
    x_TM: Tensor,
    weight_TK: Tensor,
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The launch before the kernel that is timed, and that kernel's."""

    def hidden() -> tuple[list[Tensor] | None, list[Tensor]]:
        return comet.dispatch_hidden(
            launcher, journeys, x_TM, weight_TK, given.w1, given.b1, activation=given.activation, keep=True
        )

    kept, active = hidden()
    assert kept is not None

    def gradient() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return comet.dispatch_hidden_gradient(
            launcher, journeys, x_TM, weight_TK, given.w2, given.b2, kept, activation=given.activation
        )

    if kernel.kernel == "dispatch":
        return (lambda: None), (hidden if kernel.direction == "forward" else gradient)
    if kernel.direction == "forward":
        return hidden, lambda: comet.product_combine(launcher, journeys, active, given.w2, given.b2)
    of_hidden, _, dots = gradient()
    return gradient, lambda: comet.gradient_combine(launcher, journeys, of_hidden, given.w1, dots)


def _median_seconds(pieces: tuple[Callable[[], object], Callable[[], object]]) -> float:
    before, timed = pieces

    def run() -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        timed()
        end.record()
        return [(start, end)]

    ((seconds,),) = median_seconds([run], ROUNDS, warm_up=WARM_UP, seconds=event_seconds)
    return seconds
