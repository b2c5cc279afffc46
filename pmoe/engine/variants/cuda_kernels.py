"""Passes on a GPU: pmoe's kernels copy, multiply and sum the rows, and each is launched directly.

Everything that the launches of a pass share is checked once, when the pass begins. If the kernels do not take
the layer's order or experts, the tasks of the plain passes run instead.
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


class _OnCuda(Pass):
    """A pass whose rows are copied and summed by kernels.

    moves: launches these kernels; None if they cannot copy the rows of this pass.
    """

    moves: RowMoves | None
    experts: Experts | LaunchedExperts | ExpertsWithCopies

    def take_kernels(self) -> None:
        """Prepares the launches of this pass. Called when the buffers have been allocated."""
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
        if self.moves is None or not _is_readable(source_TM):
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
        """Returns whether kernels can move rows by an index that sorts them."""
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
    """A forward pass whose kernels are launched directly."""

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
        # The first product sorts the rows while it loads them: row r is the arrived row regroup[r].
        regroup = self.regroup[i]
        assert regroup is not None
        return ExpertRows(
            rows_NM, self.groups(unit), self.parameters, self.space(unit), out, slots=RowSlots(regroup, 1)
        )

    def _gathers(self, i: int, arrived: Tensor) -> bool:
        """Returns whether the experts read the rows of chunk i in the order in which they arrived.

        arrived: (N, M), the buffer in which they arrived.
        """
        regroup = self.regroup[i]
        if regroup is None or regroup.dtype != torch.int32:
            return False
        is_arrived = arrived.data_ptr() == self.buffer(self.received, i).data_ptr()
        return is_arrived and self._reads(arrived, arrived, regroup.numel(), 1)

    def local(self, j: int) -> None:
        """Computes block j of the rows that stay on this rank; the experts may read them from the tokens."""
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
        """Returns whether the experts read the rows of block j, which stay on this rank, from the tokens.

        They then need no copy. Backward must not need one that forward has kept.

        out_NM: (N, M), memory for the results of the block's N rows, with M = d_model columns.
        """
        num_rows = self.pass_plan.pieces[j].groups.num_rows
        has_slots = self.pass_plan.slot.dtype == torch.int32
        return has_slots and self._reads(self.source_TM, out_NM, num_rows, self.plan.top_k)

    def _reads(self, source: Tensor, out_NM: Tensor, num_rows: int, top_k: int) -> bool:
        """Returns whether the experts gather rows in the load of their first product.

        source: the tensor from which they gather.
        out_NM: (N, M), memory for the results, or memory that lies as that will.
        num_rows: N.
        top_k: how many rows are copies of a row of ``source``.
        """
        experts = self.experts
        if not isinstance(experts, LaunchedExperts):
            return False
        if self.keep and self.plan.restore.dispatched != "communicate":
            return False
        return experts.reads_tokens(source, out_NM, num_rows, top_k)


class CudaBackward(_OnCuda, Backward):
    """A backward pass whose kernels are launched directly."""

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: ForwardState) -> None:
        super().__init__(plan, grad_TM, saved)
        self.take_kernels()


def _is_readable(rows: Tensor) -> bool:
    """Returns whether kernels can read a tensor (rows, columns) with its strides and its address."""
    return rows.data_ptr() % VECTOR_BYTES == 0 and strides_fit(rows)
