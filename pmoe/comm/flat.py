"""The flat irregular all-to-all: exactly the routed rows travel, each straight to its rank.

Letters: N rows, W ranks, M columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from pmoe.comm.ranks import Ranks


@dataclass(kw_only=True)
class Traffic:
    """Bytes that this rank sent to other ranks, by what they were. Rows that stay are not counted."""

    counts: int = 0
    rows: int = 0
    scalars: int = 0

    @property
    def total(self) -> int:
        return self.counts + self.rows + self.scalars


@dataclass(kw_only=True)
class FlatAllToAll:
    """Sends rows from each rank to each rank of ``ranks``, counting bytes into ``traffic``.

    Every rank must call it the same number of times in the same order; numbers of rows may be zero.
    """

    ranks: Ranks
    traffic: Traffic = field(default_factory=Traffic)

    def exchange(
        self, rows: Tensor, send_rows: Sequence[int], out: Tensor, recv_rows: Sequence[int]
    ) -> dist.Work | None:
        """Starts sending send_rows[r] consecutive rows of ``rows`` to rank r and receiving recv_rows[r]
        from it into ``out``. Both are contiguous, (N,) or (N, M). Returns a Work whose wait() ends it.

        What a peer sends must be what this rank expects, or the process may abort: counts come from
        `pmoe.comm.counts`, never from a guess.
        """
        sent = (rows.shape[0] - send_rows[self.ranks.rank]) * rows[0:1].numel() * rows.element_size()
        if rows.dim() == 1:
            self.traffic.scalars += sent
        else:
            self.traffic.rows += sent
        work: dist.Work | None = dist.all_to_all_single(
            out, rows, list(recv_rows), list(send_rows), group=self.ranks.group, async_op=True
        )
        return work
