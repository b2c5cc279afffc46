"""Decides whether pmoe's kernels compute a product, the same on every rank, and stores it.

The kernels are checked first, once a process: see `pmoe.measure.kernel_check`. The ranks compare what they
know, from this process or from the file, and measure the rest together: the seconds of the slowest rank
count. There is one file for each device, torch and build of the kernels, beside
the profiles, in $PMOE_CACHE or ~/.cache/pmoe:

    {"format": 1, "device": "NVIDIA H200", "torch": "2.13.0", "build": "0123456789abcdef",
     "choices": {"forward bfloat16 experts=8 rows=4096 in=1024 out=4096": {
                     "choice": "pmoe", "seconds": {"pmoe": 0.0001, "grouped_mm": 0.0002}, "when": "2026-..."},
                 ...}}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pmoe.comm.ranks import Agree, digest
from pmoe.kernels.extension import Architecture
from pmoe.kernels.product_request import ProductRequest
from pmoe.kernels.registry import MeasuredChoice, Registry
from pmoe.measure.kernel_check import KernelCase
from pmoe.measure.product_bench import ProductBench, needed_bytes
from pmoe.measure.rounds import timestamp
from pmoe.measure.store import cache_path, load_json, save_json
from pmoe.warn import warn_once

TIE = 0.01
"""Within this part of the plain way's seconds the plain way is taken."""

UNKNOWN, UNWILLING = 0, 9
"""Codes of requests, beside 1 and 2 for the two candidates that compete. The largest wins."""


@dataclass(frozen=True)
class ProductMeasurer:
    """Measures for a registry, which then knows what was found. faults: by case, what is computed wrongly."""

    registry: Registry
    bench: ProductBench
    faults: dict[KernelCase, str | None] = field(default_factory=dict)

    def measure(self, requests: Sequence[ProductRequest], agree: Agree, case: KernelCase) -> None:
        """Has the registry know, of each request for which two candidates compete, which one is faster.

        Collective: one reduction where all ranks know the same, else up to three; between them the ranks
        measure, each what it can. What not all ranks know, or know differently, is measured on all.

        requests: all of one device, and the same on every rank; where ranks come with different ones
        nevertheless, nothing is measured, and a warning says so.
        case: of the kernels that these requests use. Where it is wrong on any rank, the registry distrusts
        them on all.

        Nothing happens in deterministic mode, which must be on for all ranks or for none. Trouble on one rank
        (no memory left, a file that cannot be read) leaves requests unmeasured or has them measured; it warns
        and never raises on one rank alone.

        Raises ValueError on every rank where kernels are loaded on some and the ranks' code or compute
        capability differs.
        """
        if not requests or torch.are_deterministic_algorithms_enabled():
            return
        here, known = self.bench.architecture(requests[0].device), self._known(requests)
        fault = self._fault(case, requests)
        codes = [self._code(request, known) for request in requests]
        of_requests, of_codes = digest(each.key for each in requests), digest(map(str, codes))
        code = [here.binary_version, here.ptx_version, here.capability]
        facts = [*code, of_requests, of_codes, float(fault is not None)]
        lowest_facts, highest_facts = _range(facts, agree)
        _check_architectures(here, lowest_facts, highest_facts)
        if lowest_facts[3] != highest_facts[3]:
            warn_once("the ranks' experts are of unlike sizes: their products are not measured")
            return
        if highest_facts[5]:
            self.registry.distrust(requests[0], fault or "they compute wrongly on another rank")
            return
        low, high = (codes, codes) if lowest_facts[4] == highest_facts[4] else _range(codes, agree)
        unknown = []
        for request, lowest, highest in zip(requests, low, high, strict=True):
            if lowest == highest and highest not in (UNKNOWN, UNWILLING):
                self.registry.learn(request, known[request])
            elif highest != UNWILLING:
                unknown.append(request)
        if unknown:
            self._measure(unknown, agree)

    def _code(self, request: ProductRequest, known: Mapping[ProductRequest, MeasuredChoice]) -> int:
        names = self.registry.competing(request)
        if names is None:
            return UNWILLING
        found = known.get(request)
        return 1 + names.index(found.choice) if found and set(found.seconds) == set(names) else UNKNOWN

    def _fault(self, case: KernelCase, requests: Sequence[ProductRequest]) -> str | None:
        """What the kernels compute wrongly here; None where they do not, or take none of the requests. Raises
        nothing: the others wait."""
        if not any(map(self.registry.competing, requests)):
            return None
        if case not in self.faults:
            try:
                with self._plain(case.device):
                    self.faults[case] = self.bench.mismatch(case)
            except Exception as error:
                self.faults[case] = f"a small case failed: {error}"
        return self.faults[case]

    @contextmanager
    def _plain(self, device: torch.device) -> Iterator[None]:
        """Whatever the layer runs under."""
        no_grad, no_autocast = torch.no_grad(), torch.autocast(device.type, enabled=False)
        with torch.inference_mode(False), no_grad, no_autocast:
            yield

    def _known(self, requests: Sequence[ProductRequest]) -> dict[ProductRequest, MeasuredChoice]:
        stored = self.file(requests[0]).load()
        known = {each: self.registry.measured(each) or stored.get(each.key) for each in requests}
        return {request: choice for request, choice in known.items() if choice is not None}

    def file(self, request: ProductRequest) -> ChoiceFile:
        """The file of the request's device, with this torch and this build of the kernels."""
        build, torch_version = self.bench.build(), str(torch.__version__)
        whose = {"device": request.device_name, "torch": torch_version, "build": build}
        names = [each.name for each in self.registry.candidates]
        return ChoiceFile(folder=self.bench.folder, whose=whose, names=names)

    def _measure(self, requests: Sequence[ProductRequest], agree: Agree) -> None:
        failures: dict[ProductRequest, str] = {}
        own = [second for request in requests for second in self._seconds(request, failures)]
        self.bench.release(requests[0].device)
        slowest = agree(own)
        when = timestamp()
        found: dict[str, MeasuredChoice] = {}
        for i, request in enumerate(requests):
            names = self.registry.competing(request)
            seconds = dict(zip(names or (), slowest[2 * i : 2 * i + 2], strict=False))
            if names and all(map(math.isfinite, seconds.values())):
                challenger, plain = names
                faster = challenger if seconds[challenger] < (1 - TIE) * seconds[plain] else plain
                choice = MeasuredChoice(choice=faster, seconds=seconds, when=when)
                found[request.key] = choice
                self.registry.learn(request, choice)
            else:
                why = failures.get(request, "could not be measured on every rank")
                self.registry.learn_failure(request, why)
        if found:
            self.file(requests[0]).save(found)

    def _seconds(self, request: ProductRequest, failures: dict[ProductRequest, str]) -> list[float]:
        """Of the two, here; infinite where they cannot be measured. Raises nothing: the others wait."""
        names, device = self.registry.competing(request), request.device
        try:
            assert names is not None, "the ranks agreed that there are two"
            wanted, free = needed_bytes(request), self.bench.free_bytes(device)
            if wanted > free // 2:
                raise MemoryError(f"{wanted} bytes are needed, and half of {free} free ones may be used")
            with self._plain(device):
                found = self.bench.seconds(self.bench.works(request, names), device)
            return [found[name] for name in names]
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


# ---- the file


FORMAT = 1
"""Of the file. Rises with every change of what a field means."""


@dataclass(frozen=True, kw_only=True)
class ChoiceFile:
    """folder: finds it, or raises RuntimeError. whose: device, torch and build. names: of the candidates."""

    folder: Callable[[], Path]
    whose: Mapping[str, str]
    names: Sequence[str]

    def path(self) -> Path:
        return cache_path(["kernels", *self.whose.values(), f"v{FORMAT}"], self.folder())

    def load(self) -> dict[str, MeasuredChoice]:
        """By a request's key; empty, with a warning, where the file cannot be used."""
        try:
            return load_json(self.path(), self._parsed)
        except FileNotFoundError:
            return {}
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: there is no home
            warn_once(f"stored choices of kernels are not used: {error}", for_each_reason=True)
            return {}

    def save(self, added: Mapping[str, MeasuredChoice]) -> None:
        """Beside what is there; a warning where that fails, which must not stop one rank alone.

        Every rank saves, since each node may have a folder of its own. Of two at once one may lose what it
        added: it is measured again later.
        """
        held = self.load()
        if all(key in held and held[key].choice == each.choice for key, each in added.items()):
            return  # another rank of this node was here
        choices = {key: asdict(each) for key, each in sorted((held | dict(added)).items())}
        try:
            save_json(self.path(), {"format": FORMAT, **self.whose, "choices": choices})
        except (OSError, RuntimeError) as error:
            message = f"measured products could not be saved, and will be measured again: {error}"
            warn_once(message, for_each_reason=True)

    def _parsed(self, held: dict[str, Any]) -> dict[str, MeasuredChoice]:
        if held.get("format") != FORMAT:
            raise ValueError(f"format ({held.get('format')!r}) must be {FORMAT}")
        for name, here in self.whose.items():
            if held.get(name) != here:
                raise ValueError(f"{name} ({held.get(name)!r}) must be {here!r}")
        choices = held.get("choices")
        if not isinstance(choices, dict):
            raise ValueError(f"choices ({choices!r}) must be an object")
        return {key: self._choice(key, value) for key, value in choices.items()}

    def _choice(self, key: str, value: Any) -> MeasuredChoice:
        match value:
            case {"choice": str(choice), "seconds": dict(seconds)} if (
                choice in seconds and len(seconds) == 2 and set(seconds) <= set(self.names)
            ):
                if all(isinstance(each, float) and 0 <= each < math.inf for each in seconds.values()):
                    return MeasuredChoice(choice=choice, seconds=seconds, when=str(value.get("when")))
        raise ValueError(
            f"{key} ({value!r}) must have the choice and seconds of two of {', '.join(self.names)}"
        )
