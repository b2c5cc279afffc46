"""The number formats to which operands of products can be rounded.

Each operand is a matrix of rows with K columns, and the product sums over the columns. Some columns of one
row share a scale:

    name     numbers   columns of a scale   scale                     GPU with a product for it in torch
    "e4m3"   e4m3      all K                float32                   Hopper (compute capability 9.0)
    "mxfp8"  e4m3      32                   e8m0: a power of two      Blackwell (10.x)

e4m3 is a float8 type with 4 bits of exponent and 3 of mantissa. Its largest number is 448.
"""

from __future__ import annotations

from typing import Literal

ProductsName = Literal["e4m3", "mxfp8"]
"""The values of MoELayer's argument ``products``, apart from None."""

MX_COLUMNS = 32
"""Columns of a row that share one scale in "mxfp8". The last block of a row may have fewer."""
