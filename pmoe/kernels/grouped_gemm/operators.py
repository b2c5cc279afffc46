"""The grouped products as ``torch.library`` operators, each with a fake for tracing.

Letters: N rows, E experts, I in-features, O out-features, M = d_model, H = d_hidden, G = H or 2H rows of w1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmoe.kernels.gemm import activation_code
from pmoe.kernels.grouped_gemm.checks import (
    RowSlots,
    check_bias,
    check_operands,
    check_rows,
    check_scale,
    hidden_width,
    weight_gradient_shape,
)
from pmoe.kernels.grouped_gemm.products import (
    hidden,
    hidden_gradient,
    input_gradient,
    product,
    weight_gradient,
)


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
    bias_EO, scale, slot_N, top_k, gathered = others
    slots = RowSlots.of(slot_N, top_k)
    num_rows = check_operands(rows, weight_EOI, ends_E, slots, gathered, 2)
    check_bias(bias_EO, weight_EOI)
    check_scale(scale, rows, num_rows, slots, gathered)
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
    found, active = hidden(
        rows, weight_EGI, ends_E, activation=activation, bias_EG=bias_EG, slots=slots,
        gathered=slots is not None,
    )  # fmt: skip
    assert found is not None
    return found, active


@hidden_op.register_fake
def _(rows: Tensor, weight_EGI: Tensor, ends_E: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    bias_EG, slot_N, top_k, activation = others
    activation_code(activation)
    slots = RowSlots.of(slot_N, top_k)
    num_rows = check_operands(rows, weight_EGI, ends_E, slots, slots is not None, 2)
    check_bias(bias_EG, weight_EGI)
    columns = weight_EGI.shape[1]
    width = hidden_width(columns, activation)
    return rows.new_empty(num_rows, columns), rows.new_empty(num_rows, width)


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


@torch.library.custom_op("pmoe::grouped_hidden_gradient", mutates_args=())
def hidden_gradient_op(
    grad: Tensor,
    weight_EMH: Tensor,
    hidden_NG: Tensor,
    scale: Tensor,
    ends_E: Tensor,
    slot_N: Tensor | None,
    top_k: int,
    activation: str,
    weighs_active: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    slots = RowSlots.of(slot_N, top_k)
    return hidden_gradient(
        grad, weight_EMH, hidden_NG, scale, ends_E, activation=activation, slots=slots,
        gathered=slots is not None, weighs_active=weighs_active,
    )  # fmt: skip


@hidden_gradient_op.register_fake
def _(
    grad: Tensor, weight_EMH: Tensor, hidden_NG: Tensor, scale: Tensor, ends_E: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    slot_N, top_k, activation, _ = others
    activation_code(activation)
    slots = RowSlots.of(slot_N, top_k)
    rows = check_operands(grad, weight_EMH, ends_E, slots, slots is not None, 1)
    width = weight_EMH.shape[2]
    check_rows("hidden", hidden_NG, (rows, 2 * width if activation == "swiglu" else width), weight_EMH)
    check_scale(scale, grad, rows, slots, slots is not None)
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (
        torch.empty_like(hidden_NG, memory_format=torch.contiguous_format),
        grad.new_empty(rows, weight_EMH.shape[2]),
        grad.new_empty(rows, dtype=wide),
    )
