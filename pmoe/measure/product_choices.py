"""Decides, the same on every rank, whether pmoe's kernels or plain torch compute a matrix product.

First the kernels are checked for wrong results, once in a process (`pmoe.measure.kernel_check`). Then the
ranks compare which products each of them has measured before, and measure the others together. The seconds of
the slowest rank count.
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
from pmoe.kernels.registry import TIE, MeasuredChoice, ProductOperands, ProductRequest, Registry
from pmoe.measure.kernel_check import KernelCase, mismatch
from pmoe.measure.timing import event_seconds, marked, median_seconds, timestamp
from pmoe.warn import warn_once

UNKNOWN = 0
"""Code, a number that ranks compare, of a product that this rank has not measured.

The codes 1 and 2 say which of two candidates, pmoe's kernels or plain torch, was faster.
"""

UNWILLING = 9
"""Code, a number that ranks compare, of a product that has fewer than two candidates on this rank.

pmoe's kernels, or all plain computations, refuse it. This is the largest code, so it remains in a maximum
over ranks.
"""


def measure_choices(
    registry: Registry, requests: Sequence[ProductRequest], agree: Agree, case: KernelCase
) -> None:
    """Measures for each product whether pmoe's kernels or plain PyTorch is faster. Stores the results.

    A rank may have measured a product before. Its code for the product is a number that says which candidate
    was faster then, or that the product was not measured (`_code`). The function is a collective with up to
    three reductions:

        1. facts      versions of the kernels' binary, digests of the requests and of the codes, and whether
                      the kernels computed wrongly
        2. codes      only if the digests of the codes differ between ranks
        3. seconds    of both candidates, for products that are not measured, or whose codes differ

    Nothing is done in deterministic mode, which must be on for all ranks or for none.

    Args:
        registry: the candidates; the results are stored in it.
        requests: the products, all of one device. If they differ between ranks nothing is measured, with a
            warning.
        agree: takes the largest of each value over the ranks.
        case: the case with which the kernels are checked. If the check fails on any rank, the registry
            refuses the kernels on all ranks.

    If a rank cannot measure a product, for example because it has too little memory, it warns, and the
    product stays unmeasured on all ranks. Raises ValueError on every rank if some rank has kernels, and the
    kernels' code or the compute capabilities differ between ranks.
    """
    if not requests or torch.are_deterministic_algorithms_enabled():
        return
    pairs = [registry.competing(request) for request in requests]
    architecture = loaded_architecture(requests[0].device)
    fault = _fault(registry, case) if any(pairs) else None
    codes = [_code(registry, request, pair) for request, pair in zip(requests, pairs, strict=True)]
    of_requests = digest(request.key for request in requests)
    of_codes = digest(map(str, codes))
    facts = [*astuple(architecture), of_requests, of_codes, float(fault is not None)]
    lowest_facts, highest_facts = _range(facts, agree)
    if lowest_facts[:3] != highest_facts[:3] and highest_facts[0]:  # some rank has kernels
        names = ("binary version", "PTX version", "compute capability times 10")
        ranges = zip(names, lowest_facts[:3], highest_facts[:3], strict=True)
        gpu = requests[0].device_name
        spans = ", ".join(f"{name} {int(low)} to {int(high)}" for name, low, high in ranges)
        raise ValueError(
            f"mixed architectures: the kernels of this rank's {gpu} ({architecture}) must be those of all "
            f"ranks, which have {spans}: "
            "put GPUs of one compute capability in a group, or install with PMOE_CUDA=0 on all of them"
        )
    if lowest_facts[3] != highest_facts[3]:
        warn_once("other ranks have experts of other sizes, so it is not measured which kernels are faster")
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
    """Returns a number for what this rank knows of a product, which ranks can compare by a reduction.

        1, 2        the index in ``pair``, plus 1, of the candidate that was faster when this rank measured
        UNKNOWN     this rank has not measured the product
        UNWILLING   fewer than two candidates can compute it

    registry: holds the results of measurements.
    request: the product.
    pair: names of the two candidates: pmoe's kernels and a plain computation. None if fewer can compute it.
    """
    if pair is None:
        return UNWILLING
    measured = registry.measured.get(request)
    return 1 + pair.index(measured.choice) if measured and set(measured.seconds) == set(pair) else UNKNOWN


def _fault(registry: Registry, case: KernelCase) -> str | None:
    """Checks the kernels on this rank. Returns a text about a wrong result or an error; None if all is right.

    No error is raised, because other ranks are waiting for this one.

    registry: holds earlier results of the check.
    case: the settings of the check.
    """
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
    """Measures products on all ranks and stores the results in the registry. Collective.

    unknown: the products, each with the names of the two implementations to compare.
    agree: takes the largest of each value over the ranks.
    """
    failures: dict[ProductRequest, str] = {}
    own = [second for request, pair in unknown for second in _seconds(request, pair, failures)]
    release_memory(unknown[0][0].device)
    slowest = iter(agree(own))
    when = timestamp()
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
    """Returns the seconds of both candidates on this rank; infinities if they cannot be measured.

    No error is raised, because other ranks are waiting for this one.

    request: the product.
    pair: names of the candidates: pmoe's kernels and a plain computation.
    failures: if the product cannot be measured, the reason is stored here under ``request``.
    """
    device = request.device
    try:
        needed = needed_bytes(request)
        free = free_bytes(device)
        if needed > free // 2:
            raise MemoryError(
                f"{needed} bytes are needed, but only half of the {free} free bytes may be used"
            )
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            return candidate_seconds(request, pair)
    except Exception as error:
        failures[request] = f"not measured: {error}"
        message = f"some products could not be measured, so pmoe's kernels do not compute them: {error}"
        warn_once(message, for_each_reason=True)
        return [math.inf, math.inf]


def _range(values: Sequence[float], agree: Agree) -> tuple[list[float], list[float]]:
    """Returns (the smallest, the largest) of each value over the ranks, with a single reduction.

    values: numbers of this rank.
    agree: takes the largest of each value over the ranks.
    """
    maxima = agree([*values, *(-value for value in values)])
    return [-value for value in maxima[len(values) :]], maxima[: len(values)]


# ---- timing: pmoe's kernels and a plain computation take turns on the same random operands

WARM_UP = 2
"""Number of rounds of a measurement that run first and are not timed."""

MIN_ROUNDS = 3
"""Smallest number of timed rounds."""

MAX_ROUNDS = 15
"""Largest number of timed rounds."""

SPAN_SECONDS = 0.03
"""Seconds that all timed rounds together should take, within MIN_ROUNDS and MAX_ROUNDS rounds."""

LEAD_CYCLES = 3_000_000
"""Clock cycles (about 2 ms) for which the device sleeps while the host enqueues the timed work.

Without this sleep the device would wait for the host between launches, so the host's time would be measured.
"""


def candidate_seconds(request: ProductRequest, names: Sequence[str]) -> list[float]:
    """Returns the median seconds of each candidate for this product, on the current stream.

    The candidates (pmoe's kernels, plain computations) run in turns, so that a change of the clock rate or of
    the cache affects all of them.

    request: the product.
    names: names of the candidates.
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
    """Returns how many bytes are left for new tensors: free on the device, or unused in torch's cache."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def release_memory(device: torch.device) -> None:
    """Returns unused memory of torch's cache to the device, after a measurement has deleted its operands."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()


def compute(method: str, operands: ProductOperands, groups: RowGroups) -> None:
    """Computes one product by a candidate, and writes the result into the operands' ``out``.

    method: name of the candidate: pmoe's kernels or a plain computation.
    operands: the matrices of the product, and the tensor for the result.
    groups: which rows belong to each expert.
    """
    form, first, second, experts, bias, out = operands
    if form == "forward":
        expert_product(first, second, groups, bias, out, method=method)
    elif form == "input":
        expert_input_gradient(first, second, groups, out, method)
    else:
        like = first.new_empty(1).expand(experts, first.shape[1], second.shape[1])
        GradientSum(like, 1).add_weight(first, second, groups, method)


def random_operands(request: ProductRequest) -> tuple[ProductOperands, RowGroups]:
    """Returns random operands of a product, and which rows belong to each expert.

    Rows are spread evenly over all experts except the last one, which has none, as may happen in a real
    batch. The state of torch's random generators is not changed.
    """
    device = request.device
    experts = request.experts
    rows = request.rows
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=request.dtype, device=device, generator=generator)

    busy = max(experts - 1, 1)
    counts = [rows // busy + (i < rows % busy) for i in range(busy)] + [0] * (experts - busy)
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    groups = RowGroups(counts=tuple(counts), ends=ends)
    form = request.form
    num_in, num_out = request.in_features, request.out_features
    if form == "weight":
        return ProductOperands(form, random(rows, num_out), random(rows, num_in), experts), groups
    columns, result_columns = (num_in, num_out) if form == "forward" else (num_out, num_in)
    first = random(rows, columns)
    weight = random(experts, num_out, num_in)
    bias = random(experts, num_out) if request.bias else None
    return ProductOperands(form, first, weight, experts, bias, first.new_empty(rows, result_columns)), groups


def needed_bytes(request: ProductRequest) -> int:
    """Returns the bytes that a measurement of a product allocates.

    They are the bytes of the operands and of two results: some implementations compute into a temporary
    tensor and copy it to the result.
    """
    rows = request.rows
    columns = request.in_features + request.out_features
    weights = request.experts * request.in_features * request.out_features
    if request.form == "weight":
        elements = rows * columns + 2 * weights
    else:
        elements = rows * (columns + max(request.in_features, request.out_features)) + weights
    return elements * request.dtype.itemsize
