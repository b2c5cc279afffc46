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
from pmoe.kernels.route import Routes, route
from pmoe.measure.rounds import event_seconds, marked, median_seconds
from pmoe.ordering.sorted import chunk_bounds
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


def even_routes(
    num_tokens: int, top_k: int, num_experts: int, num_ranks: int, device: torch.device
) -> Routes:
    """Every expert as often as every other, by tokens of every rank; a chunk a rank."""
    slot = torch.arange(num_tokens * top_k, device=device)
    expert_TK = (slot % num_experts).view(num_tokens, top_k)
    logits_TE = torch.zeros(num_tokens, num_experts, device=device).scatter_(1, expert_TK, 1.0)
    return route(logits_TE, top_k, normalize=True, num_chunks=num_ranks)


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
        routes = even_routes(ranks * tokens, top_k, num_experts, ranks, device)
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
