"""Grouped matrix products: the rows of each expert, sorted by expert, times that expert's matrix.

On CUDA `pmoe.kernels.registry` picks for each product one of three implementations: pmoe's own kernels, one
launch of `torch.nn.functional.grouped_mm`, or a loop over the experts. On the CPU it is the loop, unless an
implementation is forced. All of them take the same `RowGroups`. An expert without rows costs nothing.

Letters: N rows, E experts of this rank, I input features and O output features of an expert's matrix.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.kernels import grouped_gemm
from pmoe.kernels.registry import GROUPED_MM, LOOP, PMOE, PRODUCTS, Form, ProductOperands


class RowGroups:
    """Numbers of rows of each local expert, among N rows that are sorted by expert.

    counts: E numbers on the host: the rows of each of the rank's E experts.
    ends: (E,) int32 on the rows' device, the running sum of counts, which CUDA kernels read; None on the CPU.
    num_rows: N, the number of all rows.

    Do not assign to the fields: the other attributes are computed from them once.

    Example: counts (2, 0, 3), ends [2, 2, 5]: expert 0 has rows 0 and 1, expert 2 has rows 2 to 4.
    """

    # Not a frozen dataclass, which calls a C function for each field; each call makes several objects. Not a
    # named tuple, because some attributes are cached.
    def __init__(self, *, counts: tuple[int, ...], ends: Tensor | None = None) -> None:
        self.counts = counts
        self.ends = ends
        self.num_rows: int = sum(counts)

    @functools.cached_property
    def ends_E(self) -> Tensor:
        """The end of each expert's rows, (E,) int32 for E experts: the running sum of the counts.

        It is ``ends``, on the rows' device, if the record has it; otherwise a new tensor on the CPU.
        """
        return torch.tensor(self.counts).cumsum(0).int() if self.ends is None else self.ends

    @functools.cached_property
    def bounds(self) -> Tensor:
        """The first row of each of E experts and, last, the number of all rows: (E + 1,) int64 on the CPU."""
        return torch.tensor([0, *itertools.accumulate(self.counts)])

    def slices(self) -> Iterator[tuple[int, slice]]:
        """Yields (expert, slice of the expert's rows) for each expert that has rows."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count

    @functools.cached_property
    def with_rows(self) -> list[int]:
        """The indices of the local experts that have rows."""
        return [expert for expert, count in enumerate(self.counts) if count]

    def rows_by_expert(self, *tensors: Tensor) -> Iterable[tuple[Any, ...]]:
        """Yields a tuple for each expert that has rows: the expert, then its rows of every tensor, as views.

        A tensor is split by one operation, or by none if a single expert has all rows. Indexing expert by
        expert would keep the host busy while the GPU waits for the next product.

        tensors: tensors whose first dimension indexes the N rows of all experts.
        """
        if len(self.with_rows) == 1:
            return ((self.with_rows[0], *tensors),)
        return zip(self.with_rows, *map(self.split, tensors), strict=True)

    def split(self, tensor: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """Returns the rows of each expert that has rows, as views; the tensor itself if only one has any.

        tensor: a tensor of which dimension ``dim`` indexes the N rows of all experts.
        """
        if len(self.with_rows) == 1:
            return (tensor,)
        return tensor.split_with_sizes([self.counts[expert] for expert in self.with_rows], dim)


@dataclass
class ExpertViews:
    """The views of each expert's part of the parameters. A pass makes each view once, for all chunks.

    parameters: the tensors with which the experts compute, (E, ...) for E experts. The object lives as long
        as one pass, in which they stay the same. Views of other tensors are made at each call and not stored.
    """

    parameters: Sequence[Tensor]
    _made: dict[tuple[int, bool], tuple[Tensor, ...]] = field(default_factory=dict)

    def of(self, stacked: Tensor, *, transposed: bool = False) -> tuple[Tensor, ...]:
        """Returns the part of each expert, as views; with ``transposed``, of (E, O, I) the matrices (I, O).

        stacked: (E, ...), a weight or bias of E experts.
        """
        key = (id(stacked), transposed)
        views = self._made.get(key)
        if views is None:
            views = (stacked.transpose(1, 2) if transposed else stacked).unbind()
            if any(stacked is parameter for parameter in self.parameters):
                self._made[key] = views
        return views


NO_VIEWS = ExpertViews(())
"""Stores no views, because it has no parameters."""


def choice(
    form: Form,
    first: Tensor,
    second: Tensor,
    groups: RowGroups,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> str:
    """Returns the implementation that computes a product: PMOE, GROUPED_MM or LOOP.

    form, first, second: the kind of the product, and its two factors, for N rows, E experts, I input and O
        output features:

        form      product                           first             second
        forward   rows times experts' matrices      rows (N, I)       matrices (E, O, I)
        input     gradient of the rows              gradient (N, O)   matrices (E, O, I)
        weight    gradient of experts' matrices     gradient (N, O)   rows (N, I)

    groups: where each expert's rows begin and end.
    bias: (E, O), or None.
    out: memory for the result; None if the implementation allocates it.
    """
    # As `_asks`, without a call: each task asks for several products.
    if not groups.num_rows or not (first.is_cuda or PRODUCTS.forced is not None):
        return LOOP
    operands = ProductOperands(form, first, second, len(groups.counts), bias, out)
    return PRODUCTS.choose(operands.request, operands)


def _asks(rows: Tensor) -> bool:
    """Returns whether `pmoe.kernels.registry` chooses the implementation of a product of these rows.

    If the result is False, the loop over experts is used. On the CPU the loop is as fast as any other
    implementation, and writes its result in place.

    rows: a factor of the product, of which only the device is read.
    """
    return rows.is_cuda or PRODUCTS.forced is not None


def expert_product(
    rows_NI: Tensor,
    weight_EOI: Tensor,
    groups: RowGroups,
    bias_EO: Tensor | None = None,
    out: Tensor | None = None,
    scale_N: Tensor | None = None,
    method: str | None = None,
    views: ExpertViews = NO_VIEWS,
) -> Tensor:
    """Returns (rows @ weight[e]^T + bias[e]) * scale for the rows of each expert e: (N, O).

    rows_NI: (N, I), N rows of I input features, sorted by expert.
    weight_EOI: (E, O, I), a matrix for each of E experts, with O output features.
    groups: where each expert's rows begin and end.
    bias_EO: (E, O); None adds nothing.
    out: (N, O), memory for the result; None allocates it.
    scale_N: (N,), a factor for each row; None is 1.
    method: the implementation, PMOE, GROUPED_MM or LOOP; None lets `choice` pick it.
    views: the views of weight and bias that the pass has made already.
    """
    method = choice("forward", rows_NI, weight_EOI, groups, bias_EO, out) if method is None else method
    if method == PMOE:
        scale = None if scale_N is None else scale_of(scale_N, rows_NI)  # the kernel scales before it rounds
        return grouped_gemm.product(rows_NI, weight_EOI, groups.ends_E, bias_EO=bias_EO, scale=scale, out=out)
    if method == GROUPED_MM:
        result = F.grouped_mm(rows_NI, weight_EOI.transpose(1, 2), offs=groups.ends_E)
        out = result.contiguous() if out is None else out.copy_(result)
    else:
        out = rows_NI.new_empty(rows_NI.shape[0], weight_EOI.shape[1]) if out is None else out
        weight_IO = views.of(weight_EOI, transposed=True)
        bias_O = () if bias_EO is None else views.of(bias_EO)
        for expert, rows, out_rows in groups.rows_by_expert(rows_NI, out):
            if bias_O:
                torch.addmm(bias_O[expert], rows, weight_IO[expert], out=out_rows)
            else:
                torch.mm(rows, weight_IO[expert], out=out_rows)
    return out if scale_N is None else out.mul_(scale_N.unsqueeze(1))


def scale_of(weight_N: Tensor, rows: Tensor) -> Tensor:
    """Returns the N rows' routing weights, (N,), in the dtype and layout that kernels read.

    The result is contiguous, and in float32, or in the dtype of ``rows`` if that is wider.

    weight_N: (N,), the routing weights.
    rows: a tensor with the dtype of the rows.
    """
    return weight_N.to(torch.promote_types(rows.dtype, torch.float32)).contiguous()


def expert_input_gradient(
    grad_NO: Tensor,
    weight_EOI: Tensor,
    groups: RowGroups,
    out: Tensor | None = None,
    method: str | None = None,
    views: ExpertViews = NO_VIEWS,
) -> Tensor:
    """Returns grad @ weight[e] for the rows of each expert e: the gradient of the rows, (N, I).

    grad_NO: (N, O), the gradient of N results of O output features, sorted by expert.
    weight_EOI: (E, O, I), a matrix for each of E experts, with I input features.
    groups: where each expert's rows begin and end.
    out: (N, I), memory for the result; None allocates it.
    method: the implementation, PMOE, GROUPED_MM or LOOP; None lets `choice` pick it.
    views: the views of the weight that the pass has made already.
    """
    method = choice("input", grad_NO, weight_EOI, groups, None, out) if method is None else method
    if method == PMOE:
        return grouped_gemm.input_gradient(grad_NO, weight_EOI, groups.ends_E, out=out)
    if method == GROUPED_MM:
        return expert_product(grad_NO, weight_EOI.transpose(1, 2), groups, out=out, method=method)
    out = grad_NO.new_empty(grad_NO.shape[0], weight_EOI.shape[2]) if out is None else out
    weight_OI = views.of(weight_EOI)
    for expert, grad, out_rows in groups.rows_by_expert(grad_NO, out):
        torch.mm(grad, weight_OI[expert], out=out_rows)
    return out


class GradientSum:
    """Sums the gradient of one parameter over chunks, in the order in which chunks are computed.

    The parameter holds one weight of all E experts of the rank: (E, ...).

    parameter: the parameter. The sum has its shape.
    new: a function that returns uninitialised memory with the dtype and device of a tensor, in a given shape.
        It provides the sum's memory, unless the sum has another dtype than the parameter.
    contributions: number of additions that will follow. If there are several, a parameter narrower than
        float32 is summed in float32 and rounded once.
    total: the sum so far, of the parameter's shape.
    is_empty: whether nothing has been added yet.

    The first addition overwrites uninitialised memory. So ``total`` is not set to zero first. Only the parts
    of experts without rows are set to zero, because nothing overwrites these.
    """

    total: Tensor

    def __init__(
        self, parameter: Tensor, contributions: int, new: Callable[..., Tensor] = Tensor.new_empty
    ) -> None:
        narrow = parameter.dtype in (torch.bfloat16, torch.float16)
        self._dtype = parameter.dtype
        if narrow and contributions > 1:
            self.total = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        else:
            self.total = new(parameter, *parameter.shape)
        self.is_empty: bool = True

    @functools.cached_property
    def by_expert(self) -> tuple[Tensor, ...]:
        """The sum of each of E experts, as views of `total`."""
        return self.total.unbind()

    def add_weight(
        self, grad_NO: Tensor, rows_NI: Tensor, groups: RowGroups, method: str | None = None
    ) -> None:
        """Adds the gradient of the experts' matrices from some rows: total[e] += grad[e]^T @ rows[e].

        grad[e] and rows[e] are the rows of expert e.

        grad_NO: (N, O), the gradient of N results of O output features, sorted by expert.
        rows_NI: (N, I), the rows of I input features that the results were computed from.
        groups: where each expert's rows begin and end.
        method: the implementation, PMOE, GROUPED_MM or LOOP; None lets `choice` pick it.
        """
        method = choice("weight", grad_NO, rows_NI, groups, None, self.total) if method is None else method
        # pmoe's kernel writes the parameter's dtype, but adds in float32 only.
        if method == PMOE and (self.is_empty or self.total.dtype == torch.float32):
            grouped_gemm.weight_gradient(
                grad_NO, rows_NI, groups.ends_E, out=self.total, accumulate=not self.is_empty
            )
        elif method != LOOP:
            self.add(_weight_gradient(method, grad_NO, rows_NI, groups))
        else:
            if self.is_empty:
                self._zero_without_rows(groups)
            # Transposed once for all experts, because a view for each would take long beside small products.
            grads_On = groups.split(grad_NO.t(), 1)
            for (expert, rows_nI), grad_On in zip(groups.rows_by_expert(rows_NI), grads_On, strict=True):
                total = self.by_expert[expert]
                if self.is_empty and total.dtype == rows_nI.dtype:
                    torch.mm(grad_On, rows_nI, out=total)
                elif total.dtype == rows_nI.dtype:
                    total.addmm_(grad_On, rows_nI)
                elif self.is_empty:
                    total.copy_(grad_On @ rows_nI)
                else:
                    total.add_(grad_On @ rows_nI)
        self.is_empty = False

    def add_bias(self, grad_NO: Tensor, groups: RowGroups) -> None:
        """Adds the gradient of the experts' biases: total[e] += the sum of grad over the rows of expert e.

        grad_NO: (N, O), the gradient of N results of O output features, sorted by expert.
        groups: where each expert's rows begin and end.
        """
        if grad_NO.element_size() == 2 and _asks(grad_NO):
            # A product with ones sums in a fixed order, unlike atomic adds, so the result repeats to the bit.
            # 8 columns are the least that kernels take: 16 bytes a row.
            ones = grad_NO.new_ones(grad_NO.shape[0], 8)
            method = choice("weight", grad_NO, ones, groups)
            if method != LOOP:
                self.add(_weight_gradient(method, grad_NO, ones, groups)[..., 0])
                return
        # The operation rounds its sums to the dtype of the rows, so the total must have this dtype, too.
        in_one_operation = not grad_NO.is_cuda and grad_NO.dtype == self.total.dtype
        if in_one_operation and len(groups.with_rows) > 1:
            self.add(_sums_by_expert(grad_NO, groups))
            return
        if self.is_empty:
            self._zero_without_rows(groups)
        for expert, grad_nO in groups.rows_by_expert(grad_NO):
            total = self.by_expert[expert]
            if self.is_empty:
                torch.sum(grad_nO, 0, dtype=total.dtype, out=total)
            else:
                total.add_(grad_nO.sum(0, dtype=total.dtype))
        self.is_empty = False

    def _zero_without_rows(self, groups: RowGroups) -> None:
        """Sets the sums of experts without rows to zero, because no product overwrites them.

        groups: where each expert's rows begin and end.
        """
        for expert, count in enumerate(groups.counts):
            if count == 0:
                self.total[expert].zero_()

    def add(self, contribution: Tensor) -> None:
        """Adds a tensor of the parameter's shape to the sum."""
        if self.is_empty:
            self.total.copy_(contribution)
        else:
            self.total.add_(contribution)
        self.is_empty = False

    def add_expert(self, expert: int, contribution: Tensor) -> None:
        """Adds a gradient of one expert's parameter to the sum.

        expert: the number of the expert on this rank.
        contribution: the gradient. It has the parameter's shape without the first dimension.
        """
        if self.is_empty:
            self.total.zero_()
            self.is_empty = False
        self.total[expert].add_(contribution)

    def result(self) -> Tensor:
        """Returns the sum, of the parameter's shape, in the parameter's dtype; zeros if nothing was added."""
        if self.is_empty:
            self.total.zero_()
        return self.total.to(self._dtype)


def _sums_by_expert(grad_NO: Tensor, groups: RowGroups) -> Tensor:
    """Returns the sum of grad over the rows of each expert, (E, O) for E experts, on the CPU.

    One operation sums the rows of all experts. A loop over 32 experts takes three times as long.

    grad_NO: (N, O), N rows of O columns, sorted by expert.
    groups: where each expert's rows begin and end.
    """
    rows = torch.arange(grad_NO.shape[0])
    return F.embedding_bag(rows, grad_NO, groups.bounds, mode="sum", include_last_offset=True)


def _weight_gradient(method: str, grad_NO: Tensor, rows_NI: Tensor, groups: RowGroups) -> Tensor:
    """Returns grad[e]^T @ rows[e] for each expert e, (E, O, I), from one kernel launch.

    grad[e] and rows[e] are the rows of expert e, one of E experts.

    method: PMOE for pmoe's kernel, anything else for torch's grouped_mm.
    grad_NO: (N, O), the gradient of N results of O output features, sorted by expert.
    rows_NI: (N, I), the rows of I input features.
    groups: where each of the E experts' rows begin and end.
    """
    if method == PMOE:
        return grouped_gemm.weight_gradient(grad_NO, rows_NI, groups.ends_E)
    products = F.grouped_mm(grad_NO.t(), rows_NI, offs=groups.ends_E)
    for expert, count in enumerate(groups.counts):
        if count == 0:
            products[expert].zero_()  # on some devices grouped_mm leaves it unwritten
    return products
