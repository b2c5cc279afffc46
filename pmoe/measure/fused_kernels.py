"""Measures divisions of fused kernels, and the fused layer beside the chunked one (COMET, Section 3.2.2).

The ranks are processes, or virtual ranks of one process that share a device: then all ranks' tokens are rows
of one tensor, rank r's from floor(r T / W) on, as `pmoe.kernels.route` cuts chunks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from pmoe.arguments import check_not_negative
from pmoe.comm.agreement import Agree, digest, largest
from pmoe.comm.heap.providers import process_heap, virtual_heaps
from pmoe.comm.ranks import Ranks
from pmoe.kernels.comet import launches
from pmoe.kernels.comet.launcher import Division, Launcher
from pmoe.kernels.comet.launches import Journey
from pmoe.kernels.heap import HeapShape
from pmoe.kernels.route import Routes, route
from pmoe.measure.division import AGREEING
from pmoe.measure.rounds import begin_together, clock_of, event_seconds, marked, median_seconds, timestamp
from pmoe.ordering.sorted import chunk_bounds
from pmoe.planner.division import (
    DivisionTable,
    Entry,
    FusedKernelSizes,
    FusedLayerSizes,
    LayerSeconds,
    all_kernel_sizes,
    candidates,
    clamped,
    rule,
)

WARM_UP, ROUNDS = 2, 7
"""How often a launch, or a layer's passes, run before they count, and how often they count."""


def journeys_of(routes: Routes, shape: HeapShape, ranks: Iterable[int]) -> list[Journey]:
    """The journeys of these ranks' rows, for a routing of all ranks' tokens with a chunk a rank."""
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


def time_division(
    kernel: FusedKernelSizes, division: Division, *, top_k: int, device: torch.device, group: Ranks
) -> float:
    """Seconds of one fused kernel with a division of its blocks: the median of some rounds.

    Rows are random and their routing is even. Collective over ``group``, whose ranks share nothing but the
    heap, or of one process for virtual ranks.

    Raises as `process_heap` and `virtual_heaps` do, and HeapError where a rank waits in vain.
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
    act, no_bias = "swiglu" if kernel.gated else "gelu", [None] * len(w1)
    hidden = partial(
        launches.dispatch_hidden, launcher, journeys, x_TM, weight_TK, w1, no_bias, activation=act, keep=True
    )
    kept, active = hidden()
    assert kept is not None
    gradient = partial(
        launches.dispatch_hidden_gradient, launcher, journeys, x_TM, weight_TK, w2, no_bias, kept,
        activation=act,
    )  # fmt: skip
    if kernel.kernel == "dispatch":
        return (lambda: None), (hidden if kernel.direction == "forward" else gradient)
    if kernel.direction == "forward":
        return hidden, partial(launches.product_combine, launcher, journeys, active, w2, no_bias)
    of_hidden, _, dots = gradient()
    return gradient, partial(launches.gradient_combine, launcher, journeys, of_hidden, w1, dots)


def _agree_among(ranks: Ranks, device: torch.device) -> Agree:
    return partial(largest, ranks, device, stage=AGREEING)


def measure_kernels(
    layers: Sequence[FusedLayerSizes], ranks: Ranks, device: torch.device, *, top_k: int
) -> DivisionTable:
    """The fused kernels of these layers with every division of a sweep, on random rows, evenly routed.

    Collective; see `sweep`. Warns about divisions that cannot be measured, and leaves them out.
    """
    seconds = partial(time_division, top_k=top_k, device=device, group=ranks)
    kernels = [kernel for each in dict.fromkeys(layers) for kernel in all_kernel_sizes(each)]
    entries = sweep(kernels, seconds, _agree_among(ranks, device))
    return DivisionTable({each.sizes: each for each in entries})


def sweep(
    kernels: Sequence[FusedKernelSizes], time: Callable[[FusedKernelSizes, Division], float], agree: Agree
) -> list[Entry]:
    """Measures every candidate division of every kernel, and the one that `rule` would take beside them.

    Collective: one reduction, and one more a kernel. time: seconds of one division on this rank, a median of
    rounds; it may be collective, since all ranks try the same divisions in the same order. Where it raises on
    one rank, the division does not count on any; that is a warning, never an exception on one rank alone. The
    slowest rank's seconds count; of equal ones those of fewer communicating blocks. Kernels without any
    measured division are left out.

    Raises ValueError on every rank where the ranks come with unlike kernels.
    """
    here = float(digest(map(str, kernels)))
    highest, minus_lowest = agree([here, -here])
    if highest != -minus_lowest:
        raise ValueError("shapes to measure must be the same on every rank, and differ")
    warned: set[str] = set()
    found = []
    for kernel in kernels:
        columns = kernel.d_model if kernel.kernel == "combine" else None
        divisions = candidates(kernel.num_blocks, columns)
        tried = sorted({clamped(each, kernel) for each in divisions} | {rule(kernel)})
        slowest = agree(
            [_seconds_or_inf(partial(time, kernel, each), f"{each} of {kernel}", warned) for each in tried]
        )
        seconds = {each: took for each, took in zip(tried, slowest, strict=True) if math.isfinite(took)}
        if seconds:
            best = min(seconds, key=lambda each: (seconds[each], each))
            found.append(Entry(sizes=kernel, division=best, seconds=seconds, when=timestamp()))
    return found


def _seconds_or_inf(time: Callable[[], float], name: str, warned: set[str]) -> float:
    """Infinite where it cannot be measured here, with one warning for each reason."""
    try:
        seconds = float(time())
        check_not_negative(seconds=seconds)
        return seconds
    except Exception as error:
        if str(error) not in warned:
            warned.add(str(error))
            warnings.warn(f"pmoe: {name} could not be measured: {error}", stacklevel=4)
        return math.inf


def time_layers(fused: nn.Module, chunked: nn.Module, x_TM: Tensor, ranks: Ranks) -> LayerSeconds:
    """Medians of both layers' passes over ``x_TM`` (T, M), on the slowest rank.

    Rounds of both alternate. Collective; clears the gradients of both.
    """
    dy_TM = torch.randn_like(x_TM)
    clock = clock_of(x_TM.device)

    def forward(layer: nn.Module) -> None:
        with torch.no_grad():
            layer(x_TM)

    def step(layer: nn.Module) -> None:
        layer.zero_grad(set_to_none=True)
        layer(x_TM.detach().requires_grad_()).backward(dy_TM)

    def seconds_of(work: Callable[[nn.Module], None], layer: nn.Module) -> tuple[float]:
        begin = clock()
        work(layer)
        return (clock() - begin,)

    runs = [partial(seconds_of, work, layer) for layer in (fused, chunked) for work in (forward, step)]
    medians = median_seconds(
        runs, ROUNDS, warm_up=WARM_UP, begin=begin_together(ranks), agree=_agree_among(ranks, x_TM.device)
    )
    for layer in (fused, chunked):
        layer.zero_grad(set_to_none=True)
    (fused_forward,), (fused_step,), (chunked_forward,), (chunked_step,) = medians
    return LayerSeconds(fused_forward, fused_step, chunked_forward, chunked_step, timestamp())
