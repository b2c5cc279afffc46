"""Measures fused kernels: how many thread blocks should communicate, and whether fusing is faster.

In a fused kernel some thread blocks send and receive rows while the others compute (COMET, Section 3.2.2).

The ranks are processes, or "virtual" ranks: several ranks in one process that share a device. With virtual
ranks the tokens of all ranks are rows of one tensor. The tokens of rank r begin at row floor(r T / W), where
T is the number of all tokens and W the number of ranks, because `pmoe.kernels.route` cuts tokens this way.
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
from pmoe.kernels.comet import operators as launches
from pmoe.kernels.comet.launcher import Division, Launcher
from pmoe.kernels.comet.operators import FusedRouting
from pmoe.kernels.heap import HeapShape
from pmoe.kernels.route import Routes, route
from pmoe.measure.block_split import AGREEING
from pmoe.measure.timing import begin_together, clock_of, event_seconds, marked, median_seconds, timestamp
from pmoe.ordering.sorted import chunk_bounds
from pmoe.planner.block_split import (
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

WARM_UP = 2
"""Number of rounds of measurement that run first and are not timed."""

ROUNDS = 7
"""Number of timed rounds of a measurement."""


def fused_routings_of(routes: Routes, shape: HeapShape, ranks: Iterable[int]) -> list[FusedRouting]:
    """Returns, for each of the given ranks, where its rows are sent and which rows it receives.

    The result has the form that the fused kernels (COMET) take.

    routes: the routing of the tokens of all ranks. Its chunk r holds the tokens of rank r.
    shape: sizes of the heap, the device memory that all ranks can write.
    ranks: the ranks for which the routing is returned.
    """
    experts = shape.experts
    top_k = routes.expert_TK.shape[1]
    first = chunk_bounds(routes.expert_TK.shape[0], shape.num_ranks)
    return [
        FusedRouting(
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
    """Returns a routing in which every expert is chosen equally often, for measurements.

    The tokens of all ranks are in one tensor, one rank after the other. The routing is cut into num_ranks
    chunks, and chunk r has the tokens of rank r. Chunks are parts of consecutive tokens here, and not
    micro-batches.

    num_tokens: number of tokens of all ranks.
    top_k: number of experts that each token chooses.
    num_experts: number of experts of all ranks.
    num_ranks: number of ranks.
    device: device of the tensors.
    """
    slot = torch.arange(num_tokens * top_k, device=device)
    expert_TK = (slot % num_experts).view(num_tokens, top_k)
    logits_TE = torch.zeros(num_tokens, num_experts, device=device).scatter_(1, expert_TK, 1.0)
    return route(logits_TE, top_k, normalize=True, num_chunks=num_ranks)


def time_division(
    kernel: FusedKernelSizes, division: Division, *, top_k: int, device: torch.device, group: Ranks
) -> float:
    """Returns the median seconds of one fused kernel with a number of communicating thread blocks.

    Rows are random and evenly routed. Collective over ``group``, unless the kernel has virtual ranks: several
    ranks in this process.

    kernel: the kernel and its sizes.
    division: number of thread blocks that communicate, and number of columns that they send at a time.
    top_k: number of experts that each token chooses.
    group: the ranks that measure together. Unused with virtual ranks.

    Raises HeapError if a rank waits too long for another one, and the errors of allocating the heap: the
    device memory that all ranks can write (`process_heap`, `virtual_heaps`).
    """
    dtype: torch.dtype = getattr(torch, kernel.dtype)
    ranks = kernel.num_ranks
    tokens = max(kernel.rows // top_k, 1)
    num_experts = ranks * kernel.experts
    sizes = HeapShape(ranks, kernel.experts, 2 * kernel.rows, kernel.rows, kernel.d_model, dtype)
    heaps = virtual_heaps(sizes, device) if kernel.virtual else [process_heap(group, sizes, device)]

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, device=device).mul_(scale).to(dtype)

    def matrices(num_out: int, num_in: int) -> list[Tensor]:  # scaled so that products stay of similar size
        return [random(kernel.experts, num_out, num_in, scale=num_in**-0.5) for _ in heaps]

    try:
        launcher = Launcher(heaps, lambda kernel, direction: division)
        routes = even_routes(ranks * tokens, top_k, num_experts, ranks, device)
        fused_routings = fused_routings_of(routes, sizes, [heap.rank for heap in heaps])
        w1 = matrices(kernel.d_hidden * (1 + kernel.gated), kernel.d_model)
        w2 = matrices(kernel.d_model, kernel.d_hidden)
        x_TM = random(ranks * tokens, kernel.d_model)
        launch_before, timed = _launches(kernel, launcher, fused_routings, w1, w2, x_TM, routes.weight_TK)

        def run() -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
            launch_before()
            return marked(timed)

        ((seconds,),) = median_seconds([run], ROUNDS, warm_up=WARM_UP, seconds=event_seconds)
        return seconds
    finally:
        for heap in heaps:
            heap.close()


def _launches(
    kernel: FusedKernelSizes,
    launcher: Launcher,
    fused_routings: Sequence[FusedRouting],
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    x_TM: Tensor,
    weight_TK: Tensor,
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns two functions: one launches the kernels that must run first, one launches the timed kernel.

    In the shapes, T is the number of tokens of all ranks, K = top_k, E the number of experts of a rank, M =
    d_model, H = d_hidden, and G = H, or 2H for SwiGLU.

    kernel: the kernel that is timed, and its sizes.
    launcher: launches kernels for the ranks of this process.
    fused_routings: for each rank of this process, where its rows are sent and which rows it receives.
    w1: (E, G, M) for each rank of this process: the first weights of its experts.
    w2: (E, M, H) for each rank of this process: the second weights of its experts.
    x_TM: (T, M), the tokens of all ranks.
    weight_TK: (T, K), the routing weights of the tokens.
    """
    act = "swiglu" if kernel.gated else "gelu"
    no_bias = [None] * len(w1)
    hidden = partial(
        launches.dispatch_hidden,
        launcher,
        fused_routings,
        x_TM,
        weight_TK,
        w1,
        no_bias,
        activation=act,
        keep=True,
    )
    kept, active = hidden()
    assert kept is not None
    gradient = partial(
        launches.dispatch_hidden_gradient, launcher, fused_routings, x_TM, weight_TK, w2, no_bias, kept,
        activation=act,
    )  # fmt: skip
    if kernel.kernel == "dispatch":
        return (lambda: None), (hidden if kernel.direction == "forward" else gradient)
    if kernel.direction == "forward":
        return hidden, partial(launches.product_combine, launcher, fused_routings, active, w2, no_bias)
    of_hidden, _, dots = gradient()
    return gradient, partial(launches.gradient_combine, launcher, fused_routings, of_hidden, w1, dots)


def _agree_among(ranks: Ranks, device: torch.device) -> Agree:
    """Returns a collective function that takes the largest of each value over the given ranks."""
    return partial(largest, ranks, device, stage=AGREEING)


def measure_kernels(
    layers: Sequence[FusedLayerSizes], ranks: Ranks, device: torch.device, *, top_k: int
) -> DivisionTable:
    """Measures every fused kernel of these layers, each with several numbers of communicating blocks.

    Rows are random and evenly routed. A kernel that cannot be measured with any number of communicating
    blocks is left out, with a warning. Collective (`sweep`).

    layers: sizes of the layers, the same on every rank.
    ranks: the ranks that measure together.
    device: the CUDA device.
    top_k: number of experts that each token chooses.
    """
    seconds = partial(time_division, top_k=top_k, device=device, group=ranks)
    kernels = [kernel for layer in dict.fromkeys(layers) for kernel in all_kernel_sizes(layer)]
    entries = sweep(kernels, seconds, _agree_among(ranks, device))
    return DivisionTable({entry.sizes: entry for entry in entries})


def sweep(
    kernels: Sequence[FusedKernelSizes], time: Callable[[FusedKernelSizes, Division], float], agree: Agree
) -> list[Entry]:
    """Measures each kernel with several numbers of communicating thread blocks, and returns the fastest.

    A division is a number of thread blocks that communicate, and a number of columns that they send at a
    time. The seconds of a division are those of the slowest rank. If divisions are equally fast, the one with
    fewer communicating blocks is chosen. A kernel for which no division could be measured is left out.

    Args:
        kernels: the kernels; the same on every rank.
        time: returns the seconds of one division on this rank. It may be collective, because all ranks try
            the same divisions in the same order.
        agree: takes the largest of each value over the ranks.

    If ``time`` raises on one rank, that rank warns, and no rank uses this division of this kernel. If
    ``time`` is collective, it must raise on all ranks or on none, since the others would wait.

    Collective: one reduction, and one more for each kernel.

    Raises ValueError on every rank if the ranks pass different kernels.
    """
    own_digest = float(digest(map(str, kernels)))
    highest, minus_lowest = agree([own_digest, -own_digest])
    if highest != -minus_lowest:
        raise ValueError("kernels to measure must be the same on every rank, but they differ")
    warned: set[str] = set()
    entries = []
    for kernel in kernels:
        columns = kernel.d_model if kernel.kernel == "combine" else None
        divisions = candidates(kernel.num_blocks, columns)
        tried = sorted({clamped(division, kernel) for division in divisions} | {rule(kernel)})
        slowest = agree(
            [
                _seconds_or_inf(partial(time, kernel, division), f"{division} of {kernel}", warned)
                for division in tried
            ]
        )
        seconds = {
            division: division_seconds
            for division, division_seconds in zip(tried, slowest, strict=True)
            if math.isfinite(division_seconds)
        }
        if seconds:
            best = min(seconds, key=lambda division: (seconds[division], division))
            entries.append(Entry(sizes=kernel, division=best, seconds=seconds, when=timestamp()))
    return entries


def _seconds_or_inf(time: Callable[[], float], name: str, warned: set[str]) -> float:
    """Returns the seconds that ``time`` measures, or infinity, with a warning, if it raises.

    A warning with the same reason is given only once.

    time: measures and returns the seconds.
    name: what is measured, for the warning.
    warned: the reasons of earlier warnings. A new reason is added.
    """
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
    """Returns the median seconds of a fused and of a chunked layer, on the slowest rank. Collective.

    Two runs of each layer are timed: a forward pass without gradients, and a step (forward and backward).
    The four runs take turns. The gradients of both layers are cleared.

    fused, chunked: the layer with fused kernels, and the layer that cuts its batch into chunks.
    x_TM: (T, M), the input of both layers: T tokens of this rank, M = d_model.
    ranks: the ranks of both layers.
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
        runs,
        ROUNDS,
        warm_up=WARM_UP,
        begin=begin_together(ranks, x_TM.device),
        agree=_agree_among(ranks, x_TM.device),
    )
    for layer in (fused, chunked):
        layer.zero_grad(set_to_none=True)
    (fused_forward,), (fused_step,), (chunked_forward,), (chunked_step,) = medians
    return LayerSeconds(fused_forward, fused_step, chunked_forward, chunked_step, timestamp())
