"""Makes the plan of a call: sorts its slots, and cuts them into chunks by the exchanged row counts.

Nothing is communicated and the host waits for nothing: the counts are on the host already.

Row counts are exchanged in bins, which are finer than chunks. A chunk is a run of neighbouring bins, so that
forward and backward may have different numbers of chunks over the same bins. Example: n = 2 chunks in
forward, 4 in backward, so lcm(2, 4) = 4 bins:

    bins       0 | 1 | 2 | 3
    forward    chunk 0 | chunk 1
    backward   0 | 1 | 2 | 3

Within a chunk the rows of an expert are sorted by bin. So the rows that an expert has in one bin are one run
in a chunk of either pass, and whole runs can be copied from forward's chunks to backward's
(`pmoe.engine.plan.regroup_chunks`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pmoe.comm.counts import RankCounts, without_own
from pmoe.comm.failures import publishing_failures
from pmoe.comm.grid import Grid
from pmoe.engine.plan.plan import Chunk, LocalChunk, PassModules, PassPlan, Plan, WeightMessage
from pmoe.engine.plan.regroup_chunks import join_chunks
from pmoe.experts.products import RowGroups
from pmoe.ordering.sorted import SortedRows, Tokens, chunk_bounds, count_rows, sort_rows
from pmoe.planner.degree import Choice
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import local_pieces

if TYPE_CHECKING:
    from pmoe.engine.variants.padding import Padding
    from pmoe.engine.variants.send_once import DeduplicatedRows


class SortedSlots:
    """The routing of a call, which sorts and counts its slots for any number of chunks.

    Each order is computed when it is first asked for and then kept: trials of several n share it.

    expert_TK: (T, K) int64, the global expert of each slot.
    keep_TK: (T, K) bool, whether the slot is kept; None keeps all.
    tokens: the number of tokens, and the token of each slot if tokens do not all have K slots.
    padding: as in `Plan`; the slots are padded rows then.
    """

    expert_TK: Tensor
    keep_TK: Tensor | None
    tokens: Tokens

    padding: Padding | None = None

    def __init__(
        self, modules: PassModules, expert_TK: Tensor, keep_TK: Tensor | None, tokens: Tokens
    ) -> None:
        self.expert_TK = expert_TK
        self.keep_TK = keep_TK
        self.tokens = tokens
        self.modules = modules
        self._sorted: dict[int, SortedRows] = {}
        self._counted: dict[int, Tensor] = {}

    def slots(self, n: int) -> SortedRows:
        """All slots, sorted by chunk and expert for n chunks; dropped ones last."""
        if n not in self._sorted:
            modules = self.modules
            num_pieces = self.num_pieces(n)
            num_experts = modules.num_experts
            staying = modules.staying
            self._sorted[n] = sort_rows(
                self.expert_TK, self.keep_TK, n, num_experts, staying, num_pieces, self.tokens
            )
        return self._sorted[n]

    def num_pieces(self, n: int) -> int:
        """Returns m, the number of pieces into which the rows that stay are cut, for n chunks."""
        stages = self.modules.stages
        if self.modules.rotates:
            return n * stages.local
        return local_pieces(n, local=stages.local, remote=stages.remote)

    def sent(self, n: int) -> SortedRows:
        """The slots whose rows leave: `slots`, or fewer if slots share a row (`DeduplicatedSlots`)."""
        return self.slots(n)

    def count(self, bins: int) -> Tensor:
        """(bins, E) int64, kept rows in each bin for each expert of all ranks."""
        if bins not in self._counted:
            num_experts = self.modules.num_experts
            self._counted[bins] = count_rows(self.expert_TK, self.keep_TK, bins, num_experts, self.tokens)
        return self._counted[bins]

    def count_once(self, bins: int) -> Tensor | None:
        """(bins, P) rows for each rank if a token travels once to a rank (`DeduplicatedSlots`); else None."""
        return None

    def number_rows(
        self, n: int, weights: WeightMessage, shared: RankCounts, fine: Tensor
    ) -> DeduplicatedRows | None:
        """The row that carries the token of each routing weight; None if every slot has a row of its own.

        n: number of chunks.
        weights: the message of routing weights.
        shared: the row counts, joined to n chunks.
        fine: (W, n, E_local, bins of a chunk) rows that arrive, by source, chunk, expert and bin.
        """
        return None

    def plan(self, counts: RankCounts, choice: Choice) -> Plan:
        """Returns the plan of this call with the chosen numbers of chunks and restore pair.

        The caller hides it from checkpoints, which count operations and expect as many in both passes: trials
        of several n may have sorted these slots already in one of the passes.
        """
        with publishing_failures(self.modules.grid.all, "the plan of a pass"):
            return make_plan(self, *self._deep_enough(choice, counts.depth), counts, choice.restore)

    def _deep_enough(self, choice: Choice, depth: dict[int, int]) -> tuple[int, int]:
        """Returns n of forward and n of backward, doubled until no chunk overflows a ring slot on any rank.

        depth: for each n, how often it is doubled (`RankCounts.depth`); empty if nothing rotates.
        """
        forward, backward = choice.forward, choice.backward
        if depth:
            forward, backward = forward << depth[forward], backward << depth[backward]
        if forward % backward and self.modules.experts.are_modules and choice.restore.hidden != "recompute":
            backward = forward  # backward would need a part of a forward chunk: a saved graph cannot be split
        return forward, backward if self.modules.hooks is None else forward


def make_plan(orders: SortedSlots, n: int, n_backward: int, shared: RankCounts, restore: Restore) -> Plan:
    """Cuts the sorted rows into n chunks for forward and n_backward for backward. The host waits for nothing.

    shared: the exchanged row counts, in a number of bins that n and n_backward divide.
    restore: what becomes of T_DI and T_M between the passes.
    """
    modules = orders.modules
    # The coarsest bins whose borders include those of both passes' chunks (see the picture above).
    num_bins = math.lcm(n, n_backward)
    bins = shared if shared.send.shape[0] == num_bins else shared.joined(num_bins)
    forward = backward = _cut(orders, n, bins)
    joined = None
    if n != n_backward:
        rank = modules.grid.all.rank
        received, received_device = bins.recv, bins.recv_device
        if modules.stages.local:
            received, received_device = (without_own(counts, rank) for counts in (received, received_device))
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


def _cut(orders: SortedSlots, n: int, bins: RankCounts) -> PassPlan:
    """Cuts the sorted rows into n chunks for one pass. bins: row counts in bins that both passes share."""
    modules = orders.modules
    tokens = orders.tokens
    top_k = orders.expert_TK.shape[1]
    num_pieces = orders.num_pieces(n)
    slots = orders.slots(n)
    token_bounds = chunk_bounds(tokens.count, n)
    travelling = orders.sent(n)
    grid = modules.grid
    bypass_local = modules.stages.local
    rank = grid.all.rank
    shared = bins if bins.send.shape[0] == n else bins.joined(n)
    travelling_counts = shared.travelling(rank) if bypass_local else shared
    send = travelling_counts.send
    recv = travelling_counts.recv
    recv_device = travelling_counts.recv_device
    bins_device = recv_device if shared is bins else bins.recv_device
    if bypass_local and shared is not bins:
        bins_device = without_own(bins_device, rank)
    come_rows = travelling_counts.received_rows
    sent_by_chunk = travelling_counts.sent_rows.tolist()
    come_by_chunk = come_rows.tolist()
    are_several = _are_several(come_rows)
    by_expert = recv.sum(1).tolist()
    # Computed for all chunks at once: on a GPU, one chunk at a time would be several launches for each.
    received_ends = _ends(recv_device)
    local_counts: list[list[int]] = []
    local_ends: Sequence[Tensor | None] = ()
    if bypass_local:
        local_counts = _by_piece(shared.send[:, rank], num_pieces).tolist()
        local_ends = _ends(_by_piece(shared.recv_device[:, rank], num_pieces).unsqueeze(1))
    slot_bounds = [end * top_k for end in token_bounds]
    if tokens.of_slot is not None:  # no slot is dropped then, so the counts are the numbers of slots
        slot_bounds = [0, *itertools.accumulate(shared.send.sum((1, 2)).tolist())]
    chunks = []
    pieces = []
    first_row = 0
    # Rows by (source rank, chunk, expert, bin of the chunk), the order in which they arrive from one source.
    fine = bins_device.unflatten(0, (n, -1)).permute(2, 0, 3, 1)
    for i in range(n):
        send_rows = sent_by_chunk[i]
        recv_rows, gathered = _by_place(come_by_chunk[i], grid)
        regroup = None
        if shared.sent_once is None and are_several[i]:
            regroup = _regroup(fine[:, i].flatten(1), come_by_chunk[i])
        chunks.append(
            Chunk(
                tokens=slice(token_bounds[i], token_bounds[i + 1]),
                slots=slice(slot_bounds[i], slot_bounds[i + 1]),
                sent=slice(first_row, first_row + sum(send_rows)),
                send_rows=tuple(send_rows),
                recv_rows=recv_rows,
                received=RowGroups(counts=tuple(by_expert[i]), ends=received_ends[i]),
                regroup=regroup,
                relayed=[() if counts is None else tuple(counts[i].tolist()) for counts in shared.relayed],
                gathered=gathered,
            )
        )
        first_row += sum(send_rows)
        # As `sort_rows` sorts them: with a piece for each chunk, piece i follows the rows that chunk i sends;
        # fewer pieces follow the rows of all chunks.
        following_pieces = range(i, i + 1) if num_pieces == n else range(num_pieces if i == n - 1 else 0)
        for j in following_pieces:
            end = first_row + sum(local_counts[j])
            groups = RowGroups(counts=tuple(local_counts[j]), ends=local_ends[j])
            pieces.append(LocalChunk(rows=slice(first_row, end), groups=groups))
            first_row = end
    weights = None
    once = None
    if modules.stages.remote:
        kept = slots.slot[: int(shared.send.sum())]
        weights = _weight_journey(kept, orders.expert_TK, send, recv, fine, modules)
        once = orders.number_rows(n, weights, shared, fine)
    row_slot = travelling.slot[:first_row]
    token = row_slot if top_k == 1 else row_slot // top_k
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
    slot: Tensor, expert_TK: Tensor, send: Tensor, recv: Tensor, fine: Tensor, modules: PassModules
) -> WeightMessage:
    """Plans the message that carries the routing weights of all chunks.

    slot: (rows,) kept slots in sorted order.
    send, recv: (n, P, E_local), (n, W, E_local) rows that travel, on the host.
    fine: (W, n, E_local, bins of a chunk) rows that arrive, where the rows are.
    """
    destination = expert_TK.reshape(-1)[slot] // send.shape[2]
    if modules.stages.local:
        # Weights of rows that stay are not sent: behind all ranks, where the slice below leaves them out.
        destination = torch.where(destination == modules.grid.all.rank, send.shape[1], destination)
    come_rows = recv.sum((0, 2))
    send_rows = send.sum((0, 2)).tolist()
    come_by_source = come_rows.tolist()
    recv_rows, gathered = _by_place(come_by_source, modules.grid)
    return WeightMessage(
        slot=slot[destination.argsort(stable=True)[: sum(send_rows)]],
        send=tuple(send_rows),
        recv=recv_rows,
        regroup=_regroup(fine.flatten(1), come_by_source) if _are_several(come_rows) else None,
        gathered=gathered,
    )


def _by_place(come: Sequence[int], grid: Grid) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Splits row counts by source into those that S brings to this rank, and sums for each rank inside.

    come: (W,) rows from each source in the order in which gathered rows lie: L blocks of P, a block for each
        rank inside the node.
    Returns the (P,) counts of this rank's own block, and the (L,) sums of the blocks; () without sharding.
    """
    width = grid.ep.size
    own_start = grid.esp.rank * width
    gathered = (sum(come[start : start + width]) for start in range(0, len(come), width))
    return tuple(come[own_start : own_start + width]), tuple(gathered) if grid.is_sharded else ()


def _are_several(come_nW: Tensor) -> Any:
    """Whether each chunk has rows from more than one rank. If not, they arrive in expert order.

    come_nW: (n, W) rows by chunk and source rank, on the host; or (W,), which gives one bool.
    """
    return (come_nW.count_nonzero(-1) > 1).tolist()


def _regroup(counts_WG: Tensor, rows_by_source: Sequence[int]) -> Tensor:
    """(N,) int64 index that turns rows sorted by (source rank, group) into rows by (group, source rank).

    counts_WG: (W, G) rows by source rank and group, where the rows are.
    rows_by_source: W numbers on the host, whose sum is N; they spare the host a wait for the device.
    """
    size, num_groups = counts_WG.shape
    group = torch.arange(num_groups, device=counts_WG.device).repeat(size)
    rows = group.repeat_interleave(counts_WG.reshape(-1), output_size=sum(rows_by_source))
    return rows.argsort(stable=True)


def _ends(counts_nWE: Tensor) -> Sequence[Tensor | None]:
    """Running sums of each chunk's rows over experts, (E_local,) int32 a chunk, as grouped_mm takes them.

    None for each chunk on the CPU, which loops over the experts.

    counts_nWE: (n, W, E_local) rows by chunk, source rank and expert.
    """
    if counts_nWE.device.type != "cuda":
        return [None] * counts_nWE.shape[0]
    return counts_nWE.sum(1).cumsum(1).int().unbind(0)


def _by_piece(counts_nE: Tensor, m: int) -> Tensor:
    """Joins the row counts of n chunks to those of m pieces, (m, E); see `pmoe.schedule.tasks.piece_of`."""
    joined = counts_nE.shape[0] - m + 1
    return torch.cat([counts_nE[:joined].sum(0, keepdim=True), counts_nE[joined:]])
