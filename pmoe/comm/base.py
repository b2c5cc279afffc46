"""What carries rows between ranks: the abstract Dispatch and Combine, the flat one, and what they count."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.ranks import Ranks
from pmoe.comm.standing import collectives

RowCounts = Sequence[int]
"""Of the rows for each rank, or from each; or the numbers of `Exchange.relay_counts` for them."""


@dataclass(kw_only=True)
class Traffic:
    """Bytes that this rank sent to other ranks, by what they were. Rows that stay are not counted.

    rows: token rows, between nodes and inside them alike; inside: those of them, and of scalars, that did not
    leave the node, where the ranks' nodes are known.
    """

    counts: int = 0
    rows: int = 0
    scalars: int = 0
    inside: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.counts + self.rows + self.scalars

    def add(self, like: Tensor, num_rows: int, *, inside: bool = False) -> None:
        """Counts ``num_rows`` rows (N, M), or scalars (N,), of the width and type of ``like``."""
        sent = num_rows * like.element_size()
        if like.dim() == 1:
            self.scalars += sent
        else:
            sent *= like.shape[1]
            self.rows += sent
        self.inside += sent * inside


class Exchange(abc.ABC):
    """An irregular all-to-all over ranks. Subclass `Dispatch` or `Combine`, which are told apart only by the
    direction that a layer uses them for.

    Every rank must call each method the same number of times in the same order; numbers of rows may be zero.
    """

    ranks: Ranks
    traffic: Traffic

    in_steps = False
    """Whether exchange waits for one collective before it issues the next: the CPU runs it in a thread
    then."""

    def bind(self, ranks: Ranks, traffic: Traffic) -> None:
        """Called once, when the layer is built, on every rank: the place to make process groups."""
        self.ranks, self.traffic = ranks, traffic

    def relay_counts(self, send_FW: Tensor, recv_FW: Tensor) -> Tensor | None:
        """What this rank must know of other ranks' rows to carry them a part of the way: (F, X) int64, which
        adds up over bins as rows do; None where it needs to know nothing. A collective, called behind the
        exchange of counts, before the host looks at any.

        send_FW, recv_FW: int64 on the rows' device: rows of each bin that this rank has for each rank, and
        that each rank has for it.
        """
        return None

    @abc.abstractmethod
    def exchange(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts = ()
    ) -> dist.Work | None:
        """Sends send_rows[r] consecutive rows of ``rows`` to rank r and receives recv_rows[r] from it into
        ``out``, in order of rank. Both are contiguous, (N,) or (N, M), of any dtype. relayed: the X numbers
        of `relay_counts` for these rows. Returns a Work whose wait() ends it, or None where it has ended.
        """


class Dispatch(Exchange):
    """Carries rows to the ranks of their experts: the tokens in forward, the gradients of their results in
    backward."""


class Combine(Exchange):
    """Carries results back to the ranks of their tokens, and in backward the gradients of what was
    dispatched."""


# ---- flat: exactly the routed rows travel, each straight to its rank, in one irregular all-to-all


class FlatAllToAll(Dispatch, Combine):
    """Sends rows from each rank straight to each rank in one collective, either way.

    What a peer sends must be what this rank expects, or the process may abort: counts come from
    `pmoe.comm.counts`, never from a guess.
    """

    def exchange(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts = ()
    ) -> dist.Work | None:
        self.traffic.add(rows, rows.shape[0] - send_rows[self.ranks.rank])
        if self.ranks.group is None:
            out.copy_(rows)
            return None
        return all_to_all(rows, send_rows, out, recv_rows, self.ranks.group)


def all_to_all(
    rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, group: dist.ProcessGroup
) -> dist.Work:
    """Starts one irregular all-to-all; float8 rows travel as bytes, for not every backend knows them."""
    if rows.is_floating_point() and rows.element_size() == 1:
        rows, out = rows.view(torch.uint8), out.view(torch.uint8)
    collectives.begun += 1
    work: dist.Work = dist.all_to_all_single(
        out, rows, list(recv_rows), list(send_rows), group=group, async_op=True
    )
    return work
