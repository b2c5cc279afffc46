"""The plan of one call: for each chunk, which rows go where, from the routing and the exchanged counts.

Letters: T tokens, K choices, N rows, E experts, W ranks, n chunks, M = d_model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.comm.base import Combine, Dispatch
from pmoe.comm.counts import Shared
from pmoe.comm.ranks import Ranks
from pmoe.experts.base import Experts, Runs
from pmoe.experts.products import RowGroups
from pmoe.ordering.sorted import SortedRows, chunk_bounds
from pmoe.pipeline.schedule import Stages
from pmoe.planner.restore import Restore


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
class Cut:
    """How one pass cuts the batch.

    pieces: the rows that stay. slot, position: as in `SortedRows`. row_token: (T*K,) the token of each row in
    sorted order. weights: None where nothing travels, on any rank.
    """

    chunks: tuple[Chunk, ...]
    pieces: tuple[Piece, ...]
    weights: WeightJourney | None
    slot: Tensor
    row_token: Tensor
    position: Tensor

    @property
    def num_received(self) -> int:
        return sum(chunk.received.num_rows for chunk in self.chunks)

    def home(self, i: int) -> slice:
        """Where all rows of chunk i's tokens stand, travelling or not, if there is a piece a chunk."""
        sent = self.chunks[i].sent
        return slice(sent.start, self.pieces[i].rows.stop) if self.pieces else sent


Joined = tuple[tuple[tuple[int, Runs], ...], ...]
"""For each chunk of backward, the chunks of forward that it has rows of, and which."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that forward and backward of one call need beside tensors. It is decided once: the routing that
    forward used is the one that backward reverses.

    backward: may have another number of chunks than forward; joined_received, joined_local then say where its
    rows stand in forward's, None where the chunks are the same, as weight_map does for all received rows: the
    index among forward's. num_kept: this rank's slots less those that
    capacity dropped. has_drops: whether some may have been dropped. restore: what becomes of T_DI and T_M
    between the passes. rotates: whether buffers are ring slots; else each chunk has its own.
    """

    experts: Experts
    ranks: Ranks
    dispatch: Dispatch
    combine: Combine
    forward: Cut
    backward: Cut
    joined_received: Joined | None
    joined_local: Joined | None
    weight_map: Tensor | None
    num_kept: int
    top_k: int
    num_tokens: int
    has_drops: bool
    bypass_local: bool
    sequential: bool
    restore: Restore
    rotates: bool

    @property
    def rearranged(self) -> bool:
        return self.joined_received is not None

    @property
    def stages(self) -> Stages:
        # Whether there is a journey, not how many rows this rank sends: all ranks issue the same collectives.
        return Stages(local=self.bypass_local, remote=self.forward.weights is not None)


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Numbers of chunks of the two passes, and into how many pieces the rows that stay are cut."""

    forward: int
    backward: int
    pieces: int


def make_plan(
    *,
    experts: Experts,
    ranks: Ranks,
    dispatch: Dispatch,
    combine: Combine,
    order: SortedRows,
    backward_order: SortedRows,
    expert_TK: Tensor,
    shared: Shared,
    degrees: Degrees,
    restore: Restore,
    rotates: bool,
    bypass_local: bool,
    has_drops: bool,
    sequential: bool,
) -> Plan:
    """Cuts the sorted rows into chunks without any further synchronisation. order, backward_order: the rows
    as the two passes have them; the same object where their chunks are the same."""
    num_tokens, top_k = expert_TK.shape
    same = degrees.forward == degrees.backward
    # Experts have their rows by the smallest chunks of either pass: so a chunk of one has its rows of a chunk
    # of the other in one run an expert.
    finest = math.lcm(degrees.forward, degrees.backward)
    bins = shared.joined(finest)

    def cut(n: int, rows: SortedRows) -> Cut:
        pieces = degrees.pieces if same else n * bypass_local
        return _cut(n, rows, expert_TK, bins, ranks, pieces, bypass_local)

    forward = cut(degrees.forward, order)
    joined_received = joined_local = weight_map = None
    if not same:
        received, stay, received_device = bins.recv, bins.recv[:, ranks.rank], bins.recv_device
        if bypass_local:
            received, received_device = (_without(each, ranks.rank) for each in (received, received_device))
        weight_map = _forward_index(received_device.sum(1), degrees, int(received.sum()))
        joined_received = _join(received.sum(1), degrees)
        joined_local = _join(stay, degrees)
    return Plan(
        experts=experts,
        ranks=ranks,
        dispatch=dispatch,
        combine=combine,
        forward=forward,
        backward=forward if same else cut(degrees.backward, backward_order),
        joined_received=joined_received,
        joined_local=joined_local,
        weight_map=weight_map,
        num_kept=int(shared.send.sum()),
        top_k=top_k,
        num_tokens=num_tokens,
        has_drops=has_drops,
        bypass_local=bypass_local,
        sequential=sequential,
        restore=restore,
        rotates=rotates,
    )


def _cut(
    n: int,
    order: SortedRows,
    expert_TK: Tensor,
    bins: Shared,
    ranks: Ranks,
    num_pieces: int,
    bypass_local: bool,
) -> Cut:
    num_tokens, top_k = expert_TK.shape
    shared = bins.joined(n)
    send, recv, recv_device = shared.send, shared.recv, shared.recv_device
    bins_device = bins.recv_device
    if bypass_local:
        send, recv, recv_device, bins_device = (
            _without(counts, ranks.rank) for counts in (send, recv, recv_device, bins_device)
        )
    # Running sums of all chunks at once: a chunk's own would be several launches each.
    received_ends = _ends(recv_device.sum(1))
    local_counts: list[list[int]] = []
    local_ends: list[Tensor | None] = []
    if bypass_local:
        local_counts = _by_piece(shared.send[:, ranks.rank], num_pieces).tolist()
        local_ends = list(_ends(_by_piece(shared.recv_device[:, ranks.rank], num_pieces)))
    bounds = chunk_bounds(num_tokens, n)
    chunks, pieces, first = [], [], 0

    def add_piece(j: int, first: int) -> int:
        end = first + sum(local_counts[j])
        groups = RowGroups(counts=tuple(local_counts[j]), ends=local_ends[j])
        pieces.append(Piece(rows=slice(first, end), groups=groups))
        return end

    # (source, chunk, expert, bin of the chunk): as rows arrive from one source.
    fine = bins_device.unflatten(0, (n, -1)).permute(2, 0, 3, 1)
    for i in range(n):
        send_rows, recv_rows = send[i].sum(1).tolist(), recv[i].sum(1).tolist()
        chunks.append(
            Chunk(
                tokens=slice(bounds[i], bounds[i + 1]),
                sent=slice(first, first + sum(send_rows)),
                send_rows=tuple(send_rows),
                recv_rows=tuple(recv_rows),
                received=RowGroups(counts=tuple(recv[i].sum(0).tolist()), ends=received_ends[i]),
                regroup=_regroup(fine[:, i].flatten(1), recv_rows),
            )
        )
        first += sum(send_rows)
        if num_pieces == n:
            first = add_piece(i, first)
    if num_pieces != n:
        for j in range(num_pieces):
            first = add_piece(j, first)
    weights = None
    if not bypass_local or ranks.size > 1:
        weights = _weight_journey(order, expert_TK, send, recv, fine, first, ranks.rank, bypass_local)
    return Cut(
        chunks=tuple(chunks),
        pieces=tuple(pieces),
        weights=weights,
        slot=order.slot,
        row_token=order.slot if top_k == 1 else order.slot // top_k,
        position=order.position,
    )


def _join(counts_LE: Tensor, degrees: Degrees) -> Joined:
    """For each chunk of backward its runs of rows in chunks of forward. counts: rows by bin, L of them, and
    expert, in both passes the order of rows inside an expert's part of a chunk."""
    counts: list[list[int]] = counts_LE.tolist()
    finest, num_experts = len(counts), len(counts[0])
    start: dict[str, dict[tuple[int, int], int]] = {}
    for name, n in (("forward", degrees.forward), ("backward", degrees.backward)):
        width, start[name] = finest // n, {}
        for chunk in range(n):
            row = 0
            for expert in range(num_experts):
                for at in range(chunk * width, (chunk + 1) * width):
                    start[name][at, expert] = row
                    row += counts[at][expert]
    forward_width, backward_width = finest // degrees.forward, finest // degrees.backward
    joined = []
    for chunk in range(degrees.backward):
        runs: dict[int, list[tuple[slice, slice]]] = {}
        for expert in range(num_experts):
            for at in range(chunk * backward_width, (chunk + 1) * backward_width):
                rows = counts[at][expert]
                if not rows:
                    continue
                of = runs.setdefault(at // forward_width, [])
                there, here = start["forward"][at, expert], start["backward"][at, expert]
                if of and (of[-1][0].stop, of[-1][1].stop) == (there, here):
                    there, here, rows = of[-1][0].start, of[-1][1].start, rows + there - of.pop()[0].start
                of.append((slice(there, there + rows), slice(here, here + rows)))
        joined.append(tuple((i, tuple(of)) for i, of in sorted(runs.items())))
    return tuple(joined)


def _forward_index(counts_LE: Tensor, degrees: Degrees, num_rows: int) -> Tensor:
    """What `_join` says, as an index of each of backward's rows, in order, among forward's."""
    finest, num_experts = counts_LE.shape

    def by_chunk(per_bin: Tensor, n: int) -> Tensor:
        """(L, E) in the order of a pass's rows: chunk, expert, bin of the chunk."""
        bins: Tensor = per_bin.unflatten(0, (n, -1))
        return bins.transpose(1, 2).reshape(-1)

    group = torch.arange(finest * num_experts, device=counts_LE.device)
    place = torch.empty_like(group)
    place[by_chunk(group.view(finest, num_experts), degrees.backward)] = group
    forward_place = by_chunk(place.view(finest, num_experts), degrees.forward)
    rows = forward_place.repeat_interleave(by_chunk(counts_LE, degrees.forward), output_size=num_rows)
    return rows.argsort(stable=True)


def _weight_journey(
    order: SortedRows,
    expert_TK: Tensor,
    send: Tensor,
    recv: Tensor,
    fine: Tensor,
    num_kept: int,
    rank: int,
    bypass_local: bool,
) -> WeightJourney:
    slot = order.slot[:num_kept]
    destination = expert_TK.reshape(-1)[slot] // send.shape[2]
    if bypass_local:
        destination = torch.where(destination == rank, send.shape[1], destination)
    send_rows, recv_rows = send.sum((0, 2)).tolist(), recv.sum((0, 2)).tolist()
    return WeightJourney(
        slot=slot[destination.argsort(stable=True)[: sum(send_rows)]],
        send=tuple(send_rows),
        recv=tuple(recv_rows),
        regroup=_regroup(fine.flatten(1), recv_rows),
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
