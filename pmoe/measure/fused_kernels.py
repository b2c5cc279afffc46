"""Measures divisions of fused kernels, and the fused layer beside the chunked one (COMET, Section 3.2.2)."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pmoe.comm.agree import Agree, digest, largest
from pmoe.comm.ranks import Ranks
from pmoe.kernels import comet, status
from pmoe.measure.division import AGREEING
from pmoe.measure.fused_timing import time_division
from pmoe.measure.rounds import begin_together, clock_of, median_seconds, timestamp
from pmoe.planner.division import (
    Division,
    FusedKernelSizes,
    FusedLayerSizes,
    all_kernel_sizes,
    candidates,
    clamped,
    rule,
)
from pmoe.planner.division_table import DivisionTable, Entry, LayerSeconds, check_seconds

WARM_UP, ROUNDS = 2, 7
"""Of a layer's passes: how often they run before they count, and how often they count."""


def _agree_among(ranks: Ranks, device: torch.device) -> Agree:
    return functools.partial(largest, ranks, device, stage=AGREEING)


def timing_refusal(device: torch.device) -> str | None:
    """Why the fused kernels cannot be timed on ``device``; None where they can."""
    found = status()
    if found.no_devices is not None:
        return found.no_devices
    if device.type != "cuda":
        return f"device ({device}) is none"
    if found.reason is not None:
        return found.reason
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= len(found.devices):
        return f"device ({device}) is not here, torch sees {len(found.devices)}"
    return found.devices[index].reason or comet.path(torch.device("cuda", index))[1]


# ---- kernels


def measure_kernels(
    layers: Sequence[FusedLayerSizes], ranks: Ranks, device: torch.device, *, top_k: int
) -> DivisionTable:
    """The fused kernels of these layers with every division of a sweep, on random rows, evenly routed.

    Collective; see `sweep`. Warns about divisions that cannot be measured, and leaves them out.
    """

    def seconds(kernel: FusedKernelSizes, division: Division) -> float:
        return time_division(kernel, division, top_k=top_k, device=device, group=ranks)

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
        tried = sorted(
            {clamped(each, kernel) for each in candidates(kernel.num_blocks, columns)} | {rule(kernel)}
        )
        slowest = agree([_seconds_or_inf(kernel, each, time, warned) for each in tried])
        seconds = {each: took for each, took in zip(tried, slowest, strict=True) if math.isfinite(took)}
        if seconds:
            best = min(seconds, key=lambda each: (seconds[each], each))
            found.append(Entry(sizes=kernel, division=best, seconds=seconds, when=timestamp()))
    return found


def _seconds_or_inf(
    kernel: FusedKernelSizes,
    division: Division,
    time: Callable[[FusedKernelSizes, Division], float],
    warned: set[str],
) -> float:
    """Infinite where it cannot be measured here, with one warning for each reason."""
    try:
        seconds = float(time(kernel, division))
        check_seconds("seconds", seconds)
        return seconds
    except Exception as error:
        if str(error) not in warned:
            warned.add(str(error))
            warnings.warn(f"pmoe: {division} of {kernel} could not be measured: {error}", stacklevel=4)
        return math.inf


# ---- layers


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

    runs = [
        functools.partial(seconds_of, work, layer) for layer in (fused, chunked) for work in (forward, step)
    ]
    medians = median_seconds(
        runs, ROUNDS, warm_up=WARM_UP, begin=begin_together(ranks), agree=_agree_among(ranks, x_TM.device)
    )
    for layer in (fused, chunked):
        layer.zero_grad(set_to_none=True)
    (fused_forward,), (fused_step,), (chunked_forward,), (chunked_step,) = medians
    return LayerSeconds(
        fused_forward=fused_forward,
        fused_step=fused_step,
        chunked_forward=chunked_forward,
        chunked_step=chunked_step,
    )
