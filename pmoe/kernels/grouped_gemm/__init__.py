"""Grouped products with what follows them fused: rows sorted by expert times that expert's matrix.

Expert e owns rows ends[e - 1] to ends[e], and ends[E - 1] is N: group sizes stay on the device, and the host
waits for nothing. `product` and `hidden` may gather rows: row r of the N is then row slot[r] // K of the
tokens, so that the dispatched rows (T_DI) need not exist. Gradients take rows in place. The kernels are in
cuda/grouped_gemm; without them, or on the CPU, `reference` computes.

Letters: N rows, E experts, K choices, S slots, I in-features, O out-features, M = d_model, H = d_hidden,
G = H or 2H rows of w1.
"""

from pmoe.kernels.gemm import misfit, refusal
from pmoe.kernels.grouped_gemm.checks import RowSlots
from pmoe.kernels.grouped_gemm.operators import grouped_hidden, grouped_product, sum_by_expert
from pmoe.kernels.grouped_gemm.products import (
    hidden,
    hidden_gradient,
    input_gradient,
    product,
    weight_gradient,
)

__all__ = [
    "RowSlots",
    "grouped_hidden",
    "grouped_product",
    "hidden",
    "hidden_gradient",
    "input_gradient",
    "misfit",
    "product",
    "refusal",
    "sum_by_expert",
    "weight_gradient",
]
