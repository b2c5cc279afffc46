"""Decides whether pmoe's kernels compute a product, the same on every rank.

The kernels are checked first, once a process: see `pmoe.measure.kernel_check`. The ranks compare what their
processes know, and measure the rest together: the seconds of the slowest rank count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple

import torch

from pmoe.comm.agreement import Agree, digest
from pmoe.kernels.extension import Architecture, loaded_architecture
from pmoe.kernels.product_request import ProductRequest
from pmoe.kernels.registry import MeasuredChoice, Registry
from pmoe.measure.kernel_check import KernelCase, mismatch
from pmoe.measure.product_bench import candidate_seconds, free_bytes, needed_bytes, release_memory
from pmoe.measure.rounds import timestamp
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
    _check_architectures(here, lowest_facts, highest_facts)
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


def _check_architectures(
    here: Architecture, lowest_facts: Sequence[float], highest_facts: Sequence[float]
) -> None:
    """Where no rank has kernels there are none to differ."""
    if lowest_facts[:3] != highest_facts[:3] and highest_facts[0]:
        names = ("binary version", "PTX version", "compute capability times 10")
        found = [
            f"{name} {int(low)} to {int(high)}"
            for name, low, high in zip(names, lowest_facts[:3], highest_facts[:3], strict=True)
        ]
        raise ValueError(
            f"mixed architectures: the kernels of this rank ({here}) must be those of all ranks, which have "
            f"{', '.join(found)}"
        )
