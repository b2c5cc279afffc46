"""Forward and backward passes on a GPU, in which pmoe's CUDA kernels copy, multiply and sum the rows.

The arguments that all launches of a pass share are checked once, when the pass begins, to save time of the
host. If the kernels do not support the layer's order (the module that copies and sums rows) or its experts,
the methods of the base classes run, which use PyTorch operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import ForwardState, Inputs, Pass, Unit
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.plan import PassModules, PassPlan, Plan
from pmoe.experts.base import ExpertRows, Experts
from pmoe.experts.launched import LaunchedExperts, launched
from pmoe.experts.with_copies import ExpertsWithCopies
from pmoe.kernels.grouped_gemm import RowSlots
from pmoe.kernels.grouped_gemm.launch import zeroed_of_thread
from pmoe.kernels.operands import VECTOR_BYTES, is_dense, strides_fit
from pmoe.kernels.permute.row_moves import RowCopy, RowMoves
from pmoe.ordering.sorted import SortedOrder
from pmoe.schedule.buffer_sizes import BufferSizes
from pmoe.schedule.restore import GATHERED_AGAIN
from pmoe.schedule.tasks import Kind


class _OnCuda(Pass):
    """A pass in which pmoe's CUDA kernels copy and sum the rows, if they can read the rows.

    moves: launches the kernels that copy and sum rows; None if these kernels cannot read the rows of this
        pass.
    reads_source: whether these kernels can read the rows of the pass's input.
    experts: the layer's experts, or an object that launches their matrix products directly.
    direct: the object that launches their products directly; None if it cannot compute this pass. It is made
        before the buffers are allocated, because it needs fewer of them.
    places_results: whether the experts' last product stores all results in the order in which rows arrived.
        The product computes the rows sorted by expert. It stores the result of row r as row regroup[r] of the
        buffer that is sent back, so no copy has to undo the sorting, and results have no sorted form.
    weight_of_pieces: the routing weights of each block of the rows that stay on this rank, (rows of the
        block,) each.
    """

    moves: RowMoves | None
    reads_source: bool
    weight: Tensor
    weight_sorted: Tensor
    experts: Experts | LaunchedExperts | ExpertsWithCopies
    direct: LaunchedExperts | None
    places_results: bool
    weight_of_pieces: Sequence[Tensor]

    def take_products(
        self, modules: PassModules, pass_plan: PassPlan, parameters: Sequence[Tensor], rows: Tensor
    ) -> None:
        """Sets `direct` and `places_results`. Called before the buffers are allocated.

        modules, pass_plan: the layer's modules, and the plan of this pass.
        parameters: the tensors with which the experts compute.
        rows: a tensor with the dtype and device of the pass's rows.
        """
        self.direct = launched(modules.experts, parameters, rows)
        computes_alone = modules.copies is None and modules.products is None
        # With send_once=True, results of one arrived row are summed before they are sent back.
        self.places_results = self.direct is not None and computes_alone and pass_plan.once is None

    @property
    def sizes_type(self) -> Callable[..., BufferSizes]:  # type: ignore[override]
        sizes_type = super().sizes_type
        return functools.partial(sizes_type, places=True) if self.places_results else sizes_type

    def take_kernels(self) -> None:
        """Sets `moves` and `experts`: checks which kernels can run in this pass, and prepares their launches.

        Called when the buffers have been allocated.
        """
        modules = self.plan.modules
        order = modules.order
        # Positions are int32 only if `pmoe.engine.plan.make_plan` expected the kernels.
        has_positions = self.pass_plan.position.dtype == torch.int32
        self.moves = None
        self.reads_source = is_readable(self.source_TM)
        if has_positions and isinstance(order, SortedOrder):
            takes_rows = order.runs_kernels(self.source_TM, self.plan.top_k)
            self.moves = RowMoves(self.source_TM) if takes_rows else None
        self.experts = self.direct or modules.experts
        if self.places_results:  # the products read an int32 index, as kernels compute it
            narrow = [None if regroup is None else regroup.int() for regroup in self.regroup]
            self.regroup: Sequence[Tensor | None] = narrow

    @functools.cached_property
    def row_token(self) -> Tensor:
        """The token of each sorted row, (rows,), for rows that are sent and rows that stay on this rank.

        Kernels do not need this tensor to copy rows. If kernels sorted the slots, it is therefore computed
        only when other operators must copy rows.
        """
        pass_plan = self.pass_plan
        is_empty = pass_plan.row_token.numel() < pass_plan.slot.numel()
        return pass_plan.slot // self.plan.top_k if is_empty else pass_plan.row_token

    def pieces_of(self, numbers: Tensor) -> Sequence[Tensor]:
        """Returns a part of ``numbers`` for each block of the rows that stay on this rank.

        numbers: (rows,), a number for each row of this rank, in the order of `KernelOrder`.
        """
        if not self.pass_plan.pieces:
            return ()
        sizes = self.pass_plan.rows.local
        return numbers[numbers.shape[0] - sum(sizes) :].split_with_sizes(sizes)

    @functools.cached_property
    def weight_by_number(self) -> Tensor | None:
        """Routing weights of this rank's rows in the order `PassPlan.by_kernel`; None if that is None."""
        by_kernel = self.pass_plan.by_kernel
        return None if by_kernel is None else by_kernel.sort(self.weight)

    def take_weights(self) -> None:
        """Sets `weight_of_pieces`. Called when the order of the rows and their weights are known."""
        by_number = self.weight_by_number
        if by_number is None:
            self.weight_of_pieces = [self.weight_sorted[piece.rows] for piece in self.pass_plan.pieces]
        else:
            self.weight_of_pieces = self.pieces_of(by_number)

    def run_schedule(self) -> None:
        counters = zeroed_of_thread.set(self.pass_plan.counters)
        try:
            super().run_schedule()
        finally:
            zeroed_of_thread.reset(counters)

    def gather_rows(self, source_TM: Tensor, out: Tensor, i: int) -> None:
        is_read = self.reads_source if source_TM is self.source_TM else is_readable(source_TM)
        if self.moves is None or not is_read:
            sent = self.pass_plan.chunks[i].sent
            self.plan.modules.order.order(source_TM, self.row_token[sent], out)
            return
        chunk = self.pass_plan.chunks[i]
        self.moves.place(source_TM[chunk.tokens], self.positions[i], chunk.sent.start, out)

    def copy_of_sent(self, source_TM: Tensor, out: Tensor, i: int) -> RowCopy:
        """Returns the arguments of the kernel that copies tokens to the send buffer of chunk i.

        source_TM: (T, M), T tokens with M = d_model columns; in backward, the gradients of their outputs.
        out: (rows of the chunk, M), the send buffer.
        """
        chunk = self.pass_plan.chunks[i]
        return RowCopy(source_TM[chunk.tokens], self.positions[i], chunk.sent.start, out)

    def gather_local(self, source_TM: Tensor, out: Tensor, j: int) -> Tensor:
        pieces = self.pass_plan.pieces
        is_read = self.reads_source if source_TM is self.source_TM else is_readable(source_TM)
        if self.moves is None or len(pieces) != len(self.pass_plan.chunks) or not is_read:
            self.plan.modules.order.order(source_TM, self.row_token[pieces[j].rows], out)
            return out
        tokens = self.pass_plan.chunks[j].tokens
        self.moves.place(source_TM[tokens], self.positions[j], pieces[j].rows.start, out)
        return out

    def in_expert_order(self, name: str, i: int, arrived: Tensor) -> Tensor:
        regroup = self.regroup[i]
        if regroup is None or not self._moves_by(regroup, arrived):
            return super().in_expert_order(name, i, arrived)
        assert self.moves is not None
        rows_NM = self.temporary(f"{name}_sorted", i)
        self.moves.sum(arrived, regroup.unsqueeze(1), 0, rows_NM)  # a sum of one row is a copy
        return rows_NM

    def for_experts(
        self, unit: Unit, rows_NM: Tensor, out: Tensor | None = None, grad_weight_N: Tensor | None = None
    ) -> ExpertRows:
        return self.rows_for_kernels(unit, rows_NM, out, grad_weight_N)

    def rows_for_kernels(
        self,
        unit: Unit,
        rows_NM: Tensor,
        out: Tensor | None,
        grad_weight_N: Tensor | None = None,
        slots: RowSlots | None = None,
    ) -> ExpertRows:
        """Returns the argument for the experts' methods, as `for_experts` does.

        slots: for each row its (token, choice) pair, if the first product picks the rows from the tokens; it
            must be None in backward.
        """
        # As `groups`, without a call for each task.
        i, place = unit
        result_row = None
        if place:
            groups = self.pass_plan.pieces[i].groups
        else:
            groups = self.pass_plan.chunks[i].received
            result_row = self.regroup[i] if out is not None and self.places_results else None
        space = functools.partial(self.place, unit)
        return ExpertRows(rows_NM, groups, self.parameters, space, out, grad_weight_N, slots, result_row)

    def result_of(self, i: int) -> Tensor:
        return self.leaving_buffer(i) if self.places_results else super().result_of(i)

    def in_source_order(self, i: int, rows_NM: Tensor) -> None:
        if not self.places_results:
            super().in_source_order(i, rows_NM)

    def put_back(self, leaving_NM: Tensor, regroup: Tensor, rows_NM: Tensor) -> None:
        if self._moves_by(regroup, rows_NM):
            assert self.moves is not None
            self.moves.place(rows_NM, regroup.unsqueeze(1), 0, leaving_NM)
        else:
            super().put_back(leaving_NM, regroup.long(), rows_NM)

    def _moves_by(self, regroup: Tensor, rows_NM: Tensor) -> bool:
        """Returns whether a kernel can reorder rows by an index: their dtypes and addresses must suit it.

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
            first_row = self.pass_plan.chunks[i].sent.start
        rows_NM = home[:-1] if self.pass_plan.has_drops else home
        self.moves.sum(rows_NM, self.positions[i], first_row, out_TM)
        if self.shared_TM is not None:
            out_TM.add_(self.shared_TM[self.pass_plan.chunks[i].tokens])


class CudaForward(_OnCuda, Forward):
    """A forward pass on a GPU. Where possible, experts read rows as they arrived, without a sorted copy.

    unsorted: the chunks of which the experts get the rows in the order of arrival, and an index that sorts.
    """

    unsorted: set[int]

    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        self.take_products(plan.modules, plan.forward, inputs.parameters, inputs.x_TM)
        super().__init__(plan, inputs, keep)
        self.take_kernels()
        self.take_weights()
        self.unsorted = set()

    def in_expert_order(self, name: str, i: int, arrived: Tensor) -> Tensor:
        regroup = self.regroup[i]
        if regroup is None:
            return arrived
        if self._gathers(regroup, arrived, i):
            self.unsorted.add(i)
            return arrived
        return super().in_expert_order(name, i, arrived)

    def for_experts(
        self, unit: Unit, rows_NM: Tensor, out: Tensor | None = None, grad_weight_N: Tensor | None = None
    ) -> ExpertRows:
        i, place = unit
        if place or i not in self.unsorted:
            return self.rows_for_kernels(unit, rows_NM, out, grad_weight_N)
        # The experts' first matrix product sorts the rows while it loads them: as row r it loads the arrived
        # row regroup[r].
        regroup = self.regroup[i]
        assert regroup is not None
        return self.rows_for_kernels(unit, rows_NM, out, slots=RowSlots(regroup, 1))

    def _gathers(self, regroup: Tensor, arrived: Tensor, i: int) -> bool:
        """Returns whether the experts can load the rows of chunk i unsorted, in their order of arrival.

        The sorted copy is then not made: the first matrix product picks its rows by an index.

        regroup: (N,), the index that sorts the N rows by expert. The kernel reads it only as int32.
        arrived: (rows, M), the rows as they arrived, with M = d_model columns. The result is False if this is
            not the buffer that received the rows of chunk i: a callback may have replaced them.
        i: number of the chunk.
        """
        reader = self.reader_of_arrived
        is_buffer = arrived.data_ptr() == self.buffer(self.received, i).data_ptr()
        if reader is None or regroup.dtype != torch.int32 or not is_buffer:
            return False
        # Results that products cannot place go to new memory, which kernels can write.
        result = self.leaving_buffer(i) if self.places_results else arrived
        return reader.takes(regroup.numel(), arrived, result)

    def local(self, j: int) -> None:
        """Computes block j of the rows that stay on this rank, because their experts are on it (task L).

        If possible, experts read the tokens themselves, and no copy of the tokens is made.
        """
        piece = self.pass_plan.pieces[j]
        out_NM = self.home_rows(j, piece.rows)
        unit = (j, "_L")
        reader = self.reader_of_tokens
        if reader is not None and reader.takes(piece.groups.num_rows, out_NM):
            slots = RowSlots(self.pass_plan.slot[piece.rows], self.plan.top_k)
            space = functools.partial(self.place, unit)
            expert_rows = ExpertRows(
                self.source_TM, piece.groups, self.parameters, space, out_NM, slots=slots
            )
        else:
            rows_NM = self.gather_local(self.source_TM, self.temporary("T_DI_L", j), j)
            expert_rows = self.for_experts(unit, rows_NM, out_NM)
        self.compute_unit(unit, expert_rows, self.weight_of_pieces[j])

    def make_scalars(self) -> None:
        by_number = self.weight_by_number
        if by_number is None:
            super().make_scalars()
        else:
            self.scalars.append(self.scalar(by_number[: self.weight_message.slot.shape[0]]))

    @functools.cached_property
    def reader_of_tokens(self) -> LaunchedExperts | None:
        """The experts, if their first product may load rows that stay directly from the tokens; else None."""
        reader = self._reader(self.plan.top_k) if self.pass_plan.slot.dtype == torch.int32 else None
        return reader if reader is not None and is_dense(self.source_TM) else None

    @functools.cached_property
    def reader_of_arrived(self) -> LaunchedExperts | None:
        """The experts, if their first product may load arrived rows in the order of arrival; else None."""
        return self._reader(1)

    def _reader(self, top_k: int) -> LaunchedExperts | None:
        """Returns the experts if their first product may pick its rows by an index while it loads them.

        The result is None if they cannot, if copying the rows first is faster, or if backward needs the
        sorted copy of the rows that forward would otherwise make.

        top_k: the number of rows to which each row is copied.
        """
        experts = self.experts
        if not isinstance(experts, LaunchedExperts):
            return None
        if self.keep and self.plan.restore.dispatched not in GATHERED_AGAIN:
            return None
        return experts if experts.gathers(top_k) else None


class CudaBackward(_OnCuda, Backward):
    """A backward pass on a GPU, in which pmoe's CUDA kernels copy, multiply and sum the rows.

    grad_of_piece: by block of rows that stay on this rank, the gradients of the output of these rows. An
        entry was copied together with the block's input, and is removed when a task reads it.
    gathered: the chunks whose send buffers (of gradients) have been filled, but not sent yet.
    grad_by_number: (rows,), the gradients of the routing weights of this rank's rows, in the order of
        `PassPlan.by_kernel`; None if no kernel has computed this order.
    """

    grad_of_piece: dict[int, Tensor]
    gathered: set[int]
    grad_by_number: Tensor | None
    grad_weight_home: Tensor

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: ForwardState) -> None:
        self.take_products(plan.modules, plan.backward, saved.inputs.parameters, grad_TM)
        super().__init__(plan, grad_TM, saved)
        self.take_kernels()
        self.grad_of_piece = {}
        self.gathered = set()
        self.grad_by_number = None
        if self.weight_by_number is not None:
            self.take_weights()
            self.grad_by_number = torch.empty_like(self.weight_by_number)
            if self.pass_plan.weights is not None:
                self.grad_weight_home = self.grad_by_number[: self.weight_message.slot.shape[0]]

    def run_schedule(self) -> None:
        super().run_schedule()
        by_kernel = self.pass_plan.by_kernel
        if by_kernel is not None and self.grad_by_number is not None:
            self.grad_weight.index_copy_(0, by_kernel.slot, self.grad_by_number)

    def local(self, j: int) -> None:
        if self.grad_by_number is None:
            super().local(j)
            return
        rows = self.pass_plan.pieces[j].rows
        grad_NM = self.gather_local(self.source_TM, self.temporary("dT_DO_L", j), j)
        grad_weight_N = self.pieces_of(self.grad_by_number)[j]
        weight_N = self.weight_of_pieces[j]
        self._input_gradient((j, "_L"), grad_NM, weight_N, self.home_rows(j, rows), grad_weight_N)

    def gather_again(self, i: int) -> None:
        """Copies the tokens of chunk i to be sent again, together with other rows (`Schedule.joint_copies`).

        The same launch also copies the gradients for the next task G, and the input and the gradients of the
        block of the next task LM. These tasks then copy nothing.
        """
        x_TM = self.saved.inputs.x_TM
        if self.moves is None or self.plan.modules.hooks is not None or not self._both_are_readable:
            super().gather_again(i)
            return
        copies = [self.copy_of_sent(x_TM, self.buffer("send_again", i), i)]
        for task in self.schedule.joint_copies[f"{Kind.GATHER_AGAIN.value}{i}"]:
            if task.kind is Kind.GATHER:
                copies.append(self.copy_of_sent(self.source_TM, self.buffer("send", task.chunk), task.chunk))
                self.gathered.add(task.chunk)
            else:
                copies += self._copies_of_piece(task.chunk)
        self.moves.place_several(copies)

    def gather(self, i: int) -> None:
        if i in self.gathered:
            self.gathered.remove(i)
        else:
            super().gather(i)

    def recompute(self, i: int, place: str = "") -> None:
        if place and self.moves is not None:
            self.moves.place_several(self._copies_of_piece(i))
        super().recompute(i, place)

    def _copies_of_piece(self, j: int) -> list[RowCopy]:
        """Returns the copies of tokens that fill two buffers of block j, which one launch then makes.

        The two buffers are the experts' input, and the gradients of their output. The method also records
        both buffers as filled. The task that recomputes the hidden activation needs only the input. The
        gradients are needed by the next task of the compute lane, so they may be copied early: blocks take
        turns in the memory for gradients, and the tasks that read the previous block's gradients ran earlier
        in the same lane.

        The list is empty if backward does not read the input from the tokens again, or if the buffers have
        been filled already.

        j: number of the block of rows that stay on this rank.
        """
        pieces = self.pass_plan.pieces
        is_copied = self.plan.restore.dispatched == "communicate" and (j, "_L") not in self.rows
        if not is_copied or len(pieces) != len(self.pass_plan.chunks) or not self._both_are_readable:
            return []
        tokens = self.pass_plan.chunks[j].tokens
        self.rows[j, "_L"] = self.temporary("T_DI_L", j)
        self.grad_of_piece[j] = self.temporary("dT_DO_L", j)
        first_row = pieces[j].rows.start
        return [
            RowCopy(self.saved.inputs.x_TM[tokens], self.positions[j], first_row, self.rows[j, "_L"]),
            RowCopy(self.source_TM[tokens], self.positions[j], first_row, self.grad_of_piece[j]),
        ]

    @functools.cached_property
    def _both_are_readable(self) -> bool:
        """Whether kernels can read both the tokens and the gradients of their outputs."""
        return self.reads_source and is_readable(self.saved.inputs.x_TM)

    def gather_local(self, source_TM: Tensor, out: Tensor, j: int) -> Tensor:
        if source_TM is self.source_TM and j in self.grad_of_piece:
            return self.grad_of_piece.pop(j)
        return super().gather_local(source_TM, out, j)


def is_readable(rows: Tensor) -> bool:
    """Returns whether kernels can read a tensor (rows, columns), judged by its strides and its address."""
    return rows.data_ptr() % VECTOR_BYTES == 0 and strides_fit(rows)
