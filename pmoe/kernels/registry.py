"""Which kernel computes a product: each is asked why not; the challenger is taken where it is faster.

The first candidate is the challenger, the others are plain ways. The rule, without measuring anything itself:

    asked for by name       this one (`Registry.forcing`)
    measured                the faster of the challenger and the first willing plain way; see
                            `pmoe.measure.product_choices`, which also checks that the challenger is right
    else                    the first willing plain way: what nobody has timed and checked is not taken
    in deterministic mode   the same: on every rank and in every run alike, whatever was measured

With PMOE_LOG_KERNELS=1 every choice is logged once for each request, by the logger "pmoe".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pmoe.kernels import grouped_gemm
from pmoe.kernels.extension import device_name
from pmoe.kernels.operands import memory_misfit
from pmoe.warn import log, warn_once

Form = Literal["forward", "input", "weight"]
"""Rows times a matrix an expert, the gradient of those rows, or that of the matrices."""


def bucket(rows: int) -> int:
    """The least power of two that is not below ``rows``.

    Example: 1000 -> 1024, 1024 -> 1024, 0 -> 1.
    """
    return 1 << max(rows - 1, 0).bit_length()


@dataclass(frozen=True, kw_only=True)
class ProductRequest:
    """Which product, of what sizes, on what device; devices of one name count as one.

    device_name: "" is the device's own. rows: any number, of which the `bucket` is kept.
    """

    form: Form
    device: torch.device = field(compare=False)
    device_name: str = ""
    dtype: torch.dtype
    experts: int
    rows: int
    in_features: int
    out_features: int
    bias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_name", self.device_name or device_name(self.device))
        object.__setattr__(self, "rows", bucket(self.rows))

    @property
    def key(self) -> str:
        """All but the device."""
        bias = " bias" if self.bias else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.form} {dtype} experts={self.experts} rows={self.rows} in={self.in_features} "
            f"out={self.out_features}{bias}"
        )

    def __str__(self) -> str:
        return f"{self.key} on {self.device_name}"


class ProductOperands(NamedTuple):
    """The tensors of one product. out: where the result is to lie, None for memory of its own.

    forward: first is rows (N, I), second weight (E, O, I).
    input:   first is grad (N, O), second weight (E, O, I).
    weight:  first is grad (N, O), second rows (N, I).
    """

    form: Form
    first: Tensor
    second: Tensor
    experts: int
    bias: Tensor | None = None
    out: Tensor | None = None

    @property
    def request(self) -> ProductRequest:
        if self.form == "weight":
            num_out, num_in = self.first.shape[1], self.second.shape[1]
        else:
            num_out, num_in = self.second.shape[1], self.second.shape[2]
        return ProductRequest(
            form=self.form,
            device=self.first.device,
            dtype=self.first.dtype,
            experts=self.experts,
            rows=self.first.shape[0],
            in_features=num_in,
            out_features=num_out,
            bias=self.bias is not None,
        )


@dataclass(frozen=True, kw_only=True)
class ProductCandidate:
    """A way to compute products.

    reasons: why it would not compute a request, on its device; nothing where it would.
    misfit: why it would not take these operands of a request that it would compute: strides, alignment.
    """

    name: str
    reasons: Callable[[ProductRequest], list[str]]
    misfit: Callable[[Any], str | None] = lambda operands: None


@dataclass(frozen=True, kw_only=True)
class MeasuredChoice:
    """The faster of two that compete, and the seconds of both on the slowest rank. when: ISO 8601, UTC."""

    choice: str
    seconds: Mapping[str, float]
    when: str


class Registry:
    """Candidates in the order of priority, the choices among them, and why.

    The first is the challenger. The last one refuses nothing.
    """

    candidates: tuple[ProductCandidate, ...]
    challenger: str

    def __init__(self, candidates: Sequence[ProductCandidate]) -> None:
        self.candidates = tuple(candidates)
        self.challenger = candidates[0].name
        self.forced: ProductCandidate | None = None
        self.measured: dict[ProductRequest, MeasuredChoice] = {}
        self.faults: dict[Any, str | None] = {}
        """What the challenger computes wrongly, by the case that was checked; None where it does not."""
        self._named = {each.name: each for each in candidates}
        self._distrusted: dict[tuple[str, torch.dtype], str] = {}
        self._unmeasured: dict[ProductRequest, str] = {}
        self._ranked: dict[tuple[ProductRequest, bool], tuple[ProductCandidate, ...]] = {}

    # ---- what was measured

    def learn(self, request: ProductRequest, found: MeasuredChoice) -> None:
        """From now on the rule takes this choice."""
        self.measured[request] = found
        self._ranked.pop((request, False), None)

    def learn_failure(self, request: ProductRequest, why: str) -> None:
        """From now on the request counts as not measured."""
        self.measured.pop(request, None)
        self._unmeasured[request] = why
        self._ranked.pop((request, False), None)

    def distrust(self, request: ProductRequest, why: str) -> None:
        """From now on the challenger refuses all requests of this device and type."""
        self._distrusted[request.device_name, request.dtype] = why
        self._ranked.clear()

    # ---- choosing

    def choose(self, request: ProductRequest, operands: Any = None) -> str:
        """The name of the first candidate that is willing and that the operands fit, as the rule ranks them.

        Warns once for each reason for which the very first is passed over.
        """
        if self.forced is not None:
            fits = operands is None or self.forced.misfit(operands) is None
            return self.forced.name if fits else self.candidates[-1].name
        *ranked, last = self._rank(request)
        for candidate in ranked:
            why = None if operands is None else candidate.misfit(operands)
            if why is None:
                return candidate.name
            self._warn_of_fallback(candidate, request, [why])
        return last.name

    @contextmanager
    def forcing(self, name: str) -> Iterator[None]:
        """Every choice in the block, on any device and thread, is ``name`` where the operands fit it.

        The last candidate computes the others. This asks for kernels by name: nothing need be measured.
        """
        if name not in self._named:
            raise ValueError(f"name ({name!r}) must be one of {', '.join(self._named)}")
        before, self.forced = self.forced, self._named[name]
        try:
            yield
        finally:
            self.forced = before

    def competing(self, request: ProductRequest) -> tuple[str, str] | None:
        """The challenger and the plain way that is measured beside it; None where one of them refuses."""
        willing = self._willing(request)
        return (willing[0], willing[1]) if len(willing) > 1 and willing[0] == self.challenger else None

    def _rank(self, request: ProductRequest) -> tuple[ProductCandidate, ...]:
        key = (request, torch.are_deterministic_algorithms_enabled())
        found = self._ranked.get(key)
        if found is None:
            willing = self._willing(request)
            first, _ = self._first(request, willing)
            # Operands that do not fit the first go to plain ways, in the order of priority.
            names = [first, *(name for name in willing if name not in (first, self.challenger))]
            found = self._ranked[key] = tuple(self._named[name] for name in names)
            self._warn_of_fallback(self.candidates[0], request, self._refusals(request)[self.challenger])
            if os.environ.get("PMOE_LOG_KERNELS", "") not in ("", "0"):
                log.warning("%s", self.explain(request))  # a level that shows: it was asked for
        return found

    def _refusals(self, request: ProductRequest) -> dict[str, list[str]]:
        found = {candidate.name: candidate.reasons(request) for candidate in self.candidates}
        why = self._distrusted.get((request.device_name, request.dtype))
        return found if why is None else {**found, self.challenger: [*found[self.challenger], why]}

    def _willing(self, request: ProductRequest) -> list[str]:
        return [name for name, reasons in self._refusals(request).items() if not reasons]

    def _first(self, request: ProductRequest, willing: Sequence[str]) -> tuple[str, str]:
        """(its name, why)."""
        plain = next(name for name in willing if name != self.challenger)
        if self.challenger not in willing:
            return plain, f"{self.challenger} refuses"
        if torch.are_deterministic_algorithms_enabled():
            return plain, "deterministic mode: nothing that depends on a measurement"
        measured = self.measured.get(request)
        if measured is not None and measured.choice in willing:
            rule = "as fast, or faster" if measured.choice == plain else "faster"
            return measured.choice, f"{rule}, measured {measured.when}"
        return plain, self._unmeasured.get(request, "not measured, and nothing untimed replaces it")

    def explain(self, request: ProductRequest) -> str:
        """The request, of each candidate why not or how long it takes, and the choice with its reason.

        forward bfloat16 experts=8 rows=4096 in=1024 out=4096 on NVIDIA H200
          pmoe        0.104 ms
          grouped_mm  0.131 ms
          loop        willing
          takes pmoe: faster, measured 2026-01-31T12:00:00+00:00
        """
        refusals = self._refusals(request)
        first, why = self._first(request, self._willing(request))
        measured, width = self.measured.get(request), max(map(len, refusals))
        lines = [str(request)]
        for name, reasons in refusals.items():
            state = "willing"
            if reasons:
                state = f"refuses: {'; '.join(reasons)}"
            elif measured is not None and name in measured.seconds:
                state = f"{measured.seconds[name] * 1e3:.3g} ms"
            lines.append(f"  {name.ljust(width)}  {state}")
        lines.append(f"  takes {first}: {why}")
        return "\n".join(lines)

    def _warn_of_fallback(
        self, candidate: ProductCandidate, request: ProductRequest, reasons: Iterable[str]
    ) -> None:
        if candidate is self.candidates[0] and request.device.type == "cuda":
            for reason in reasons:
                message = f"products are computed without {candidate.name}'s kernels: {reason}"
                warn_once(message, for_each_reason=True)


# ---- the three ways to compute a grouped product: pmoe's kernels, one launch of grouped_mm, or a loop


PMOE, GROUPED_MM, LOOP = "pmoe", "grouped_mm", "loop"

BIAS = "bias: grouped_mm has none, and adding it afterwards rounds twice"


def _pmoe_reasons(request: ProductRequest) -> list[str]:
    columns = {"in_features": request.in_features, "out_features": request.out_features}
    why = grouped_gemm.refusal(request.device, request.dtype, **columns)
    return [] if why is None else [why]


def _pmoe_misfit(operands: ProductOperands) -> str | None:
    if not operands.first.is_cuda:
        return None  # the reference takes everything
    (first, second), out = _named(operands), operands.out
    if operands.form == "weight":
        return memory_misfit(rows=dict([first, second]), dense={"out": out})
    return memory_misfit(rows=dict([first, ("out", out)]), dense=dict([second, ("bias", operands.bias)]))


def _grouped_mm_reasons(request: ProductRequest) -> list[str]:
    device = request.device
    if device.type != "cuda":
        return [f"device {device.type}: a loop is as fast there and writes in place"]
    found = []
    if request.dtype != torch.bfloat16:
        found.append(f"dtype {request.dtype}: grouped_mm has one launch for bfloat16 only")
    if request.bias:
        found.append(BIAS)
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10):
        found.append(
            f"compute capability {major}.{minor}: grouped_mm loops there, reading the offsets on the host"
        )
    if request.experts >= 1024:
        found.append(f"{request.experts} experts: grouped_mm takes fewer than 1024")
    columns = {"in_features": request.in_features}
    if request.form != "forward":  # the columns of a result are padded
        columns["out_features"] = request.out_features
    for name, count in columns.items():
        if count * request.dtype.itemsize % 16:
            found.append(f"{name}: a row of {count} elements is no multiple of 16 bytes")
    return found


def _grouped_mm_misfit(operands: ProductOperands) -> str | None:
    if operands.bias is not None:
        return BIAS
    return memory_misfit(dense=dict(_named(operands))) if operands.first.is_cuda else None


def _named(operands: ProductOperands) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    """The first and the second operand with their names."""
    first, second = {"forward": ("rows", "weight"), "input": ("grad", "weight"), "weight": ("grad", "rows")}[
        operands.form
    ]
    return (first, operands.first), (second, operands.second)


PRODUCTS = Registry(
    [
        ProductCandidate(name=PMOE, reasons=_pmoe_reasons, misfit=_pmoe_misfit),
        ProductCandidate(name=GROUPED_MM, reasons=_grouped_mm_reasons, misfit=_grouped_mm_misfit),
        ProductCandidate(name=LOOP, reasons=lambda request: []),
    ]
)
"""The choices of this process, for all layers, on CUDA. On the CPU the loop is as fast, and writes in place.
 `pmoe.measure.products` has them measured."""
