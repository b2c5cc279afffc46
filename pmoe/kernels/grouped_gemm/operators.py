"""The grouped products as ``torch.library`` operators: fakes for tracing, and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmoe.kernels.gemm import activation_code
from pmoe.kernels.grouped_gemm.checks import RowSlots, check_operands, hidden_width, weight_gradient_shape
from pmoe.kernels.grouped_gemm.products import hidden, input_gradient, product, weight_gradient
from pmoe.kernels.grouped_gemm.reference import slope
from pmoe.kernels.permute import unpermute


@torch.library.custom_op("pmoe::grouped_product", mutates_args=())
def product_op(
    rows: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    bias_EO: Tensor | None,
    scale: Tensor | None,
    slot_N: Tensor | None,
    top_k: int,
    gathered: bool,
) -> Tensor:
    slots = RowSlots.of(slot_N, top_k)
    return product(rows, weight_EOI, ends_E, bias_EO=bias_EO, scale=scale, slots=slots, gathered=gathered)


@product_op.register_fake
def _(rows: Tensor, weight_EOI: Tensor, ends_E: Tensor, *others: Any) -> Tensor:
    bias, scale, slot_N, top_k, gathered = others
    slots = RowSlots.of(slot_N, top_k)
    num_rows = check_operands(rows, weight_EOI, ends_E, slots, gathered, 2, bias=bias, scale=scale)
    return rows.new_empty(num_rows, weight_EOI.shape[1])


@torch.library.custom_op("pmoe::grouped_hidden", mutates_args=())
def hidden_op(
    rows: Tensor,
    weight_EGI: Tensor,
    ends_E: Tensor,
    bias_EG: Tensor | None,
    slot_N: Tensor | None,
    top_k: int,
    activation: str,
) -> tuple[Tensor, Tensor]:
    slots = RowSlots.of(slot_N, top_k)
    found, active = hidden(rows, weight_EGI, ends_E, activation=activation, bias_EG=bias_EG, slots=slots)
    assert found is not None
    return found, active


@hidden_op.register_fake
def _(rows: Tensor, weight_EGI: Tensor, ends_E: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    bias, slot_N, top_k, activation = others
    activation_code(activation)
    slots = RowSlots.of(slot_N, top_k)
    num_rows = check_operands(rows, weight_EGI, ends_E, slots, slots is not None, 2, bias=bias)
    columns = weight_EGI.shape[1]
    return rows.new_empty(num_rows, columns), rows.new_empty(num_rows, hidden_width(columns, activation))


@torch.library.custom_op("pmoe::grouped_input_gradient", mutates_args=())
def input_gradient_op(grad_NO: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return input_gradient(grad_NO, weight_EOI, ends_E)


@input_gradient_op.register_fake
def _(grad_NO: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    num_rows = check_operands(grad_NO, weight_EOI, ends_E, None, False, 1)
    return grad_NO.new_empty(num_rows, weight_EOI.shape[2])


@torch.library.custom_op("pmoe::grouped_weight_gradient", mutates_args=())
def weight_gradient_op(
    grad_NO: Tensor, rows: Tensor, ends_E: Tensor, slot_N: Tensor | None, top_k: int
) -> Tensor:
    """rows are gathered where slot_N is given."""
    slots = RowSlots.of(slot_N, top_k)
    return weight_gradient(grad_NO, rows, ends_E, slots=slots, gathers_rows=slots is not None)


@weight_gradient_op.register_fake
def _(grad_NO: Tensor, rows: Tensor, ends_E: Tensor, slot_N: Tensor | None, top_k: int) -> Tensor:
    slots = RowSlots.of(slot_N, top_k)
    return rows.new_empty(weight_gradient_shape(grad_NO, rows, ends_E, slots, False, slots is not None))


# ---- with gradients


def grouped_product(
    rows: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    *,
    bias_EO: Tensor | None = None,
    scale: Tensor | None = None,
    slots: RowSlots | None = None,
    gathered: bool = False,
) -> Tensor:
    """`product` with gradients of rows, weight, bias and scale; ends[E - 1] must be N."""
    found: Tensor = product_op(rows, weight_EOI, ends_E, bias_EO, scale, *(slots or (None, 1)), gathered)
    return found


def grouped_hidden(
    rows: Tensor,
    weight_EGI: Tensor,
    ends_E: Tensor,
    *,
    activation: str,
    bias_EG: Tensor | None = None,
    slots: RowSlots | None = None,
) -> tuple[Tensor, Tensor]:
    """`hidden` with gradients of rows (gathered where slots are given), weight and bias."""
    given = (rows, weight_EGI, ends_E, bias_EG, *(slots or (None, 1)), activation)
    found: tuple[Tensor, Tensor] = hidden_op(*given)
    return found


def sum_by_expert(
    rows: Tensor, ends_E: Tensor, weight: Tensor | None = None, *, slots: RowSlots | None = None
) -> Tensor:
    """(E, O): for each expert the sum of its rows, each times its weight where there are weights.

    rows: (N, O), or with ``slots`` of tokens, gathered as in `product`. weight: (N,), by slot with slots.

    The order of the sum is fixed, where atomic adds would have none: it is a product with a column.
    """
    weight_N = weight if weight is None or slots is None else weight.index_select(0, slots.slot_N.long())
    column = rows.new_zeros(rows.shape[0] if slots is None else slots.slot_N.numel(), 8)  # 16 bytes a row
    column[:, 0] = 1 if weight_N is None else weight_N
    if slots is not None:
        return weight_gradient(rows, column, ends_E, slots=slots, gathers_grad=True)[:, :, 0]
    summed: Tensor = weight_gradient_op(rows, column, ends_E, None, 1)  # an operator, for tracing
    return summed[:, :, 0]


def _to_tokens(grad_NI: Tensor, slot_N: Tensor | None, top_k: int, num_tokens: int) -> Tensor:
    """Gradients of gathered rows, summed by token in the order of its choices."""
    if slot_N is None:
        return grad_NI
    position = torch.full((num_tokens * top_k,), grad_NI.shape[0], dtype=torch.int32, device=slot_N.device)
    order = torch.arange(slot_N.shape[0], dtype=torch.int32, device=slot_N.device)
    position = position.scatter(0, slot_N.long(), order)
    return unpermute(grad_NI, position.view(num_tokens, top_k))


def _save_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, ends, bias, scale, slot, top_k, gathered = inputs
    ctx.save_for_backward(rows, weight, ends, bias, scale, slot)
    ctx.top_k, ctx.gathered = top_k, gathered


def _product_backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, ends, bias, scale, slot = ctx.saved_tensors
    grad_NO, needs = grad_NO.contiguous(), ctx.needs_input_grad
    gather_slot = slot if ctx.gathered else None
    grad_rows = grad_scale = grad_weight = grad_bias = None
    scale_N1 = None
    if scale is not None:
        scale_N1 = (scale if slot is None else scale.index_select(0, slot.long())).unsqueeze(1)
    if needs[0] or needs[4]:
        plain_NI = input_gradient_op(grad_NO, weight, ends)
        if needs[4]:
            rows_N = rows if gather_slot is None else rows.index_select(0, slot.long() // ctx.top_k)
            # <plain, row> + <grad, bias of the row's expert> for each row, where its scale stands.
            dot_N = (plain_NI.to(scale.dtype) * rows_N.to(scale.dtype)).sum(1)
            if bias is not None:
                row_N = torch.arange(dot_N.shape[0], device=ends.device)
                expert_N = torch.searchsorted(ends, row_N, right=True)
                dot_N = dot_N + (grad_NO.to(scale.dtype) * bias[expert_N].to(scale.dtype)).sum(1)
            grad_scale = dot_N if slot is None else torch.zeros_like(scale).scatter(0, slot.long(), dot_N)
        if needs[0]:
            scaled = plain_NI if scale_N1 is None else (plain_NI * scale_N1).to(rows.dtype)
            grad_rows = _to_tokens(scaled, gather_slot, ctx.top_k, rows.shape[0])
    if needs[1] or needs[3]:
        scaled = grad_NO if scale_N1 is None else (grad_NO * scale_N1).to(rows.dtype)
        if needs[1]:
            grad_weight = weight_gradient_op(scaled, rows, ends, gather_slot, ctx.top_k)
        if needs[3]:
            grad_bias = sum_by_expert(scaled, ends)
    return grad_rows, grad_weight, None, grad_bias, grad_scale, None, None, None


product_op.register_autograd(_product_backward, setup_context=_save_product)


def _save_hidden(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, weight, ends, bias, slot, top_k, activation = inputs
    ctx.save_for_backward(rows, weight, ends, slot, output[0])
    ctx.top_k, ctx.activation, ctx.has_bias = top_k, activation, bias is not None


def _hidden_backward(ctx: Any, grad_hidden: Tensor, grad_active: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, ends, slot, hidden_NG = ctx.saved_tensors
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = grad_hidden.to(wide) + slope(ctx.activation, hidden_NG.to(wide), grad_active.to(wide))
    total = total.to(rows.dtype).contiguous()
    grad_rows = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_rows = _to_tokens(input_gradient_op(total, weight, ends), slot, ctx.top_k, rows.shape[0])
    if ctx.needs_input_grad[1]:
        grad_weight = weight_gradient_op(total, rows, ends, slot, ctx.top_k)
    if ctx.has_bias and ctx.needs_input_grad[3]:
        grad_bias = sum_by_expert(total, ends)
    return grad_rows, grad_weight, None, grad_bias, None, None, None


hidden_op.register_autograd(_hidden_backward, setup_context=_save_hidden)
