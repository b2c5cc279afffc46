"""Grouped products: rows sorted by expert, each times the weight matrix of its expert.

The kernel of a product also adds the bias, applies the nonlinearity and multiplies by routing weights.

    products    the products without gradients, computed by the kernels of cuda/grouped_gemm or by `reference`
    operators   the products with gradients, as torch operators
    reference   the products as PyTorch expressions, for any dtype and device
    launch      launches one kernel
    checks      checks of operands

``ends`` says which rows belong to which expert: expert e has the rows from ends[e - 1] up to but not
including ends[e] (for expert 0 they begin at 0), and the last entry is N. The ends stay on the device, so the
host does not wait for row counts:

    ends     2         2         5
    rows     0 1       -         2 3 4
    expert   0         1         2

`product` and `hidden` can read their rows directly from the tokens. Row r is then a copy of token slot[r] //
K: slot[r] is the row's index among the T * K (token, choice) pairs. A call without gradients then need not
store the dispatched input (T_DI). Gradients can only be computed from stored rows.

Letters: T tokens, K choices of a token, N rows, E experts, I in-features, O out-features, M = d_model, H =
d_hidden, G = columns of the hidden activation before the nonlinearity: H, or 2H for SwiGLU.
"""

from typing import TYPE_CHECKING

from pmoe.kernels import late_names
from pmoe.kernels.gemm import layout_problem, refusal
from pmoe.kernels.grouped_gemm.checks import RowSlots

if TYPE_CHECKING:
    from pmoe.kernels.grouped_gemm.operators import grouped_hidden, grouped_product, sum_by_expert
    from pmoe.kernels.grouped_gemm.products import (
        hidden,
        hidden_gradient,
        input_gradient,
        product,
        weight_gradient,
    )

_LATER = {
    "grouped_hidden": "operators",
    "grouped_product": "operators",
    "hidden": "products",
    "hidden_gradient": "products",
    "input_gradient": "products",
    "product": "products",
    "sum_by_expert": "operators",
    "weight_gradient": "products",
}
"""Names of this package and their files. A file is imported when one of its names is first used."""

__all__ = [
    "RowSlots",
    "grouped_hidden",
    "grouped_product",
    "hidden",
    "hidden_gradient",
    "input_gradient",
    "layout_problem",
    "product",
    "refusal",
    "sum_by_expert",
    "weight_gradient",
]

# Hidden from type checkers: with a __getattr__ they would accept every mistyped name.
if not TYPE_CHECKING:
    __getattr__ = late_names(__name__, _LATER)
