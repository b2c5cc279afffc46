"""Seconds of one launch of a fused kernel, on random experts and evenly routed rows.

The ranks are processes, or virtual ranks of one process that share a device: then all ranks' tokens are rows
of one tensor, rank r's from floor(r T / W) on, as `pmoe.kernels.route` cuts chunks.

Letters: T tokens of all ranks, K choices, W ranks, E experts of a rank, M = d_model, H = d_hidden, G = H or
2H rows of w1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from pmoe.comm.heap import HeapShape, process_heap, virtual_heaps
from pmoe.comm.ranks import Ranks
from pmoe.kernels import comet
from pmoe.kernels.comet import Journey, Launcher
from pmoe.kernels.route import Routes
from pmoe.measure.rounds import event_seconds, marked, median_seconds
from pmoe.ordering.sorted import LocalExperts, chunk_bounds, sort_rows
from pmoe.planner.division import Division, FusedKernelSizes

WARM_UP, ROUNDS = 2, 7


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
    if keep_TK is None:
        keep_TK = torch.ones_like(expert_TK, dtype=torch.bool)
    for rank, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        kept = keep_TK[begin:end]
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
    sizes = HeapShape(ranks, kernel.experts, 2 * kernel.rows, kernel.rows, kernel.d_model, dtype)
    heaps = virtual_heaps(sizes, device) if kernel.virtual else [process_heap(group, sizes, device)]

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, device=device).mul_(scale).to(dtype)

    def matrices(num_out: int, num_in: int) -> list[Tensor]:  # results are about as large as their operands
        return [random(kernel.experts, num_out, num_in, scale=num_in**-0.5) for _ in heaps]

    try:
        launcher = Launcher(heaps, lambda kernel, direction: division)
        routes = routes_of(even_choices(ranks * tokens, top_k, num_experts, device), None, ranks, num_experts)
        journeys = journeys_of(routes, sizes, [heap.rank for heap in heaps])
        w1 = matrices(kernel.d_hidden * (1 + kernel.gated), kernel.d_model)
        w2 = matrices(kernel.d_model, kernel.d_hidden)
        x_TM = random(ranks * tokens, kernel.d_model)
        before, timed = _launches(kernel, launcher, journeys, w1, w2, x_TM, routes.weight_TK)

        def run() -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
            before()
            return marked(timed)

        ((seconds,),) = median_seconds([run], ROUNDS, warm_up=WARM_UP, seconds=event_seconds)
        return seconds
    finally:
        for heap in heaps:
            heap.close()


def _launches(
    kernel: FusedKernelSizes,
    launcher: Launcher,
    journeys: Sequence[Journey],
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    x_TM: Tensor,
    weight_TK: Tensor,
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The launch before the kernel that is timed, and that kernel's. w1 (E, G, M), w2 (E, M, H): by rank."""
    activation, no_bias = "swiglu" if kernel.gated else "gelu", [None] * len(w1)

    def hidden() -> tuple[list[Tensor] | None, list[Tensor]]:
        return comet.dispatch_hidden(
            launcher, journeys, x_TM, weight_TK, w1, no_bias, activation=activation, keep=True
        )

    kept, active = hidden()
    assert kept is not None

    def gradient() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return comet.dispatch_hidden_gradient(
            launcher, journeys, x_TM, weight_TK, w2, no_bias, kept, activation=activation
        )

    if kernel.kernel == "dispatch":
        return (lambda: None), (hidden if kernel.direction == "forward" else gradient)
    if kernel.direction == "forward":
        return hidden, lambda: comet.product_combine(launcher, journeys, active, w2, no_bias)
    of_hidden, _, dots = gradient()
    return gradient, lambda: comet.gradient_combine(launcher, journeys, of_hidden, w1, dots)
