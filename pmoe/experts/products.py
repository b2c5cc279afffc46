"""Grouped matrix products: rows sorted by expert times that expert's matrix.

One launch for all experts (`torch.nn.functional.grouped_mm`) where the device has one, a loop over the
experts where it refuses. Both see the same `RowGroups`; rows of experts without rows cost nothing.

Letters: N rows, E experts of this rank, I in-features, O out-features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class RowGroups:
    """How many of N consecutive rows belong to each local expert.

    counts: one number an expert, on the host. ends: (E,) int32 on the device, their running sum, as
    grouped_mm wants it; None on the CPU.
    """

    counts: tuple[int, ...]
    ends: Tensor | None = None

    @functools.cached_property
    def num_rows(self) -> int:
        return sum(self.counts)

    def slices(self) -> Iterator[tuple[int, slice]]:
        """(expert, its rows) for each expert that has rows."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count


def refusal(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    """Why grouped_mm would not take these operands in one launch, or None where it does."""
    if rows.device.type != "cuda":
        return f"device {rows.device.type}: a loop is as fast there and writes in place"
    if rows.dtype != torch.bfloat16:
        return f"dtype {rows.dtype}: grouped_mm has one launch for bfloat16 only"
    if bias is not None:
        return "bias: grouped_mm has none, and adding it afterwards rounds twice"
    major, minor = torch.cuda.get_device_capability(rows.device)
    if major not in (9, 10):
        return f"compute capability {major}.{minor}: grouped_mm loops there, reading the offsets on the host"
    if weight.dim() == 3 and weight.shape[0] >= 1024:
        return f"{weight.shape[0]} experts: grouped_mm takes fewer than 1024"
    for name, tensor in (("rows", rows), ("weight", weight)):
        if tensor.shape[-1] * tensor.element_size() % 16:
            return f"{name}: a row of {tensor.shape[-1]} elements is no multiple of 16 bytes"
        if not tensor.is_contiguous():
            return f"{name}: not contiguous"
        if tensor.data_ptr() % 16:
            return f"{name}: not aligned to 16 bytes"
    return None


def product(
    rows_NI: Tensor,
    weight_EOI: Tensor,
    groups: RowGroups,
    bias_EO: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """rows @ weight[e]^T + bias[e] for the rows of each expert e, (N, O)."""
    if groups.num_rows and refusal(rows_NI, weight_EOI, bias_EO) is None:
        result = F.grouped_mm(rows_NI, weight_EOI.transpose(1, 2), offs=groups.ends)
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
    if groups.num_rows and refusal(grad_NO, weight_EOI) is None:
        result = F.grouped_mm(grad_NO, weight_EOI, offs=groups.ends)
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
        if groups.num_rows and refusal(grad_NO, rows_NI) is None:
            self.add(_without_empty(F.grouped_mm(grad_NO.t(), rows_NI, offs=groups.ends), groups))
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
        if groups.num_rows and refusal(grad_NO, grad_NO) is None:
            # A product with a column of ones sums in a fixed order; scattered atomic adds would not.
            ones = torch.ones(grad_NO.shape[0], 8, dtype=grad_NO.dtype, device=grad_NO.device)
            self.add(_without_empty(F.grouped_mm(grad_NO.t(), ones, offs=groups.ends), groups)[..., 0])
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
