"""The plan of one call: for each chunk, which rows go where, from the routing and the exchanged counts.

Letters: T tokens, K choices, N rows, E experts, W ranks, n chunks, M = d_model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.comm.counts import Shared
from pmoe.comm.flat import FlatAllToAll
from pmoe.experts.base import Experts
from pmoe.experts.products import RowGroups
from pmoe.ordering.sorted import SortedRows, chunk_bounds


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One micro-batch: a range of this rank's tokens, and the rows that it sends and receives.

    sent: where the rows that travel stand in sorted order. send_rows, recv_rows: one number a rank.
    received: the rows by expert, as the experts see them. regroup: index of each received row, in expert
    order, among the rows as they arrived by source rank; None where the two orders are the same.
    """

    tokens: slice
    sent: slice
    send_rows: tuple[int, ...]
    recv_rows: tuple[int, ...]
    received: RowGroups
    regroup: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows that stay: where they stand in sorted order, and by expert."""

    rows: slice
    groups: RowGroups


@dataclass(frozen=True, kw_only=True)
class WeightJourney:
    """The one message of routing weights, for all chunks. slot: the slots whose weights are sent, by
    destination rank. regroup: as in `Chunk`, for all received rows by (chunk, expert)."""

    slot: Tensor
    send: tuple[int, ...]
    recv: tuple[int, ...]
    regroup: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that forward and backward of one call need beside tensors. It is decided once: the routing that
    forward used is the one that backward reverses.

    pieces: the rows that stay. num_kept: this rank's slots less those that capacity dropped.
    row_token: (T*K,) the token of each row in sorted order. position: see `SortedRows`.
    has_drops: whether some slots may have been dropped by capacity.
    """

    experts: Experts
    collective: FlatAllToAll
    chunks: tuple[Chunk, ...]
    pieces: tuple[Piece, ...]
    num_kept: int
    weights: WeightJourney | None
    slot: Tensor
    row_token: Tensor
    position: Tensor
    top_k: int
    num_tokens: int
    has_drops: bool
    bypass_local: bool
    sequential: bool

    @property
    def num_received(self) -> int:
        return sum(chunk.received.num_rows for chunk in self.chunks)


def make_plan(
    *,
    experts: Experts,
    collective: FlatAllToAll,
    order: SortedRows,
    expert_TK: Tensor,
    shared: Shared,
    num_pieces: int,
    bypass_local: bool,
    has_drops: bool,
    sequential: bool,
) -> Plan:
    """Cuts the sorted rows into the chunks of ``shared`` without any further synchronisation."""
    ranks = collective.ranks
    num_tokens, top_k = expert_TK.shape
    n = shared.send.shape[0]
    send, recv, recv_device = shared.send, shared.recv, shared.recv_device
    if bypass_local:
        send, recv, recv_device = (_without(counts, ranks.rank) for counts in (send, recv, recv_device))
    # Running sums of all chunks at once: a chunk's own would be several launches each.
    received_ends = _ends(recv_device.sum(1))
    bounds = chunk_bounds(num_tokens, n)
    chunks, first = [], 0
    for i in range(n):
        send_rows, recv_rows = send[i].sum(1).tolist(), recv[i].sum(1).tolist()
        chunks.append(
            Chunk(
                tokens=slice(bounds[i], bounds[i + 1]),
                sent=slice(first, first + sum(send_rows)),
                send_rows=tuple(send_rows),
                recv_rows=tuple(recv_rows),
                received=RowGroups(counts=tuple(recv[i].sum(0).tolist()), ends=received_ends[i]),
                regroup=_regroup(recv_device[i], recv_rows),
            )
        )
        first += sum(send_rows)
    pieces = []
    if bypass_local:
        local_counts = _by_piece(shared.send[:, ranks.rank], num_pieces)
        local_ends = _ends(_by_piece(shared.recv_device[:, ranks.rank], num_pieces))
        for counts, ends in zip(local_counts.tolist(), local_ends, strict=True):
            pieces.append(
                Piece(
                    rows=slice(first, first + sum(counts)), groups=RowGroups(counts=tuple(counts), ends=ends)
                )
            )
            first += sum(counts)
    weights = None
    if not bypass_local or ranks.size > 1:
        weights = _weight_journey(order, expert_TK, send, recv, recv_device, first, ranks.rank, bypass_local)
    return Plan(
        experts=experts,
        collective=collective,
        chunks=tuple(chunks),
        pieces=tuple(pieces),
        num_kept=first,
        weights=weights,
        slot=order.slot,
        row_token=order.slot if top_k == 1 else order.slot // top_k,
        position=order.position,
        top_k=top_k,
        num_tokens=num_tokens,
        has_drops=has_drops,
        bypass_local=bypass_local,
        sequential=sequential,
    )


def _weight_journey(
    order: SortedRows,
    expert_TK: Tensor,
    send: Tensor,
    recv: Tensor,
    recv_device: Tensor,
    num_kept: int,
    rank: int,
    bypass_local: bool,
) -> WeightJourney:
    slot = order.slot[:num_kept]
    destination = expert_TK.reshape(-1)[slot] // send.shape[2]
    if bypass_local:
        destination = torch.where(destination == rank, send.shape[1], destination)
    send_rows, recv_rows = send.sum((0, 2)).tolist(), recv.sum((0, 2)).tolist()
    n, size, num_local = recv.shape
    by_chunk_and_expert = recv_device.transpose(0, 1).reshape(size, n * num_local)
    return WeightJourney(
        slot=slot[destination.argsort(stable=True)[: sum(send_rows)]],
        send=tuple(send_rows),
        recv=tuple(recv_rows),
        regroup=_regroup(by_chunk_and_expert, recv_rows),
    )


def _regroup(counts_WG: Tensor, rows_by_source: Sequence[int]) -> Tensor | None:
    """Index that turns rows by (source rank, group) into rows by (group, source rank)."""
    if sum(rows > 0 for rows in rows_by_source) <= 1:
        return None
    size, num_groups = counts_WG.shape
    group = torch.arange(num_groups, device=counts_WG.device).repeat(size)
    rows = group.repeat_interleave(counts_WG.reshape(-1), output_size=sum(rows_by_source))
    return rows.argsort(stable=True)


def _ends(counts_nE: Tensor) -> Sequence[Tensor | None]:
    """Each chunk's running sum over experts, int32 as grouped_mm wants it; None on the CPU, which loops."""
    if counts_nE.device.type != "cuda":
        return [None] * counts_nE.shape[0]
    return counts_nE.cumsum(1).int().unbind(0)


def _by_piece(counts_nE: Tensor, m: int) -> Tensor:
    """Counts of the n chunks as those of m pieces (m, E); see `pmoe.ordering.sorted.piece_of`."""
    joined = counts_nE.shape[0] - m + 1
    return torch.cat([counts_nE[:joined].sum(0, keepdim=True), counts_nE[joined:]])


def _without(counts_nWE: Tensor, rank: int) -> Tensor:
    """counts with the rows between ``rank`` and itself set to none."""
    counts_nWE = counts_nWE.clone()
    counts_nWE[:, rank] = 0
    return counts_nWE
