"""The grouped products as ``torch.library`` operators, with gradients and fake functions for tracing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmoe.kernels.gemm import activation_code
from pmoe.kernels.grouped_gemm.checks import RowSlots, check_operands, hidden_width, weight_gradient_shape
from pmoe.kernels.grouped_gemm.products import input_gradient, product, weight_gradient
from pmoe.kernels.grouped_gemm.reference import activate, by_row
from pmoe.kernels.permute.operators import permute


@torch.library.custom_op("pmoe::grouped_product", mutates_args=())
def product_op(rows_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor, bias_EO: Tensor | None) -> Tensor:
    return product(rows_NI, weight_EOI, ends_E, bias_EO=bias_EO)


@product_op.register_fake
def _(rows_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor, bias_EO: Tensor | None) -> Tensor:
    num_rows = check_operands(rows_NI, weight_EOI, ends_E, 2, bias=bias_EO)
    return rows_NI.new_empty(num_rows, weight_EOI.shape[1])


@torch.library.custom_op("pmoe::grouped_input_gradient", mutates_args=())
def input_gradient_op(grad_NO: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return input_gradient(grad_NO, weight_EOI, ends_E)


@input_gradient_op.register_fake
def _(grad_NO: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    num_rows = check_operands(grad_NO, weight_EOI, ends_E, 1)
    return grad_NO.new_empty(num_rows, weight_EOI.shape[2])


@torch.library.custom_op("pmoe::grouped_weight_gradient", mutates_args=())
def weight_gradient_op(grad_NO: Tensor, rows_NI: Tensor, ends_E: Tensor) -> Tensor:
    return weight_gradient(grad_NO, rows_NI, ends_E)


@weight_gradient_op.register_fake
def _(grad_NO: Tensor, rows_NI: Tensor, ends_E: Tensor) -> Tensor:
    return rows_NI.new_empty(weight_gradient_shape(grad_NO, rows_NI, ends_E))


def _save_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _product_backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, ends = ctx.saved_tensors
    grad_NO = grad_NO.contiguous()
    needs_rows, needs_weight, _, needs_bias = ctx.needs_input_grad
    return (
        input_gradient_op(grad_NO, weight, ends) if needs_rows else None,
        weight_gradient_op(grad_NO, rows, ends) if needs_weight else None,
        None,
        sum_by_expert(grad_NO, ends) if needs_bias else None,
    )


product_op.register_autograd(_product_backward, setup_context=_save_product)


# ---- products with gradients. Gathering, scaling and the nonlinearity are separate operations, not fused


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
    """Computes a grouped product, (N, O), with gradients of rows, weight, bias and scale.

    The result for a row of expert e is (row weight[e]^T + bias[e]) * scale, for N rows, E experts, I
    in-features and O out-features.

    rows: (N, I), sorted by expert, or the tokens (T, I) if ``gathered``.
    weight_EOI: (E, O, I).
    ends_E: (E,) int32, the index behind each expert's last row. The last entry must be N.
    bias_EO: (E, O), or None.
    scale: (N,), a factor for each row; if there are slots, a factor for each slot; None multiplies by 1.
    slots: slot of each row, its index among all (token, choice) pairs; or None.
    gathered: whether rows are read from tokens: row r is then rows[slot[r] // top_k].

    `pmoe.kernels.grouped_gemm.product` does everything in one kernel. This function stores the gathered rows,
    and stores the product before it is scaled, so a scaled product is rounded twice.
    """
    num_rows = check_operands(
        rows, weight_EOI, ends_E, 2, slots=slots, gathered=gathered, bias=bias_EO, scale=scale
    )
    if gathered and slots is not None:
        rows = permute(rows, _positions(slots, rows.shape[0]), num_rows)
    result: Tensor = product_op(rows, weight_EOI, ends_E, bias_EO)
    return result if scale is None else (result * by_row(scale, slots).unsqueeze(1)).to(result.dtype)


def grouped_hidden(
    rows: Tensor,
    weight_EGI: Tensor,
    ends_E: Tensor,
    *,
    activation: str,
    bias_EG: Tensor | None = None,
    slots: RowSlots | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes an expert's first product and nonlinearity, with gradients of rows, weight and bias.

    rows: (N, I), N rows sorted by expert, or the tokens (T, I) if there are slots.
    weight_EGI, bias_EG: first weight (E, G, I) and bias (E, G) of E experts.
    ends_E: (E,) int32, the index behind each expert's last row. The last entry must be N.
    activation: name of the nonlinearity. G is H = d_hidden, or 2H for "swiglu".
    slots: slot of each row, its index among all (token, choice) pairs, if rows are read from tokens; or None.

    Returns the hidden activation before the nonlinearity (T_M), (N, G), and after it, (N, H).
    """
    activation_code(activation)
    hidden_width(weight_EGI.shape[1], activation)
    gathered = slots is not None
    hidden_NG = grouped_product(rows, weight_EGI, ends_E, bias_EO=bias_EG, slots=slots, gathered=gathered)
    return hidden_NG, activate(activation, hidden_NG)


def _positions(slots: RowSlots, num_tokens: int) -> Tensor:
    """Returns the row of each slot, (T, K) int32, for T tokens with K choices each.

    A slot is a (token, choice) pair. A slot without a row gets the number of rows, which is no row's index.

    slots: the slot of each row.
    num_tokens: T.
    """
    slot_N = slots.slot_N
    num_rows = slots.slot_N.shape[0]
    position = torch.full((num_tokens * slots.top_k,), num_rows, dtype=torch.int32, device=slot_N.device)
    order = torch.arange(num_rows, dtype=torch.int32, device=slot_N.device)
    return position.scatter(0, slot_N.long(), order).view(num_tokens, slots.top_k)


def sum_by_expert(rows_NO: Tensor, ends_E: Tensor, weight_N: Tensor | None = None) -> Tensor:
    """Returns for each expert the sum of its rows, (E, O) for E experts. The function can be traced.

    rows_NO: (N, O), N rows of O columns, sorted by expert.
    ends_E: (E,) int32, the index behind each expert's last row.
    weight_N: (N,), factor of each row; None means 1.

    The sum is computed as a grouped product with a column of ones or weights, because a product adds in a
    fixed order. Atomic additions have no fixed order.
    """
    column = rows_NO.new_zeros(rows_NO.shape[0], 8)  # 8 columns, because kernels need 16 bytes a row
    column[:, 0] = 1 if weight_N is None else weight_N
    summed: Tensor = weight_gradient_op(rows_NO, column, ends_E)  # the operator, so that it can be traced
    return summed[:, :, 0]
