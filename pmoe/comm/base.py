"""Interfaces of the exchanges that carry rows (`Dispatch`, `Combine`), and the flat all-to-all."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.group_record import collectives
from pmoe.comm.ranks import Ranks

RowCounts = Sequence[int]
"""Numbers of rows that go to each rank, or come from each; or the numbers of `Exchange.relay_counts`."""


@dataclass(kw_only=True)
class Traffic:
    """Bytes that this rank has sent to other ranks, by kind. Rows that stay on the rank are not counted.

    counts: row counts, and the numbers that ranks agree on with them.
    rows: token rows, those between nodes and those inside a node.
    scalars: tensors with one number for each row, such as routing weights.
    inside: the part of ``rows`` and ``scalars`` that did not leave the node. Only exchanges that know the
        nodes count it: hierarchical all-to-alls, and the collectives of sharded experts.
    """

    counts: int = 0
    rows: int = 0
    scalars: int = 0
    inside: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds: counts + rows + scalars. ``inside`` is part of the latter two."""
        return self.counts + self.rows + self.scalars

    def add(self, like: Tensor, num_rows: int, *, inside: bool = False) -> None:
        """Adds ``num_rows`` rows of the width and dtype of ``like``.

        Args:
            like: (N, M) for token rows, (N,) for scalars.
            num_rows: number of rows that were sent to other ranks.
            inside: whether they stayed inside the node.
        """
        sent = num_rows * like.element_size()
        if like.dim() == 1:
            self.scalars += sent
        else:
            sent *= like.shape[1]
            self.rows += sent
        self.inside += sent * inside


class Exchange(abc.ABC):
    """An irregular all-to-all: each rank sends each rank a number of rows, which may be zero.

    Subclass `Dispatch`, `Combine` or both. They have the same methods; the class says for which direction a
    layer may use the module.

    Every rank must call each method equally often and in the same order.
    """

    ranks: Ranks
    traffic: Traffic

    in_steps = False
    """Whether `exchange` waits for one collective before it starts the next.

    If it does, the engine runs it in a thread on the CPU, and each call of the layer uses `relay_counts`.
    """

    def bind(self, ranks: Ranks, traffic: Traffic) -> None:
        """Stores the layer's ranks and its byte counts. Subclasses make their process groups in it.

        It is called once on every rank, when the layer is built.
        """
        self.ranks = ranks
        self.traffic = traffic

    def relay_counts(self, send_FW: Tensor, recv_FW: Tensor) -> Tensor | None:
        """Returns the numbers of other ranks' rows that this rank passes on, (F, X) int64; None for none.

        An exchange in several steps sends rows by way of other ranks. Those must know how many rows to
        expect. X is up to the exchange. The numbers add up over bins as rows do, because the numbers of a
        chunk are the sums over its bins.

        A collective. It is called after the exchange of counts, before the host reads any count.

        Args:
            send_FW: (F, W) int64 on the rows' device, the rows of each bin that this rank has for each rank.
            recv_FW: (F, W) int64 on the rows' device, the rows of each bin that each rank has for this one.
        """
        return None

    @abc.abstractmethod
    def exchange(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts = ()
    ) -> dist.Work | None:
        """Sends a block of ``rows`` to every rank, and receives a block of ``out`` from every rank.

        Args:
            rows: contiguous (N,) or (N, M), of any dtype. The block for rank 0 comes first, then that for
                rank 1, and so on.
            send_rows: send_rows[r] is the number of rows for rank r.
            out: contiguous, of the same width and dtype. Blocks of received rows, in order of rank.
            recv_rows: recv_rows[r] is the number of rows from rank r.
            relayed: the X numbers of `relay_counts` for these rows.

        Returns a Work whose wait() ends the exchange, or None if it has ended already.
        """


class Dispatch(Exchange):
    """Carries rows to the ranks of their experts.

    In forward the rows are tokens. In backward they are gradients of the tokens' results.
    """


class Combine(Exchange):
    """Carries rows from the ranks of the experts back to the ranks of their tokens.

    In forward the rows are the experts' results. In backward they are gradients of the dispatched rows.
    """


# ---- flat: one irregular all-to-all sends each routed row straight to its rank, without padding


class FlatAllToAll(Dispatch, Combine):
    """Sends all rows straight to their ranks in one collective. It serves as dispatch and as combine.

    A rank must expect exactly the rows that its peers send; otherwise the backend may abort the process. So
    numbers of rows must come from the exchange of counts (`pmoe.comm.counts`).
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
    """Starts one irregular all-to-all, with the arguments of `Exchange.exchange`, and returns its Work.

    float8 rows travel as bytes, because not every backend knows their dtype.
    """
    if rows.is_floating_point() and rows.element_size() == 1:
        rows = rows.view(torch.uint8)
        out = out.view(torch.uint8)
    collectives.begun += 1
    work: dist.Work = dist.all_to_all_single(
        out, rows, list(recv_rows), list(send_rows), group=group, async_op=True
    )
    return work
