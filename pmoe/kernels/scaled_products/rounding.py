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

    numbers: (..., R, K) e4m3, contiguous, for R rows of K columns.
    scales: contiguous. (..., R) float32 for "e4m3"; (..., R, B) e8m0 for "mxfp8", with B blocks in a row.
    """

    numbers: Tensor
    scales: Tensor

    def select(self, rows: slice | int) -> Rounded:
        """Returns a slice of the matrix's rows. If there are several matrices, returns one or some of them.

        rows: the slice; with several matrices, the index of a matrix or a slice of matrices.
        """
        return Rounded(self.numbers[rows], self.scales[rows])


def round_operand(products: ProductsName, values: Tensor) -> Rounded:
    """Rounds a matrix, or several of the same shape, to e4m3 numbers with scales.

    products: the number format: "e4m3" (a scale for each row) or "mxfp8" (a scale for each block of a row).
    values: (..., R, K) of any strides, R rows of K columns, float32 or narrower.
    """
    columns = values.shape[-1]
    if products == "e4m3":
        scales = _least_scales(values)
        numbers = _quotients(values, scales).to(E4M3).contiguous()
        return Rounded(numbers, scales)
    if columns % MX_COLUMNS:
        values = pad(values, (0, -columns % MX_COLUMNS))
    blocks = values.unflatten(-1, (-1, MX_COLUMNS))
    scales = power_of_two(_least_scales(blocks))
    numbers = _quotients(blocks, scales.float()).to(E4M3).flatten(-2)
    return Rounded(numbers[..., :columns].contiguous(), scales)


def _least_scales(blocks: Tensor) -> Tensor:
    """Returns the smallest scales with which no number of a block exceeds 448, (...) float32.

    blocks: (..., C), blocks of C columns.
    """
    scales: Tensor = torch.linalg.vector_norm(blocks, math.inf, dim=-1).float()
    return scales.div_(LARGEST).clamp_(min=SMALLEST_SCALE)


def _quotients(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the values of blocks, divided by the scales of the blocks, in float32.

    blocks: (..., C), blocks of C columns.
    scales: (...) float32.
    """
    if blocks.dtype == torch.float32:
        return blocks / scales.unsqueeze(-1)
    # A division of two dtypes would make a float32 copy of the blocks beside its result.
    return blocks.float().div_(scales.unsqueeze(-1))


def restored(products: ProductsName, matrix: Rounded) -> Tensor:
    """Returns the values of a rounded matrix as float32, in the matrix's shape.

    products: the number format of the matrix.
    matrix: the rounded matrix, or several of the same shape.
    """
    values = matrix.numbers.float()
    if products == "e4m3":
        return values.mul_(matrix.scales.unsqueeze(-1))
    columns = values.shape[-1]
    scales = matrix.scales.float()
    if columns % MX_COLUMNS:
        return values.mul_(scales.repeat_interleave(MX_COLUMNS, dim=-1)[..., :columns])
    values.unflatten(-1, (-1, MX_COLUMNS)).mul_(scales.unsqueeze(-1))
    return values


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


# ---- bytes


def rounded_bytes(products: ProductsName, num_rows: int, columns: int) -> int:
    """Returns the bytes of a rounded matrix: its numbers and its scales.

    products: the number format of the matrix.
    num_rows: number of rows, over all matrices if there are several.
    columns: number of columns.
    """
    row_scales = 4 if products == "e4m3" else -(-columns // MX_COLUMNS)
    return num_rows * (columns + row_scales)


def rounding_bytes(products: ProductsName, num_rows: int, columns: int, element_size: int) -> int:
    """Returns the peak memory of `round_operand` in bytes, including the rounded matrix.

    The memory holds the matrix divided by its scales, in float32; the rounded numbers; and the scales. With
    "mxfp8" it also holds the scales in float32. If the columns do not fill the last block, the matrix is
    first copied to whole blocks.

    products: the format to which the matrix is rounded.
    num_rows: number of rows, over all matrices if there are several.
    columns: number of columns.
    element_size: bytes of an element of the matrix.
    """
    if products == "e4m3":
        return num_rows * 4 * columns + rounded_bytes(products, num_rows, columns)
    num_blocks = -(-columns // MX_COLUMNS)
    filled = num_blocks * MX_COLUMNS
    copied = filled * element_size * (filled > columns)
    of_numbers = 5 * filled
    of_quotients = 4 * filled + 4 * num_blocks
    return num_rows * (copied + num_blocks + max(of_numbers, of_quotients))


def restoring_bytes(products: ProductsName, num_rows: int, columns: int) -> int:
    """Returns the peak memory in bytes while `restored` converts a rounded matrix back to float32.

    The float32 result is included.

    products: the number format of the matrix.
    num_rows: number of rows.
    columns: number of columns.
    """
    if products == "e4m3":
        return num_rows * 4 * columns
    num_blocks = -(-columns // MX_COLUMNS)
    repeated = num_blocks * MX_COLUMNS * (columns % MX_COLUMNS > 0)
    return num_rows * 4 * (columns + num_blocks + repeated)
