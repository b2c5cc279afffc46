"""FlashDMoE's persistent kernels: a pass of the layer, from dispatch to combine, in one launch.

Blocks are actors: one schedules and subscribes to what arrives, all others are processors that send, multiply
and sum tile by tile. The kernels are in cuda/flashdmoe (thesis, chapters 4 and 5; backward is pmoe's own).

A rank's rows for an expert lie in a cell of C rows on that expert's rank (layout L, section 5.3). A cell that
is not full is padded in place: what is missing neither travels nor is computed (section 5.4). Tensors by cell
hold C rows for each cell, too; those beyond a cell's rows are undefined.

Letters: T tokens of this rank, K choices, W ranks, E experts of a rank, A = W E cells, C rows of a cell,
M = d_model, H = d_hidden, G = H or 2H rows of w1.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.comet.launcher import HeapLauncher, HeapView
from pmoe.kernels.comet.launches import check_expert_weight
from pmoe.kernels.comet.steps import float_weights
from pmoe.kernels.gemm import ACTIVATIONS
from pmoe.kernels.operands import address, check_memory, check_tensor

TILE_ROWS, ALIGNMENT = 128, 1024
"""Rows of a tile, and bytes on which a workspace begins."""


@dataclass(frozen=True, kw_only=True)
class CellRows:
    """Where the rows of a rank's tokens stand in their cells. All tensors are int32.

    expert_TK: (T, K), of all ranks' experts.
    row_TK: (T, K), which of this rank's rows for that expert each slot's row is; -1 where it is dropped.
    counts_A: (A,), this rank's rows for each expert of all ranks; the caller sees to it that none is over C.
    """

    expert_TK: Tensor
    row_TK: Tensor
    counts_A: Tensor

    @staticmethod
    def of(expert_TK: Tensor, position_TK: Tensor, counts_A: Tensor) -> CellRows:
        """position_TK: (T, K), where each slot's row stands among all rows that this rank sends, sorted by
        expert; -1 where it is dropped."""
        before_A = counts_A.cumsum(0) - counts_A
        row_TK = torch.where(position_TK < 0, -1, position_TK - before_A[expert_TK.long()])
        expert_TK, row_TK, counts_A = (each.int().contiguous() for each in (expert_TK, row_TK, counts_A))
        return CellRows(expert_TK=expert_TK, row_TK=row_TK, counts_A=counts_A)

    def slots(self, capacity: int) -> Tensor:
        """(A C + 1,) int32: the slot, among the T K, of each row of a cell; the last is a dropped one's."""
        num_rows = self.counts_A.numel() * capacity
        place_TK = torch.where(self.row_TK < 0, num_rows, self.expert_TK.long() * capacity + self.row_TK)
        slot_S = torch.arange(place_TK.numel(), dtype=torch.int32, device=place_TK.device)
        return slot_S.new_zeros(num_rows + 1).scatter_(0, place_TK.view(-1), slot_S)


class RankPass:
    """A rank's part of a launch, by the names of cuda/flashdmoe/bind.cpp: numbers, and tensors, which are
    held until it is launched. ``tensors["result"]`` is (T, M): T_O, or the gradient of T_I."""

    def __init__(
        self,
        heap: HeapView,
        rows: CellRows,
        source_TM: Tensor,
        weight_TK: Tensor,
        parameters: Sequence[Tensor | None],
        activation: str,
    ) -> None:
        """source_TM: T_I, or the gradient of T_O. parameters: w1, w2, b1 and b2 of this rank's experts.

        Raises ValueError, naming the tensor, for what the kernels would not read right."""
        w1, w2, b1, b2 = parameters
        assert w1 is not None and w2 is not None
        self.heap, self.activation, self.is_backward, self.wide = heap, activation, False, w1.shape[1]
        check_expert_weight("w1", w1, b1, heap, columns=2)
        _, _, width = check_expert_weight("w2", w2, b2, heap, columns=1)
        check_tensor("counts_A", rows.counts_A, shape=(heap.shape.num_ranks * heap.shape.experts,))
        check_tensor("weight", weight_TK, shape=rows.expert_TK.shape, device=heap.device)
        num_tokens, top_k = rows.expert_TK.shape
        strides = ("source_stride", "result_stride", "again_stride")
        self.numbers = {"tokens": num_tokens, "top_k": top_k, "d_hidden": width, "recomputes": 0}
        self.numbers |= dict.fromkeys(strides, heap.shape.row_bytes)
        self.tensors: dict[str, Any] = {
            "counts": rows.counts_A,
            "slot": rows.slots(heap.shape.rows),
            "expert": rows.expert_TK,
            "row": rows.row_TK,
            "weight": float_weights(weight_TK),
            "source": self._checked(source_TM, num_tokens),
            "result": torch.empty_like(source_TM),
            **{"w1": w1, "w2": w2, "b1": b1, "b2": b2},
            "active": self._by_cell(source_TM, width),
        }

    def forward(self, *, keeps_input: bool, keeps_hidden: bool) -> None:
        """Makes room for ``tensors["input"]``, T_DI (A, C, M), and ``tensors["hidden"]``, T_M (A, C, G); each
        is None unless it is kept."""
        like = self.tensors["source"]
        self.tensors["input"] = self._by_cell(like, like.shape[1]) if keeps_input else None
        self.tensors["hidden"] = self._by_cell(like, self.wide) if keeps_hidden else None

    def backward(self, *, x_TM: Tensor | None, kept: Sequence[Tensor | None], needs: Sequence[bool]) -> None:
        """kept: T_DI and T_M. Without T_DI x_TM is sent again; without T_M it is computed again.
        needs: which of w1, w2, b1 and b2 want a gradient.

        Makes room for ``tensors["weight_gradient"]``, (T, K) float32 and 0 for dropped slots, and "of_w1",
        "of_w2", "of_b1" and "of_b2", which repeat to the bit; each is None where it is not wanted."""
        grad_TM, capacity = self.tensors["source"], self.heap.shape.rows
        input_ACM, hidden_ACG = (None if each is None else _refitted(each, capacity) for each in kept)
        parts = extension.module().row_dot_parts(False, self.numbers["d_hidden"])
        self.is_backward, self.numbers["recomputes"] = True, int(hidden_ACG is None)
        for name, need in zip(("w1", "w2", "b1", "b2"), needs, strict=True):
            of = self.tensors[name]
            self.tensors[f"of_{name}"] = torch.empty_like(of) if need and of is not None else None
        self.tensors |= {
            "again": None if x_TM is None else self._checked(x_TM, grad_TM.shape[0]),
            "input": input_ACM,
            "hidden": self._by_cell(grad_TM, self.wide) if hidden_ACG is None else hidden_ACG,
            "gradient": self._by_cell(grad_TM, self.wide),
            "dots": self._by_cell(self.tensors["weight"], parts),  # as the kernel has them: (parts, A C)
            "weight_gradient": torch.empty_like(self.tensors["weight"]),
        }

    def _checked(self, rows_TM: Tensor, num_tokens: int) -> Tensor:
        wanted = (num_tokens, self.heap.shape.d_model)
        check_tensor("rows", rows_TM, shape=wanted, dtypes=[self.heap.shape.dtype], device=self.heap.device)
        check_memory(dense={"rows": rows_TM})
        return rows_TM

    def _by_cell(self, like: Tensor, columns: int) -> Tensor:
        """(A, C, columns), not initialised."""
        shape = self.heap.shape
        return like.new_empty(shape.num_ranks * shape.experts, shape.rows, columns)

    def fields(self, blocks: int) -> dict[str, int]:
        shape, width = self.heap.shape, self.numbers["d_hidden"]
        return {
            "capacity": shape.rows,
            "sends_again": shape.sends_again,
            "most_tokens": shape.home_rows,
            "workspace": workspace(self.heap, width, self.activation == "swiglu", blocks).data_ptr(),
            **self.numbers,
            **{name: address(each) for name, each in self.tensors.items()},
        }


def _refitted(kept_ACX: Tensor, capacity: int) -> Tensor:
    """The same rows where a heap with other cells has taken the place of forward's."""
    num_cells, kept, columns = kept_ACX.shape
    if kept == capacity:
        return kept_ACX
    fitting, both = kept_ACX.new_empty(num_cells, capacity, columns), min(kept, capacity)
    fitting[:, :both] = kept_ACX[:, :both]
    return fitting


_workspaces: weakref.WeakKeyDictionary[HeapView, dict[tuple[int, bool, int], Tensor]]
_workspaces = weakref.WeakKeyDictionary()


def workspace(heap: HeapView, d_hidden: int, halves: bool, blocks: int) -> Tensor:
    """uint8, on ALIGNMENT bytes: the queue and the counters of the actors of a heap's rank. All of it is zero
    between rounds but for the number of the last, which must be one of this heap's."""
    kept, key = _workspaces.setdefault(heap, {}), (d_hidden, halves, blocks)
    if key not in kept:
        num_bytes = heap.shape.sizes(d_hidden=d_hidden, halves=halves, blocks=blocks)["workspace"]
        whole = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8, device=heap.device)
        kept[key] = whole[-whole.data_ptr() % ALIGNMENT :]
    return kept[key]


class PersistentLauncher(HeapLauncher):
    """One launch a pass. Any two resident blocks of a rank make progress."""

    def launch(self, passes: Sequence[RankPass]) -> None:
        """passes: of each rank of this process, of one direction. Raises HeapError for a broken heap."""
        first, begun = passes[0], self.begin()
        extension.module().flashdmoe(
            **begun,
            is_backward=first.is_backward,
            activation=ACTIVATIONS[first.activation],
            ranks=[self.rank_fields(own.heap) | own.fields(self.blocks) for own in passes],
        )
