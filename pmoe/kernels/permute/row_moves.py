"""`RowMoves`: launches of permutes and unpermutes that share a device, a stream and a width of rows.

`RowMoves` leaves out the checks of `pmoe.kernels.permute.launches.move`, which take host time. The engine
allocates the rows and positions itself, so they meet the conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.permute import launches


class RowCopy(NamedTuple):
    """A copy of tokens into rows (`RowMoves.place`): rows[position[t, k] - first_row] = tokens[t].

    tokens_TM: (T, M), T tokens with M columns.
    position_TK: (T, K) int32, a position for each of the K choices of a token.
    first_row: the position of the first of the N rows.
    rows_NM: (N, M), memory for N rows.
    """

    tokens_TM: Tensor
    position_TK: Tensor
    first_row: int
    rows_NM: Tensor


class RowMoves:
    """Launches kernels that copy tokens into rows, and kernels that sum the rows of each token.

    The kernels run on the stream that is current when the object is made.

    like: a tensor (..., M) with the columns, dtype and device of tokens and rows. A row's bytes must be a
        multiple of 16, and `pmoe.kernels.permute.refusal` must not refuse the dtype.
    """

    def __init__(self, like: Tensor) -> None:
        self._module = extension.module()
        self._where = (
            like.device.index,
            torch.cuda.current_stream(like.device).cuda_stream,
            launches.TYPES[like.dtype],
        )
        self._element_size = like.element_size()
        self._row_bytes = like.shape[-1] * self._element_size

    def place(self, tokens_TM: Tensor, position_TK: Tensor, first_row: int, rows_NM: Tensor) -> None:
        """Copies tokens into rows: rows[position[t, k] - first_row] = tokens[t].

        Positions outside first_row .. first_row + N - 1 are skipped.

        tokens_TM: (T, M), T tokens with M columns. Its address and row stride are multiples of 16 bytes.
        position_TK: (T, K) int32, contiguous, a position for each of the K choices of a token.
        first_row: the position of the first of the N rows.
        rows_NM: (N, M), contiguous memory for N rows.
        """
        if rows_NM.shape[0] and tokens_TM.shape[0]:
            moving, first_address = self._moving(position_TK, first_row, rows_NM)
            stride = tokens_TM.stride(0) * self._element_size
            self._module.permute(moving, tokens_TM.data_ptr(), stride, first_address, self._row_bytes)

    def place_several(self, copies: Sequence[RowCopy]) -> None:
        """Makes up to four copies of tokens into rows (`RowCopy`) in one launch.

        Each copy is the same as one call of `place`.

        copies: the arguments of these calls.
        """
        with_rows = [copy for copy in copies if copy.rows_NM.shape[0] and copy.tokens_TM.shape[0]]
        if len(with_rows) < 2:
            for copy in with_rows:
                self.place(*copy)
            return
        copied = []
        for tokens_TM, position_TK, first_row, rows_NM in with_rows:
            moving, first_address = self._moving(position_TK, first_row, rows_NM)
            stride = tokens_TM.stride(0) * self._element_size
            copied.append((moving, tokens_TM.data_ptr(), stride, first_address, self._row_bytes))
        self._module.permute_several(copied)

    def sum(self, rows_NM: Tensor, position_TK: Tensor, first_row: int, out_TM: Tensor) -> None:
        """Sums the rows of each token: out[t] = sum over k of rows[position[t, k] - first_row].

        Choices with positions outside first_row .. first_row + N - 1 count as dropped.

        rows_NM: (N, M), N rows of M columns, contiguous.
        position_TK: (T, K) int32, contiguous, for T tokens with K choices each.
        out_TM: (T, M), contiguous memory for the sums.
        """
        if not rows_NM.shape[0]:
            out_TM.zero_()
        elif out_TM.shape[0]:
            moving, first_address = self._moving(position_TK, first_row, rows_NM)
            self._module.unpermute(moving, first_address, self._row_bytes, out_TM.data_ptr(), self._row_bytes)

    def _moving(self, position_TK: Tensor, first_row: int, rows_NM: Tensor) -> tuple[object, int]:
        """Returns the arguments that the kernels have in common, and the address of row 0.

        Positions begin with first_row, so row 0 is the address of ``rows_NM`` minus the bytes of first_row
        rows. A kernel adds position * (bytes of a row) to it.

        position_TK: (T, K) int32, the index of the row of each of the K choices of T tokens.
        first_row: the position of the first of the N rows. Choices with positions outside of first_row ..
            first_row + N - 1 have no row, and are skipped.
        rows_NM: (N, M), the rows.
        """
        tokens, top_k = position_TK.shape
        moving = self._module.Moving(
            *self._where, tokens, top_k, rows_NM.shape[0], self._row_bytes, position_TK.data_ptr(), 0,
            launches.PARTS, first_row,
        )  # fmt: skip
        return moving, rows_NM.data_ptr() - first_row * self._row_bytes
