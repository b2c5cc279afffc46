"""How a plan is made: rows are sorted by chunk and expert, and cut into chunks by the exchanged counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pmoe.comm.counts import RankCounts, without_own
from pmoe.comm.ranks import Grid, telling
from pmoe.engine.plan import Chunk, Modules, PassPlan, Piece, Plan, WeightJourney
from pmoe.engine.replay import hidden_from_checkpoints
from pmoe.experts.products import RowGroups
from pmoe.ordering.sorted import SortedRows, Tokens, chunk_bounds, count_rows, sort_rows
from pmoe.planner.degree import Choice
from pmoe.schedule.restore import Restore

if TYPE_CHECKING:
    from pmoe.engine.once import MergedRows
    from pmoe.engine.padding import Padding


class Orders:
    """The slots of a call sorted by chunk and expert, once for each number of chunks.

    expert_TK: (T, K) int64. keep_TK: (T, K) bool, None where all slots are kept. padding: as in `Plan`.
    """

    expert_TK: Tensor
    keep_TK: Tensor | None
    tokens: Tokens

    padding: Padding | None = None

    def __init__(self, modules: Modules, expert_TK: Tensor, keep_TK: Tensor | None, tokens: Tokens) -> None:
        self.expert_TK, self.keep_TK, self.tokens = expert_TK, keep_TK, tokens
        self.modules = modules
        self._sorted: dict[int, SortedRows] = {}
        self._counted: dict[int, Tensor] = {}

    def slots(self, n: int) -> SortedRows:
        """All kept slots by chunk and expert."""
        if n not in self._sorted:
            modules, pieces = self.modules, self.modules.num_pieces(n)
            experts, staying = modules.num_experts, modules.staying
            self._sorted[n] = sort_rows(
                self.expert_TK, self.keep_TK, n, experts, staying, pieces, self.tokens
            )
        return self._sorted[n]

    def sent(self, n: int) -> SortedRows:
        """The rows that leave: the slots, but where several of them share a row (`pmoe.engine.once`)."""
        return self.slots(n)

    def count(self, bins: int) -> Tensor:
        """(bins, E) rows"""
        if bins not in self._counted:
            num_experts = self.modules.num_experts
            self._counted[bins] = count_rows(self.expert_TK, self.keep_TK, bins, num_experts, self.tokens)
        return self._counted[bins]

    def count_once(self, bins: int) -> Tensor | None:
        """(bins, ranks) rows, where a token goes once to a rank (`pmoe.engine.once`); else None."""
        return None

    def number_rows(
        self, n: int, weights: WeightJourney, shared: RankCounts, fine: Tensor
    ) -> MergedRows | None:
        """Which row carries each weight's token, where that is not its own."""
        return None

    def plan(self, counts: RankCounts, choice: Choice) -> Plan:
        """These rows in chunks. Checkpoints do not see it: trials may have made parts of it."""
        with telling(self.modules.grid.all, "the plan of a pass"), hidden_from_checkpoints():
            return make_plan(self, *self._deep_enough(choice, counts.depth), counts, choice.restore)

    def _deep_enough(self, choice: Choice, depth: dict[int, int]) -> tuple[int, int]:
        """Numbers of chunks, as deep as every rank's slots need them."""
        forward, backward = choice.forward, choice.backward
        if depth:
            forward, backward = forward << depth[forward], backward << depth[backward]
        if forward % backward and self.modules.experts.are_modules and choice.restore.hidden != "recompute":
            backward = forward  # a saved graph cannot be split
        return forward, backward if self.modules.hooks is None else forward


def make_plan(orders: Orders, n: int, n_backward: int, shared: RankCounts, restore: Restore) -> Plan:
    """Cuts the sorted rows into n chunks, and into those of backward, without any further synchronisation."""
    modules = orders.modules
    # Experts have their rows by the smallest chunks of either pass: so a chunk of one has its rows of a chunk
    # of the other in one run an expert.
    bins = shared.joined(math.lcm(n, n_backward))
    forward = backward = _cut(orders, n, bins)
    joined = None
    if n != n_backward:
        from pmoe.engine.rearranged import join_chunks

        rank = modules.grid.all.rank
        received, received_device = bins.recv, bins.recv_device
        if modules.stages.local:
            received, received_device = (without_own(each, rank) for each in (received, received_device))
        joined = join_chunks(received, received_device, bins.recv[:, rank], n, n_backward)
        backward = _cut(orders, n_backward, bins)
    return Plan(
        modules=modules,
        forward=forward,
        backward=backward,
        joined=joined,
        top_k=orders.expert_TK.shape[1],
        restore=restore,
        slot_token=orders.tokens.of_slot,
        padding=orders.padding,
    )


def _cut(orders: Orders, n: int, bins: RankCounts) -> PassPlan:
    modules, tokens, top_k = orders.modules, orders.tokens, orders.expert_TK.shape[1]
    num_pieces, slots, travelling = modules.num_pieces(n), orders.slots(n), orders.sent(n)
    grid, bypass_local = modules.grid, modules.stages.local
    rank = grid.all.rank
    shared = bins.joined(n)
    travelling_counts = shared.travelling(rank) if bypass_local else shared
    send, recv, recv_device = travelling_counts.send, travelling_counts.recv, travelling_counts.recv_device
    bins_device = recv_device if shared is bins else bins.recv_device
    if bypass_local and shared is not bins:
        bins_device = without_own(bins_device, rank)
    come_rows = travelling_counts.received_rows
    sent, come = travelling_counts.sent_rows.tolist(), come_rows.tolist()
    are_several = _are_several(come_rows)
    by_expert = recv.sum(1).tolist()
    # Running sums of all chunks at once: a chunk's own would be several launches each.
    received_ends = _ends(recv_device)
    local_counts: list[list[int]] = []
    local_ends: Sequence[Tensor | None] = ()
    if bypass_local:
        local_counts = _by_piece(shared.send[:, rank], num_pieces).tolist()
        local_ends = _ends(_by_piece(shared.recv_device[:, rank], num_pieces).unsqueeze(1))
    bounds = chunk_bounds(tokens.count, n)
    ends = [end * top_k for end in bounds]
    if tokens.of_slot is not None:  # none of which is dropped
        ends = [0, *itertools.accumulate(shared.send.sum((1, 2)).tolist())]
    chunks, pieces, first = [], [], 0
    # (source, chunk, expert, bin of the chunk): as rows arrive from one source.
    fine = bins_device.unflatten(0, (n, -1)).permute(2, 0, 3, 1)
    for i in range(n):
        send_rows, (recv_rows, gathered) = sent[i], _by_place(come[i], grid)
        regroup = None
        if shared.sent_once is None and are_several[i]:
            regroup = _regroup(fine[:, i].flatten(1), come[i])
        chunks.append(
            Chunk(
                tokens=slice(bounds[i], bounds[i + 1]),
                slots=slice(ends[i], ends[i + 1]),
                sent=slice(first, first + sum(send_rows)),
                send_rows=tuple(send_rows),
                recv_rows=recv_rows,
                received=RowGroups(counts=tuple(by_expert[i]), ends=received_ends[i]),
                regroup=regroup,
                relayed=[() if each is None else tuple(each[i].tolist()) for each in shared.relayed],
                gathered=gathered,
            )
        )
        first += sum(send_rows)
        # Rows that stay follow their chunk's rows that travel, or all of those.
        follow = range(i, i + 1) if num_pieces == n else range(num_pieces if i == n - 1 else 0)
        for j in follow:
            end = first + sum(local_counts[j])
            groups = RowGroups(counts=tuple(local_counts[j]), ends=local_ends[j])
            pieces.append(Piece(rows=slice(first, end), groups=groups))
            first = end
    weights = once = None
    if modules.stages.remote:
        kept = slots.slot[: int(shared.send.sum())]
        weights = _weight_journey(kept, orders.expert_TK, send, recv, fine, modules)
        once = orders.number_rows(n, weights, shared, fine)
    sent_slot = travelling.slot[:first]
    token = sent_slot if top_k == 1 else sent_slot // top_k
    return PassPlan(
        chunks=tuple(chunks),
        pieces=tuple(pieces),
        weights=weights,
        slot=slots.slot,
        row_token=token if tokens.of_slot is None else tokens.of_slot[token],
        position=travelling.position,
        has_drops=orders.keep_TK is not None or once is not None,
        once=once,
    )


def _weight_journey(
    slot: Tensor, expert_TK: Tensor, send: Tensor, recv: Tensor, fine: Tensor, modules: Modules
) -> WeightJourney:
    destination = expert_TK.reshape(-1)[slot] // send.shape[2]
    if modules.stages.local:
        destination = torch.where(destination == modules.grid.all.rank, send.shape[1], destination)
    come_rows = recv.sum((0, 2))
    send_rows, come = send.sum((0, 2)).tolist(), come_rows.tolist()
    recv_rows, gathered = _by_place(come, modules.grid)
    return WeightJourney(
        slot=slot[destination.argsort(stable=True)[: sum(send_rows)]],
        send=tuple(send_rows),
        recv=recv_rows,
        regroup=_regroup(fine.flatten(1), come) if _are_several(come_rows) else None,
        gathered=gathered,
    )


def _by_place(come: Sequence[int], grid: Grid) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of rows by source, as they lie once gathered: those that came to this rank itself, by rank across; and
    how many came to each rank inside, where experts are sharded."""
    width = grid.across.size
    own = grid.inside.rank * width
    gathered = (sum(come[at : at + width]) for at in range(0, len(come), width))
    return tuple(come[own : own + width]), tuple(gathered) if grid.is_sharded else ()


def _are_several(come_nW: Tensor) -> Any:
    """Of each chunk, whether rows come from more ranks than one: else they are in expert order as they are.
    come_nW: rows by source rank, on the host; or (W,), of one chunk."""
    return (come_nW.count_nonzero(-1) > 1).tolist()


def _regroup(counts_WG: Tensor, rows_by_source: Sequence[int]) -> Tensor:
    """Index that turns rows by (source rank, group) into rows by (group, source rank)."""
    size, num_groups = counts_WG.shape
    group = torch.arange(num_groups, device=counts_WG.device).repeat(size)
    rows = group.repeat_interleave(counts_WG.reshape(-1), output_size=sum(rows_by_source))
    return rows.argsort(stable=True)


def _ends(counts_nWE: Tensor) -> Sequence[Tensor | None]:
    """Each chunk's running sum over experts, int32 as grouped_mm wants it; None on the CPU, which loops."""
    if counts_nWE.device.type != "cuda":
        return [None] * counts_nWE.shape[0]
    return counts_nWE.sum(1).cumsum(1).int().unbind(0)


def _by_piece(counts_nE: Tensor, m: int) -> Tensor:
    """Counts of the n chunks as those of m pieces (m, E); see `pmoe.schedule.tasks.piece_of`."""
    joined = counts_nE.shape[0] - m + 1
    return torch.cat([counts_nE[:joined].sum(0, keepdim=True), counts_nE[joined:]])
