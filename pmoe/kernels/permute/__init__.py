"""Copies tokens into the order of their experts (permute), and sums results back by token (unpermute).

A slot is one of the T * K (token, choice) pairs. ``position_TK`` has the index of each slot's row among the N
rows that are sorted by expert:

    position   [[1, 0],      x          rows
                [2, 5]]      0   ->     1, 0        row 0 is slot (0, 1), row 1 is slot (0, 0)
                             1   ->     2           row 2 is slot (1, 0); slot (1, 1) is dropped, as N = 3

A position outside 0 .. num_rows - 1 means that the slot is dropped: its row is neither read nor written. The
other positions must be distinct and include each number from 0 to num_rows - 1. This is not checked.

On CUDA the kernels of cuda/permute are used, on the CPU PyTorch operations. If the kernels are missing or do
not take the tensors (`refusal`), PyTorch operations are also used on CUDA, with one warning. Sums are
computed in float32 or wider, in the order of choices, and rounded once. So a token has the same result, to
the bit, in any batch.

Letters: T tokens, K choices of a token, N rows (num_rows), M columns.
"""

from typing import TYPE_CHECKING

from pmoe.kernels import late_names
from pmoe.kernels.permute.launches import refusal

if TYPE_CHECKING:
    from pmoe.kernels.permute.operators import permute, permute_directly, unpermute, unpermute_directly
    from pmoe.kernels.permute.row_moves import RowCopy, RowMoves

_LATER = {
    "RowCopy": "row_moves",
    "RowMoves": "row_moves",
    "permute": "operators",
    "permute_directly": "operators",
    "unpermute": "operators",
    "unpermute_directly": "operators",
}
"""Names of this package and their files. A file is imported when one of its names is first used."""

__all__ = [
    "RowCopy",
    "RowMoves",
    "permute",
    "permute_directly",
    "refusal",
    "unpermute",
    "unpermute_directly",
]

# Hidden from type checkers: with a __getattr__ they would accept every mistyped name.
if not TYPE_CHECKING:
    __getattr__ = late_names(__name__, _LATER)
