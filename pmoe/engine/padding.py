"""Equal splits padded to capacity: each rank has as many rows for every expert, whatever its gate decides.

Where rows go then follows from the number of tokens alone: no counts are exchanged, the host waits for
nothing, and a CUDA graph that holds a call can be replayed with other routing. A schedule runs the padded
rows as if each were a token of one choice; `Padding` brings tokens there, and their sums back. What a
padding row holds is zero, its routing weight and its gradient too: it adds nothing, but it is sent and
computed.

Letters: T tokens of this rank, K choices, E experts of all W ranks, N padded rows, F bins, M = d_model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pmoe.comm.base import Traffic
from pmoe.comm.counts import CountsExchange, Fault, RankCounts
from pmoe.comm.ranks import Grid
from pmoe.engine.backward_pass import Backward
from pmoe.engine.forward_pass import Forward
from pmoe.engine.passes import Forwarded, Inputs
from pmoe.engine.plan import Plan
from pmoe.ordering.sorted import count_rows, sort_rows


@dataclass(frozen=True, kw_only=True)
class Splits:
    """How many rows each rank has for every expert: ``capacity``, rounded up to a multiple of ``bins``.

    Rows stand by (bin, expert, place among the expert's rows), so that n chunks are equal for every n that
    divides ``bins``. Which rows are kept does not depend on it: places from ``capacity`` on stay empty.
    Example: capacity 5 in 2 bins is 3 rows a bin; of 2 experts, N = 12.
    """

    num_experts: int
    capacity: int
    bins: int

    @property
    def rows_a_bin(self) -> int:
        return -(-self.capacity // self.bins)

    @property
    def num_rows(self) -> int:
        return self.num_experts * self.bins * self.rows_a_bin

    def expert_of_rows(self, device: torch.device) -> Tensor:
        """(N, 1) int64, as a gate would give it for tokens of one choice."""
        expert_N = torch.arange(self.num_rows, device=device) // max(self.rows_a_bin, 1) % self.num_experts
        return expert_N.unsqueeze(1)

    def counts(
        self, num_ranks: int, device: torch.device, *, max_tokens: int, needs_grad: bool
    ) -> RankCounts:
        """What an exchange of counts would find."""
        shape = (self.bins, num_ranks, self.num_experts // num_ranks)
        counts = torch.full(shape, self.rows_a_bin, dtype=torch.int64, device="cpu")
        return RankCounts(
            send=counts,
            recv=counts,
            recv_device=torch.full(shape, self.rows_a_bin, dtype=torch.int64, device=device),
            max_tokens=max_tokens,
            needs_grad=needs_grad,
        )


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Between tokens and padded rows; each direction is the other's transpose, and adds in a fixed order.

    slot_N: the slot, among the T*K, whose row it is; T*K in padding. position_TK: the row of each slot, N
    where it is dropped.
    """

    slot_N: Tensor
    position_TK: Tensor

    def spread(self, tokens_TM: Tensor) -> Tensor:
        """(N, M): in each row its token."""
        return _taken(tokens_TM, self.slot_N // self.position_TK.shape[1])

    def gather(self, rows_NM: Tensor) -> Tensor:
        """(T, M): of each token the sum of its rows, in the order of its choices."""
        top_k = self.position_TK.shape[1]
        rows_SM = _taken(rows_NM, self.position_TK.view(-1))  # no view: users may change T_O in place
        return rows_SM if top_k == 1 else rows_SM.unflatten(0, (-1, top_k)).sum(1)

    def spread_weights(self, weight_TK: Tensor) -> Tensor:
        """(N, 1)"""
        return _taken(weight_TK.reshape(-1), self.slot_N).unsqueeze(1)

    def gather_weights(self, weight_N1: Tensor) -> Tensor:
        """(T, K)"""
        return _taken(weight_N1.reshape(-1), self.position_TK.view(-1)).view_as(self.position_TK)


def make_padding(expert_TK: Tensor, splits: Splits) -> tuple[Padding, Tensor]:
    """The first ``capacity`` rows of each expert, in token order, get a place, and kept_E counts them; as
    `pmoe.gates.capacity` keeps them. No host synchronisation."""
    num_slots, num_rows, rows = expert_TK.numel(), splits.num_rows, max(splits.rows_a_bin, 1)
    expert = expert_TK.reshape(-1)
    counts_E = count_rows(expert_TK, None, 1, splits.num_experts)[0]
    by_expert = sort_rows(expert_TK, None, 1, splits.num_experts, range(0, 0), 0)
    place = by_expert.position - (counts_E.cumsum(0) - counts_E)[expert]
    row = (place // rows * splits.num_experts + expert) * rows + place % rows
    row = torch.where(place < splits.capacity, row, num_rows)
    # One more than there are, for all that are dropped.
    slot = torch.full((num_rows + 1,), num_slots, dtype=torch.int64, device=expert.device)
    slot.scatter_(0, row, torch.arange(num_slots, device=expert.device))
    padding = Padding(slot_N=slot[:num_rows], position_TK=row.view_as(expert_TK))
    return padding, counts_E.clamp(max=splits.capacity)


def _taken(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], (S, ...), zero where index (S,) is the number of rows."""
    count, columns = rows.shape[0], rows.shape[1:]
    if not count:
        return rows.new_zeros(*index.shape, *columns)
    found = rows.index_select(0, index.clamp(max=count - 1))
    return found.masked_fill_((index == count).view(-1, *(1 for _ in columns)), 0)


# ---- what ranks must have alike, for no counts are exchanged


@dataclass(frozen=True, kw_only=True)
class PaddedKind:
    """What padded calls of one kind share. needs_grad: whether backward may follow. dtype: of the rows."""

    num_tokens: int
    needs_grad: bool
    dtype: torch.dtype

    def exchange(
        self,
        grid: Grid,
        num_experts: int,
        device: torch.device,
        fault: Tensor | Fault,
        traffic: Traffic,
        *,
        training: bool,
    ) -> CountsExchange:
        """Tells the other ranks, for `check_same_calls`. Collective, with one host synchronisation.

        training: whether the layer is in training mode, in which ranks may differ.
        """
        facts_FE = torch.empty(2, num_experts, dtype=torch.int64, device=device)
        facts_FE[0], facts_FE[1] = self.num_tokens, self.needs_grad
        return CountsExchange(grid, facts_FE, fault=fault, traffic=traffic, training=training, **vars(self))


def check_same_calls(told: RankCounts) -> None:
    """Raises ValueError, on every rank, where ranks do not make the same call."""
    tokens, needs_grad = told.recv[:, :, 0].tolist()
    if len(set(tokens)) > 1:
        by_rank = "; ".join(f"rank {rank}: {count}" for rank, count in enumerate(tokens))
        raise ValueError(
            f"x must have the same number of tokens on every rank with pad_to_capacity (True): {by_rank}"
        )
    if len(set(needs_grad)) > 1:
        raise ValueError(
            "gradients must be asked for on every rank or on none with pad_to_capacity (True): they are not "
            f"on rank {', '.join(str(rank) for rank, needs in enumerate(needs_grad) if not needs)}"
        )


# ---- the passes of a plan whose cuts are of padded rows


def _padded(plan: Plan, inputs: Inputs) -> Inputs:
    """The same with padded rows in place of tokens."""
    padding, x_TM = plan.padding, inputs.x_TM
    assert padding is not None
    if x_TM is not None:  # as in a backward pass that has no use for it
        x_TM = padding.spread(x_TM)
    return replace(inputs, x_TM=x_TM, weight_TK=padding.spread_weights(inputs.weight_TK))


class PaddedForward(Forward):
    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        super().__init__(plan, _padded(plan, inputs), keep)
        self.left.inputs = inputs  # padded rows are made again

    def run(self) -> Tensor:
        result_NM = super().run()
        assert self.plan.padding is not None
        return self.plan.padding.gather(result_NM)


class PaddedBackward(Backward):
    def __init__(self, plan: Plan, grad_TM: Tensor, saved: Forwarded) -> None:
        assert plan.padding is not None
        saved = replace(saved, inputs=_padded(plan, saved.inputs))
        super().__init__(plan, plan.padding.spread(grad_TM), saved)

    def run(self) -> list[Tensor | None]:
        grad_NM, grad_weight_N1, *others = super().run()
        padding = self.plan.padding
        assert padding is not None and grad_NM is not None and grad_weight_N1 is not None
        return [padding.gather(grad_NM), padding.gather_weights(grad_weight_N1), *others]
