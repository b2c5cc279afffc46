"""The order in which Blackwell's tensor cores read the scales of MXFP8 operands (SWIZZLE_32_4_4).

Scales are read in tiles of 512 bytes. A tile has the scales of 128 rows for 4 neighbouring blocks of columns,
one byte each. Within a tile, the scale of row r and block b is at byte

    16 * (r % 32) + 4 * (r // 32) + b

So the four scales of a row are adjacent, and rows 0, 32, 64 and 96 share 16 bytes. The tiles of the same rows
follow each other, then come the tiles of the next 128 rows. Rows and blocks are padded with zeros to whole
tiles. The rows of each expert begin a new tile:

    rows          expert 0: 130 rows         | expert 1: 0 rows | expert 2: 5 rows
    rows padded   130 -> 256, tiles 0 and 1  | none             | 5 -> 128, tile 2

Letters: N rows, E experts, R rows of a matrix, B blocks of 32 columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE_ROWS = 128
"""Rows of a tile of scales."""

TILE_BLOCKS = 4
"""Blocks of a tile of scales."""


def filled(count: int, multiple: int) -> int:
    """Returns the smallest multiple of ``multiple`` that is at least ``count``."""
    return -(-count // multiple) * multiple


def in_tiles(scales: Tensor) -> Tensor:
    """Rearranges the scales of matrices into tiles, and returns them. Each matrix begins a new tile.

    A tile has the scales of 128 rows for 4 neighbouring blocks of columns. They are next to each other in
    memory. Zeros fill up the last tiles of a matrix.

    scales: (..., R, B), one byte each: for each of R rows of a matrix, a scale for each of B blocks of
        columns.

    The result is (..., X), where X is the product of two numbers: R rounded up to a multiple of 128, and B
    rounded up to a multiple of 4.
    """
    num_rows, num_blocks = scales.shape[-2:]
    whole = pad(
        scales.view(torch.uint8),
        (0, filled(num_blocks, TILE_BLOCKS) - num_blocks, 0, filled(num_rows, TILE_ROWS) - num_rows),
    )
    tiles = whole.unflatten(-1, (-1, TILE_BLOCKS)).unflatten(-3, (-1, TILE_ROWS // 32, 32))
    # (..., tile of rows, r // 32, r % 32, tile of blocks, b)
    # -> (..., tile of rows, tile of blocks, r % 32, r // 32, b)
    result: Tensor = tiles.movedim(-2, -4).transpose(-3, -2).flatten(-5).view(scales.dtype)
    return result


def rows_in_tiles(scales_NB: Tensor, counts: Sequence[int], ends_E: Tensor) -> Tensor:
    """Rearranges the scales of rows into tiles, and returns them. Each expert's rows begin a new tile.

    A tile has the scales of 128 rows for 4 neighbouring blocks of columns. They are next to each other in
    memory. Zeros fill up the last tiles of each expert. The host does not wait for the device.

    scales_NB: (N, B), one byte each: for each of N rows, a scale for each of B blocks of columns. The rows
        are sorted by expert.
    counts: the numbers of rows of E experts.
    ends_E: (E,) int32, the running sum of ``counts``, on the device of the scales.

    The result is (X, Y). X is the sum of the experts' numbers of rows, each rounded up to a multiple of 128.
    Y is B rounded up to a multiple of 4.
    """
    num_rows, num_blocks = scales_NB.shape
    total = sum(filled(count, TILE_ROWS) for count in counts)
    expert_N = torch.searchsorted(
        ends_E, torch.arange(num_rows, dtype=torch.int32, device=ends_E.device), right=True
    )
    # Each expert's rows move down by the rows that fill up the experts before it.
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    missing_E = (-counts_E).remainder(TILE_ROWS)
    shift_E = missing_E.cumsum(0) - missing_E
    place_N = torch.arange(num_rows, device=ends_E.device) + shift_E[expert_N]
    whole = scales_NB.new_zeros(total, num_blocks, dtype=torch.uint8)
    whole[place_N] = scales_NB.view(torch.uint8)
    return in_tiles(whole).view(scales_NB.dtype).view(total, filled(num_blocks, TILE_BLOCKS))
