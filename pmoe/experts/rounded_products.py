"""Experts that round the operands of their products to float8 (MoELayer's ``products``).

    rounded      rows times w1, rows times w2, and the gradients of the rows of both
    not rounded  the gradients of w1, w2 and biases; the nonlinearity; routing weights

Groups of float8 numbers share a scale. The numbers of a group lie along the dimension that the product sums
over. Forward and the gradients of rows sum over different dimensions of a weight, so a weight is rounded in
two ways. A pass rounds each weight once, however many chunks it has. Gradients are computed as if the
rounding were the identity.
"""

from __future__ import annotations

from torch import Tensor

from pmoe.experts.products import NO_VIEWS, ExpertViews, RowGroups
from pmoe.experts.stacked import StackedExperts
from pmoe.kernels.scaled_products import products as scaled
from pmoe.kernels.scaled_products.formats import ProductsName
from pmoe.kernels.scaled_products.rounding import Rounded, round_operand


class RoundedProducts:
    """The two products of `StackedExperts` with rounded operands. An object is made for each pass.

    products: the number format of the operands.
    """

    def __init__(self, products: ProductsName) -> None:
        self.products: ProductsName = products
        self._weights: dict[tuple[object, ...], tuple[Tensor, Rounded]] = {}

    def product(
        self,
        rows_NI: Tensor,
        weight_EOI: Tensor,
        groups: RowGroups,
        bias_EO: Tensor | None = None,
        out: Tensor | None = None,
        scale_N: Tensor | None = None,
        *,
        views: ExpertViews = NO_VIEWS,
    ) -> Tensor:
        """Returns (rows @ weight[e]^T + bias[e]) * scale for the rows of each expert e.

        Rows and weights are rounded. The result is (N, O).

        rows_NI: (N, I), N rows of I input features, sorted by expert.
        weight_EOI: (E, O, I), a matrix for each of E experts, with O output features.
        groups: where each expert's rows begin and end.
        bias_EO: (E, O); None adds nothing.
        out: (N, O), memory for the result; None allocates it.
        scale_N: (N,), a factor for each row; None is 1.
        views: not read, because the rounded weights have no views for each expert.
        """
        return self._multiply(rows_NI, weight_EOI, "forward", groups, bias_EO, out, scale_N)

    def input_product(
        self,
        grad_NO: Tensor,
        weight_EOI: Tensor,
        groups: RowGroups,
        out: Tensor | None = None,
        *,
        views: ExpertViews = NO_VIEWS,
    ) -> Tensor:
        """Returns grad @ weight[e] for the rows of each expert e: (N, I).

        Gradients and weights are rounded.

        grad_NO: (N, O), the gradient of N results of O output features, sorted by expert.
        weight_EOI: (E, O, I), a matrix for each of E experts, with I input features.
        groups: where each expert's rows begin and end.
        out: (N, I), memory for the result; None allocates it.
        views: not read, because the rounded weights have no views for each expert.
        """
        return self._multiply(grad_NO, weight_EOI, "input", groups, None, out, None)

    def _multiply(
        self,
        rows: Tensor,
        weight_EOI: Tensor,
        form: str,
        groups: RowGroups,
        bias: Tensor | None,
        out: Tensor | None,
        scale_N: Tensor | None,
    ) -> Tensor:
        """Multiplies rounded rows by a rounded weight, and returns the result in the dtype of the rows.

        rows: (N, K), sorted by expert: K is I if form is "forward", O if it is "input".
        weight_EOI: (E, O, I), a matrix for each of E experts.
        form: "forward", or "input" for the gradient of rows.
        groups: where each expert's rows begin and end.
        bias: the bias of each expert; None adds nothing.
        out: memory for the result; None allocates it.
        scale_N: (N,), a factor for each row; None is 1.
        """
        columns = weight_EOI.shape[1 if form == "forward" else 2]
        out = rows.new_empty(rows.shape[0], columns) if out is None else out
        if not groups.num_rows:
            return out
        matrices = self._weight(weight_EOI, form)
        return scaled.scaled_product(
            self.products,
            round_operand(self.products, rows),
            matrices,
            groups.counts,
            groups.ends_E,
            bias,
            scale_N,
            out,
        )

    def _weight(self, weight_EOI: Tensor, form: str) -> Rounded:
        """Returns a rounded weight. Its last dimension is the one that the product sums over.

        A pass rounds each weight once. The rounded weight is stored under the address of the weight. The
        weight itself is stored, too, because otherwise another tensor could get its address.

        weight_EOI: (E, O, I).
        form: "forward": the result is (E, O, I); "input": (E, I, O).
        """
        key = (weight_EOI.data_ptr(), weight_EOI.shape, weight_EOI.stride(), form)
        if key not in self._weights:
            matrices = weight_EOI if form == "forward" else weight_EOI.transpose(1, 2)
            self._weights[key] = (weight_EOI, round_operand(self.products, matrices))
        return self._weights[key][1]


def with_rounded_products(experts: StackedExperts, products: ProductsName) -> StackedExperts:
    """Returns experts that round the operands of their products, to be used in one pass.

    The returned experts have the same parameters as ``experts``.

    experts: the layer's experts.
    products: the number format of the operands.
    """
    # Not copy.copy: parametrized modules refuse to be copied so.
    view = object.__new__(type(experts))
    vars(view).update(vars(experts))
    rounding = RoundedProducts(products)
    view.product = rounding.product
    view.input_product = rounding.input_product
    view.fuses = False
    return view
