"""Stacked experts on a GPU whose operands are checked once for each pass, to save time of the host.

The functions of `pmoe.kernels.grouped_gemm` check all operands at each launch of a kernel. In a pass, the
weights, the device and the stream are the same for all chunks (micro-batches). `LaunchedExperts` checks them
once, when the pass begins. At a launch it checks only the layout and alignment of the rows.

Letters: N rows, E experts of this rank, M = d_model, H hidden columns, G columns of T_M, the hidden
activation before the nonlinearity (G = H, or 2H for gated experts).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pmoe.experts.base import ExpertRows, Experts, Hidden, fresh
from pmoe.experts.products import GradientSum, RowGroups, scale_of
from pmoe.experts.stacked import StackedExperts, split_parameters
from pmoe.kernels import extension
from pmoe.kernels.gemm import (
    ACTIVATIONS,
    FORWARD,
    HIDDEN,
    HIDDEN_GRADIENT,
    INPUT,
    PLAIN,
    WEIGHT,
    layout_problem,
)
from pmoe.kernels.grouped_gemm.launch import (
    counters_of_thread,
    fields_for_all,
    gathers_in_load,
    num_row_dots,
    path_for,
    spare_of_thread,
)
from pmoe.kernels.operands import VECTOR_BYTES, address
from pmoe.kernels.registry import PMOE, PRODUCTS, Form, ProductRequest


class PreparedProduct:
    """A matrix product of all experts, prepared for several launches of one pass, each with other rows.

    The arguments of a launch that do not depend on the rows were checked before. The product must be launched
    on the stream that was current when this object was made.

    request: function (number of rows) that returns a description of the product, a `ProductRequest`. The
        implementation is chosen for this request.
    device: the device that computes.
    fields: the arguments of a launch that do not depend on the rows.
    start: the function of the extension that launches the kernel.
    """

    def __init__(
        self,
        request: Callable[[int], ProductRequest],
        device: torch.device,
        fields: dict[str, Any],
        start: Callable[..., None],
    ) -> None:
        self._request = request
        self._device = device
        self._fields = fields
        self._start = start
        self._is_chosen: dict[int, bool] = {}

    def takes(self, num_rows: int, *rows: Tensor) -> bool:
        """Returns whether pmoe's kernel should compute the product of N rows; False if N is 0.

        True if the kernel is the fastest implementation for this number of rows and can read the tensors.

        num_rows: N, the number of rows.
        rows: the tensors (rows, columns) that the kernel would read and write.
        """
        # The implementation is chosen once for all numbers of rows up to the same power of two.
        bits = max(num_rows - 1, 0).bit_length()
        if bits not in self._is_chosen:
            self._is_chosen[bits] = PRODUCTS.choose(self._request(num_rows)) == PMOE
        fits = num_rows > 0 and self._is_chosen[bits]
        for tensor in rows:
            fits = fits and tensor.is_contiguous() and tensor.data_ptr() % VECTOR_BYTES == 0
        return fits

    def launch(self, num_rows: int, groups: RowGroups, **fields: int) -> None:
        """Launches the product of N rows, for which `takes` must have returned True.

        num_rows: N, the number of rows.
        groups: where each expert's rows begin and end.
        fields: the arguments of the launch that depend on the rows, by their names in
            cuda/grouped_gemm/bind.cpp.
        """
        ends = groups.ends_E if groups.ends is None else groups.ends
        counters = counters_of_thread.get()
        if counters is not None:
            fields["spare"] = spare_of_thread.get()
            fields["next_tile"] = next(counters.addresses, 0) or counters.take(self._device)
        self._start(**{**self._fields, "rows": num_rows, "ends": ends.data_ptr(), **fields})


class LaunchedExperts:
    """Experts on a GPU that launch their matrix products without repeated checks. Made for one pass.

    The object has the methods of `Experts` that compute products, with the same arguments and results. If
    pmoe's kernels do not suit the rows of a call, these methods call the same methods of ``stacked``.

    stacked: the experts. Kernels must be able to compute their nonlinearity.
    weights: the tensors to compute with (`StackedExperts.weights`).
    rows: a tensor with the dtype and device of the pass's rows.
    kernels: the GPU architecture for which the kernels were compiled, "sm_90a" or "sm_80".
    """

    def __init__(
        self,
        stacked: StackedExperts,
        weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        rows: Tensor,
        kernels: str,
    ) -> None:
        w1, w2, b1, b2 = weights
        self._stacked = stacked
        self._device = rows.device
        self._b2 = b2
        self._num_hidden = w1.shape[1]
        self._width = w2.shape[2]
        self._kernels = kernels
        # The gradient of w2 is (weight * grad)^T active, with the routing weight of each row. It equals
        # grad^T (weight * active), so a kernel multiplies the activation by the weights instead, which saves
        # a pass over grad. The gradient of b2 needs weight * grad in any case.
        self._weighs_active = b2 is None
        self._scale_dtype = torch.promote_types(rows.dtype, torch.float32)
        self._experts = w1.shape[0]
        self._weights = w1, w2, b1, None if stacked.shard.index else b2
        self._rows = rows
        self._start = extension.module().grouped_gemm
        self._activation = ACTIVATIONS[stacked.activation]
        self._takes_rows: dict[int, bool] = {}

    def _product(
        self,
        form: Form,
        in_features: int,
        out_features: int,
        bias: Tensor | None = None,
        epilogue: int = PLAIN,
        **fields: int,
    ) -> PreparedProduct:
        """Prepares one of the matrix products of this pass for launches.

        form: "forward" for rows times weight, "input" for the gradient of rows, "weight" for the gradient of
            a weight.
        in_features, out_features: columns and rows of the weight, or of the gradient of the weight.
        bias: the bias that is added to the product; None if it has none.
        epilogue: number of the operation that the kernel applies to the product before it writes the result.
        fields: the arguments of the launch that do not depend on the rows.
        """
        rows = self._rows

        def request(num_rows: int) -> ProductRequest:
            return ProductRequest(
                form=form,
                device=rows.device,
                dtype=rows.dtype,
                experts=self._experts,
                rows=num_rows,
                in_features=in_features,
                out_features=out_features,
                bias=bias is not None,
            )

        fields |= fields_for_all(self._kernels, FORMS[form], rows, epilogue)
        return PreparedProduct(
            request,
            rows.device,
            {**fields, "experts": self._experts, "bias": 0 if bias is None else bias.data_ptr()},
            self._start,
        )

    @functools.cached_property
    def _hidden(self) -> PreparedProduct:
        """Forward's first product, T_M = rows @ w1^T + b1, together with the nonlinearity.

        T_M is the hidden activation before the nonlinearity.
        """
        w1, _, b1, _ = self._weights
        model = w1.shape[2]
        return self._product(
            "forward", model, self._num_hidden, b1, HIDDEN, b=w1.data_ptr(), a_stride=model,
            d_stride=self._num_hidden, n=self._num_hidden, k=model, active_stride=self._width,
            activation=self._activation,
        )  # fmt: skip

    @functools.cached_property
    def _again(self) -> PreparedProduct:
        """The product with which backward computes the hidden activation T_M again: rows @ w1^T + b1.

        It is forward's first product without the nonlinearity.
        """
        w1, _, b1, _ = self._weights
        model = w1.shape[2]
        return self._product(
            "forward", model, self._num_hidden, b1, b=w1.data_ptr(), a_stride=model,
            d_stride=self._num_hidden, n=self._num_hidden, k=model,
        )  # fmt: skip

    @functools.cached_property
    def _output(self) -> PreparedProduct:
        """Forward's second product: (activation @ w2^T + b2) * routing weight, for each row."""
        _, w2, _, b2 = self._weights
        width = self._width
        model = w2.shape[1]
        return self._product(
            "forward", width, model, b2, b=w2.data_ptr(), a_stride=width, d_stride=model, n=model, k=width
        )

    @functools.cached_property
    def _hidden_gradient(self) -> PreparedProduct:
        """Backward's first product: the gradients of T_M and of the routing weights, and the activation.

        T_M is the hidden activation before the nonlinearity. The hidden activation after the nonlinearity is
        computed again, because w2's gradient needs it.
        """
        _, w2, _, _ = self._weights
        hidden = self._num_hidden
        width = self._width
        model = w2.shape[1]
        return self._product(
            "input", width, model, None, HIDDEN_GRADIENT, b=w2.data_ptr(), a_stride=model, d_stride=hidden,
            active_stride=width, hidden_stride=hidden, n=width, k=model, activation=self._activation,
            weighs_active=self._weighs_active,
        )  # fmt: skip

    @functools.cached_property
    def _input_gradient(self) -> PreparedProduct:
        """Backward's second product: the gradient of the experts' input rows."""
        w1, _, _, _ = self._weights
        hidden = self._num_hidden
        model = w1.shape[2]
        return self._product(
            "input", model, hidden, b=w1.data_ptr(), a_stride=hidden, d_stride=model, n=model, k=hidden
        )

    @functools.cached_property
    def _num_dots(self) -> int:
        """The number of partial sums in which backward's first product stores the inner product of a row."""
        return num_row_dots(self._kernels, self._width, self._weights[0].shape[2], self._activation)

    @functools.cached_property
    def _of_w1(self) -> PreparedProduct:
        """The product for the gradient of w1: gradient of T_M, transposed, times rows, for each expert.

        T_M is the hidden activation before the nonlinearity.
        """
        hidden = self._num_hidden
        model = self._weights[0].shape[2]
        return self._product(
            "weight", model, hidden, a_stride=hidden, b_stride=model, d_stride=model, m=hidden, n=model
        )

    @functools.cached_property
    def _of_w2(self) -> PreparedProduct:
        """The product for the gradient of w2: gradient of the output, transposed, times activation.

        There is one product for each expert. The activation is the hidden activation after the nonlinearity.
        """
        width = self._width
        model = self._weights[1].shape[1]
        return self._product(
            "weight", width, model, a_stride=model, b_stride=width, d_stride=width, m=model, n=width
        )

    # ---- forward

    def compute(
        self, expert_rows: ExpertRows, weight_N: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Hidden | None]:
        rows_NM = expert_rows.rows_NM
        groups = expert_rows.groups
        num_rows = groups.num_rows
        out = expert_rows.out
        slots = expert_rows.slots
        # With slots, the rows are not sorted, and only pmoe's kernels can compute them. So a caller gives
        # slots only after `takes` has returned True for these rows and this memory.
        assert slots is None or out is not None
        if out is None or (slots is None and not self.takes(num_rows, rows_NM, out)):
            in_order = without_result_rows(expert_rows)
            result_NM, hidden = self._stacked.compute(in_order, weight_N, keep=keep)
            return put_in_result_rows(result_NM, expert_rows), hidden
        in_place = not keep and self._stacked._activates_in_place(self._device.type)
        space = expert_rows.space or fresh(rows_NM)
        hidden_NG = space("T_M", num_rows, self._num_hidden) if keep or in_place else None
        active_NH = hidden_NG
        if active_NH is None or not in_place:
            active_NH = space("active", num_rows, self._width)
        gathering = {}
        if slots is not None:
            gathering = {"slot": slots.slot_N.data_ptr(), "top_k": slots.top_k, "a_gathered": True}
        active = active_NH.data_ptr()
        self._hidden.launch(
            num_rows, groups, a=rows_NM.data_ptr(), a_rows=rows_NM.shape[0],
            d=0 if hidden_NG is None or not keep else hidden_NG.data_ptr(), active=active, **gathering,
        )  # fmt: skip
        has_scale = weight_N.dtype == self._scale_dtype and weight_N.is_contiguous()
        scale_N = weight_N if has_scale else self._scale(weight_N)
        result_row = expert_rows.result_row
        self._output.launch(
            num_rows, groups, a=active, a_rows=num_rows, d=out.data_ptr(), weight=scale_N.data_ptr(),
            place=0 if result_row is None else result_row.data_ptr(),
        )  # fmt: skip
        return out, Hidden(tensors=[hidden_NG]) if keep and hidden_NG is not None else None

    def takes(self, num_rows: int, *rows: Tensor) -> bool:
        """Returns whether `compute` launches pmoe's kernels for N rows. Otherwise PyTorch computes them.

        num_rows: N, the number of rows.
        rows: the tensors that kernels would read or write, unless they are known to be dense (`is_dense`):
            (N, M), the rows with M = d_model columns; or (T, M), T tokens of which the rows are copies; and
            (N, M), memory for the results.
        """
        if num_rows == 0:
            return False
        bits = (num_rows - 1).bit_length()  # as `PreparedProduct.takes` chooses
        if bits not in self._takes_rows:
            self._takes_rows[bits] = self._hidden.takes(num_rows) and self._output.takes(num_rows)
        fits = self._takes_rows[bits]
        for tensor in rows:  # as `is_dense`, without a call for each
            fits = fits and tensor.is_contiguous() and tensor.data_ptr() % VECTOR_BYTES == 0
        return fits

    def gathers(self, top_k: int) -> bool:
        """Returns whether loading rows from tokens is faster for `compute` than copying the rows first.

        Each row is then loaded from the token that ``ExpertRows.slots`` names for it, if `takes` is True.

        top_k: K, the number of choices of a token.
        """
        return gathers_in_load(self._kernels, self._num_hidden, top_k)

    # ---- backward

    def recompute(self, expert_rows: ExpertRows, recipe: Any) -> Hidden:
        rows_NM = expert_rows.rows_NM
        num_rows = rows_NM.shape[0]
        if not self._again.takes(num_rows, rows_NM):
            return self._stacked.recompute(expert_rows, recipe)
        hidden_NG = expert_rows.new("T_M", self._num_hidden)
        self._again.launch(
            num_rows, expert_rows.groups, a=rows_NM.data_ptr(), a_rows=num_rows, d=hidden_NG.data_ptr()
        )
        return Hidden(tensors=[hidden_NG], expendable=True)

    def input_gradient(
        self, grad_NM: Tensor, expert_rows: ExpertRows, weight_N: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        (hidden_NG,) = hidden.tensors
        groups = expert_rows.groups
        num_rows = groups.num_rows
        out = expert_rows.out
        dot_N = expert_rows.grad_weight_N
        takes = self._hidden_gradient.takes(num_rows, grad_NM, hidden_NG)
        if out is None or dot_N is None or not takes or not self._input_gradient.takes(num_rows, out):
            in_order = without_result_rows(expert_rows)
            result_NM, result_N, pending = self._stacked.input_gradient(grad_NM, in_order, weight_N, hidden)
            return put_in_result_rows(result_NM, expert_rows), result_N, pending
        grad_hidden_NG = expert_rows.new("dT_M", self._num_hidden)
        in_place = hidden.expendable and self._stacked._activates_in_place(self._device.type)
        active_NH = hidden_NG if in_place else expert_rows.new("active", self._width)
        dots = dot_N
        is_direct = self._num_dots == 1 and dot_N.dtype == self._scale_dtype
        if not is_direct:
            dots = dot_N.new_empty(self._num_dots, num_rows, dtype=self._scale_dtype)
        self._hidden_gradient.launch(
            num_rows, groups, a=grad_NM.data_ptr(), a_rows=num_rows, d=grad_hidden_NG.data_ptr(),
            active=active_NH.data_ptr(), hidden=hidden_NG.data_ptr(),
            weight=self._scale(weight_N).data_ptr(), row_dots=dots.data_ptr(),
        )  # fmt: skip
        if not is_direct:
            dot_N.copy_(dots.sum(0) if self._num_dots > 1 else dots[0])
        if self._b2 is not None and not self._stacked.shard.index:
            b2_M = self._b2.unbind()
            for expert, grad_nM, dot_n in groups.rows_by_expert(grad_NM, dot_N):
                dot_n.add_((grad_nM @ b2_M[expert]).to(dot_n.dtype))
        self._input_gradient.launch(
            num_rows, groups, a=grad_hidden_NG.data_ptr(), a_rows=num_rows, d=out.data_ptr(),
            place=address(expert_rows.result_row),
        )  # fmt: skip
        if not self._weighs_active:
            grad_NM.mul_(weight_N.unsqueeze(1))
        return out, dot_N, (expert_rows.rows_NM, grad_hidden_NG, active_NH, grad_NM)

    def weight_gradient(
        self, pending: tuple[Tensor, ...], groups: RowGroups, sums: Sequence[GradientSum | None]
    ) -> None:
        rows_NM, grad_hidden_NG, active_NH, grad_out_NM = pending
        of_w1, of_w2, of_b1, of_b2 = split_parameters(sums)
        if of_w1 is not None:
            self._add(self._of_w1, of_w1, grad_hidden_NG, rows_NM, groups)
        if of_w2 is not None:
            self._add(self._of_w2, of_w2, grad_out_NM, active_NH, groups)
        if of_b1 is not None:
            of_b1.add_bias(grad_hidden_NG, groups)
        if of_b2 is not None:
            of_b2.add_bias(grad_out_NM, groups)

    def _add(
        self,
        product: PreparedProduct,
        gradient: GradientSum,
        first: Tensor,
        second: Tensor,
        groups: RowGroups,
    ) -> None:
        """Computes the gradient of a weight, first^T @ second for each expert, and adds it to its sum.

        product: the prepared product.
        gradient: the sum over chunks.
        first: (N, O), the gradient of N results of O output features, sorted by expert.
        second: (N, I), the rows of I input features.
        groups: where each expert's rows begin and end.
        """
        total = gradient.total
        num_rows = groups.num_rows
        if total.element_size() < 4 and not gradient.is_empty or not product.takes(num_rows, first, second):
            gradient.add_weight(first, second, groups)
            return
        product.launch(
            num_rows, groups, a=first.data_ptr(), b=second.data_ptr(), a_rows=num_rows, b_rows=num_rows,
            d=total.data_ptr(), wide=total.dtype != first.dtype, accumulates=not gradient.is_empty,
        )  # fmt: skip
        gradient.is_empty = False

    def _scale(self, weight_N: Tensor) -> Tensor:
        """Returns the routing weights (N,) of N rows, contiguous, in float32 (float64 for float64 rows).

        weight_N: (N,), the routing weights, of any floating-point dtype.
        """
        if weight_N.dtype == self._scale_dtype and weight_N.is_contiguous():
            return weight_N
        return scale_of(weight_N, weight_N.new_empty(0, dtype=self._scale_dtype))


def without_result_rows(expert_rows: ExpertRows) -> ExpertRows:
    """Returns the argument for experts that write results in the order of rows, and not by ``result_row``.

    If ``result_row`` is None, this is the same object. Otherwise the experts choose the memory for results.

    expert_rows: the rows of a chunk.
    """
    if expert_rows.result_row is None:
        return expert_rows
    return expert_rows._replace(out=None, result_row=None)


def put_in_result_rows(result_NM: Tensor, expert_rows: ExpertRows) -> Tensor:
    """Copies results to the rows of ``expert_rows.out`` that ``expert_rows.result_row`` names; returns out.

    If ``result_row`` is None, nothing is copied, and ``result_NM`` is returned.

    result_NM: (N, M), the results of N rows in their order, with M = d_model columns.
    expert_rows: the rows of the chunk.
    """
    out = expert_rows.out
    if expert_rows.result_row is None or out is None:
        return result_NM
    return out.index_copy_(0, expert_rows.result_row.long(), result_NM)


FORMS: dict[Form, int] = {"forward": FORWARD, "input": INPUT, "weight": WEIGHT}
"""The codes of the forms of products (see `LaunchedExperts._product`) in launches of the kernel."""

COMPUTING = frozenset(("compute", "recompute", "input_gradient", "weight_gradient"))
"""The methods of `StackedExperts` that `LaunchedExperts` replaces."""


def launched(experts: Experts, parameters: Sequence[Tensor], rows: Tensor) -> LaunchedExperts | None:
    """Returns an object that launches the experts' kernels directly; None if no kernel can compute them.

    Direct launches leave out the checks that torch makes for each operator (`LaunchedExperts`).

    experts: the layer's experts.
    parameters: the tensors to compute with (`Experts.operands`).
    rows: a tensor (..., M) with the columns, dtype and device of the pass's rows, M = d_model.
    """
    kernels = kernels_for(experts, rows.device, rows.dtype)
    if kernels is None:
        return None
    stacked: Any = experts  # `kernels_for` refuses all other experts
    weights = stacked.weights(parameters)
    if rows.shape[-1] != weights[0].shape[2]:
        return None
    for tensor in weights:
        if tensor is not None and not _is_readable(tensor, rows):
            return None
    return LaunchedExperts(stacked, weights, rows, kernels)


def kernels_for(experts: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the kernels that compute these experts' products, "sm_90a" or "sm_80"; None if none can.

    The weights of a call must suit the kernels, too (`launched`).

    experts: the layer's experts.
    device, dtype: of the pass's rows.
    """
    kind: Any = type(experts)
    # A subclass, or a tool, may have replaced a method of `COMPUTING`: in its class, or in this object only.
    computes_as_stacked = (
        kind.compute is StackedExperts.compute
        and kind.recompute is StackedExperts.recompute
        and kind.input_gradient is StackedExperts.input_gradient
        and kind.weight_gradient is StackedExperts.weight_gradient
        and COMPUTING.isdisjoint(vars(experts))
    )
    if not computes_as_stacked or experts.fused_activation is None:
        return None
    if layout_problem(dtype, d_model=experts.d_model, hidden=experts.num_hidden) is not None:
        return None
    return path_for(device, dtype)


def _is_readable(weight: Tensor, rows: Tensor) -> bool:
    """Returns whether a kernel can read a weight or bias: layout, alignment, dtype and device must suit.

    weight: the weight or bias.
    rows: a tensor with the dtype and device of the rows.
    """
    is_placed = weight.is_contiguous() and weight.data_ptr() % VECTOR_BYTES == 0
    return is_placed and weight.dtype == rows.dtype and weight.device == rows.device
