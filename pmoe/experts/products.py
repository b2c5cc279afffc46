"""Grouped matrix products: rows sorted by expert times that expert's matrix.

On CUDA one of three computes each product, as `pmoe.kernels.registry` chooses: pmoe's own kernels, one launch
of `torch.nn.functional.grouped_mm`, or a loop over the experts. On the CPU it is the loop. All see the same
`RowGroups`; rows of experts without rows cost nothing.

Letters: N rows, E experts of this rank, I in-features, O out-features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.kernels import grouped_gemm
from pmoe.kernels.architecture import device_name
from pmoe.kernels.registry import Candidate, Form, Registry, Request, bucket

PMOE, GROUPED_MM, LOOP = "pmoe", "grouped_mm", "loop"


@dataclass(frozen=True, kw_only=True)
class RowGroups:
    """How many of N consecutive rows belong to each local expert.

    counts: one number an expert, on the host. ends: (E,) int32 on the device, their running sum, as
    one launch wants it; None on the CPU.
    """

    counts: tuple[int, ...]
    ends: Tensor | None = None

    @functools.cached_property
    def num_rows(self) -> int:
        return sum(self.counts)

    @functools.cached_property
    def ends_E(self) -> Tensor:
        """ends, made on the CPU where there is none."""
        return torch.tensor(self.counts).cumsum(0).int() if self.ends is None else self.ends

    def slices(self) -> Iterator[tuple[int, slice]]:
        """(expert, its rows) for each expert that has rows."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count


# ---- who computes a product, and why not


class Operands(NamedTuple):
    """Of one product: rows (N, I) and weight (E, O, I) of "forward", grad (N, O) and weight of "input", grad
    and rows of "weight". out: where the result is to lie, None for memory of its own."""

    form: Form
    first: Tensor
    second: Tensor
    groups: RowGroups
    bias: Tensor | None = None
    out: Tensor | None = None


def request_of(operands: Operands) -> Request:
    """With the number of rows as a bucket."""
    form, first, second, groups, bias, _ = operands
    if form == "weight":
        num_out, num_in = first.shape[1], second.shape[1]
    else:
        num_out, num_in = second.shape[1], second.shape[2]
    return make_request(
        form, first.device, first.dtype, len(groups.counts), first.shape[0], num_in, num_out, bias is not None
    )


def make_request(
    form: Form,
    device: torch.device,
    dtype: torch.dtype,
    experts: int,
    rows: int,
    in_features: int,
    out_features: int,
    bias: bool = False,
) -> Request:
    return Request(
        form=form,
        device=device,
        device_name=device_name(device),
        dtype=dtype,
        experts=experts,
        rows=bucket(rows),
        in_features=in_features,
        out_features=out_features,
        bias=bias,
    )


def choice(
    form: Form,
    first: Tensor,
    second: Tensor,
    groups: RowGroups,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> str:
    """PMOE, GROUPED_MM or LOOP: who is to compute this product; see `Operands`."""
    if not _asks(first) or not groups.num_rows:
        return LOOP
    operands = Operands(form, first, second, groups, bias, out)
    return PRODUCTS.choose(request_of(operands), operands)


def _asks(rows: Tensor) -> bool:
    """On the CPU a loop is as fast as any, and writes in place."""
    return rows.is_cuda or PRODUCTS.forced is not None


BIAS = "bias: grouped_mm has none, and adding it afterwards rounds twice"


def _pmoe_reasons(request: Request) -> list[str]:
    columns = {"in_features": request.in_features, "out_features": request.out_features}
    why = grouped_gemm.refusal(request.device, request.dtype, **columns)
    return [] if why is None else [why]


def _pmoe_misfit(operands: Operands) -> str | None:
    form, first, second, _, bias, out = operands
    if not first.is_cuda:
        return None  # the plain definition takes everything
    rows = {"grad" if form != "forward" else "rows": first}
    whole = {"bias": bias}
    if form == "weight":
        rows["rows"], whole["out"] = second, out
    else:
        whole["weight"] = second
        if out is not None:
            rows["out"] = out
    for name, tensor in rows.items():
        apart = tensor.stride(0) * tensor.element_size() if tensor.shape[0] > 1 else 0
        if tensor.stride(1) != 1 or apart % 16:
            return f"{name}: of strides {tensor.stride()}, not rows a multiple of 16 bytes apart"
    for name, each in whole.items():
        if each is not None and not each.is_contiguous():
            return f"{name}: not contiguous"
    for name, each in (rows | whole).items():
        if each is not None and each.data_ptr() % 16:
            return f"{name}: not aligned to 16 bytes"
    return None


def _grouped_mm_reasons(request: Request) -> list[str]:
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


def _grouped_mm_misfit(operands: Operands) -> str | None:
    form, first, second, _, bias, _ = operands
    if bias is not None:
        return BIAS
    if not first.is_cuda:
        return None
    names = {"forward": ("rows", "weight"), "input": ("grad", "weight"), "weight": ("grad", "rows")}[form]
    for name, tensor in zip(names, (first, second), strict=True):
        if not tensor.is_contiguous():
            return f"{name}: not contiguous"
        if tensor.data_ptr() % 16:
            return f"{name}: not aligned to 16 bytes"
    return None


def _run(way: str, request: Request, operands: Operands) -> None:
    """What is measured: as a layer does it, the result in its place."""
    form, first, second, groups, bias, out = operands
    if form == "forward":
        _product(way, first, second, groups, bias, out)
    elif form == "input":
        _input_gradient(way, first, second, groups, out)
    else:
        like = first.new_empty(1).expand(request.experts, request.out_features, request.in_features)
        GradientSum(like, 1).add_weight_by(way, first, second, groups)


def _random_operands(request: Request) -> Operands:
    """Rows spread evenly over all experts but one, which has none. The caller's random numbers stay."""
    device, experts = request.device, request.experts
    generator = torch.Generator(device).manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=request.dtype, device=device, generator=generator)

    busy = max(experts - 1, 1)
    counts = [request.rows // busy + (i < request.rows % busy) for i in range(busy)]
    counts += [0] * (experts - busy)
    groups = RowGroups(
        counts=tuple(counts), ends=torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    )
    rows, num_in, num_out = request.rows, request.in_features, request.out_features
    if request.form == "weight":
        return Operands("weight", made(rows, num_out), made(rows, num_in), groups)
    taken, given = (num_in, num_out) if request.form == "forward" else (num_out, num_in)
    first, weight = made(rows, taken), made(experts, num_out, num_in)
    bias = made(experts, num_out) if request.bias else None
    return Operands(request.form, first, weight, groups, bias, first.new_empty(rows, given))


PRODUCTS = Registry(
    [
        Candidate(name=PMOE, reasons=_pmoe_reasons, run=functools.partial(_run, PMOE), misfit=_pmoe_misfit),
        Candidate(
            name=GROUPED_MM,
            reasons=_grouped_mm_reasons,
            run=functools.partial(_run, GROUPED_MM),
            misfit=_grouped_mm_misfit,
        ),
        Candidate(name=LOOP, reasons=lambda request: [], run=functools.partial(_run, LOOP)),
    ],
    compete=(PMOE, GROUPED_MM),
    operands=_random_operands,
)
"""The choices of this process, for all layers. `pmoe.measure.products` has them measured."""


# ---- the products


def product(
    rows_NI: Tensor,
    weight_EOI: Tensor,
    groups: RowGroups,
    bias_EO: Tensor | None = None,
    out: Tensor | None = None,
    scale_N: Tensor | None = None,
) -> Tensor:
    """rows @ weight[e]^T + bias[e] for the rows of each expert e, each row times its scale, (N, O)."""
    way = choice("forward", rows_NI, weight_EOI, groups, bias_EO, out)
    if way == PMOE and scale_N is not None:  # before the only rounding
        scale = scale_of(scale_N, rows_NI)
        return grouped_gemm.product(rows_NI, weight_EOI, groups.ends_E, bias_EO=bias_EO, scale=scale, out=out)
    found = _product(way, rows_NI, weight_EOI, groups, bias_EO, out)
    return found if scale_N is None else found.mul_(scale_N.unsqueeze(1))


def scale_of(weight_N: Tensor, rows: Tensor) -> Tensor:
    """Routing weights as pmoe's kernels want them; the layer's are so already."""
    return weight_N.to(torch.promote_types(rows.dtype, torch.float32)).contiguous()


def _product(
    way: str,
    rows_NI: Tensor,
    weight_EOI: Tensor,
    groups: RowGroups,
    bias_EO: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    if way == PMOE:
        return grouped_gemm.product(rows_NI, weight_EOI, groups.ends_E, bias_EO=bias_EO, out=out)
    if way == GROUPED_MM:
        result = F.grouped_mm(rows_NI, weight_EOI.transpose(1, 2), offs=groups.ends_E)
        return result.contiguous() if out is None else out.copy_(result)
    if out is None:
        out = rows_NI.new_empty(rows_NI.shape[0], weight_EOI.shape[1])
    for expert, at in groups.slices():
        if bias_EO is None:
            torch.mm(rows_NI[at], weight_EOI[expert].t(), out=out[at])
        else:
            torch.addmm(bias_EO[expert], rows_NI[at], weight_EOI[expert].t(), out=out[at])
    return out


def input_gradient(
    grad_NO: Tensor, weight_EOI: Tensor, groups: RowGroups, out: Tensor | None = None
) -> Tensor:
    """grad @ weight[e] for the rows of each expert e, (N, I)."""
    way = choice("input", grad_NO, weight_EOI, groups, None, out)
    return _input_gradient(way, grad_NO, weight_EOI, groups, out)


def _input_gradient(
    way: str, grad_NO: Tensor, weight_EOI: Tensor, groups: RowGroups, out: Tensor | None
) -> Tensor:
    if way == PMOE:
        return grouped_gemm.input_gradient(grad_NO, weight_EOI, groups.ends_E, out=out)
    if way == GROUPED_MM:
        result = F.grouped_mm(grad_NO, weight_EOI, offs=groups.ends_E)
        return result.contiguous() if out is None else out.copy_(result)
    if out is None:
        out = grad_NO.new_empty(grad_NO.shape[0], weight_EOI.shape[2])
    for expert, at in groups.slices():
        torch.mm(grad_NO[at], weight_EOI[expert], out=out[at])
    return out


class GradientSum:
    """The gradient of one stacked parameter, summed over the chunks in the order of their tasks.

    The first contribution overwrites, so nothing is zeroed first. Several contributions to a parameter
    narrower than float32 are summed in float32 and rounded once.
    """

    def __init__(self, parameter: Tensor, contributions: int) -> None:
        narrow = parameter.dtype in (torch.bfloat16, torch.float16)
        self._dtype = parameter.dtype
        self.total = torch.empty_like(
            parameter,
            dtype=torch.float32 if narrow and contributions > 1 else None,
            memory_format=torch.contiguous_format,
        )
        self._first = True

    def add_weight(self, grad_NO: Tensor, rows_NI: Tensor, groups: RowGroups) -> None:
        """total[e] += grad[rows of e]^T @ rows[rows of e]"""
        way = choice("weight", grad_NO, rows_NI, groups, None, self.total)
        self.add_weight_by(way, grad_NO, rows_NI, groups)

    def add_weight_by(self, way: str, grad_NO: Tensor, rows_NI: Tensor, groups: RowGroups) -> None:
        """The same, computed by PMOE, GROUPED_MM or LOOP."""
        if way == PMOE:
            if self._first or self.total.dtype == torch.float32:  # straight into its place, rounded once
                grouped_gemm.weight_gradient(
                    grad_NO, rows_NI, groups.ends_E, out=self.total, accumulate=not self._first
                )
                self._first = False
            else:
                self.add(grouped_gemm.weight_gradient(grad_NO, rows_NI, groups.ends_E))
            return
        if way == GROUPED_MM:
            self.add(_without_empty(F.grouped_mm(grad_NO.t(), rows_NI, offs=groups.ends_E), groups))
            return
        if self._first and 0 in groups.counts:
            self.total.zero_()
        for expert, at in groups.slices():
            if self.total.dtype == rows_NI.dtype:
                beta = 0.0 if self._first else 1.0
                self.total[expert].addmm_(grad_NO[at].t(), rows_NI[at], beta=beta)
            elif self._first:
                self.total[expert].copy_(grad_NO[at].t() @ rows_NI[at])
            else:
                self.total[expert].add_(grad_NO[at].t() @ rows_NI[at])
        self._first = False

    def add_bias(self, grad_NO: Tensor, groups: RowGroups) -> None:
        """total[e] += sum of grad over the rows of e"""
        if _asks(grad_NO) and groups.num_rows and grad_NO.element_size() == 2:
            # A product with a column of ones sums in a fixed order; scattered atomic adds would not.
            ones = grad_NO.new_ones(grad_NO.shape[0], 8)
            way = choice("weight", grad_NO, ones, groups)
            if way == PMOE:
                summed = grouped_gemm.weight_gradient(grad_NO, ones, groups.ends_E)
                self.add(summed[..., 0])
                return
            if way == GROUPED_MM:
                summed = F.grouped_mm(grad_NO.t(), ones, offs=groups.ends_E)
                self.add(_without_empty(summed, groups)[..., 0])
                return
        if self._first and 0 in groups.counts:
            self.total.zero_()
        for expert, at in groups.slices():
            summed = grad_NO[at].sum(0, dtype=self.total.dtype)
            if self._first:
                self.total[expert].copy_(summed)
            else:
                self.total[expert].add_(summed)
        self._first = False

    def add(self, contribution: Tensor) -> None:
        """total += contribution, of the parameter's shape"""
        if self._first:
            self.total.copy_(contribution)
        else:
            self.total.add_(contribution)
        self._first = False

    def result(self) -> Tensor:
        """The sum in the parameter's type; zero where nothing was added."""
        if self._first:
            self.total.zero_()
        return self.total.to(self._dtype)


def _without_empty(per_expert: Tensor, groups: RowGroups) -> Tensor:
    """per_expert with zeros where an expert has no rows: some devices leave those untouched."""
    for expert, count in enumerate(groups.counts):
        if count == 0:
            per_expert[expert].zero_()
    return per_expert
