"""Decides whether pmoe's kernels compute a product, the same on every rank.

The kernels are checked first, once a process: see `pmoe.measure.kernel_check`. The ranks compare what their
processes know, and measure the rest together: the seconds of the slowest rank count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from functools import partial

import torch
from torch import Tensor

from pmoe.comm.agreement import Agree, digest
from pmoe.experts.products import GradientSum, RowGroups, expert_input_gradient, expert_product
from pmoe.kernels.extension import loaded_architecture
from pmoe.kernels.registry import MeasuredChoice, ProductOperands, ProductRequest, Registry
from pmoe.measure.kernel_check import KernelCase, mismatch
from pmoe.measure.rounds import event_seconds, marked, median_seconds, timestamp
from pmoe.warn import warn_once

TIE = 0.01
"""Within this part of the plain way's seconds the plain way is taken."""

UNKNOWN, UNWILLING = 0, 9
"""Codes of requests, beside 1 and 2 for the two candidates that compete. The largest wins."""


def measure_choices(
    registry: Registry, requests: Sequence[ProductRequest], agree: Agree, case: KernelCase
) -> None:
    """Has the registry know, of each request for which two candidates compete, which one is faster.

    Collective: one reduction where all ranks know the same, else up to three; between them the ranks
    measure, each what it can. What not all ranks know, or know differently, is measured on all. Nothing
    happens in deterministic mode, which must be on for all ranks or for none.

    requests: all of one device, and the same on every rank, or nothing is measured, with a warning.
    case: of the kernels that they use. Where it is wrong on any rank, the registry distrusts them on all.

    Trouble on one rank (no memory left) leaves requests unmeasured; it warns and never raises on one rank
    alone. Raises ValueError on every rank where kernels are loaded on some and the ranks' code or compute
    capability differs.
    """
    if not requests or torch.are_deterministic_algorithms_enabled():
        return
    pairs = [registry.competing(request) for request in requests]
    here, fault = loaded_architecture(requests[0].device), _fault(registry, case) if any(pairs) else None
    codes = [_code(registry, request, pair) for request, pair in zip(requests, pairs, strict=True)]
    of_requests, of_codes = digest(each.key for each in requests), digest(map(str, codes))
    facts = [*astuple(here), of_requests, of_codes, float(fault is not None)]
    lowest_facts, highest_facts = _range(facts, agree)
    if lowest_facts[:3] != highest_facts[:3] and highest_facts[0]:  # some rank has kernels
        names = ("binary version", "PTX version", "compute capability times 10")
        ranges = zip(names, lowest_facts[:3], highest_facts[:3], strict=True)
        raise ValueError(
            f"mixed architectures: the kernels of this rank ({here}) must be those of all ranks, which have "
            f"{', '.join(f'{name} {int(low)} to {int(high)}' for name, low, high in ranges)}"
        )
    if lowest_facts[3] != highest_facts[3]:
        warn_once("the ranks' experts are of unlike sizes: their products are not measured")
        return
    if highest_facts[5]:
        registry.distrust(requests[0], fault or "they compute wrongly on another rank")
        return
    low, high = (codes, codes) if lowest_facts[4] == highest_facts[4] else _range(codes, agree)
    unknown = [
        (request, pair)
        for request, pair, lowest, highest in zip(requests, pairs, low, high, strict=True)
        if pair and highest != UNWILLING and (lowest != highest or highest == UNKNOWN)
    ]
    if unknown:
        _measure_unknown(registry, unknown, agree)


def _code(registry: Registry, request: ProductRequest, pair: tuple[str, str] | None) -> int:
    if pair is None:
        return UNWILLING
    found = registry.measured.get(request)
    return 1 + pair.index(found.choice) if found and set(found.seconds) == set(pair) else UNKNOWN


def _fault(registry: Registry, case: KernelCase) -> str | None:
    """What the kernels compute wrongly here; None where they do not. Raises nothing: the others wait."""
    if case not in registry.faults:
        try:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                torch.autocast(case.device.type, enabled=False),
            ):
                registry.faults[case] = mismatch(case)
        except Exception as error:
            registry.faults[case] = f"a small case failed: {error}"
    return registry.faults[case]


def _measure_unknown(
    registry: Registry, unknown: Sequence[tuple[ProductRequest, tuple[str, str]]], agree: Agree
) -> None:
    failures: dict[ProductRequest, str] = {}
    own = [second for request, pair in unknown for second in _seconds(request, pair, failures)]
    release_memory(unknown[0][0].device)
    slowest, when = iter(agree(own)), timestamp()
    for request, (challenger, plain) in unknown:
        seconds = {challenger: next(slowest), plain: next(slowest)}
        if all(map(math.isfinite, seconds.values())):
            faster = challenger if seconds[challenger] < (1 - TIE) * seconds[plain] else plain
            registry.learn(request, MeasuredChoice(choice=faster, seconds=seconds, when=when))
        else:
            why = failures.get(request, "could not be measured on every rank")
            registry.learn_failure(request, why)


def _seconds(
    request: ProductRequest, pair: tuple[str, str], failures: dict[ProductRequest, str]
) -> list[float]:
    """Of the two, here; infinite where they cannot be measured. Raises nothing: the others wait."""
    device = request.device
    try:
        wanted, free = needed_bytes(request), free_bytes(device)
        if wanted > free // 2:
            raise MemoryError(f"{wanted} bytes are needed, and half of {free} free ones may be used")
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            return candidate_seconds(request, pair)
    except Exception as error:
        failures[request] = f"not measured: {error}"
        message = f"some products could not be measured, and pmoe's kernels do not compute them: {error}"
        warn_once(message, for_each_reason=True)
        return [math.inf, math.inf]


def _range(values: Sequence[float], agree: Agree) -> tuple[list[float], list[float]]:
    """The least and the most of each that a rank has, by one reduction."""
    found = agree([*values, *(-value for value in values)])
    return [-value for value in found[len(values) :]], found[: len(values)]


# ---- every candidate in turn, on the same random operands, as a layer computes them

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
