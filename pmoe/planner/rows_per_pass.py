"""Numbers of rows of one rank in a pass: counted for one call, or upper bounds for any routing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pmoe.comm.counts import RankCounts
from pmoe.planner.layer_sizes import CallRows, LayerSizes
from pmoe.schedule.buffer_sizes import ChunkRows


@dataclass(frozen=True, kw_only=True)
class PassRows:
    """Numbers of rows that one rank sends, receives and keeps in one pass.

    extent: the numbers of rows of each chunk: sent, received, staying on this rank, and further numbers that
        `ChunkRows` lists.
    received: rows that arrive from other ranks, all chunks together.
    local: rows whose expert is on this rank, so that they are not sent; all chunks together.
    sent: rows that are sent to other ranks, all chunks together.
    exact: True if these numbers were counted, False if they are upper bounds.
    relayed: rows of other ranks that this rank passes on in a hierarchical all-to-all. The number is that of
        the chunk with most such rows.
    merged: whether a token is sent only once to a rank that holds several of its experts.
    busiest_received: the most rows that one expert has among the received rows of any chunk.
    busiest_local: for each chunk, the most rows that one expert has among the rows that stay.
    local_copies: for each chunk, the rows that stay on this rank for its copies of busy experts; () if no
        such rows stay. They count in ``local``, but not in ``extent.local``.
    busiest_copies: for each chunk, the most rows that one copy has among the rows in ``local_copies``.
    """

    extent: ChunkRows
    received: int
    local: int
    sent: int
    exact: bool
    relayed: int = 0
    merged: bool = False
    busiest_received: int = 0
    busiest_local: tuple[int, ...] = ()
    local_copies: tuple[int, ...] = ()
    busiest_copies: tuple[int, ...] = ()

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the pass."""
        return len(self.extent.send)

    @property
    def largest_unit(self) -> int:
        """Number of rows of the largest matrix product of the pass.

        The received rows of a chunk are multiplied in one product. Rows that stay on this rank are multiplied
        in further products: one for each chunk, or one for several chunks together.
        """
        return max((*self.extent.received, *self.extent.local), default=0)

    @property
    def busiest(self) -> int:
        """The most rows of one expert in one matrix product of the pass, or an upper bound of them."""
        return max((self.busiest_received, *self.busiest_local))


def counted_rows(sizes: LayerSizes, counts: RankCounts, rank: int, n: int, inside_rank: int = 0) -> PassRows:
    """Returns the numbers of rows that a rank handles in a pass of n chunks, from exchanged row counts.

    sizes: sizes of the layer.
    counts: rows that this rank sends and receives, counted in equal parts of the batch ("bins").
    rank: index of this rank among all ranks of the layer, from 0.
    n: number of chunks. It divides the number of bins, so that a chunk consists of whole bins.
    inside_rank: index of this rank among the ranks that share its experts, from 0.
    """
    own = slice(inside_rank * sizes.ep_size, (inside_rank + 1) * sizes.ep_size)
    counts = counts.joined(n)
    is_merged = counts.sent_once is not None
    recv = counts.recv
    leaving = counts.sent_rows
    coming = counts.received_rows
    # An additional row of zeros stands for choices without a row of their own: dropped choices, and choices
    # that share a row because the token has several experts on the same rank.
    home = [rows + (sizes.has_drops or is_merged) for rows in leaving.sum(1).tolist()]
    local = [0] * n
    busiest_local = [0] * n
    local_copies: list[int] = []
    busiest_copies: list[int] = []
    if sizes.bypass_local:
        num_local = sizes.num_experts // sizes.ep_size
        for_experts = counts.send[:, rank, :num_local]
        for_copies = counts.send[:, rank, num_local:]
        local = for_experts.sum(1).tolist()
        busiest_local = for_experts.amax(1).tolist()
        if for_copies.shape[1] and not sizes.rotates:
            local_copies = for_copies.sum(1).tolist()
            busiest_copies = for_copies.amax(1).tolist()
        # With ring slots, rows for copies go through the all-to-all, also if the copy is on the tokens' rank.
        travelling = counts.travelling(rank, num_local if sizes.rotates else None)
        recv = travelling.recv
        leaving = travelling.sent_rows
        coming = travelling.received_rows
        if is_merged:
            home = [a + b + 1 for a, b in zip(leaving.sum(1).tolist(), local, strict=True)]
    apart = sizes.esp_size > 1 or is_merged
    extent = ChunkRows(
        send=tuple(leaving.sum(1).tolist()),
        received=tuple(recv.sum((1, 2)).tolist()),
        local=tuple(local),
        home=tuple(home),
        regrouped=tuple(is_merged or sources > 1 for sources in (coming > 0).sum(1).tolist()),
        arrived=tuple(coming[:, own].sum(1).tolist()) if apart else None,
        gathered=tuple(coming.sum(1).tolist()) if apart else None,
        esp_size=sizes.esp_size,
    )
    return PassRows(
        extent=extent,
        received=sum(extent.received),
        local=sum(local) + sum(local_copies),
        sent=sum(extent.send),
        exact=True,
        relayed=max(
            (int(relayed_rows.sum(1).max()) for relayed_rows in counts.relayed or () if relayed_rows.numel()),
            default=0,
        ),
        merged=is_merged,
        busiest_received=int(recv.sum(1).max()) if recv.numel() else 0,
        busiest_local=tuple(busiest_local),
        local_copies=tuple(local_copies),
        busiest_copies=tuple(busiest_copies),
    )


def worst_rows(
    sizes: LayerSizes,
    call: CallRows,
    n: int,
    bins: int,
    slot_rows: int,
    *,
    staying_rows: int = 0,
) -> PassRows:
    """Returns upper bounds, for any routing, of the numbers of rows that a rank handles in one pass.

    sizes: sizes of the layer.
    call: numbers of rows of a call on the rank with most tokens.
    n: number of chunks that the layer's options or a choice ask for. The batch may be cut into more chunks.
    bins: number of equal parts of the batch in which rows are counted. A chunk has at least one such part. If
        n does not divide this number, chunks are not cut into smaller chunks.
    slot_rows: rows that a ring slot (a reused buffer of fixed size) holds. If a chunk brings more rows than a
        slot holds, the batch is cut into more chunks, at most into ``bins``. Ignored for layers without ring
        slots.
    staying_rows: only read for layers with ring slots that may have copies of experts. Their chunks are also
        cut if the rows that arrive and the rows that stay on their rank are together more than
        ``slot_rows + staying_rows``.
    """
    own_rows_stay = sizes.bypass_local
    is_limited = sizes.rotates and sizes.copies.limits_rows
    # With ring slots, rows for a copy on the rank of their tokens count as received rows. So the bound has
    # both: a chunk that fills its slot with received rows, and a chunk in which all rows stay. Without ring
    # slots, rows for such a copy stay, in tasks of their own. The bytes are most if all rows that stay are
    # for the rank's own experts, because they are then computed in one larger task.
    has_local_messages = sizes.rotates and sizes.copies.hosted > 0
    own_rows_arrive = not own_rows_stay or has_local_messages
    sources = sizes.num_ranks if own_rows_arrive else sizes.num_ranks - 1
    own = _most_of_chunk(call, n)
    finest = bins if bins % n == 0 else n
    received = sources * own
    chunks = n
    if sizes.rotates:
        received = min(received, max(slot_rows, sources * _most_of_chunk(call, finest)))
        # A skewed batch of one or two chunks may be cut into more. Three chunks need as much memory as any
        # larger number, because a ring has at most two slots. In a layer that may have copies, a single chunk
        # that does not fit is cut as if n were 2, so the caller also computes the bound of n = 2.
        is_cut = sources > 0 and not (is_limited and n == 1)
        chunks = max(n, 3) if is_cut else n
    local = own if own_rows_stay else 0
    sent = own
    if is_limited and own_rows_stay:
        # The limit is for rows that arrive and rows that stay, together. A row that stays needs no more bytes
        # in a slot than one that arrives. So memory is largest if as many rows as possible arrive, and only
        # the rest of the limit stays.
        of_bin = _most_of_chunk(call, finest)
        local = min(own, max(staying_rows, of_bin))
        sent = min(own, max(slot_rows, of_bin))
    apart = sizes.esp_size > 1 or sizes.merges
    extent = ChunkRows(
        send=(sent * sizes.sends_rows,) * chunks,
        received=(received,) * chunks,
        local=(local,) * chunks,
        home=(own + (sizes.has_drops or sizes.merges),) * chunks,
        # Rows for a copy on their own rank count as rows from one more source, so they must be sorted, too.
        regrouped=(sources > 1 or sizes.merges or has_local_messages,) * chunks,
        arrived=(min(received, sizes.ep_size * own),) * chunks if apart else None,
        gathered=(received,) * chunks if apart else None,
        esp_size=sizes.esp_size,
    )
    return PassRows(
        extent=extent,
        received=sources * call.slots,
        local=0 if own_rows_arrive else call.slots,
        sent=call.slots * sizes.sends_rows,
        exact=False,
        relayed=sizes.relays * own,
        merged=sizes.merges,
        busiest_received=received,
        busiest_local=(local,) * chunks,
    )


def _most_of_chunk(call: CallRows, n: int) -> int:
    """Returns an upper bound of the rows that one rank's tokens make in one chunk, if there are n chunks.

    A token makes one row for each of its experts. The row is sent, or stays on the rank.

    call: numbers of rows of the call.
    n: number of chunks.
    """
    return min(math.ceil(call.inner / n) * call.choices, call.slots)
