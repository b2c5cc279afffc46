"""Passes that send a token only once to each rank, even for several experts there (``send_once=True``).

The rank that receives the row copies it for each of these experts. The rank then sums their results, and
returns the sum as one row. Example: the K = 3 experts of a token are on ranks 2, 0 and 2. A slot is a (token,
choice) pair:

    slot (choice)      0        1        2
    rank               2        0        2
    carrier            0        1        0         the slot whose row carries the token
    row                sent     sent     -         2 rows are sent instead of 3

A routing weight is still sent for every slot. A number is sent with each weight: it says which row carries
the weight's token. The rows that go to one rank in one chunk are numbered from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.counts import RankCounts, by_chunk
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import Pass, split_by_chunk
from pmoe.engine.passes.forward import Forward, Scalars
from pmoe.engine.plan.make_plan import SortedSlots
from pmoe.engine.plan.plan import PassModules, WeightMessage
from pmoe.ordering.sorted import SortedRows, Tokens, count_rows, sort_rows
from pmoe.planner.degree import Choice


def carriers(rank_TK: Tensor, keep_TK: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (carrier_TK, carries_TK): which slot's row carries the token for each slot.

    A slot is a (token, choice) pair: T tokens have K choices each. Slots of one token whose experts are on
    the same rank share one row.

    rank_TK: (T, K) int64, the rank of each slot's expert.
    keep_TK: (T, K) bool, whether the slot is kept; None keeps all.
    carrier_TK: the first result, (T, K) int64: for each slot, the first kept choice of the slot's token whose
        expert is on the same rank.
    carries_TK: the second result, (T, K) bool: whether a slot is its own carrier, so that a row is sent for
        it; False if the slot is dropped.

    Example: ranks (2, 0, 2) of one token -> carriers (0, 1, 0), carries (True, True, False).
    """
    same_TKK = rank_TK.unsqueeze(2) == rank_TK.unsqueeze(1)
    if keep_TK is not None:
        same_TKK = same_TKK & keep_TK.unsqueeze(1)
    carrier_TK = same_TKK.int().argmax(2)  # argmax returns the first of several equal values
    carries_TK = carrier_TK == torch.arange(rank_TK.shape[1], device=rank_TK.device)
    return carrier_TK, carries_TK if keep_TK is None else carries_TK & keep_TK


class DeduplicatedSlots(SortedSlots):
    """The sorted routing of a call in which a token is sent only once to each rank.

    If several of a token's experts are on one rank, the first of these choices gets a row. The other choices
    use this row, too.
    """

    def __init__(
        self, modules: PassModules, expert_TK: Tensor, keep_TK: Tensor | None, tokens: Tokens
    ) -> None:
        super().__init__(modules, expert_TK, keep_TK, tokens)
        self._num_ranks = modules.grid.ep.size
        self._rank_TK = expert_TK.long() // modules.num_indices
        self._carrier_TK, self._carries_TK = carriers(self._rank_TK, keep_TK)
        self._sent: dict[int, SortedRows] = {}

    def count_once(self, bins: int) -> Tensor:
        """Returns the number of rows that go to each rank, (bins, ranks) int64.

        bins: the number of bins: equal ranges of tokens in which rows are counted.
        """
        return count_rows(self._rank_TK, self._carries_TK, bins, self._num_ranks, self.tokens)

    def sent(self, n: int) -> SortedRows:
        if n not in self._sent:
            ranks = self._num_ranks
            none_stay = range(0, 0)
            self._sent[n] = sort_rows(self._rank_TK, self._carries_TK, n, ranks, none_stay, 0, self.tokens)
        return self._sent[n]

    def number_rows(self, n: int, weights: WeightMessage, bins: RankCounts, fine: Tensor) -> DeduplicatedRows:
        """Returns numbers by which a receiver finds the row of each routing weight.

        Several weights may share a row, so the position of a weight in the message does not tell its row.

        n: number of chunks.
        weights: the message of routing weights.
        bins: the exchanged row counts of bins (ranges of tokens).
        fine: (ranks, n, E_local, bins of a chunk), numbers of rows that arrive, by source rank, chunk, expert
            and bin. A bin is a range of tokens; a chunk has several.
        """
        tokens = self.tokens
        assert bins.received_once_device is not None
        come_nW = by_chunk(bins.received_once_device, n)
        top_k = self.expert_TK.shape[1]
        slot = weights.slot
        row = self.sent(n).position[slot // top_k * top_k + self._carrier_TK.view(-1)[slot]]
        token = slot // top_k if tokens.of_slot is None else tokens.of_slot[slot]
        # The rows that one chunk sends to one rank are contiguous. Each row's number counts from the first.
        sent = self.count_once(n).view(-1)
        chunk = ((token + 1) * n - 1) // max(tokens.count, 1)
        destination = self._rank_TK.reshape(-1)[slot]
        number = (row - (sent.cumsum(0) - sent)[chunk * self._num_ranks + destination]).int()
        base_Wn = (come_nW.cumsum(1) - come_nW).t().reshape(-1)
        rows_Wn = fine.sum((2, 3)).reshape(-1)
        num_received = int(bins.recv.sum())
        return DeduplicatedRows(
            number=number, base=base_Wn.repeat_interleave(rows_Wn, output_size=num_received)
        )

    def _deep_enough(self, choice: Choice, counts: RankCounts) -> tuple[int, int]:
        forward, _ = super()._deep_enough(choice, counts)
        return forward, forward


@dataclass(frozen=True, kw_only=True)
class DeduplicatedRows:
    """Numbers by which a rank finds the row that carries the token of each routing weight.

    Several weights may have the same row.

    number: (S,) int32, for each of the S weights that this rank sends: the number of its row among the rows
        that go to the same rank in the same chunk. This number is sent with the weight.
    base: (N,) int64, for each of the N weights that arrive: where the rows of its source rank begin among all
        rows that arrive in its chunk. The weight's row is base + the number that arrived with the weight.
    """

    number: Tensor
    base: Tensor


class _Once(Pass):
    """A pass in which one row carries a token to all its experts on a rank.

    The rank copies the row for each of these experts, and sums their results before they return to the
    token's rank as one row.
    """

    def put_back(self, leaving_NM: Tensor, regroup: Tensor, rows_NM: Tensor) -> None:
        leaving_NM.zero_().index_add_(0, regroup, rows_NM)


class OnceForward(_Once, Forward):
    """A forward pass in which one received row is copied for several experts.

    The pass sends a number with each routing weight: the number of the row to copy.
    """

    number: Scalars
    regroup: tuple[Tensor, ...]

    def make_scalars(self) -> None:
        super().make_scalars()
        assert self.pass_plan.once is not None
        self.number = self.scalar(self.pass_plan.once.number)
        self.scalars.append(self.number)

    def weights(self, _: int) -> dist.Work | None:
        # The schedule has one task for both messages, but the engine waits for a single Work.
        begun = [work for work in map(self.send_scalars, self.scalars) if work is not None]
        waits_for_all: Any = SimpleNamespace(wait=lambda: [work.wait() for work in begun])
        waited: dist.Work | None = waits_for_all if begun else None
        return waited

    def sorted_weights(self) -> Tensor:
        """Returns (N,), the N routing weights that arrived, sorted by chunk and expert; also sets `regroup`.

        `regroup` has an index for each chunk. ``received_rows[index]`` are the rows in the order in which the
        experts compute them: a received row appears once for each of its experts. The index is computed from
        the numbers that arrived with the weights.
        """
        assert self.pass_plan.once is not None
        row = self.pass_plan.once.base + self.number.arrived
        regroup = self.weight_message.regroup
        row = row if regroup is None else row.index_select(0, regroup)
        self.regroup = self.saved.regroup = split_by_chunk(row, self.pass_plan)
        return super().sorted_weights()


class OnceBackward(_Once, Backward):
    """A backward pass in which the gradients of all copies of a row are summed before they return."""
