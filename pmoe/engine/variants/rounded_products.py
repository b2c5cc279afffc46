"""Passes whose experts round operands of their matrix products to float8 (MoELayer's ``products``).

A pass has the same tasks as without rounding. It runs them with the experts of
`pmoe.experts.rounded_products`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.comm.wire import E4M3_DTYPES
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import ForwardState, Inputs, Pass
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.plan import Plan
from pmoe.experts.base import Experts
from pmoe.experts.rounded_products import with_rounded_products
from pmoe.experts.stacked import StackedExperts
from pmoe.kernels.scaled_products.formats import ProductsName


class RoundingPass(Pass):
    """A pass whose experts round the operands of their products."""

    experts: Experts

    def take_rounding_experts(self) -> None:
        """Sets the experts of the pass to experts that round.

        Raises ValueError if the rows' dtype must not be rounded (`check_products`).
        """
        modules = self.plan.modules
        assert modules.products is not None and isinstance(modules.experts, StackedExperts)
        check_products(modules.products, self.source_TM.dtype)
        self.experts = with_rounded_products(modules.experts, modules.products)


class RoundedForward(RoundingPass, Forward):
    """A forward pass that computes products with rounded operands."""

    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        super().__init__(plan, inputs, keep)
        self.take_rounding_experts()


class RoundedBackward(RoundingPass, Backward):
    """A backward pass that computes gradients of rows from rounded operands.

    Gradients of parameters are computed from operands that are not rounded.
    """

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: ForwardState) -> None:
        super().__init__(plan, grad_TM, saved)
        self.take_rounding_experts()


def check_products(products: ProductsName, dtype: torch.dtype) -> None:
    """Raises ValueError if rows of a dtype must not be rounded to float8.

    products: the number format of the products' operands.
    dtype: dtype of the rows.
    """
    if dtype not in E4M3_DTYPES:
        raise ValueError(
            f"products ({products!r}) must be None for rows of {dtype}: rows are float32, bfloat16 or float16"
        )
