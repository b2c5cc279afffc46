"""Passes that keep the hidden activation T_M in e4m3 until backward.

In a restore pair, "e4m3" stands for this. e4m3 is a float8 type. Every 128 columns of a row share a float32
scale, as in the messages of ``wire="e4m3"`` (`pmoe.comm.wire`). The last scale of a row may be for fewer
columns. The experts' tasks also pack and unpack:

    forward    T_DI -> T_M -> T_DO    then T_M -> packed T_M, which is saved
    backward   packed T_M -> T_M      then the gradients, from this rounded T_M

Forward computes with T_M before it is rounded to e4m3, so the rounding does not change the output. Backward
computes with the rounded T_M. So the rounding changes three results of backward: the nonlinearity's
derivative, the gradient of the second matrix, and the gradients of routing weights.

On the CPU, T_M is packed after the experts have computed the rows of a task, and not while the nonlinearity
reads T_M. This reads T_M once more: 2 or 4 bytes for each element. That is little beside the 2 * d_model
multiply-adds of the two products that compute and read the element. In return, the code of the experts need
not know the packed form.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pmoe.comm.wire import E4M3_DTYPES, pack_rows, unpack_rows
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import Inputs, Pass, SavedUnit, Unit
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.plan import Plan
from pmoe.experts.base import Hidden
from pmoe.schedule.wire import message_bytes


class _Packing(Pass):
    """A pass that packs or unpacks hidden activations, a block of rows at a time.

    Working on a block at a time keeps the memory for temporary float32 values small. A block has as many rows
    as the blocks in which the experts compute.
    """

    def check_dtype(self) -> None:
        """Raises ValueError if the rows have a dtype that must not be rounded to e4m3."""
        dtype = self.source_TM.dtype
        if dtype not in E4M3_DTYPES:
            raise ValueError(
                f"memory_reuse ({self.plan.restore}) must not keep T_M in e4m3 for rows of {dtype}: keep, "
                "offload or recompute T_M"
            )

    def blocks(self, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yields blocks of at most `HiddenColumns.scratch_rows` rows: the same rows of every tensor.

        rows: tensors with the same number of rows.
        """
        size = self.sizes.columns.scratch_rows
        return zip(*(tensor.split(size) for tensor in rows), strict=True)


class PackingForward(_Packing, Forward):
    """A forward pass that keeps the hidden activation T_M in e4m3."""

    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        super().__init__(plan, inputs, keep)
        self.check_dtype()

    def kept_for_backward(self, unit: Unit, kept: SavedUnit, rows_NM: Tensor, changed: bool) -> SavedUnit:
        kept = super().kept_for_backward(unit, kept, rows_NM, changed)
        assert kept.hidden is not None
        (hidden_NG,) = kept.hidden.tensors
        num_rows, columns = hidden_NG.shape
        size = hidden_NG.element_size()
        packed = self.new(num_rows, message_bytes("e4m3", columns, size) // size)
        if num_rows:
            self.pack_hidden(hidden_NG, packed.view(torch.uint8))
        return kept._replace(hidden=kept.hidden._replace(tensors=[packed]))

    def pack_hidden(self, hidden_NG: Tensor, packed_NC: Tensor) -> None:
        """Packs rows of T_M to e4m3.

        hidden_NG: (N, G), N rows of T_M with G columns. With float32, the values may be overwritten.
        packed_NC: (N, C) uint8, memory for the packed rows, C bytes each.
        """
        for hidden_bG, packed_bC in self.blocks(hidden_NG, packed_NC):
            pack_rows("e4m3", hidden_bG, packed_bC, expendable=True)


class PackingBackward(_Packing, Backward):
    """A backward pass that unpacks the hidden activation T_M from e4m3."""

    def hidden_of(self, unit: Unit) -> Hidden:
        if unit not in self.hidden:
            columns = self.sizes.columns.hidden
            hidden_NG = self.place(unit, "T_M", self.groups(unit).num_rows, columns)
            for kept, runs in self.parts(unit):
                assert kept.hidden is not None
                packed_NC = kept.hidden.tensors[0].view(torch.uint8)
                for forward_rows, backward_rows in runs:
                    if forward_rows.start < forward_rows.stop:
                        self.unpack_hidden(packed_NC[forward_rows], hidden_NG[backward_rows])
            self.hidden[unit] = Hidden(tensors=[hidden_NG], expendable=True)
        return super().hidden_of(unit)

    def unpack_hidden(self, packed_NC: Tensor, hidden_NG: Tensor) -> None:
        """Unpacks rows of T_M from e4m3.

        packed_NC: (N, C) uint8, N packed rows of C bytes.
        hidden_NG: (N, G), memory for the rows of T_M, G columns each.
        """
        for packed_bC, hidden_bG in self.blocks(packed_NC, hidden_NG):
            unpack_rows("e4m3", packed_bC, None, hidden_bG)
