"""Padding to capacity: every rank sends every expert the same number of rows, padded with zeros.

The row counts then follow from the number of tokens alone. No counts are exchanged, the host waits for
nothing, and a CUDA graph that holds a call can be replayed with other routing.

A schedule runs the padded rows as if each were a token with one choice. `Padding` copies tokens to padded
rows, and sums their results. A row without a token is zero, and so are its routing weight and its gradient:
it adds nothing, but it is sent and computed.

Example: 2 experts a and b, capacity 5, in 2 bins of 3 rows each:

    row      0  1  2 | 3  4  5 || 6  7  8 | 9 10 11
    bin             0          ||         1
    expert       a   |    b    ||    a    |    b
    place    0  1  2 | 0  1  2 || 3  4  - | 3  4  -      (-: always empty, because the capacity is 5)

Letters: T tokens of this rank, K choices, E experts of all W ranks, N padded rows, F bins, M = d_model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pmoe.comm.base import Traffic
from pmoe.comm.counts import CountsExchange, Fault, RankCounts
from pmoe.comm.ranks import Grid
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import Forwarded, Inputs
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.plan import Plan
from pmoe.ordering.sorted import count_rows, sort_rows


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The number of padded rows: for every expert ``capacity``, rounded up to a multiple of ``bins``.

    num_experts: E.
    capacity: rows of an expert that are kept on each rank.
    bins: F. Rows are sorted by (bin, expert, place among the expert's rows), so n chunks have equal numbers
        of rows for every n that divides F.

    Rounding up keeps no more rows: places from ``capacity`` on stay empty. Example: capacity 5 in 2 bins is 3
    rows a bin; with 2 experts N = 12.
    """

    num_experts: int
    capacity: int
    bins: int

    @property
    def rows_a_bin(self) -> int:
        """Rows of one expert in one bin: ceil(capacity / bins)."""
        return -(-self.capacity // self.bins)

    @property
    def num_rows(self) -> int:
        """N, all padded rows of a rank."""
        return self.num_experts * self.bins * self.rows_a_bin

    def expert_of_rows(self, device: torch.device) -> Tensor:
        """Returns (N, 1) int64, the expert of each padded row, as a gate returns it for K = 1."""
        expert_N = torch.arange(self.num_rows, device=device) // max(self.rows_a_bin, 1) % self.num_experts
        return expert_N.unsqueeze(1)

    def counts(
        self, num_ranks: int, device: torch.device, *, max_tokens: int, needs_grad: bool
    ) -> RankCounts:
        """Returns the row counts that an exchange would find: all equal.

        num_ranks: W.
        device: of the rows.
        max_tokens: the largest number of tokens of any rank.
        needs_grad: whether backward may follow, on any rank.
        """
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
    """The map between tokens and padded rows. Each direction is the transpose of the other.

    slot_N: (N,) int64, the slot of each padded row, in 0 ... T * K - 1; T * K for a row without one.
    position_TK: (T, K) int64, the padded row of each slot; N for a dropped slot.
    """

    slot_N: Tensor
    position_TK: Tensor

    def spread(self, tokens_TM: Tensor) -> Tensor:
        """Returns (N, M): each padded row is its token, or zero."""
        return _taken(tokens_TM, self.slot_N // self.position_TK.shape[1])

    def gather(self, rows_NM: Tensor) -> Tensor:
        """Returns (T, M): the sum of each token's rows, added in the order of its choices."""
        top_k = self.position_TK.shape[1]
        rows_SM = _taken(rows_NM, self.position_TK.view(-1))  # a copy: users may change T_O in place
        return rows_SM if top_k == 1 else rows_SM.unflatten(0, (-1, top_k)).sum(1)

    def spread_weights(self, weight_TK: Tensor) -> Tensor:
        """Returns (N, 1): the routing weight of each padded row, or zero."""
        return _taken(weight_TK.reshape(-1), self.slot_N).unsqueeze(1)

    def gather_weights(self, weight_N1: Tensor) -> Tensor:
        """Returns (T, K): for each slot the value of its padded row, zero if dropped."""
        return _taken(weight_N1.reshape(-1), self.position_TK.view(-1)).view_as(self.position_TK)


def make_padding(expert_TK: Tensor, splits: Splits) -> tuple[Padding, Tensor]:
    """Returns the padding of a batch, and kept_E, (E,) int64, the rows that each expert keeps.

    expert_TK: (T, K) int64, the expert of each slot.

    Keeps the first ``capacity`` rows of each expert in token order, as `pmoe.gates.capacity` does. The host
    waits for nothing.
    """
    num_slots = expert_TK.numel()
    num_rows = splits.num_rows
    rows_a_bin = max(splits.rows_a_bin, 1)
    expert = expert_TK.reshape(-1)
    counts_E = count_rows(expert_TK, None, 1, splits.num_experts)[0]
    by_expert = sort_rows(expert_TK, None, 1, splits.num_experts, range(0, 0), 0)
    place = by_expert.position - (counts_E.cumsum(0) - counts_E)[expert]
    row = (place // rows_a_bin * splits.num_experts + expert) * rows_a_bin + place % rows_a_bin
    row = torch.where(place < splits.capacity, row, num_rows)
    # One row more than there are: all dropped slots are written to it.
    slot = torch.full((num_rows + 1,), num_slots, dtype=torch.int64, device=expert.device)
    slot.scatter_(0, row, torch.arange(num_slots, device=expert.device))
    padding = Padding(slot_N=slot[:num_rows], position_TK=row.view_as(expert_TK))
    return padding, counts_E.clamp(max=splits.capacity)


def _taken(rows: Tensor, index: Tensor) -> Tensor:
    """Returns rows[index], (S, ...); zero for an index (S,) equal to the number of rows."""
    count = rows.shape[0]
    columns = rows.shape[1:]
    if not count:
        return rows.new_zeros(*index.shape, *columns)
    taken = rows.index_select(0, index.clamp(max=count - 1))
    return taken.masked_fill_((index == count).view(-1, *(1 for _ in columns)), 0)


# ---- No counts are exchanged, so these values must be equal on all ranks


@dataclass(frozen=True, kw_only=True)
class PaddedKind:
    """The values that all ranks must share in a padded call. Calls with equal values are one kind.

    num_tokens: T.
    needs_grad: whether backward may follow.
    dtype: of the rows that reach the experts.
    """

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
        """Sends these values to the other ranks, for `check_same_calls`. Collective; the host waits once.

        num_experts: E.
        device: of the rows.
        fault: the fault of this rank, a `Fault` or its number as an int64 scalar on the device.
        traffic: counts the bytes sent.
        training: whether the layer is in training mode. Ranks may differ in it.
        """
        facts_FE = torch.empty(2, num_experts, dtype=torch.int64, device=device)
        facts_FE[0] = self.num_tokens
        facts_FE[1] = self.needs_grad
        return CountsExchange(grid, facts_FE, fault=fault, traffic=traffic, training=training, **vars(self))


def check_same_calls(told: RankCounts) -> None:
    """Raises ValueError on every rank if ranks have other numbers of tokens, or other needs of gradients.

    told: the result of `PaddedKind.exchange`.
    """
    tokens, needs_grad = told.recv[:, :, 0].tolist()
    if len(set(tokens)) > 1:
        by_rank = "; ".join(f"rank {rank}: {count}" for rank, count in enumerate(tokens))
        raise ValueError(
            f"x must have the same number of tokens on every rank with pad_to_capacity (True): {by_rank}"
        )
    if len(set(needs_grad)) > 1:
        raise ValueError(
            "with pad_to_capacity (True) every rank must need gradients, or none: no gradient is needed on "
            f"rank {', '.join(str(rank) for rank, needs in enumerate(needs_grad) if not needs)}"
        )


# ---- The passes of a plan that cuts padded rows


def _padded(plan: Plan, inputs: Inputs) -> Inputs:
    """Returns the inputs with padded rows in place of tokens."""
    padding = plan.padding
    x_TM = inputs.x_TM
    assert padding is not None
    if x_TM is not None:  # backward has it only if it sends T_DI again
        x_TM = padding.spread(x_TM)
    return replace(inputs, x_TM=x_TM, weight_TK=padding.spread_weights(inputs.weight_TK))


class PaddedForward(Forward):
    """A forward pass of padded rows, with tokens as its input and output."""

    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        super().__init__(plan, _padded(plan, inputs), keep)
        self.left.inputs = inputs  # tokens are saved; backward pads them again

    def run(self) -> Tensor:
        result_NM = super().run()
        assert self.plan.padding is not None
        return self.plan.padding.gather(result_NM)


class PaddedBackward(Backward):
    """A backward pass of padded rows, with gradients of tokens as its input and output."""

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: Forwarded) -> None:
        assert plan.padding is not None
        saved = replace(saved, inputs=_padded(plan, saved.inputs))
        super().__init__(plan, plan.padding.spread(grad_TM), saved)

    def run(self) -> list[Tensor | None]:
        grad_NM, grad_weight_N1, *others = super().run()
        padding = self.plan.padding
        assert padding is not None and grad_NM is not None and grad_weight_N1 is not None
        return [padding.gather(grad_NM), padding.gather_weights(grad_weight_N1), *others]
