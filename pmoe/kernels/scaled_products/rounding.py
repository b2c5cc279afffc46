"""Rounds matrices to e4m3 numbers with scales, and restores the values of rounded matrices.

    scale = max(largest absolute value of the block / 448, 2**-126)     "e4m3"; a block is a row
    scale = the smallest power of two >= the "e4m3" formula             "mxfp8"; a block is 32 columns
    number = value / scale, computed in float32 and rounded once to e4m3
    restored value = number * scale, in float32

So no number exceeds 448. A block of zeros stays zeros. If a block has an Inf or a NaN, its scale is Inf or
NaN, and the whole block becomes NaN. So rounding never hides a value that is not finite.

Letters: R rows of K columns, B = ceil(K / 32) blocks of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from pmoe.kernels.scaled_products.formats import MX_COLUMNS, ProductsName

E4M3 = torch.float8_e4m3fn

LARGEST = torch.finfo(E4M3).max
"""The largest finite number of e4m3, 448."""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Lower bound of scales, 2**-126, for blocks of zeros and blocks whose scale would be a denormal number."""


@dataclass(frozen=True)
class Rounded:
    """A matrix, or several of the same shape, rounded to e4m3 numbers with scales.

    numbers: (..., R, K) e4m3, contiguous.
    scales: (..., R) float32 for "e4m3"; (..., R, B) e8m0 for "mxfp8"; contiguous.
    """

    numbers: Tensor
    scales: Tensor

    def select(self, rows: slice | int) -> Rounded:
        """Returns a slice of the rows; for several matrices, the matrix with an index or a slice of them."""
        return Rounded(self.numbers[rows], self.scales[rows])


def round_operand(products: ProductsName, values: Tensor) -> Rounded:
    """Rounds a matrix to a number format.

    products: the format.
    values: (..., R, K), of any strides, float32 or narrower.
    """
    columns = values.shape[-1]
    if products == "e4m3":
        scales = torch.linalg.vector_norm(values, math.inf, dim=-1).float()
        scales = scales.div_(LARGEST).clamp_(min=SMALLEST_SCALE)
        numbers = (values / scales.unsqueeze(-1)).to(E4M3).contiguous()
        return Rounded(numbers, scales)
    if columns % MX_COLUMNS:
        values = pad(values, (0, -columns % MX_COLUMNS))
    blocks = values.unflatten(-1, (-1, MX_COLUMNS))
    least = torch.linalg.vector_norm(blocks, math.inf, dim=-1).float()
    scales = power_of_two(least.div_(LARGEST).clamp_(min=SMALLEST_SCALE))
    numbers = (blocks / scales.float().unsqueeze(-1)).to(E4M3).flatten(-2)
    return Rounded(numbers[..., :columns].contiguous(), scales)


def restored(products: ProductsName, matrix: Rounded) -> Tensor:
    """Returns the values of a rounded matrix, (..., R, K) float32.

    products: the number format of the matrix.
    """
    values = matrix.numbers.float()
    if products == "e4m3":
        return values.mul_(matrix.scales.unsqueeze(-1))
    columns = values.shape[-1]
    return values.mul_(matrix.scales.float().repeat_interleave(MX_COLUMNS, dim=-1)[..., :columns])


def power_of_two(values: Tensor) -> Tensor:
    """Returns, for each value, the smallest power of two that is at least the value, as e8m0.

    Inf and NaN become NaN, the only e8m0 that is no power of two.

    values: float32, positive, and not denormal.
    """
    # The exponent is in bits 23 to 30. Adding all ones of the mantissa carries into it, unless the mantissa
    # is zero, so the value is rounded up. The exponent of Inf and NaN is 255, and may become 256.
    bits = values.view(torch.int32).bitwise_and(0x7FFFFFFF).long()
    exponents = (bits + 0x7FFFFF).bitwise_right_shift(23).clamp_(max=255)
    return exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
