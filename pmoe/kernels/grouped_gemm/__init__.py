"""Grouped products, fused with the operations that follow: rows sorted by expert times that expert's matrix.

    products    the products, by the kernels of cuda/grouped_gemm or by `reference`; no gradients
    operators   the same with gradients, as torch operators
    launch      one launch
    checks      what operands must be

Expert e owns the rows from ends[e - 1] to ends[e], and ends[E - 1] is N. The ends stay on the device, so the
host waits for nothing:

    ends     2         2         5
    rows     0 1       -         2 3 4
    expert   0         1         2

`product` and `hidden` may gather their rows from tokens: row r of the N is then row slot[r] // K of the
tokens, and the dispatched rows (T_DI) need not exist. Gradients take rows that are in place.

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
