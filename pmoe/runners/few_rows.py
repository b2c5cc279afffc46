"""The runner for calls with few rows and without gradients, such as a decoding step of inference.

In such a call, the work of the host takes longer than the matrix products. So this runner has no plan, no
chunks, no preallocated buffers and no schedule. It sorts the rows by expert, sends all of them in one
all-to-all (S), computes each expert once, and sends the results back in another all-to-all (R). With several
ranks, each rank does

    sort by expert   S   sort by expert again   experts   undo the second sort   R   times weight, sum

The second sort is needed because rows arrive by source rank. A token's routing weights are applied on its own
rank, so they need not be sent. Together with the exchange of row counts, a call has three collectives.

Letters: T tokens, K choices of each, N rows, P ranks, E_local experts of this rank, M = d_model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pmoe.comm.counts import RankCounts
from pmoe.comm.failures import at_stage, publishing_failures, wait_for
from pmoe.engine.autograd import Path, Saved
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.plan import PassModules
from pmoe.experts.base import ExpertRows
from pmoe.experts.products import RowGroups


@dataclass(frozen=True)
class FewRowsRunner:
    """A runner that computes a forward pass without chunks, plan or buffers. No backward pass may follow.

    modules: the layer's modules.
    expert_TK: (T, K) int64, the K experts of each of T tokens.
    keep_TK: (T, K) bool, False for choices that were dropped; None if all are kept.
    counts: the row counts of the call, on the host, for the whole batch at once (in one bin).
    """

    name: ClassVar[Path] = "few rows"

    modules: PassModules
    expert_TK: Tensor
    keep_TK: Tensor | None
    counts: RankCounts

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        assert not keep
        modules = self.modules
        send_rows = self.counts.send.sum((0, 2)).tolist()
        expert_N = self.expert_TK.reshape(-1)
        if self.keep_TK is not None:  # dropped rows are sorted to the end, and are not sent
            expert_N = expert_N.where(self.keep_TK.reshape(-1), modules.num_experts)
        slot_N = expert_N.argsort(stable=True)
        sent_N = slot_N[: sum(send_rows)]
        x_TM = inputs.x_TM
        rows_NM = x_TM.index_select(0, sent_N // self.expert_TK.shape[1])
        weight_N = inputs.weight_TK.reshape(-1).index_select(0, sent_N)
        with publishing_failures(modules.grid.all, "a forward pass"):
            if modules.grid.all.size == 1:
                home_NM = self.computed(rows_NM, weight_N, inputs)
            else:
                home_NM = self.travelled(rows_NM, send_rows, inputs).mul_(weight_N.unsqueeze(1))
        position_N = torch.empty_like(slot_N)
        position_N[slot_N] = torch.arange(slot_N.numel(), device=slot_N.device)
        if self.keep_TK is not None:  # a dropped choice reads a row of zeros
            home_NM = torch.cat([home_NM, home_NM.new_zeros(1, home_NM.shape[1])])
            position_N.clamp_(max=home_NM.shape[0] - 1)
        y_TM = torch.empty_like(x_TM)
        modules.order.restore(home_NM, position_N.view_as(self.expert_TK), y_TM)
        return y_TM, None

    def computed(self, rows_NM: Tensor, weight_N: Tensor, inputs: Inputs) -> Tensor:
        """Computes the experts. Returns their outputs, (N, M), each multiplied by its routing weight.

        rows_NM: (N, M), the N rows with M = d_model columns, sorted by expert.
        weight_N: (N,), the routing weights.
        inputs: the call's tensors, with the parameters of the experts.
        """
        groups = RowGroups(counts=tuple(self.counts.recv.sum((0, 1)).tolist()))
        out_NM, _ = self.modules.experts.compute(
            ExpertRows(rows_NM, groups, inputs.parameters), weight_N, keep=False
        )
        return out_NM

    def travelled(self, rows_NM: Tensor, send_rows: list[int], inputs: Inputs) -> Tensor:
        """Sends rows to their experts' ranks and back. Returns the results, (N, M), in the order of the rows.

        rows_NM: (N, M), the N rows of this rank's tokens with M = d_model columns, sorted by expert.
        send_rows: the number of rows for each rank.
        inputs: the call's tensors, with the parameters of the experts.
        """
        ranks = self.modules.grid.all
        recv_PE = self.counts.recv.sum(0)
        recv_rows = recv_PE.sum(1).tolist()
        arrived_NM = rows_NM.new_empty(sum(recv_rows), rows_NM.shape[1])
        with at_stage("dispatch of few rows, forward", ranks):
            work = self.modules.dispatch.exchange(rows_NM, send_rows, arrived_NM, recv_rows)
            assert work is not None
            wait_for(work, ranks.group)
        # Rows arrive sorted by source rank, then expert. The experts take them sorted by expert.
        expert_N = torch.arange(recv_PE.shape[1]).repeat(len(recv_rows)).repeat_interleave(recv_PE.flatten())
        order_N = expert_N.argsort(stable=True)
        ones_N = inputs.weight_TK.new_ones(arrived_NM.shape[0])
        result_NM = self.computed(arrived_NM.index_select(0, order_N), ones_N, inputs)
        leaving_NM = arrived_NM.index_copy_(0, order_N, result_NM)
        home_NM = torch.empty_like(rows_NM)
        with at_stage("combine of few rows, forward", ranks):
            work = self.modules.combine.exchange(leaving_NM, recv_rows, home_NM, send_rows)
            assert work is not None
            wait_for(work, ranks.group)
        return home_NM
