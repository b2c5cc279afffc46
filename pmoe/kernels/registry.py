"""Chooses which implementation computes a product: pmoe's own kernels, or a plain one.

The first candidate is the challenger. The others are the plain implementations, in the order of preference.
Each candidate says why it would refuse a request; those that do not refuse are willing. The rule:

    forced by name          the candidate that `Registry.forcing` names
    measured                the faster of the challenger and the first willing plain one
    not measured            the first willing plain one: a kernel is used only after it was checked and timed
    in deterministic mode   the same, so that no measurement changes which kernel runs

The registry itself measures nothing. `pmoe.measure.product_choices` does, and also checks that the
challenger's results are right.

PMOE_LOG_KERNELS=1 logs each choice once for each request, with the logger "pmoe".
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
"""Which product: rows times each expert's matrix, the gradient of those rows, or that of the matrices."""


def bucket(rows: int) -> int:
    """Returns the smallest power of two that is at least ``rows``.

    Example: 1000 -> 1024, 1024 -> 1024, 0 -> 1.
    """
    return 1 << max(rows - 1, 0).bit_length()


@dataclass(frozen=True, kw_only=True)
class ProductRequest:
    """A kind of product: its form, sizes and device. Choices are stored by it.

    device: not compared; devices of one name count as the same.
    device_name: "" stands for the device's own name.
    rows: the `bucket` of the number given, so that similar batches share a choice.
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
        """The request as text, without the device."""
        bias = " bias" if self.bias else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.form} {dtype} experts={self.experts} rows={self.rows} in={self.in_features} "
            f"out={self.out_features}{bias}"
        )

    def __str__(self) -> str:
        return f"{self.key} on {self.device_name}"


class ProductOperands(NamedTuple):
    """The tensors of one product.

        form      first         second             result
        forward   rows (N, I)   weight (E, O, I)   (N, O)
        input     grad (N, O)   weight (E, O, I)   (N, I)
        weight    grad (N, O)   rows (N, I)        (E, O, I)

    experts: E.
    bias: (E, O), or None.
    out: memory for the result; None if the implementation allocates it.
    """

    form: Form
    first: Tensor
    second: Tensor
    experts: int
    bias: Tensor | None = None
    out: Tensor | None = None

    @property
    def request(self) -> ProductRequest:
        """The kind of product that these operands are."""
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
    """One implementation of the products.

    name: as choices and logs call it.
    reasons: returns why it would refuse a request on the request's device; an empty list if it would not.
    misfit: returns why it would refuse these operands of a request that it takes (strides, alignment); else
        None.
    """

    name: str
    reasons: Callable[[ProductRequest], list[str]]
    misfit: Callable[[Any], str | None] = lambda operands: None


@dataclass(frozen=True, kw_only=True)
class MeasuredChoice:
    """The faster of the two candidates that were timed.

    choice: its name.
    seconds: by candidate, on the slowest rank.
    when: ISO 8601, UTC.
    """

    choice: str
    seconds: Mapping[str, float]
    when: str


class Registry:
    """The candidates in the order of preference, the choices among them, and the reasons.

    The first candidate is the challenger. The last one must refuse nothing.
    """

    candidates: tuple[ProductCandidate, ...]
    challenger: str

    def __init__(self, candidates: Sequence[ProductCandidate]) -> None:
        self.candidates = tuple(candidates)
        self.challenger = candidates[0].name
        self.forced: ProductCandidate | None = None
        self.measured: dict[ProductRequest, MeasuredChoice] = {}
        self.faults: dict[Any, str | None] = {}
        """What the challenger computed wrongly, by the case that was checked; None if it was right."""
        self._named = {candidate.name: candidate for candidate in candidates}
        self._distrusted: dict[tuple[str, torch.dtype], str] = {}
        self._unmeasured: dict[ProductRequest, str] = {}
        self._ranked: dict[tuple[ProductRequest, bool], tuple[ProductCandidate, ...]] = {}

    # ---- results of measurements

    def learn(self, request: ProductRequest, found: MeasuredChoice) -> None:
        """Stores a measured choice. The rule takes it from now on."""
        self.measured[request] = found
        self._ranked.pop((request, False), None)

    def learn_failure(self, request: ProductRequest, why: str) -> None:
        """Stores why a measurement failed. From now on the request counts as not measured."""
        self.measured.pop(request, None)
        self._unmeasured[request] = why
        self._ranked.pop((request, False), None)

    def distrust(self, request: ProductRequest, why: str) -> None:
        """Makes the challenger refuse all requests of this request's device name and dtype."""
        self._distrusted[request.device_name, request.dtype] = why
        self._ranked.clear()

    # ---- choosing

    def choose(self, request: ProductRequest, operands: Any = None) -> str:
        """Returns the name of the candidate that computes a product.

        operands: the product's tensors. If they do not fit the candidate that the rule names, the next
            willing one is tried. None checks the request alone.

        Warns once for each reason for which the challenger is passed over on CUDA.
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
        """Makes every choice in the block ``name``, on any device and thread. Nothing need be measured.

        Operands that do not fit it go to the last candidate. Raises ValueError for an unknown name.
        """
        if name not in self._named:
            raise ValueError(f"name ({name!r}) must be one of {', '.join(self._named)}")
        outer = self.forced
        self.forced = self._named[name]
        try:
            yield
        finally:
            self.forced = outer

    def competing(self, request: ProductRequest) -> tuple[str, str] | None:
        """Returns the challenger and the plain candidate to time against it; None if there are no two."""
        willing = self._willing(request)
        return (willing[0], willing[1]) if len(willing) > 1 and willing[0] == self.challenger else None

    def _rank(self, request: ProductRequest) -> tuple[ProductCandidate, ...]:
        """Returns the willing candidates, the rule's choice first. The result is stored until it changes."""
        key = (request, torch.are_deterministic_algorithms_enabled())
        ranked = self._ranked.get(key)
        if ranked is None:
            willing = self._willing(request)
            first, _ = self._first(request, willing)
            # If operands do not fit the first, plain candidates follow in the order of preference. The
            # challenger never comes second: it would be used without having won a measurement.
            names = [first, *(name for name in willing if name not in (first, self.challenger))]
            ranked = self._ranked[key] = tuple(self._named[name] for name in names)
            self._warn_of_fallback(self.candidates[0], request, self._refusals(request)[self.challenger])
            if os.environ.get("PMOE_LOG_KERNELS", "") not in ("", "0"):
                log.warning("%s", self.explain(request))  # warning: users who asked for it must see it
        return ranked

    def _refusals(self, request: ProductRequest) -> dict[str, list[str]]:
        """Returns by candidate the reasons why it refuses a request."""
        refusals = {candidate.name: candidate.reasons(request) for candidate in self.candidates}
        why = self._distrusted.get((request.device_name, request.dtype))
        return refusals if why is None else {**refusals, self.challenger: [*refusals[self.challenger], why]}

    def _willing(self, request: ProductRequest) -> list[str]:
        """Returns the names of the candidates that do not refuse a request."""
        return [name for name, reasons in self._refusals(request).items() if not reasons]

    def _first(self, request: ProductRequest, willing: Sequence[str]) -> tuple[str, str]:
        """Returns the rule's choice and why: (name, reason)."""
        plain = next(name for name in willing if name != self.challenger)
        if self.challenger not in willing:
            return plain, f"{self.challenger} refuses"
        if torch.are_deterministic_algorithms_enabled():
            return plain, "deterministic mode: measurements are ignored"
        measured = self.measured.get(request)
        if measured is not None and measured.choice in willing:
            rule = "as fast, or faster" if measured.choice == plain else "faster"
            return measured.choice, f"{rule}, measured {measured.when}"
        return plain, self._unmeasured.get(request, "not measured, and only a measured kernel replaces it")

    def explain(self, request: ProductRequest) -> str:
        """Returns a choice as text: the request, each candidate's refusal or time, the choice and why.

        forward bfloat16 experts=8 rows=4096 in=1024 out=4096 on NVIDIA H200
          pmoe        0.104 ms
          grouped_mm  0.131 ms
          loop        willing
          takes pmoe: faster, measured 2026-01-31T12:00:00+00:00
        """
        refusals = self._refusals(request)
        first, why = self._first(request, self._willing(request))
        measured = self.measured.get(request)
        width = max(map(len, refusals))
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
        """Warns once for each reason for which the challenger is passed over on CUDA."""
        if candidate is self.candidates[0] and request.device.type == "cuda":
            for reason in reasons:
                message = f"products are computed without {candidate.name}'s kernels: {reason}"
                warn_once(message, for_each_reason=True)


# ---- the three implementations of grouped products: pmoe's kernels, one launch of grouped_mm, or a loop


PMOE, GROUPED_MM, LOOP = "pmoe", "grouped_mm", "loop"

BIAS = "bias: grouped_mm has none, and adding it afterwards rounds twice"


def _pmoe_reasons(request: ProductRequest) -> list[str]:
    """Returns why pmoe's kernels would refuse a request."""
    columns = {"in_features": request.in_features, "out_features": request.out_features}
    why = grouped_gemm.refusal(request.device, request.dtype, **columns)
    return [] if why is None else [why]


def _pmoe_misfit(operands: ProductOperands) -> str | None:
    """Returns why pmoe's kernels would refuse these operands; None if they take them."""
    if not operands.first.is_cuda:
        return None  # on the CPU the reference takes any strides
    first, second = _named(operands)
    out = operands.out
    if operands.form == "weight":
        return memory_misfit(rows=dict([first, second]), dense={"out": out})
    return memory_misfit(rows=dict([first, ("out", out)]), dense=dict([second, ("bias", operands.bias)]))


def _grouped_mm_reasons(request: ProductRequest) -> list[str]:
    """Returns why one launch of grouped_mm would not compute a request."""
    device = request.device
    if device.type != "cuda":
        return [f"device {device.type}: a loop is as fast there and writes in place"]
    reasons = []
    if request.dtype != torch.bfloat16:
        reasons.append(f"dtype {request.dtype}: grouped_mm has one launch for bfloat16 only")
    if request.bias:
        reasons.append(BIAS)
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10):
        reasons.append(
            f"compute capability {major}.{minor}: grouped_mm loops there, reading the offsets on the host"
        )
    if request.experts >= 1024:
        reasons.append(f"{request.experts} experts: grouped_mm takes fewer than 1024")
    columns = {"in_features": request.in_features}
    if request.form != "forward":  # forward's out_features are the result's columns, which torch pads
        columns["out_features"] = request.out_features
    for name, count in columns.items():
        if count * request.dtype.itemsize % 16:
            reasons.append(f"{name}: a row of {count} elements is no multiple of 16 bytes")
    return reasons


def _grouped_mm_misfit(operands: ProductOperands) -> str | None:
    """Returns why grouped_mm would refuse these operands; None if it takes them."""
    if operands.bias is not None:
        return BIAS
    return memory_misfit(dense=dict(_named(operands))) if operands.first.is_cuda else None


def _named(operands: ProductOperands) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    """Returns the first and the second operand with their names."""
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
"""The choices of this process, for all layers. `pmoe.measure.products` has them measured.

On the CPU the loop is as fast as any kernel, and writes in place.
"""
