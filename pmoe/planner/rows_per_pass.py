"""Rows that a pass works on: counted rows of one call, or the most that any routing can bring."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pmoe.comm.counts import RankCounts, without_own
from pmoe.planner.layer_sizes import CallRows, LayerSizes
from pmoe.schedule.buffer_sizes import ChunkRows


@dataclass(frozen=True, kw_only=True)
class PassRows:
    """Rows of one pass on this rank.

    extent: rows of each chunk, by where they are.
    received: rows from other ranks, of all chunks.
    local: rows that stay on this rank, of all chunks.
    sent: rows to other ranks, of all chunks.
    exact: True if these rows were counted, False if they are upper bounds.
    relayed: rows that this rank passes on for others, in the chunk that has most.
    merged: whether a token is sent once to a rank that holds several of its experts.
    """

    extent: ChunkRows
    received: int
    local: int
    sent: int
    exact: bool
    relayed: int = 0
    merged: bool = False

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the pass."""
        return len(self.extent.send)

    @property
    def largest_unit(self) -> int:
        """Rows of the largest product. Received chunks and pieces of local rows are multiplied one by one."""
        return max((*self.extent.received, *self.extent.local), default=0)


def counted_rows(sizes: LayerSizes, counts: RankCounts, rank: int, n: int, inside_rank: int = 0) -> PassRows:
    """Returns the rows of rank ``rank`` in n chunks, from the row counts that ranks exchanged.

    n: number of chunks. It divides the number of bins of ``counts``.
    inside_rank: this rank's place among the ranks that share its experts.
    """
    own = slice(inside_rank * sizes.ep_size, (inside_rank + 1) * sizes.ep_size)
    counts = counts.joined(n)
    is_merged = counts.sent_once is not None
    recv = counts.recv
    leaving = counts.sent_rows
    coming = counts.received_rows
    # One more row, of zeros, is read by slots without a row of their own: dropped ones, and merged ones.
    home = [rows + (sizes.has_drops or is_merged) for rows in leaving.sum(1).tolist()]
    local = [0] * n
    if sizes.bypass_local:
        local = counts.send[:, rank].sum(1).tolist()
        recv, leaving, coming = (
            without_own(rows_of_ranks, rank) for rows_of_ranks in (recv, leaving, coming)
        )
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
        local=sum(local),
        sent=sum(extent.send),
        exact=True,
        relayed=max(
            (
                int(relayed_rows.sum(1).max())
                for relayed_rows in counts.relayed
                if relayed_rows is not None and relayed_rows.numel()
            ),
            default=0,
        ),
        merged=is_merged,
    )


def worst_rows(sizes: LayerSizes, call: CallRows, n: int, bins: int, slot_rows: int) -> PassRows:
    """Returns the most rows that any routing can bring a rank, if no rank has more tokens than this call.

    slot_rows: rows of a ring slot. Chunks are cut in two until no chunk brings more rows than a slot holds,
        but never finer than the ``bins``. Without rings there are no slots, and chunks are not cut.
    """
    sources = sizes.num_ranks - 1 if sizes.bypass_local else sizes.num_ranks
    own = _most_of_chunk(call, n)
    cuts = n  # the finest cut that the bins allow
    while bins % (2 * cuts) == 0:
        cuts *= 2
    received = sources * own
    chunks = n
    if sizes.rotates:
        received = min(received, max(slot_rows, sources * _most_of_chunk(call, cuts)))
        # A skewed batch of one or two chunks may be cut into more. Three stand for any larger number: a ring
        # has at most two slots, so they use all of them.
        chunks = max(n, 3) if sources else n
    local = own if sizes.bypass_local else 0
    apart = sizes.esp_size > 1 or sizes.merges
    extent = ChunkRows(
        send=(own * sizes.travels,) * chunks,
        received=(received,) * chunks,
        local=(local,) * chunks,
        home=(own + (sizes.has_drops or sizes.merges),) * chunks,
        regrouped=(sources > 1 or sizes.merges,) * chunks,
        arrived=(min(received, sizes.ep_size * own),) * chunks if apart else None,
        gathered=(received,) * chunks if apart else None,
        esp_size=sizes.esp_size,
    )
    return PassRows(
        extent=extent,
        received=sources * call.slots,
        local=call.slots if sizes.bypass_local else 0,
        sent=call.slots * sizes.travels,
        exact=False,
        relayed=sizes.relays * own,
        merged=sizes.merges,
    )


def _most_of_chunk(call: CallRows, n: int) -> int:
    """Returns the most slots that one of n chunks of a rank's tokens may have."""
    return min(math.ceil(call.inner / n) * call.choices, call.slots)
