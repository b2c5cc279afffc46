"""The experts of a rank and its copies of other ranks' busy experts, computed one after the other.

With ``balance``, a rank may hold temporary copies of experts that belong to other ranks, and compute a part
of these experts' rows. The rows of a chunk are sorted by expert, and the rows for copies come last. So the
rank's own experts compute the first rows, and then the same code computes the other rows with the copied
parameters:

    rows      own expert 0 | own expert 1 | copy of expert 5 | copy of expert 9
    computed  `Experts.compute` with the parameters | `Experts.compute` with the copies

Both parts use slices of the same buffers.

Letters: N rows of a chunk, M = d_model, C copies that this rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pmoe.experts.base import Allocate, ExpertRows, Experts, Hidden, Runs, fresh
from pmoe.experts.products import GradientSum, RowGroups


class _Part(NamedTuple):
    """One of two parts of a chunk's rows: the rows for the rank's own experts, or the rows for its copies.

    rows: the slice of the chunk's rows that belongs to the part.
    expert_rows: the rows of the part, with the parameters and the memory to compute them.
    """

    rows: slice
    expert_rows: ExpertRows


class ExpertsWithCopies:
    """A rank's own experts and its copies of other ranks' experts, behind the interface of `Experts`.

    It has the methods of `Experts` that a forward or backward pass calls. These methods compute the rows of
    both own experts and copies.

    experts: the rank's own experts.
    copies: the copies' parameters, in the order of `Experts.operands`; each is (C, ...) for the C copies of
        this rank. Their values may be written after this object was built.
    copied_experts: the experts that compute the rows of copies. None means ``experts``, which then compute
        with the parameters in ``copies``.
    """

    def __init__(
        self, experts: Experts, copies: Sequence[Tensor], copied_experts: Experts | None = None
    ) -> None:
        self._experts = experts
        self.copies: Sequence[Tensor] = copies
        self._copied_experts = experts if copied_experts is None else copied_experts

    @property
    def _both(self) -> tuple[Experts, Experts]:
        """Two objects: one computes the rows of own experts, the other computes the rows of copies."""
        return self._experts, self._copied_experts

    def take_copies(self) -> None:
        """Prepares the copies' parameters for matrix products. Call it once, when they have their values.

        On a GPU they are made contiguous, because kernels read each parameter of all copies as one tensor.
        """
        if self.copies[0].is_cuda:
            self.copies = [copies.contiguous() for copies in self.copies]

    def _own_groups(self, groups: RowGroups) -> RowGroups:
        """Returns how many rows each of this rank's own experts has, without the copies.

        groups: the numbers of rows of each own expert. The numbers of rows of each copy may follow.
        """
        count = self._experts.num_local_experts
        if len(groups.counts) == count:
            return groups
        return RowGroups(
            counts=groups.counts[:count], ends=None if groups.ends is None else groups.ends[:count]
        )

    def _copied_groups(self, groups: RowGroups) -> RowGroups:
        """Returns how many rows each copy has, without the own experts.

        groups: the number of rows of each own expert, then of each copy. Every rank has as many entries for
            copies as the rank with the most copies needs. A rank with fewer copies has zeros at the end.
        """
        count = self._experts.num_local_experts
        own = sum(groups.counts[:count])
        numbers = slice(count, count + self.copies[0].shape[0])
        ends = None if groups.ends is None else groups.ends[numbers] - own
        return RowGroups(counts=groups.counts[numbers], ends=ends)

    def _parts(self, expert_rows: ExpertRows) -> tuple[_Part | None, _Part | None]:
        """Divides a chunk's rows: returns the rows for own experts, and the rows for copies.

        One of the two is None if it would have no rows.

        expert_rows: the chunk's rows, with the parameters of own experts, and memory for all rows.
        """
        groups = expert_rows.groups
        own = self._own_groups(groups)
        if own.num_rows == groups.num_rows:
            return _Part(slice(0, own.num_rows), expert_rows._replace(groups=own)), None
        space = fresh(expert_rows.rows_NM) if expert_rows.space is None else expert_rows.space
        blocks = self._experts.columns(expert_rows.rows_NM.device.type).scratch_rows
        shared = _SharedSpace(space, groups.num_rows, blocks)

        def part(rows: slice, of_part: RowGroups, parameters: Sequence[Tensor]) -> _Part:
            out = expert_rows.out
            grad_weight_N = expert_rows.grad_weight_N
            return _Part(
                rows,
                ExpertRows(
                    expert_rows.rows_NM[rows],
                    of_part,
                    parameters,
                    shared.of(rows),
                    None if out is None else out[rows],
                    None if grad_weight_N is None else grad_weight_N[rows],
                ),
            )

        copied = part(slice(own.num_rows, groups.num_rows), self._copied_groups(groups), self.copies)
        if not own.num_rows:
            return None, copied
        return part(slice(0, own.num_rows), own, expert_rows.parameters), copied

    def compute(
        self, expert_rows: ExpertRows, weight_N: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Hidden | None]:
        """Computes the outputs of a chunk's rows by own experts and copies, times the routing weights.

        Returns the outputs, (N, M) for N rows with M = d_model columns, and the saved hidden activations if
        ``keep``.

        expert_rows: the chunk's rows, with the parameters of own experts, and memory for all rows.
        weight_N: (N,), the routing weight of each row.
        keep: whether backward will need the hidden activations.
        """
        parts = self._parts(expert_rows)
        saved: list[Hidden | None] = [None, None]
        for place, part in enumerate(parts):
            if part is not None:
                rows_weight = weight_N if parts[1] is None else weight_N[part.rows]
                _, saved[place] = self._both[place].compute(part.expert_rows, rows_weight, keep=keep)
        assert expert_rows.out is not None
        return expert_rows.out, _joined(saved, [_rows_of(part) for part in parts]) if keep else None

    def recompute(self, expert_rows: ExpertRows, recipe: Any) -> Hidden:
        """Computes a chunk's hidden activations again, by own experts and copies, for backward.

        expert_rows: the chunk's rows, with the parameters of own experts, and memory for all rows.
        recipe: the state that `Experts.recipe` returned before forward computed the rows.
        """
        parts = self._parts(expert_rows)
        made = [
            None if part is None else experts.recompute(part.expert_rows, recipe)
            for part, experts in zip(parts, self._both, strict=True)
        ]
        return _joined(made, [_rows_of(part) for part in parts])

    def join(self, parts: Sequence[tuple[Hidden, Runs]], num_rows: int, *, space: Allocate) -> Hidden:
        """Assembles the hidden activation (T_M) of a backward chunk from the T_M of forward chunks.

        In the chunks of both passes, the rows of own experts come first, then the rows of copies.

        parts: for each forward chunk with rows of this backward chunk: its hidden activation, and the pairs
            (slice of the forward chunk's rows, slice of the backward chunk's rows) to copy.
        num_rows: number of rows of the backward chunk.
        space: gives memory for the result.
        """
        separated: list[tuple[Hidden | None, Hidden | None, Runs]] = []
        own_runs: list[Runs] = []
        copied_runs: list[tuple[int, int]] = []  # for each part: its copies' rows, from where to where
        for hidden, runs in parts:
            own, copied = _separated(hidden)
            separated.append((own, copied, runs))
            of_own, of_copies = _rows_in(hidden)
            own_runs.append(_within(runs, 0, of_own))
            copied_runs.append((of_own, of_own + of_copies))
        num_own = sum(rows.stop - rows.start for of_part in own_runs for rows, _ in of_part)
        shared = _SharedSpace(space, num_rows, num_rows)
        joined: list[Hidden | None] = [None, None]
        if num_own or not num_rows:
            own_parts = [
                (own, of_part)
                for (own, _, _), of_part in zip(separated, own_runs, strict=True)
                if own is not None
            ]
            joined[0] = self._experts.join(own_parts, num_own, space=shared.of(slice(0, num_own)))
        if num_own < num_rows:
            copied_parts = [
                (copied, _within(runs, *rows, num_own))
                for (_, copied, runs), rows in zip(separated, copied_runs, strict=True)
                if copied is not None
            ]
            joined[1] = self._copied_experts.join(
                copied_parts, num_rows - num_own, space=shared.of(slice(num_own, num_rows))
            )
        return _joined(joined, [num_own, num_rows - num_own])

    def input_gradient(
        self, grad_NM: Tensor, expert_rows: ExpertRows, weight_N: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Tensor, tuple[Any, Any]]:
        """Computes the gradients of a chunk's rows and of their routing weights.

        There are N rows with M = d_model columns. Returns the gradient of the rows (N, M), the gradient of
        the routing weights (N,), and a pair of operands for the parameter gradients: the first for
        `weight_gradient`, the second for `copy_gradient`.

        grad_NM: (N, M), the gradient of the outputs.
        expert_rows: the chunk's rows, with the parameters of own experts, and memory for all rows.
        weight_N: (N,), the routing weight of each row.
        hidden: the hidden activations of all rows.
        """
        pending: list[Any] = [None, None]
        grad_weight_N = expert_rows.grad_weight_N
        assert grad_weight_N is not None and expert_rows.out is not None
        both = zip(self._parts(expert_rows), _separated(hidden), strict=True)
        for place, (part, of_part) in enumerate(both):
            if part is None:
                continue
            assert of_part is not None
            _, computed_N, pending[place] = self._both[place].input_gradient(
                grad_NM[part.rows], part.expert_rows, weight_N[part.rows], of_part
            )
            target_N = grad_weight_N[part.rows]
            if computed_N.data_ptr() != target_N.data_ptr():
                target_N.copy_(computed_N)
        return expert_rows.out, grad_weight_N, (pending[0], pending[1])

    def weight_gradient(
        self, pending: tuple[Any, Any], groups: RowGroups, sums: Sequence[GradientSum | None]
    ) -> None:
        """Computes a chunk's gradients of the own experts' parameters, and adds them to the sums over chunks.

        pending: the operands that `input_gradient` returned.
        groups: where each expert's rows begin and end.
        sums: one for each parameter; None for parameters without a gradient.
        """
        if pending[0] is not None:
            self._experts.weight_gradient(pending[0], self._own_groups(groups), sums)

    def copy_gradient(
        self, pending: tuple[Any, Any], groups: RowGroups, sums: Sequence[GradientSum | None]
    ) -> None:
        """Computes a chunk's gradients of the copies' parameters, and adds them to the sums over chunks.

        pending: the operands that `input_gradient` returned.
        groups: where each expert's and each copy's rows begin and end.
        sums: one for each tensor of `copies`, of the same shape; if experts are modules, one for each
            parameter of each copy.
        """
        if pending[1] is not None:
            self._copied_experts.weight_gradient(pending[1], self._copied_groups(groups), sums)


class _SharedSpace:
    """The memory for all rows of a chunk. Own experts and copies use different slices of it.

    space: function that allocates memory by name, rows and columns.
    num_rows: the number of all rows of the chunk.
    block_rows: experts compute in blocks of this many rows. The memory named "scratch" holds temporary values
        of one block. Own experts and copies use the same scratch memory, one after the other.
    """

    def __init__(self, space: Allocate, num_rows: int, block_rows: int) -> None:
        self._space = space
        self._num_rows = num_rows
        self._block_rows = min(block_rows, num_rows)
        self._whole: dict[str, Tensor] = {}

    def of(self, part_rows: slice) -> Allocate:
        """Returns a function (name, rows, columns) that returns memory for one part of the chunk's rows.

        part_rows: the slice of the chunk's rows that belongs to the part.
        """

        def take(name: str, rows: int, columns: int) -> Tensor:
            if name == "products":  # temporary values, which have no slot of their own
                return self._space(name, rows, columns)
            is_block = name == "scratch"
            if name not in self._whole:
                count = self._block_rows if is_block else self._num_rows
                self._whole[name] = self._space(name, count, columns)
            whole = self._whole[name]
            return whole[:rows] if is_block else whole[part_rows]

        return take


def _rows_of(part: _Part | None) -> int:
    """Returns the number of rows in a part of a chunk; 0 if the part is None."""
    return 0 if part is None else part.rows.stop - part.rows.start


def _rows_in(hidden: Hidden) -> tuple[int, int]:
    """Returns the numbers of rows of own experts and of copies, for a record that `_joined` made."""
    own, copied = (0 if part is None else part[0] for part in hidden.graph)
    return own, copied


def _within(runs: Runs, start: int, stop: int, target_start: int = 0) -> list[tuple[slice, slice]]:
    """Returns the part of ``runs`` whose forward rows lie in a range. Rows are counted from 0 again.

    ``runs`` says which rows of a forward chunk are which rows of a backward chunk. The rows of each chunk
    consist of two parts, the rows of own experts and the rows of copies. The range is one of these parts.

    runs: pairs (slice of a forward chunk's rows, slice of a backward chunk's rows) of the same rows.
    start, stop: the range of forward rows to keep. In the result, forward rows are counted from ``start``.
    target_start: where the part begins in the backward chunk. In the result, backward rows are counted from
        it.

    Example: forward rows 4 to 9 are backward rows 0 to 5. With start 6, stop 20 and target_start 2, the
    result has forward rows 0 to 3, which are backward rows 0 to 3.
    """
    within = []
    for forward, backward in runs:
        first = max(forward.start, start)
        end = min(forward.stop, stop)
        if first < end:
            shift = backward.start - forward.start - target_start
            within.append((slice(first - start, end - start), slice(first + shift, end + shift)))
    return within


def _joined(parts: Sequence[Hidden | None], num_rows: Sequence[int]) -> Hidden:
    """Joins two records of saved tensors to one: the record of own experts, and the record of copies.

    The ``graph`` of the result is a list with an entry for each of the two records: (number of rows, number
    of the record's tensors, the record's ``graph``). The entry is None if the record is None. `_separated`
    undoes the joining.

    parts: the record of own experts, then the record of copies. A record is None if there are no rows for it.
    num_rows: the number of rows of each.
    """
    saved = [part for part in parts if part is not None]
    return Hidden(
        tensors=[tensor for part in saved for tensor in part.tensors],
        graph=[
            None if part is None else (rows, len(part.tensors), part.graph)
            for part, rows in zip(parts, num_rows, strict=True)
        ],
        expendable=all(part.expendable for part in saved),
    )


def _separated(hidden: Hidden) -> list[Hidden | None]:
    """Splits a record that `_joined` made. Returns the records of own experts and of copies.

    A record is None if own experts, or copies, had no rows.

    hidden: the record that `_joined` made.
    """
    parts: list[Hidden | None] = []
    first = 0
    for part in hidden.graph:
        if part is None:
            parts.append(None)
            continue
        _, num_tensors, graph = part
        tensors = hidden.tensors[first : first + num_tensors]
        parts.append(Hidden(tensors=tensors, graph=graph, expendable=hidden.expendable))
        first += num_tensors
    return parts
