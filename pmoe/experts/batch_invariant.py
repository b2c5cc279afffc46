"""Experts whose results for a row have the same bits, no matter which other rows the batch has.

The rows of each expert are copied into tiles of R rows, and a row goes through the whole expert in one tile:
both products, the nonlinearity and the routing weight. Every tile has the same shape, so the libraries
compute every tile in the same way (`pmoe.kernels.fixed_tiles`). The last tile of an expert may have fewer
than R rows. The rest of this tile has rows of older tiles, whose results are not used.

    rows of expert 0: a b c d e     tiles of R = 4 rows:  a b c d | e . . .

The gradients of rows and routing weights are computed in the same tiles. The gradients of parameters are not:
they sum over the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pmoe.experts.base import ExpertRows, Hidden, row_dot
from pmoe.experts.ffn import FFNExperts
from pmoe.experts.products import RowGroups
from pmoe.experts.stacked import StackedExperts
from pmoe.experts.swiglu import SwiGLUExperts
from pmoe.kernels.fixed_tiles import TILE_ROWS, rows_of_tile, with_alignment
from pmoe.schedule.buffer_sizes import HiddenColumns


class _ExpertsInTiles(StackedExperts):
    """Stacked experts that compute in tiles of a fixed number of rows, so that results repeat bit by bit."""

    is_batch_invariant = True

    def columns(self, device_type: str) -> HiddenColumns:
        columns = super().columns(device_type)
        width = 3 * self.d_model + 2 * columns.hidden + 3 * columns.scratch  # of all tensors of a tile
        return columns._replace(scratch_rows=TILE_ROWS[0], graph=width)

    def compute(
        self, expert_rows: ExpertRows, weight_N: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Hidden | None]:
        num_rows = self.tile_rows(expert_rows.parameters)
        return self._computed(expert_rows, weight_N, keep, num_rows)

    def recompute(self, expert_rows: ExpertRows, recipe: Any) -> Hidden:
        num_rows = self.tile_rows(expert_rows.parameters)
        w1, _, b1, _ = self.weights(expert_rows.parameters)
        hidden_NG = expert_rows.new("T_M", w1.shape[1])
        x_RM = hidden_NG.new_zeros(num_rows, w1.shape[2])
        hidden_RG = hidden_NG.new_zeros(num_rows, w1.shape[1])
        for expert, tiles in _tiles(expert_rows.groups, num_rows):
            first = _Product(w1, b1, expert)
            for rows, used in tiles:
                x_RM[used] = expert_rows.rows_NM[rows]
                first.compute(x_RM, hidden_RG)
                hidden_NG[rows] = hidden_RG[used]
        return Hidden(tensors=[hidden_NG], expendable=True)

    def input_gradient(
        self, grad_NM: Tensor, expert_rows: ExpertRows, weight_N: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        num_rows = self.tile_rows(expert_rows.parameters)
        return self._differentiated(grad_NM, expert_rows, weight_N, hidden, num_rows)

    def compute_alone(self, x: Tensor) -> Tensor:
        raise TypeError(
            f"shared_expert ({type(self).__name__}) has hooks or is in a wrapper, which computes all rows in "
            "one product, so the layer cannot be batch-invariant: remove the hooks or the wrapper"
        )

    def tile_rows(self, parameters: Sequence[Tensor]) -> int:
        """Returns R, the number of rows of a tile.

        The first call for experts of these shapes finds R by a test: a row's results in a tile of R rows must
        not depend on the other rows of the tile.

        parameters: the tensors to compute with, of which only shapes, dtype and device are read.
        """
        shapes = tuple(tuple(parameter.shape[1:]) for parameter in parameters)
        like = parameters[0]
        key = (type(self), self.activation, shapes)
        return rows_of_tile(key, lambda tile_RM: self._results(tile_RM, shapes), self.d_model, like)

    def _results(self, tile_RM: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Runs forward and backward of one expert with random parameters on a tile of rows, for a test.

        The test checks that a row's results do not depend on the other rows of the tile (`tile_rows`).
        Returns tensors of R rows each: the output, the hidden activation, the gradients of the rows, the
        gradients of the routing weights, and two tensors from which weight gradients are computed.

        tile_RM: (R, M), R rows with M = d_model columns. Column 0 also serves as the routing weights, and the
            tile with its columns in reverse order as the gradients of the output: the test needs no
            particular numbers.
        shapes: the shapes of an expert's parameters.
        """
        generator = torch.Generator().manual_seed(0)
        parameters = [
            torch.randn(1, *shape, generator=generator).to(tile_RM.device, tile_RM.dtype) for shape in shapes
        ]
        num_rows = tile_RM.shape[0]
        ends = torch.tensor([num_rows], dtype=torch.int32, device=tile_RM.device)
        expert_rows = ExpertRows(tile_RM, RowGroups(counts=(num_rows,), ends=ends), parameters)
        weight_R = tile_RM[:, 0].float() if tile_RM.element_size() < 4 else tile_RM[:, 0].clone()
        out_RM, hidden = self._computed(expert_rows, weight_R, True, num_rows)
        assert hidden is not None
        kept = Hidden(tensors=[hidden.tensors[0].clone()])
        grad_RM, grad_weight_R, pending = self._differentiated(
            tile_RM.flip(1), expert_rows, weight_R, kept, num_rows
        )
        return [out_RM, *hidden.tensors, grad_RM, grad_weight_R, *pending[1:3]]

    def _computed(
        self, expert_rows: ExpertRows, weight_N: Tensor, keep: bool, num_rows: int
    ) -> tuple[Tensor, Hidden | None]:
        """Computes a chunk's rows in tiles of a fixed number of rows, as `Experts.compute` specifies.

        Returns the outputs, (N, M) for N rows with M = d_model columns, and the hidden activation if
        ``keep``.

        expert_rows: the chunk's rows, with the parameters and memory to compute with.
        weight_N: (N,), the routing weight of each row.
        keep: whether backward will need the hidden activation.
        num_rows: R, the number of rows of a tile.
        """
        rows_NM = expert_rows.rows_NM
        w1, w2, b1, b2 = self.weights(expert_rows.parameters)
        hidden_NG = expert_rows.new("T_M", w1.shape[1]) if keep else None
        out = expert_rows.new("T_DO", w2.shape[1]) if expert_rows.out is None else expert_rows.out
        x_RM = rows_NM.new_zeros(num_rows, w1.shape[2])
        out_RM = torch.empty_like(x_RM)
        hidden_RG = rows_NM.new_empty(num_rows, w1.shape[1])
        active_RH = rows_NM.new_empty(num_rows, w2.shape[2])
        weight_R1 = weight_N.new_zeros(num_rows, 1)
        for expert, tiles in _tiles(expert_rows.groups, num_rows):
            first = _Product(w1, b1, expert)
            second = _Product(w2, b2, expert)
            for rows, used in tiles:
                x_RM[used] = rows_NM[rows]
                weight_R1[used, 0] = weight_N[rows]
                first.compute(x_RM, hidden_RG)
                self.activate(hidden_RG, active_RH)
                second.compute(active_RH, out_RM)
                out_RM.mul_(weight_R1)
                out[rows] = out_RM[used]
                if hidden_NG is not None:
                    hidden_NG[rows] = hidden_RG[used]
        return out, None if hidden_NG is None else Hidden(tensors=[hidden_NG])

    def _differentiated(
        self, grad_NM: Tensor, expert_rows: ExpertRows, weight_N: Tensor, hidden: Hidden, num_rows: int
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Computes gradients in tiles of a fixed number of rows, as `Experts.input_gradient` specifies.

        Returns three results: the gradients of the N rows (N, M), with M = d_model columns; the gradients of
        the routing weights (N,); and the tensors that `weight_gradient` needs.

        grad_NM: (N, M), the gradient of the outputs.
        expert_rows: the chunk's rows, with the parameters and memory to compute with.
        weight_N: (N,), the routing weight of each row.
        hidden: the hidden activation, and whether it may be overwritten.
        num_rows: R, the number of rows of a tile.
        """
        (hidden_NG,) = hidden.tensors
        w1, w2, _, b2 = self.weights(expert_rows.parameters)
        num_hidden = w2.shape[2]
        grad_hidden_NG = expert_rows.new("dT_M", w1.shape[1])
        in_place = hidden.expendable and self._activates_in_place(grad_NM.device.type)
        active_NH = hidden_NG[:, :num_hidden] if in_place else expert_rows.new("active", num_hidden)
        grad_weight_N = expert_rows.grad_weight_N
        if grad_weight_N is None:
            grad_weight_N = torch.empty_like(weight_N)
        out = expert_rows.new("dT_DI", w1.shape[2]) if expert_rows.out is None else expert_rows.out
        grad_RM = grad_NM.new_zeros(num_rows, w1.shape[2])
        out_RM = torch.empty_like(grad_RM)
        hidden_RG = grad_NM.new_zeros(num_rows, w1.shape[1])
        grad_RG = torch.empty_like(hidden_RG)
        grad_RH = grad_RG[:, :num_hidden]
        active_RH = grad_NM.new_empty(num_rows, num_hidden)
        product_RH = torch.empty_like(active_RH)
        weight_R1 = weight_N.new_zeros(num_rows, 1)
        for expert, tiles in _tiles(expert_rows.groups, num_rows):
            first = _Product(w1, None, expert)
            second = _Product(w2, b2, expert)
            for rows, used in tiles:
                grad_RM[used] = grad_NM[rows]
                hidden_RG[used] = hidden_NG[rows]
                weight_R1[used, 0] = weight_N[rows]
                self.activate(hidden_RG, active_RH)
                second.differentiate(grad_RM, grad_RH)
                dot_R = row_dot(active_RH, grad_RH, product_RH)
                if second.bias_O is not None:
                    dot_R = dot_R + row_dot(grad_RM, second.bias_O.expand_as(grad_RM), out_RM)
                grad_RH.mul_(weight_R1)
                self.activation_gradient(grad_RG, hidden_RG)
                first.differentiate(grad_RG, out_RM)
                out[rows] = out_RM[used]
                grad_hidden_NG[rows] = grad_RG[used]
                active_NH[rows] = active_RH[used]
                grad_weight_N[rows] = dot_R[used].to(grad_weight_N.dtype)
        grad_NM.mul_(weight_N.unsqueeze(1))
        return out, grad_weight_N, (expert_rows.rows_NM, grad_hidden_NG, active_NH, grad_NM)


class _Product:
    """The product of tiles of rows with one expert's weight, and the gradient of the rows.

    weight_EOI: (E, O, I), the weights of E experts, with O output and I input features.
    bias_EO: (E, O), or None.
    expert: the expert's index among this rank's experts.
    """

    def __init__(self, weight_EOI: Tensor, bias_EO: Tensor | None, expert: int) -> None:
        self._weight_OI = with_alignment(weight_EOI[expert])
        self.bias_O = None if bias_EO is None else with_alignment(bias_EO[expert])

    def compute(self, tile_RI: Tensor, out_RO: Tensor) -> None:
        """Writes tile @ weight^T + bias to out_RO.

        tile_RI: (R, I), a tile of R rows with I input features.
        out_RO: (R, O), O output features.
        """
        if self.bias_O is None:
            torch.mm(tile_RI, self._weight_OI.t(), out=out_RO)
        else:
            torch.addmm(self.bias_O, tile_RI, self._weight_OI.t(), out=out_RO)

    def differentiate(self, grad_RO: Tensor, out_RI: Tensor) -> None:
        """Writes grad @ weight, the gradient of a tile's rows, to out_RI.

        grad_RO: (R, O), the gradient of the results of R rows, with O output features.
        out_RI: (R, I), I input features.
        """
        torch.mm(grad_RO, self._weight_OI, out=out_RI)


def _tiles(groups: RowGroups, num_rows: int) -> Iterator[tuple[int, Iterator[tuple[slice, slice]]]]:
    """Yields (expert, its tiles) for each expert that has rows.

    A tile is a pair: (slice of the chunk's rows, slice of the tile's rows to which they are copied).

    groups: where each expert's rows begin and end.
    num_rows: R, the number of rows of a tile.
    """

    def of_expert(rows: slice) -> Iterator[tuple[slice, slice]]:
        for start in range(rows.start, rows.stop, num_rows):
            stop = min(start + num_rows, rows.stop)
            yield slice(start, stop), slice(0, stop - start)

    for expert, rows in groups.slices():
        yield expert, of_expert(rows)


class BatchInvariantFFN(_ExpertsInTiles, FFNExperts):
    """Feed-forward experts whose results for a row do not depend on the rows beside it, bit by bit."""


class BatchInvariantSwiGLU(_ExpertsInTiles, SwiGLUExperts):
    """Gated experts whose results for a row do not depend on the rows beside it, bit by bit."""
