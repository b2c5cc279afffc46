"""Programs whose row counts stay on the device, so that a CUDA graph can hold their passes.

A CUDA graph repeats launches with the arguments of its capture, and reads no row count on the host. The
arguments of a program follow from its cut: numbers that are computed from row counts. A bounded program has a
cut of upper bounds instead. Each chunk has room for fixed numbers of rows (`RowBounds`), so all addresses and
grids are the same in each call. The rows that exist lie at the beginning of their room:

    sent rows of chunk 0    stay    sent rows of chunk 1    stay       room
    r r r r r - - -         r r -   r r r r r r - -         r - -      r: a row, -: room for another one

The kernels find out on the device which rows exist:

    products      the ends of the experts' rows. Rows after the last end are not written
    PLACE, SUM    the position of each row. A row that does not exist has the position -1
    TAKE, PUT     the (token, choice) pair of each row. Rows that do not exist have the pair T * K, so
                  routing weights need one number more
    EXCHANGE      a table of row counts. Only rows that exist are sent, into heaps (``cuda/program/push.h``)

`rows_on_device` computes these tensors from the row counts of all ranks, which the ranks gather on the
device. If the rows of any rank do not fit, all ranks compute nothing: then no row exists.

Letters: T tokens, K choices of a token, E experts of all ranks, E_local of one rank, W ranks, n chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SENT, STAYS = 0, 1
"""The two parts of a chunk's rows: those that are sent, then those that stay on their rank."""


@dataclass(frozen=True, kw_only=True)
class RowBounds:
    """The most rows of a chunk for which each rank has room. All ranks have the same bounds.

    chunks: n, number of chunks.
    ranks: W, number of ranks, at least 2.
    local_experts: E_local, experts of each rank.
    sent, stays: the most rows of a chunk that a rank sends, and that stay on it.
    received: the most rows of a chunk that a rank receives from all other ranks.
    """

    chunks: int
    ranks: int
    local_experts: int
    sent: int
    stays: int
    received: int

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"ranks ({self.ranks}) must be at least 2: a single rank exchanges no rows")
        if self.stays < 1:
            raise ValueError(f"stays ({self.stays}) must be at least 1")
        for name, rows in (("sent", self.sent), ("received", self.received)):
            # The cut must have rows from each other rank, so that the program sorts the rows that arrive.
            if rows < self.ranks - 1:
                raise ValueError(f"{name} ({rows}) must be at least ranks - 1 ({self.ranks - 1})")

    @staticmethod
    def of(
        *, max_tokens: int, top_k: int, slack: float, chunks: int, ranks: int, local_experts: int
    ) -> RowBounds:
        """Returns bounds of ``slack`` times the rows of balanced routing, but at most all rows.

        max_tokens: the most tokens of a rank.
        top_k: K, choices of a token.
        slack: at least 1.

        Example: 8 tokens, K = 2, 2 chunks, 2 ranks, slack 1.5. A chunk has 8 rows, 4 for each rank if routing
        is balanced. So there is room for 6 rows that are sent, 6 that stay, and 6 that are received.
        """
        if slack < 1:
            raise ValueError(f"slack ({slack}) must be at least 1: balanced routing would not fit")
        rows = -(-max_tokens // chunks) * top_k
        share = slack * rows / ranks
        others = ranks - 1
        return RowBounds(
            chunks=chunks,
            ranks=ranks,
            local_experts=local_experts,
            sent=max(min(math.ceil(share * others), rows), others),
            stays=max(min(math.ceil(share), rows), 1),
            received=max(min(math.ceil(share * others), rows * others), others),
        )

    @property
    def num_rows(self) -> int:
        """Room for the rows of all chunks of one rank: those that it sends, and those that stay."""
        return self.chunks * (self.sent + self.stays)

    def counts(self, rank: int) -> tuple[Tensor, Tensor]:
        """Returns the row counts with which the cut is computed, (n, W, E_local) int64 on the host.

        The first are rows that this rank sends to each expert, the second those that it receives. Only their
        sums matter, and that rows come from each other rank.

        rank: this rank.
        """
        return self._spread(rank, self.sent), self._spread(rank, self.received)

    def _spread(self, rank: int, rows: int) -> Tensor:
        """Returns counts with ``rows`` of the other ranks, at least 1 of each, and ``stays`` of this rank."""
        counts = torch.zeros(self.chunks, self.ranks, self.local_experts, dtype=torch.int64)
        counts[:, :, 0] = 1
        counts[:, (rank + 1) % self.ranks, 0] = rows - (self.ranks - 2)
        counts[:, rank, 0] = self.stays
        return counts


@dataclass(frozen=True, kw_only=True)
class DeviceRows:
    """The rows of a call that exist, as tensors on the device, which a bounded program reads.

    They take the place of row counts on the host.

    fits: bool scalar, the same on all ranks: whether the rows of each rank fit into its bounds.
    position_TK: (T, K) int32, the sorted row of each (token, choice) pair (`Base.POSITION`); -1 for none.
    pair_by_number: (rows,) int32 (`Base.PAIR_BY_NUMBER`): first sent rows by chunk, then rows that stay. Rows
        that do not exist have the pair T * K, so `Base.WEIGHT` and `Base.DWEIGHT` need one number more.
        Backward writes only the gradients of pairs that have rows, so the caller sets `Base.DWEIGHT` to 0.
    ends: (2 n, E_local) int32, where each expert's rows end: received rows by chunk, then rows that stay.
    regroup: (n, received) int32, the index that sorts the received rows of each chunk by expert; None with 2
        ranks.
    regroup_weights: (n * received,) int32, the same index for the routing weights of all chunks; None with 2
        ranks.
    rows_by_rank: (2 n + 2, W) int64. Line 2 i has the rows of chunk i that are sent to each rank, and line
        2 i + 1 those that are received from each. The last two lines are not read.
    """

    fits: Tensor
    position_TK: Tensor
    pair_by_number: Tensor
    ends: Tensor
    regroup: Tensor | None
    regroup_weights: Tensor | None
    rows_by_rank: Tensor


def rows_on_device(
    expert_TK: Tensor,
    counts_WnE: Tensor,
    bounds: RowBounds,
    rank: int,
    *,
    is_allowed: Tensor | None = None,
) -> DeviceRows:
    """Computes which rows of a call exist. The host does not wait for the device.

    Each (token, choice) pair must have a row: no choice may be dropped by a capacity or a mask.

    expert_TK: (T, K) int64 or int32, the experts of this rank's tokens.
    counts_WnE: (W, n, E) int64, the rows of each source rank for each expert, by chunk
        (`pmoe.ordering.sorted.count_rows`), which the ranks have gathered.
    bounds: for how many rows there is room.
    rank: this rank.
    is_allowed: bool scalar on the device, the same on all ranks. If it is False, no row exists, as if the
        rows did not fit. None means True.
    """
    n = bounds.chunks
    counts_WnWL = counts_WnE.view(bounds.ranks, n, bounds.ranks, bounds.local_experts)
    fits = _fits(counts_WnWL.sum(3), bounds)
    if is_allowed is not None:
        fits = fits & is_allowed
    counts_WnWL = counts_WnWL * fits
    sent_nWL = counts_WnWL[rank].clone()
    stays_nL = sent_nWL[:, rank].clone()
    sent_nWL[:, rank] = 0
    received_nWL = counts_WnWL[:, :, rank].transpose(0, 1).clone()
    received_nWL[:, rank] = 0
    rows_by_rank = counts_WnE.new_zeros(2 * n + 2, bounds.ranks)
    rows_by_rank[0 : 2 * n : 2] = sent_nWL.sum(2)
    rows_by_rank[1 : 2 * n : 2] = received_nWL.sum(2)
    ends = torch.cat([received_nWL.sum(1), stays_nL]).cumsum(1).int()
    regroup = _regroup(received_nWL, bounds) if bounds.ranks > 2 else None
    position_TK, pair_by_number = _places(expert_TK, bounds, rank, fits)
    return DeviceRows(
        fits=fits,
        position_TK=position_TK,
        pair_by_number=pair_by_number,
        ends=ends,
        regroup=None if regroup is None else regroup.int(),
        regroup_weights=None if regroup is None else _one_after_another(regroup).int(),
        rows_by_rank=rows_by_rank,
    )


def _fits(rows_WnW: Tensor, bounds: RowBounds) -> Tensor:
    """Returns whether the rows of each rank fit: a bool scalar.

    rows_WnW: (W, n, W), rows by source rank, chunk and destination.
    """
    stays_nW = rows_WnW.diagonal(dim1=0, dim2=2)
    sent_nW = rows_WnW.sum(2).transpose(0, 1) - stays_nW
    received_nW = rows_WnW.sum(0) - stays_nW
    parts = ((stays_nW, bounds.stays), (sent_nW, bounds.sent), (received_nW, bounds.received))
    return torch.stack([(rows_nW <= most).all() for rows_nW, most in parts]).all()


def _places(expert_TK: Tensor, bounds: RowBounds, rank: int, fits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``position_TK`` and ``pair_by_number`` of `DeviceRows`.

    fits: bool scalar. If it is False, no row exists.
    """
    tokens, top_k = expert_TK.shape
    n = bounds.chunks
    num_experts = bounds.ranks * bounds.local_experts
    expert = expert_TK.reshape(-1).long()
    pair = torch.arange(expert.shape[0], device=expert.device)
    # Chunk i begins at token i * T // n, so this is the chunk of token t.
    chunk = ((pair // top_k + 1) * n - 1) // max(tokens, 1)
    stays = (expert // bounds.local_experts == rank).long()
    part = 2 * chunk + stays
    order = (part * num_experts + expert).argsort(stable=True)
    rows_of_part = expert.new_zeros(2 * n).scatter_add_(0, part, torch.ones_like(part))
    before_part = rows_of_part.cumsum(0) - rows_of_part
    in_part = torch.empty_like(pair).scatter_(0, order, pair) - before_part[part]
    is_sent = stays == SENT
    position = chunk * (bounds.sent + bounds.stays) + stays * bounds.sent + in_part
    number = torch.where(is_sent, chunk * bounds.sent, n * bounds.sent + chunk * bounds.stays) + in_part
    # Rows that do not fit have numbers beyond their room, so all pairs go to one more number then.
    number = torch.where(fits, number, bounds.num_rows)
    pair_by_number = pair.new_full((bounds.num_rows + 1,), pair.shape[0]).scatter_(0, number, pair)
    position = torch.where(fits, position, -1)
    return position.view(tokens, top_k).int(), pair_by_number[:-1].int()


def _regroup(received_nWL: Tensor, bounds: RowBounds) -> Tensor:
    """Returns the index that sorts the rows of each chunk by expert, (n, received) int64.

    Rows that do not exist come last, in their order. So the index is a permutation of the whole room.

    received_nWL: (n, W, E_local), rows of each source rank for each expert of this rank, in this order.
    """
    ends = received_nWL.flatten(1).cumsum(1)
    row = torch.arange(bounds.received, device=ends.device).expand(bounds.chunks, -1).contiguous()
    source_and_expert = torch.searchsorted(ends, row, right=True)
    expert = torch.where(
        source_and_expert < ends.shape[1], source_and_expert % bounds.local_experts, bounds.local_experts
    )
    return expert.argsort(dim=1, stable=True)


def _one_after_another(regroup: Tensor) -> Tensor:
    """Returns the index of all chunks, whose rows lie one after another, from those of each chunk."""
    chunks, received = regroup.shape
    begin = torch.arange(chunks, device=regroup.device).unsqueeze(1) * received
    return (regroup + begin).flatten()
