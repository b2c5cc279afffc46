"""Checks whether a layer can round the operands of its experts' products (``products``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pmoe.engine.variants.rounded_products import check_products
from pmoe.experts.stacked import StackedExperts
from pmoe.kernels.scaled_products.formats import ProductsName

if TYPE_CHECKING:
    from pmoe.call.modules import LayerModules


def check_rounded(modules: LayerModules, products: ProductsName) -> None:
    """Raises ValueError if a layer's experts cannot compute with rounded operands.

    modules: the layer's modules and options.
    products: the number format of the operands.
    """
    reason = modules.refusal("rounded products")
    if reason is None and not isinstance(modules.experts, StackedExperts):
        reason = f"experts ({type(modules.experts).__name__}) are no pmoe.experts.StackedExperts"
    if reason is not None:
        raise ValueError(f"products ({products!r}) must be None where {reason}")
    parameter = modules.reference_parameter
    if parameter is not None:
        check_products(products, parameter.dtype)
