"""Forward and backward passes on a GPU, in which pmoe's CUDA kernels copy, multiply and sum the rows.

The arguments that all launches of a pass share are checked once, when the pass begins, to save time of the
host. If the kernels cannot run the layer's order (the module that sorts rows) or its experts, the tasks of
the base classes, in PyTorch operators, run instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import ForwardState, Inputs, Pass, Unit
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.plan import Plan
from pmoe.experts.base import ExpertRows, Experts
from pmoe.experts.launched import LaunchedExperts, launched
from pmoe.experts.with_copies import ExpertsWithCopies
from pmoe.kernels.grouped_gemm import RowSlots
from pmoe.kernels.operands import VECTOR_BYTES, strides_fit
from pmoe.kernels.permute import RowMoves
from pmoe.ordering.sorted import SortedOrder
from pmoe.schedule.restore import GATHERED_AGAIN


class _OnCuda(Pass):
    """A pass whose rows are copied and summed by pmoe's CUDA kernels, where these can read the rows.

    moves: launches the kernels that copy and sum rows; None if these kernels cannot read the rows of this
        pass.
    experts: the layer's experts, or an object that launches their matrix products directly.
    """

    moves: RowMoves | None
    experts: Experts | LaunchedExperts | ExpertsWithCopies

    def take_kernels(self) -> None:
        """Sets `moves` and `experts`: checks which kernels can run in this pass, and prepares their launches.

        Called when the buffers have been allocated.
        """
        modules = self.plan.modules
        order = modules.order
        # Positions are int32 only if `pmoe.engine.plan.make_plan` expected the kernels.
        has_positions = self.pass_plan.position.dtype == torch.int32
        self.moves = None
        if has_positions and isinstance(order, SortedOrder):
            takes_rows = order.runs_kernels(self.source_TM, self.plan.top_k)
            self.moves = RowMoves(self.source_TM) if takes_rows else None
        self.experts = launched(modules.experts, self.parameters, self.source_TM) or modules.experts

    def gather_rows(self, source_TM: Tensor, out: Tensor, i: int) -> None:
        if self.moves is None or not is_readable(source_TM):
            super().gather_rows(source_TM, out, i)
            return
        chunk = self.pass_plan.chunks[i]
        self.moves.place(source_TM[chunk.tokens], self.positions[i], chunk.sent.start, out)

    def in_expert_order(self, name: str, i: int, arrived: Tensor) -> Tensor:
        regroup = self.regroup[i]
        if regroup is None or not self._moves_by(regroup, arrived):
            return super().in_expert_order(name, i, arrived)
        assert self.moves is not None
        rows_NM = self.temporary(f"{name}_sorted", i)
        self.moves.sum(arrived, regroup.unsqueeze(1), 0, rows_NM)  # a sum of one row is a copy
        return rows_NM

    def put_back(self, leaving_NM: Tensor, regroup: Tensor, rows_NM: Tensor) -> None:
        if self._moves_by(regroup, rows_NM):
            assert self.moves is not None
            self.moves.place(rows_NM, regroup.unsqueeze(1), 0, leaving_NM)
        else:
            super().put_back(leaving_NM, regroup.long(), rows_NM)

    def _moves_by(self, regroup: Tensor, rows_NM: Tensor) -> bool:
        """Returns whether a kernel can reorder rows by an index, given their dtypes and place in memory.

        regroup: the index that sorts the rows by expert. The kernel reads it only as int32.
        rows_NM: (N, M), the N rows, with M = d_model columns.
        """
        has_type = regroup.dtype == torch.int32 and rows_NM.dtype == self.source_TM.dtype
        is_placed = rows_NM.is_contiguous() and rows_NM.data_ptr() % VECTOR_BYTES == 0
        return self.moves is not None and has_type and is_placed

    def output(self, i: int) -> None:
        if self.moves is None:
            super().output(i)
            return
        out_TM = self.results[i]
        home = self.home
        first_row = 0
        if home is None:
            home = self.temporary(self.home_name, i)
            first_row = self.pass_plan.home[i].start
        rows_NM = home[:-1] if self.pass_plan.has_drops else home
        self.moves.sum(rows_NM, self.positions[i], first_row, out_TM)
        if self.shared_TM is not None:
            out_TM.add_(self.shared_TM[self.pass_plan.chunks[i].tokens])


class CudaForward(_OnCuda, Forward):
    """A forward pass on a GPU. Where possible, experts read rows as they arrived, without a sorted copy."""

    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        super().__init__(plan, inputs, keep)
        self.take_kernels()

    def in_expert_order(self, name: str, i: int, arrived: Tensor) -> Tensor:
        return arrived if self._gathers(i, arrived) else super().in_expert_order(name, i, arrived)

    def for_experts(
        self, unit: Unit, rows_NM: Tensor, out: Tensor | None = None, grad_weight_N: Tensor | None = None
    ) -> ExpertRows:
        i, place = unit
        if place or not self._gathers(i, rows_NM):
            return super().for_experts(unit, rows_NM, out, grad_weight_N)
        # The experts' first matrix product sorts the rows while it loads them: as row r it loads the arrived
        # row regroup[r].
        regroup = self.regroup[i]
        assert regroup is not None
        return ExpertRows(
            rows_NM, self.groups(unit), self.parameters, self.space(unit), out, slots=RowSlots(regroup, 1)
        )

    def _gathers(self, i: int, arrived: Tensor) -> bool:
        """Returns whether the experts can load the rows of chunk i unsorted, in their order of arrival.

        The sorted copy is then not made: the first matrix product picks its rows by an index.

        i: number of the chunk.
        arrived: (N, M), the buffer from which the experts would load N rows with M = d_model columns. The
            result is False for a buffer other than the one that received the rows of chunk i, such as a
            sorted copy.
        """
        regroup = self.regroup[i]
        if regroup is None or regroup.dtype != torch.int32:
            return False
        is_arrived = arrived.data_ptr() == self.buffer(self.received, i).data_ptr()
        return is_arrived and self._reads(arrived, arrived, regroup.numel(), 1)

    def local(self, j: int) -> None:
        """Computes block j of the rows that stay on this rank, because their experts are on it (task L).

        If possible, experts read the tokens themselves, and no copy of the tokens is made.
        """
        piece = self.pass_plan.pieces[j]
        out_NM = self.home_rows(j, piece.rows)
        if not self._reads_tokens(j, out_NM):
            super().local(j)
            return
        unit = (j, "_L")
        slots = RowSlots(self.pass_plan.slot[piece.rows], self.plan.top_k)
        expert_rows = ExpertRows(
            self.source_TM, piece.groups, self.parameters, self.space(unit), out_NM, slots=slots
        )
        self.compute_unit(unit, expert_rows, self.weight_sorted[piece.rows])

    def _reads_tokens(self, j: int, out_NM: Tensor) -> bool:
        """Returns whether the experts can load the rows of block j directly from the tokens, without a copy.

        The rows of the block stay on this rank, because their experts are on it.

        j: number of the block.
        out_NM: (N, M), memory for the results of the block's N rows, with M = d_model columns.
        """
        num_rows = self.pass_plan.pieces[j].groups.num_rows
        has_slots = self.pass_plan.slot.dtype == torch.int32
        return has_slots and self._reads(self.source_TM, out_NM, num_rows, self.plan.top_k)

    def _reads(self, source: Tensor, out_NM: Tensor, num_rows: int, top_k: int) -> bool:
        """Returns whether the experts' first matrix product can pick its rows from a tensor while loading.

        The result is False if backward needs the sorted copy of the rows that forward would otherwise make.

        source: the tensor from which rows are picked.
        out_NM: (N, M), memory for the results of M = d_model columns, or memory with the same layout and
            alignment.
        num_rows: N, the number of rows.
        top_k: how many of the rows are copies of one row of ``source``.
        """
        experts = self.experts
        if not isinstance(experts, LaunchedExperts):
            return False
        if self.keep and self.plan.restore.dispatched not in GATHERED_AGAIN:
            return False
        return experts.reads_tokens(source, out_NM, num_rows, top_k)


class CudaBackward(_OnCuda, Backward):
    """A backward pass on a GPU, in which pmoe's CUDA kernels copy, multiply and sum the rows."""

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: ForwardState) -> None:
        super().__init__(plan, grad_TM, saved)
        self.take_kernels()


def is_readable(rows: Tensor) -> bool:
    """Returns whether kernels can read a tensor (rows, columns): its strides and address suit their loads."""
    return rows.data_ptr() % VECTOR_BYTES == 0 and strides_fit(rows)
