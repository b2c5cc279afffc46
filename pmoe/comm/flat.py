"""The flat irregular all-to-all: exactly the routed rows travel, each straight to its rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.base import Combine, Dispatch, Exchange


class FlatAllToAll(Exchange):
    """Sends rows from each rank straight to each rank in one collective.

    What a peer sends must be what this rank expects, or the process may abort: counts come from
    `pmoe.comm.counts`, never from a guess.
    """

    def exchange(
        self,
        rows: Tensor,
        send_rows: Sequence[int],
        out: Tensor,
        recv_rows: Sequence[int],
        relayed: Sequence[int] = (),
    ) -> dist.Work | None:
        self.traffic.add(rows, rows.shape[0] - send_rows[self.ranks.rank])
        if self.ranks.group is None:
            out.copy_(rows)
            return None
        return all_to_all(rows, send_rows, out, recv_rows, self.ranks.group)


class FlatDispatch(FlatAllToAll, Dispatch):
    """`pmoe.Dispatch` by one flat all-to-all."""


class FlatCombine(FlatAllToAll, Combine):
    """`pmoe.Combine` by one flat all-to-all."""


def all_to_all(
    rows: Tensor, send_rows: Sequence[int], out: Tensor, recv_rows: Sequence[int], group: dist.ProcessGroup
) -> dist.Work | None:
    """Starts one irregular all-to-all; float8 rows travel as bytes, for not every backend knows them."""
    if rows.is_floating_point() and rows.element_size() == 1:
        rows, out = rows.view(torch.uint8), out.view(torch.uint8)
    work: dist.Work | None = dist.all_to_all_single(
        out, rows, list(recv_rows), list(send_rows), group=group, async_op=True
    )
    return work
