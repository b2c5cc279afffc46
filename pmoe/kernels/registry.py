"""Chooses which implementation computes a grouped product: pmoe's own kernels or a plain one.

Each implementation is a candidate. A candidate is called willing if it has no reason to refuse a product. The
first candidate (pmoe's kernels) is called the challenger, because it is used only if it was measured to be
faster. The other candidates are called plain, and are listed in order of preference. The first rule that
applies chooses:

    a user forces a candidate   that candidate (`Registry.forcing`)
    deterministic mode is on    the first willing plain candidate, so that measurements do not change results
    times were measured         the faster of the challenger and the first willing plain candidate
    nothing was measured        the first willing plain candidate, because only a measurement checks that the
                                challenger computes correctly

This module measures nothing. `pmoe.measure.product_choices` measures times, and also checks that the
challenger computes correctly.

PMOE_LOG_KERNELS=1 logs each choice once for each kind of product, with the logger "pmoe".
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
from pmoe.warn import log, warn_of_fallback, warn_once

Form = Literal["forward", "input", "weight"]
"""One of three products: rows times each expert's weights, gradient of the rows, gradient of the weights."""


TIE = 0.01
"""pmoe's kernels are chosen if they save at least this fraction of the plain candidate's seconds.

If the two candidates' seconds differ by less, both count as equally fast.
"""


def bucket(rows: int) -> int:
    """Returns the smallest power of two that is at least ``rows``, so that similar sizes share a choice.

    Example: 1000 -> 1024, 1024 -> 1024, 0 -> 1.
    """
    return 1 << max(rows - 1, 0).bit_length()


@dataclass(frozen=True, kw_only=True)
class ProductRequest:
    """A grouped product that is to be computed: its form, its sizes and its device.

    The registry stores for each request which implementation it has chosen.

    form: "forward" (rows times weights), "input" (gradient of the rows) or "weight" (gradient of the
        weights).
    device: the device that computes. It does not count when requests are compared, so devices with the same
        name share the chosen implementation.
    device_name: name of the device; "" is replaced by torch's name for the device.
    dtype: dtype of the operands.
    experts: number of experts.
    rows: number of rows of all experts together. It is rounded up to a power of two, so that batches of
        similar size share the chosen implementation.
    in_features, out_features: columns and rows of each expert's weight matrix.
    bias: whether a bias is added.
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
        """The request as text, without the device: the key of stored measurements.

        Example: "forward bfloat16 experts=8 rows=4096 in=1024 out=4096 bias".
        """
        bias = " bias" if self.bias else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.form} {dtype} experts={self.experts} rows={self.rows} in={self.in_features} "
            f"out={self.out_features}{bias}"
        )

    def __str__(self) -> str:
        return f"{self.key} on {self.device_name}"


class ProductOperands(NamedTuple):
    """The tensors of one grouped product, with N rows, E experts, I in-features and O out-features.

        form      first         second             result
        forward   rows (N, I)   weight (E, O, I)   (N, O)
        input     grad (N, O)   weight (E, O, I)   (N, I)
        weight    grad (N, O)   rows (N, I)        (E, O, I)

    form: "forward", the product of rows and weights; "input", the gradient of rows; or "weight", the gradient
        of weights.
    first, second: the operands, as in the table.
    experts: E.
    bias: (E, O), or None.
    out: memory for the result; None lets the implementation allocate it.
    """

    form: Form
    first: Tensor
    second: Tensor
    experts: int
    bias: Tensor | None = None
    out: Tensor | None = None

    @property
    def request(self) -> ProductRequest:
        """The form, sizes, dtype and device of this product. The registry stores its choices under them."""
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
    """One implementation of the grouped products.

    name: its name in choices and logs.
    reasons: function that returns the reasons why the implementation refuses a request; [] if it accepts.
    layout_problem: function that returns why the implementation cannot read the strides or addresses of given
        operands; None if it can.
    """

    name: str
    reasons: Callable[[ProductRequest], list[str]]
    layout_problem: Callable[[Any], str | None] = lambda operands: None


@dataclass(frozen=True, kw_only=True)
class MeasuredChoice:
    """The faster of the two candidates that were timed for a request.

    choice: name of the faster candidate.
    seconds: measured seconds of each candidate by name, on the slowest rank.
    when: time of the measurement in UTC, as ISO 8601.
    """

    choice: str
    seconds: Mapping[str, float]
    when: str


class Registry:
    """Chooses which candidate computes a grouped product, by measured times and by reasons to refuse.

    candidates: the implementations in the order of preference. The first, pmoe's kernels, is used only for
        requests for which it was measured to be faster than the others. The last must refuse nothing.
    challenger: name of the first candidate.
    forced: the candidate that every product must use inside a `forcing` block; None outside such a block.
    measured: for each request that was measured, the faster candidate and the times.
    faults: results of checks of the first candidate, by checked case. A result is a text that says which
        values were wrong; None if all were correct.
    """

    candidates: tuple[ProductCandidate, ...]
    challenger: str

    def __init__(self, candidates: Sequence[ProductCandidate]) -> None:
        self.candidates = tuple(candidates)
        self.challenger = candidates[0].name
        self.forced: ProductCandidate | None = None
        self.measured: dict[ProductRequest, MeasuredChoice] = {}
        self.faults: dict[Any, str | None] = {}
        """Results of checks of the first candidate: a text about wrong values; None if all were correct."""
        self._named = {candidate.name: candidate for candidate in candidates}
        self._distrusted: dict[tuple[str, torch.dtype], str] = {}
        self._unmeasured: dict[ProductRequest, str] = {}
        self._ranked: dict[tuple[ProductRequest, bool], tuple[ProductCandidate, ...]] = {}

    # ---- results of measurements

    def learn(self, request: ProductRequest, result: MeasuredChoice) -> None:
        """Stores the result of a measurement. From now on `choose` returns the faster candidate."""
        self.measured[request] = result
        self._ranked.pop((request, False), None)

    def learn_failure(self, request: ProductRequest, why: str) -> None:
        """Stores why the measurement of a request failed. From now on the request counts as not measured."""
        self.measured.pop(request, None)
        self._unmeasured[request] = why
        self._ranked.pop((request, False), None)

    def distrust(self, request: ProductRequest, why: str) -> None:
        """Excludes pmoe's kernels from all products with this request's device name and dtype.

        The kernels have computed a wrong result on a device of that name.

        request: a product of that device name and dtype.
        why: a text that says which result was wrong. Warnings and logs show it.
        """
        self._distrusted[request.device_name, request.dtype] = why
        self._ranked.clear()

    # ---- choosing

    def choose(self, request: ProductRequest, operands: Any = None) -> str:
        """Returns the name of the candidate that computes a product.

        request: the product's form, sizes, dtype and device.
        operands: the product's tensors. If a candidate cannot read their strides or addresses, the next
            candidate that does not refuse is tried. None skips this check.

        If the first candidate (pmoe's kernels) cannot be used on a CUDA device, this method warns once for
        each reason.
        """
        if self.forced is not None:
            fits = operands is None or self.forced.layout_problem(operands) is None
            return self.forced.name if fits else self.candidates[-1].name
        *ranked, last = self._rank(request)
        for candidate in ranked:
            why = None if operands is None else candidate.layout_problem(operands)
            if why is None:
                return candidate.name
            self._warn_of_fallback(candidate, request, [why])
        return last.name

    @contextmanager
    def forcing(self, name: str) -> Iterator[None]:
        """Makes `choose` return the candidate ``name`` inside a with-block, for all devices and threads.

        No measurement is needed. If the candidate cannot read a product's operands, `choose` returns the last
        candidate.

        Raises ValueError for an unknown name.
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
        """Returns the names of the two candidates to time: pmoe's kernels, and the best other candidate.

        The best other candidate is the first candidate, in the order of preference, that does not refuse the
        request. Returns None if pmoe's kernels refuse the request.
        """
        willing = self._willing(request)
        return (willing[0], willing[1]) if len(willing) > 1 and willing[0] == self.challenger else None

    def _rank(self, request: ProductRequest) -> tuple[ProductCandidate, ...]:
        """Returns the candidates that do not refuse a request, in the order in which `choose` tries them.

        The result is cached until the next measurement or failed check, which may change it.
        """
        key = (request, torch.are_deterministic_algorithms_enabled())
        ranked = self._ranked.get(key)
        if ranked is None:
            willing = self._willing(request)
            first, _ = self._first(request, willing)
            # If the first candidate cannot read the operands, plain candidates are tried in the order of
            # preference. The challenger is not among them, because it must win a measurement before it is
            # used.
            names = [first, *(name for name in willing if name not in (first, self.challenger))]
            ranked = self._ranked[key] = tuple(self._named[name] for name in names)
            self._warn_of_fallback(self.candidates[0], request, self._refusals(request)[self.challenger])
            self._warn_of_slower(request, first)
            if os.environ.get("PMOE_LOG_KERNELS", "") not in ("", "0"):
                log.warning("%s", self.explain(request))  # warnings show without configured logging
        return ranked

    def _refusals(self, request: ProductRequest) -> dict[str, list[str]]:
        """Returns each candidate's reasons to refuse a request, by the candidate's name.

        An empty list means that the candidate does not refuse.
        """
        refusals = {candidate.name: candidate.reasons(request) for candidate in self.candidates}
        why = self._distrusted.get((request.device_name, request.dtype))
        return refusals if why is None else {**refusals, self.challenger: [*refusals[self.challenger], why]}

    def _willing(self, request: ProductRequest) -> list[str]:
        """Returns the names of the candidates that do not refuse a request, in the order of preference."""
        return [name for name, reasons in self._refusals(request).items() if not reasons]

    def _first(self, request: ProductRequest, willing: Sequence[str]) -> tuple[str, str]:
        """Returns the name of the candidate to use for a request, and the reason in words.

        willing: names of the candidates that do not refuse the request, in the order of preference.
        """
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
        """Returns a text that explains the choice for a request: each candidate's time or reason to refuse.

        In this example, "willing" means that a candidate does not refuse, but was not timed:

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
        """Warns, once for each reason, that pmoe's kernels cannot be used on a CUDA device.

        Does nothing for a candidate other than pmoe's kernels, or a device that is not a CUDA device.

        candidate: the candidate that cannot be used.
        request: the product.
        reasons: why it cannot be used.
        """
        if candidate is self.candidates[0] and request.device.type == "cuda":
            for reason in reasons:
                warn_of_fallback("products are computed", reason)

    def _warn_of_slower(self, request: ProductRequest, first: str) -> None:
        """Warns, once in a process, if another candidate was measured to be faster than pmoe's kernels.

        The warning is for requests on CUDA devices, which that candidate then computes. If the two are about
        equally fast, there is no warning.

        request: the product.
        first: name of the candidate that was chosen for the request.
        """
        measured = self.measured.get(request)
        if request.device.type != "cuda" or measured is None or first == self.challenger:
            return
        seconds = measured.seconds
        if first in seconds and seconds[first] < (1 - TIE) * seconds[self.challenger]:
            warn_once(
                f"products are computed without {self.challenger}'s kernels where these are slower: {first} "
                f"takes {seconds[first] * 1e3:.3g} ms and {self.challenger} "
                f"{seconds[self.challenger] * 1e3:.3g} ms for {request}. PMOE_LOG_KERNELS=1 logs every choice"
            )


# ---- the three implementations of grouped products: pmoe's kernels, one launch of grouped_mm, or a loop


PMOE, GROUPED_MM, LOOP = "pmoe", "grouped_mm", "loop"

BIAS = "bias: grouped_mm has none, and adding it afterwards rounds twice"


def _pmoe_reasons(request: ProductRequest) -> list[str]:
    """Returns why pmoe's kernels refuse a request; an empty list if they do not."""
    columns = {"in_features": request.in_features, "out_features": request.out_features}
    why = grouped_gemm.refusal(request.device, request.dtype, **columns)
    return [] if why is None else [why]


def _pmoe_misfit(operands: ProductOperands) -> str | None:
    """Returns why pmoe's kernels cannot read the strides or addresses of these operands; None if they can."""
    if not operands.first.is_cuda:
        return None  # on the CPU the reference takes any strides
    first, second = _named(operands)
    out = operands.out
    if operands.form == "weight":
        return memory_misfit(rows=dict([first, second]), dense={"out": out})
    return memory_misfit(rows=dict([first, ("out", out)]), dense=dict([second, ("bias", operands.bias)]))


def grouped_mm_loops(capability: tuple[int, int]) -> str | None:
    """Returns why torch's grouped_mm needs several launches on a compute capability; None if it needs one.

    The docstring of grouped_mm allows compute capability 8.0 and later. But torch 2.13 (GroupedBlas.cpp)
    computes all experts by a single launch on 9.x and 10.x only. On other capabilities grouped_mm copies the
    offsets to the host and calls one product for each expert. pmoe's own loop over the experts does not need
    that copy.
    """
    major, minor = capability
    if major in (9, 10):
        return None
    return (
        f"compute capability {major}.{minor}: grouped_mm takes it, but loops over the experts there, and "
        "copies the offsets to the host first"
    )


def _grouped_mm_reasons(request: ProductRequest) -> list[str]:
    """Returns the reasons against PyTorch's grouped_mm for a request; [] if there is none.

    grouped_mm may refuse the request, need several launches, or be no faster than a loop.
    """
    device = request.device
    if device.type != "cuda":
        return [f"device {device.type}: a loop is as fast there and writes in place"]
    reasons = []
    if request.dtype != torch.bfloat16:
        reasons.append(f"dtype {request.dtype}: grouped_mm has one launch for bfloat16 only")
    if request.bias:
        reasons.append(BIAS)
    if (loops := grouped_mm_loops(torch.cuda.get_device_capability(device))) is not None:
        reasons.append(loops)
    if request.experts >= 1024:
        reasons.append(f"{request.experts} experts: grouped_mm takes fewer than 1024")
    columns = {"in_features": request.in_features}
    if request.form != "forward":  # in forward, out_features are columns of the result, which torch pads
        columns["out_features"] = request.out_features
    for name, count in columns.items():
        if count * request.dtype.itemsize % 16:
            reasons.append(f"{name}: a row of {count} elements is no multiple of 16 bytes")
    return reasons


def _grouped_mm_misfit(operands: ProductOperands) -> str | None:
    """Returns why PyTorch's grouped_mm cannot read these operands; None if it can."""
    if operands.bias is not None:
        return BIAS
    return memory_misfit(dense=dict(_named(operands))) if operands.first.is_cuda else None


def _named(operands: ProductOperands) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    """Returns the two operands of a product as pairs (name, tensor).

    The names depend on the product's form:

        form      the product                      names of the operands
        forward   rows times weights               "rows", "weight"
        input     the gradient of the rows         "grad", "weight"
        weight    the gradient of the weights      "grad", "rows"
    """
    first, second = {"forward": ("rows", "weight"), "input": ("grad", "weight"), "weight": ("grad", "rows")}[
        operands.form
    ]
    return (first, operands.first), (second, operands.second)


PRODUCTS = Registry(
    [
        ProductCandidate(name=PMOE, reasons=_pmoe_reasons, layout_problem=_pmoe_misfit),
        ProductCandidate(name=GROUPED_MM, reasons=_grouped_mm_reasons, layout_problem=_grouped_mm_misfit),
        ProductCandidate(name=LOOP, reasons=lambda request: []),
    ]
)
"""The implementations of grouped products, and the choices of this process, which all layers share.

`pmoe.measure.product_choices` measures them. On the CPU the loop is as fast as any kernel, and it writes into
memory of the caller.
"""
