"""How many rows a pass works on: those that were counted, or the most that any routing brings.

Letters: n chunks, B the largest number of tokens of a rank, W ranks, K choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pmoe.planner.layer_sizes import LayerSizes
from pmoe.schedule.slots import ChunkRows

if TYPE_CHECKING:
    from pmoe.comm.counts import RankCounts


@dataclass(frozen=True, kw_only=True)
class PassRows:
    """Rows of one pass on this rank.

    extent: by chunk. received, local, sent: in all. exact: the very rows, else the most that there may be.
    """

    extent: ChunkRows
    received: int
    local: int
    sent: int
    exact: bool

    @property
    def num_chunks(self) -> int:
        return len(self.extent.send)

    @property
    def largest_unit(self) -> int:
        """Rows of the largest product: chunks that travel and pieces that stay are multiplied one by one."""
        return max((*self.extent.received, *self.extent.local), default=0)


def counted_rows(sizes: LayerSizes, counts: RankCounts, rank: int, n: int, inside_rank: int = 0) -> PassRows:
    """The rows of rank ``rank`` in n chunks, from the counts that ranks exchanged.

    inside_rank: its place among the ranks that share its experts. n divides the bins of ``counts``.
    """
    own = slice(inside_rank * sizes.num_across, (inside_rank + 1) * sizes.num_across)
    counts = counts.joined(n)
    send, recv = counts.send.clone(), counts.recv.clone()
    home = [rows + sizes.has_drops for rows in send.sum((1, 2)).tolist()]
    local = [0] * n
    if sizes.bypass_local:
        local = send[:, rank].sum(1).tolist()
        send[:, rank] = 0
        recv[:, rank] = 0
    extent = ChunkRows(
        send=tuple(send.sum((1, 2)).tolist()),
        received=tuple(recv.sum((1, 2)).tolist()),
        local=tuple(local),
        home=tuple(home),
        regrouped=tuple((recv.sum(2) > 0).sum(1).gt(1).tolist()),
        arrived=tuple(recv[:, own].sum((1, 2)).tolist()) if sizes.inside > 1 else None,
        gathered=tuple(recv.sum((1, 2)).tolist()) if sizes.inside > 1 else None,
        inside=sizes.inside,
    )
    return PassRows(
        extent=extent,
        received=sum(extent.received),
        local=sum(local),
        sent=sum(extent.send),
        exact=True,
    )


def worst_rows(sizes: LayerSizes, num_tokens: int, n: int, bins: int, slot_rows: int) -> PassRows:
    """The most rows that any routing brings a rank, where no rank has more than ``num_tokens`` tokens.

    slot_rows: the rows of a slot; chunks are cut finer until none brings more, down to the ``bins``.
    """
    sources = sizes.num_ranks - 1 if sizes.bypass_local else sizes.num_ranks
    own = math.ceil(num_tokens / n) * sizes.top_k
    cuts = n
    while bins % (2 * cuts) == 0:
        cuts *= 2
    finest = math.ceil(num_tokens / cuts) * sizes.top_k
    received = min(sources * own, max(slot_rows, sources * finest))
    local = own if sizes.bypass_local else 0
    # A skewed batch of one or two chunks is cut into more, which use every slot of a ring.
    chunks = max(n, 3) if sources else n
    extent = ChunkRows(
        send=(own * sizes.travels,) * chunks,
        received=(received,) * chunks,
        local=(local,) * chunks,
        home=(own + sizes.has_drops,) * chunks,
        regrouped=(sources > 1,) * chunks,
        arrived=(min(received, sizes.num_across * own),) * chunks if sizes.inside > 1 else None,
        gathered=(received,) * chunks if sizes.inside > 1 else None,
        inside=sizes.inside,
    )
    slots = num_tokens * sizes.top_k
    return PassRows(
        extent=extent,
        received=sources * slots,
        local=slots if sizes.bypass_local else 0,
        sent=slots * sizes.travels,
        exact=False,
    )
