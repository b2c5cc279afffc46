"""Padding to capacity: every rank sends every expert the same number of rows, filled up with zeros.

The row counts then follow from the number of tokens alone. So no counts are exchanged, the host does not wait
for the device, and a CUDA graph that contains a call can be replayed with other routing.

Both passes run on padded rows as if each row were a token with a single expert. `Padding` copies tokens to
padded rows, and sums the results of each token. A padded row without a token is zero, and so are its routing
weight and its gradient: it is sent and computed, but changes no result.

The rows are divided into bins, so that every chunk can consist of whole bins. Example: 2 experts a and b with
capacity 5, and 2 bins with 3 rows of each expert. The line "place" has the number of each row among the rows
of its expert:

    row      0  1  2 | 3  4  5 || 6  7  8 | 9 10 11
    bin             0          ||         1
    expert       a   |    b    ||    a    |    b
    place    0  1  2 | 0  1  2 || 3  4  - | 3  4  -      (-: always empty, because the capacity is 5)

Letters: T tokens of this rank, K experts per token, E experts of all ranks, N padded rows, M = d_model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pmoe.comm.base import Traffic
from pmoe.comm.counts import CountsExchange, Fault, RankCounts
from pmoe.comm.grid import Grid
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import ForwardState, Inputs
from pmoe.engine.passes.forward import Forward
from pmoe.engine.plan.plan import Plan
from pmoe.ordering.sorted import count_rows, sort_rows


@dataclass(frozen=True, kw_only=True)
class PaddedRowCounts:
    """The number and order of padded rows: ``capacity`` rows for each expert, rounded up to fill bins.

    num_experts: E, the number of experts of all ranks.
    capacity: the number of rows of each expert that a rank keeps.
    bins: the number of bins, equal parts of the rows. Rows are sorted by bin, then by expert. So n chunks
        have the same number of rows each, if n divides ``bins``.

    Capacity is rounded up to a multiple of ``bins``; the added rows stay empty. Example: capacity 5 in 2 bins
    gives 3 rows in each bin for each expert; with 2 experts that is N = 12 rows.
    """

    num_experts: int
    capacity: int
    bins: int

    @property
    def rows_a_bin(self) -> int:
        """The number of rows of one expert in one bin: its capacity / bins, rounded up."""
        return -(-self.capacity // self.bins)

    @property
    def num_rows(self) -> int:
        """N, the number of padded rows of a rank."""
        return self.num_experts * self.bins * self.rows_a_bin

    def expert_of_rows(self, device: torch.device) -> Tensor:
        """Returns the expert of each of the N padded rows, (N, 1) int64: routing with one expert per row."""
        expert_N = torch.arange(self.num_rows, device=device) // max(self.rows_a_bin, 1) % self.num_experts
        return expert_N.unsqueeze(1)

    def counts(
        self, num_ranks: int, device: torch.device, *, max_tokens: int, needs_grad: bool
    ) -> RankCounts:
        """Returns the row counts of a call, as a `RankCounts`, which is also the result of an exchange.

        With padding every rank sends every expert the same number of rows, so no exchange is needed.

        num_ranks: the number of ranks of the layer.
        device: the device of the rows.
        max_tokens: the largest number of tokens of any rank.
        needs_grad: whether any rank needs gradients of the call.
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
    """The map between tokens and padded rows. Its methods copy values from tokens to rows and back.

    A slot is a (token, choice) pair: T tokens have K choices each. `spread` copies values from tokens to
    rows, and `gather` sums the values of each token's rows. As matrices, `spread` and `gather` are transposes
    of each other, so each computes the gradient of the other.

    slot_N: (N,) int64, the slot of each of the N padded rows, a number in 0 ... T * K - 1; T * K for an empty
        row.
    position_TK: (T, K) int64, the padded row of each slot; N for a dropped slot.
    """

    slot_N: Tensor
    position_TK: Tensor

    def spread(self, tokens_TM: Tensor) -> Tensor:
        """Returns the token of each of the N padded rows, (N, M); zeros for rows without a token.

        tokens_TM: (T, M), the T tokens with M = d_model columns.
        """
        return _taken(tokens_TM, self.slot_N // self.position_TK.shape[1])

    def gather(self, rows_NM: Tensor) -> Tensor:
        """Returns (T, M), the sum of the padded rows of each of T tokens, added in the order of its choices.

        rows_NM: (N, M), the N padded rows with M = d_model columns.
        """
        top_k = self.position_TK.shape[1]
        rows_SM = _taken(rows_NM, self.position_TK.view(-1))  # a copy: users may change T_O in place
        return rows_SM if top_k == 1 else rows_SM.unflatten(0, (-1, top_k)).sum(1)

    def spread_weights(self, weight_TK: Tensor) -> Tensor:
        """Returns the routing weight of each of the N padded rows, (N, 1); zero for rows without a token.

        weight_TK: (T, K), the routing weights of T tokens with K choices each.
        """
        return _taken(weight_TK.reshape(-1), self.slot_N).unsqueeze(1)

    def gather_weights(self, weight_N1: Tensor) -> Tensor:
        """Returns (T, K), the value of the padded row of each (token, choice) pair; zero for dropped pairs.

        weight_N1: (N, 1), a value for each of the N padded rows: the gradient of the row's routing weight.
        """
        return _taken(weight_N1.reshape(-1), self.position_TK.view(-1)).view_as(self.position_TK)


def make_padding(expert_TK: Tensor, splits: PaddedRowCounts) -> tuple[Padding, Tensor]:
    """Returns the padding of a batch, and the number of rows that each of E experts keeps, (E,) int64.

    Each expert keeps the first ``capacity`` rows in token order, as `pmoe.gates.capacity` does. The host does
    not wait for the device.

    expert_TK: (T, K) int64, the expert of each (token, choice) pair, for T tokens with K choices each.
    splits: the capacity, and the number of padded rows.
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
    """Returns rows[index]; zeros where the index is equal to the number of rows.

    rows: (rows, ...), the rows from which some are taken.
    index: (S,), S numbers from 0 to the number of rows. The result is (S, ...).
    """
    count = rows.shape[0]
    columns = rows.shape[1:]
    if not count:
        return rows.new_zeros(*index.shape, *columns)
    taken = rows.index_select(0, index.clamp(max=count - 1))
    return taken.masked_fill_((index == count).view(-1, *(1 for _ in columns)), 0)


# ---- No counts are exchanged, so these values must be equal on all ranks


@dataclass(frozen=True, kw_only=True)
class PaddedCallKey:
    """The values of a padded call that must be equal on all ranks.

    A padded call is a call of a layer with ``pad_to_capacity``: every rank computes all row counts from its
    own number of tokens, without an exchange. If the values differed between ranks, collectives would not
    match. On a GPU the ranks compare the values only in the first call with these values.

    num_tokens: T, the number of tokens of a rank.
    needs_grad: whether backward may follow.
    dtype: the dtype of the rows that reach the experts.
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
        """Starts to send these values to the other ranks. `check_same_calls` checks the values that arrive.

        The method is a collective. The host waits only when the caller calls ``finish`` on the result.

        grid: the layer's ranks.
        num_experts: E, the number of experts of all ranks.
        device: the device of the rows.
        fault: an error of this rank, which is to be raised on all ranks: a `Fault`, or its number as an int64
            scalar on the device.
        traffic: counts the bytes sent.
        training: whether the layer is in training mode. The value may differ between ranks.
        """
        facts_FE = torch.empty(2, num_experts, dtype=torch.int64, device=device)
        facts_FE[0] = self.num_tokens
        facts_FE[1] = self.needs_grad
        return CountsExchange(grid, facts_FE, fault=fault, traffic=traffic, training=training, **vars(self))


def check_same_calls(counts: RankCounts) -> None:
    """Raises ValueError on every rank if the ranks differ in their number of tokens or in `needs_grad`.

    With ``pad_to_capacity`` both must be equal on all ranks, because row counts are not exchanged.

    counts: the result of ``finish()`` of the exchange that `PaddedCallKey.exchange` started.
    """
    tokens, needs_grad = counts.recv[:, :, 0].tolist()
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
    """Returns the inputs of a call with padded rows in place of tokens, and with one weight for each row.

    plan: the plan of the call, which has the map from tokens to padded rows.
    inputs: the inputs with tokens.
    """
    padding = plan.padding
    x_TM = inputs.x_TM
    assert padding is not None
    if x_TM is not None:  # backward has it only if it sends T_DI again
        x_TM = padding.spread(x_TM)
    return inputs._replace(x_TM=x_TM, weight_TK=padding.spread_weights(inputs.weight_TK))


class PaddedForward(Forward):
    """A forward pass that runs on padded rows. Its input and output are tokens."""

    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        super().__init__(plan, _padded(plan, inputs), keep)
        self.saved.inputs = inputs  # tokens are saved; backward pads them again

    def run(self) -> Tensor:
        result_NM = super().run()
        assert self.plan.padding is not None
        return self.plan.padding.gather(result_NM)


class PaddedBackward(Backward):
    """A backward pass that runs on padded rows. Its input and output are gradients of tokens."""

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: ForwardState) -> None:
        assert plan.padding is not None
        saved = replace(saved, inputs=_padded(plan, saved.inputs))
        super().__init__(plan, plan.padding.spread(grad_TM), saved)

    def run(self) -> list[Tensor | None]:
        grad_NM, grad_weight_N1, *others = super().run()
        padding = self.plan.padding
        assert padding is not None and grad_NM is not None and grad_weight_N1 is not None
        return [padding.gather(grad_NM), padding.gather_weights(grad_weight_N1), *others]
