"""Times products on one device, as a layer computes them: every candidate on the same random operands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pmoe.experts.products import GradientSum, RowGroups, expert_input_gradient, expert_product
from pmoe.kernels.product_request import ProductOperands, ProductRequest
from pmoe.measure.rounds import event_seconds, marked, median_seconds

WARM_UP, MIN_ROUNDS, MAX_ROUNDS, SPAN_SECONDS = 2, 3, 15, 0.03
"""How often each candidate runs before it counts; how often it counts, within about so many seconds."""

LEAD_CYCLES = 3_000_000
"""The device sleeps so long, some 2 ms, while the host enqueues what is timed: the device's time counts."""


def candidate_seconds(request: ProductRequest, names: Sequence[str]) -> list[float]:
    """Of each of these candidates the median for the product that is asked for, on the current stream.

    They take turns in rounds: a clock that changes, or a cache that fills, meets them all.
    """
    operands, groups = random_operands(request)
    runs = [partial(marked, partial(compute, name, operands, groups)) for name in names]

    def medians(rounds: int, warm_up: int = 0) -> list[float]:
        torch.cuda.synchronize(request.device)
        torch.cuda._sleep(LEAD_CYCLES)
        return [part for (part,) in median_seconds(runs, rounds, warm_up=warm_up, seconds=event_seconds)]

    with torch.cuda.device(request.device):
        span = sum(medians(1, WARM_UP - 1))
        rounds = int(SPAN_SECONDS / span) if span > 0 else MAX_ROUNDS
        return medians(min(max(rounds, MIN_ROUNDS), MAX_ROUNDS))


def free_bytes(device: torch.device) -> int:
    """What a tensor may still take: the device's own, and what torch holds without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def release_memory(device: torch.device) -> None:
    """After measuring: torch need not hold what the operands took."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()


def compute(way: str, operands: ProductOperands, groups: RowGroups) -> None:
    """One product as a layer computes it, the result in its place."""
    form, first, second, experts, bias, out = operands
    if form == "forward":
        expert_product(first, second, groups, bias, out, way=way)
    elif form == "input":
        expert_input_gradient(first, second, groups, out, way)
    else:
        like = first.new_empty(1).expand(experts, first.shape[1], second.shape[1])
        GradientSum(like, 1).add_weight(first, second, groups, way)


def random_operands(request: ProductRequest) -> tuple[ProductOperands, RowGroups]:
    """Rows spread evenly over all experts but one, which has none. The caller's random numbers stay."""
    device, experts, rows = request.device, request.experts, request.rows
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=request.dtype, device=device, generator=generator)

    busy = max(experts - 1, 1)
    counts = [rows // busy + (i < rows % busy) for i in range(busy)] + [0] * (experts - busy)
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    groups, form = RowGroups(counts=tuple(counts), ends=ends), request.form
    num_in, num_out = request.in_features, request.out_features
    if form == "weight":
        return ProductOperands(form, random(rows, num_out), random(rows, num_in), experts), groups
    columns, result_columns = (num_in, num_out) if form == "forward" else (num_out, num_in)
    first, weight = random(rows, columns), random(experts, num_out, num_in)
    bias = random(experts, num_out) if request.bias else None
    return ProductOperands(form, first, weight, experts, bias, first.new_empty(rows, result_columns)), groups


def needed_bytes(request: ProductRequest) -> int:
    """Of operands, of a result in its place, and of one that is made elsewhere first."""
    rows, columns = request.rows, request.in_features + request.out_features
    weights = request.experts * request.in_features * request.out_features
    if request.form == "weight":
        elements = rows * columns + 2 * weights
    else:
        elements = rows * (columns + max(request.in_features, request.out_features)) + weights
    return elements * request.dtype.itemsize
