"""Forward by the fused kernels, backward by the pipeline engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pmoe.engine.autograd import Path, Saved
from pmoe.engine.passes import Forwarded, Inputs, Kept, Unit
from pmoe.engine.plan import Plan
from pmoe.experts.base import Hidden
from pmoe.experts.stacked import split_parameters
from pmoe.runners.fused import FusedRunner, dense
from pmoe.runners.pipeline import keep_for_backward


@dataclass(frozen=True)
class FusedForwardRunner:
    """Forward by the steps of ``fused``, backward by ``plan``, whose two passes have the same chunks.

    recv_FWE: rows that come to this rank by bin, source rank and expert, on their device.
    """

    fused: FusedRunner
    plan: Plan
    recv_FWE: Tensor
    name: ClassVar[Path] = "fused forward"

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        with self.fused.steps.all_or_give_up():
            y_TM, left = self._take_steps(inputs)
        return y_TM, keep_for_backward(self.plan, left) if keep else None

    def _take_steps(self, inputs: Inputs) -> tuple[Tensor, Forwarded]:
        plan, cut = self.plan, self.plan.forward
        steps, journey, activation = self.fused.steps, self.fused.journey, self.fused.activation
        w1, w2, b1, b2 = split_parameters(inputs.parameters)
        weight_TK, keeps_hidden = inputs.weight_TK, plan.restore.hidden == "keep"
        hidden_NG, active_NH = steps.dispatch_hidden(
            journey, dense(inputs.x_TM), weight_TK, w1, b1, activation=activation, keep=keeps_hidden
        )
        n, m, num_rows = len(cut.chunks), len(cut.pieces), journey.num_received
        index_N = unit_index(
            self.recv_FWE.unflatten(0, (n, -1)).sum(1), journey.rank, num_pieces=m, num_rows=num_rows
        )
        received = [chunk.received.num_rows for chunk in cut.chunks]
        units: dict[Unit, int] = {(i, ""): rows for i, rows in enumerate(received)}
        units |= {(j, "_L"): piece.groups.num_rows for j, piece in enumerate(cut.pieces)}
        rows_NM = steps.rows(journey) if plan.restore.dispatched == "keep" else None
        left = Forwarded(inputs=inputs)
        for unit, at in zip(units, index_N.split(list(units.values())), strict=True):
            kept = left.kept[unit] = Kept()
            kept.rows_NM = None if rows_NM is None else rows_NM.index_select(0, at)
            if hidden_NG is not None:
                kept.hidden = Hidden(tensors=[hidden_NG.index_select(0, at)])
        if cut.weights is not None:
            weight_N = steps.row_weight(journey).to(weight_TK.dtype)
            left.weight_received = weight_N.index_select(0, index_N[: sum(received)])
        return steps.product_combine(journey, active_NH, w2, b2), left


def unit_index(recv_nWE: Tensor, rank: int, *, num_pieces: int, num_rows: int) -> Tensor:
    """(N,) where the rows of a pass's units stand among those of a fused dispatch: first what each chunk
    received, by expert and source rank; then the rows that stay, by piece and expert, in token order. With no
    pieces the rows of this rank itself are received like all others.

    Example: one expert, rank 0 of two, two chunks and pieces, a row from each rank in each: the fused order
    is (rank 0, chunk 0), (0, 1), (1, 0), (1, 1), and the units' rows stand at 2, 3, 0, 1.
    """
    n, num_ranks, num_experts = recv_nWE.shape

    def along(numbers: Tensor, dim: int) -> Tensor:
        return numbers.view([-1 if at == dim else 1 for at in range(3)])

    ascending = torch.arange(max(n, num_ranks, num_experts), device=recv_nWE.device)
    expert, chunk = along(ascending[:num_experts], 0), along(ascending[:n], 2)
    source = along((ascending[:num_ranks] + rank) % num_ranks, 1)
    # Of the rows from one source for an expert in a chunk, a block in both orders: which block of the units.
    place_EWn = (chunk * num_experts + expert) * num_ranks + source
    if num_pieces:
        piece = (chunk - (n - num_pieces)).clamp(min=0)  # `pmoe.schedule.tasks.piece_of`
        stays = n * num_experts * num_ranks + (piece * num_experts + expert) * n + chunk
        place_EWn = torch.where(source == rank, stays, place_EWn)
    counts_EWn = recv_nWE.roll(-rank, 1).permute(2, 1, 0)
    place_N = place_EWn.reshape(-1).repeat_interleave(counts_EWn.reshape(-1), output_size=num_rows)
    return place_N.argsort(stable=True)
