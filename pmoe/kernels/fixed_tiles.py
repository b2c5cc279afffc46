"""Computes rows in tiles of a fixed size, so that a row's result does not depend on other rows.

The number of rows decides by which method a library computes a product. Elementwise operations may compute
the last few elements of a tensor by another method, for example without vector instructions. The tensor's
size decides which elements these are. So the last bits of a row's result can change with the batch that the
row is in.

If all rows are computed in tiles of one shape, the library uses the same method for every tile. The result of
a row may then still depend on the row's place in the tile. `rows_of_tile` checks that it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

TILE_ROWS = (32, 8)
"""Numbers of rows of a tile, in the order in which `rows_of_tile` tries them."""

TRIED_TILES = 4
"""Number of random tiles with which `rows_of_tile` checks a size of tiles."""

ALIGNMENT = 64
"""Bytes: tiles begin at multiples of this in memory, because libraries may compute differently elsewhere."""

_checked: dict[Hashable, int] = {}
"""The results of `rows_of_tile` in this process, by its key and the number of threads."""


def with_alignment(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same values whose memory begins at a multiple of `ALIGNMENT` bytes.

    If the tensor's own memory does so already, the tensor itself is returned. Memory that torch has just
    allocated always does.
    """
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def rows_of_tile(
    key: Hashable, compute: Callable[[Tensor], Sequence[Tensor]], columns: int, like: Tensor
) -> int:
    """Returns the largest number of rows of a tile in which a row's place does not change its result.

    The numbers in `TILE_ROWS` are tried with random rows. The other rows of the tile must not change a row's
    result, either. If no number passes, the result is 1: in a tile of one row there is no other place. The
    result is cached, so the check runs once for each key and number of threads.

    key: everything on which ``compute`` depends, apart from values.
    compute: maps a tile, (rows, columns), to tensors of results, (rows, ...) each.
    columns: columns of a tile.
    like: a tensor of any shape with the dtype and device of the tiles.
    """
    key = (key, like.dtype, like.device, torch.get_num_threads())
    if key not in _checked:
        # The check runs at one call only, so activation checkpointing must not see its operators.
        with _disable_current_modes(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            sizes = (rows for rows in TILE_ROWS if _are_places_equal(compute, rows, columns, like))
            _checked[key] = next(sizes, 1)
    return _checked[key]


def _are_places_equal(
    compute: Callable[[Tensor], Sequence[Tensor]], rows: int, columns: int, like: Tensor
) -> bool:
    """Returns whether random rows have the same results, bit by bit, at all places of a tile.

    Every row of `TRIED_TILES` tiles is computed at several places of a tile, and together with other rows.
    Many rows are tried, because two orders of summation often give the same bits.

    compute: maps a tile, (rows, columns), to tensors of results.
    rows: number of rows of a tile.
    columns: columns of a tile.
    like: a tensor with the dtype and device of the tiles.
    """
    generator = torch.Generator().manual_seed(rows)
    places = torch.arange(rows)
    orders = [places.roll(shift) for shift in (1, 3, rows // 2)] + [places.flip(0)]
    for _ in range(TRIED_TILES):
        tile = torch.randn(rows, columns, generator=generator).to(like.device, like.dtype)
        expected = [result.clone() for result in compute(tile)]
        for order in orders:
            index = order.to(like.device)
            results = compute(tile[index])
            if not all(map(torch.equal, results, (result[index] for result in expected))):
                return False
    return True
