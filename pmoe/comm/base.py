"""Interfaces of the all-to-alls that send rows (`Dispatch`, `Combine`), and the flat all-to-all."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.group_record import collectives
from pmoe.comm.ranks import Ranks

RowCounts = Sequence[int]
"""Numbers of rows, one for each rank: how many rows go to the rank, or how many come from it.

A rank that passes on rows for other ranks has one more list, with the numbers of these rows
(`Exchange.relay_counts`).
"""


@dataclass(kw_only=True)
class Traffic:
    """Bytes that this rank has sent to other ranks, by kind. Rows that stay on the rank are not counted.

    counts: bytes of row counts, and of the numbers that ranks reduce together with the counts.
    rows: bytes of token rows, between nodes and inside a node.
    scalars: bytes of tensors with one number for each row, such as routing weights.
    weights: bytes of the weights of busy experts' copies, and of the gradients of these weights.
    inside: the bytes in ``rows`` and ``scalars`` that went to ranks of this rank's node. Only hierarchical
        all-to-alls and the collectives of sharded experts count these bytes. Flat all-to-alls do not know the
        nodes.
    """

    counts: int = 0
    rows: int = 0
    scalars: int = 0
    weights: int = 0
    inside: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds: counts + rows + scalars + weights.

        ``inside`` is not added, because its bytes are counted in ``rows`` and ``scalars`` already.
        """
        return self.counts + self.rows + self.scalars + self.weights

    def add(self, like: Tensor, num_rows: int, *, inside: bool = False) -> None:
        """Adds the bytes of ``num_rows`` rows that were sent to other ranks.

        Args:
            like: a tensor of the rows' dtype and width: (N, M) for N token rows of M columns, or (N,) for
                scalars.
            num_rows: number of rows that were sent to other ranks.
            inside: whether all of these ranks are on this rank's node.
        """
        sent = num_rows * like.element_size()
        if like.dim() == 1:
            self.scalars += sent
        else:
            sent *= like.shape[1]
            self.rows += sent
        self.inside += sent * inside


class Exchange(abc.ABC):
    """An irregular all-to-all: the number of rows from one rank to another may differ, and may be 0.

    Subclass `Dispatch` for rows that go to experts, `Combine` for results that come back, or both. The two
    classes have the same methods.

    Methods start collectives, so all ranks must call the same methods in the same order.

    ranks: the ranks that exchange rows. `bind` sets them.
    traffic: the counter of sent bytes. `bind` sets it.
    """

    ranks: Ranks
    traffic: Traffic

    in_steps = False
    """Whether `exchange` runs several collectives, one after the other.

    If True, the engine calls `relay_counts` in each call of the layer. On the CPU it runs `exchange` in a
    thread of its own.
    """

    def bind(self, ranks: Ranks, traffic: Traffic) -> None:
        """Stores the ranks among which rows are exchanged, and the counter of sent bytes.

        The constructor of the layer calls this method. The method must not communicate, because ranks may
        have different exchanges until the first call compares them. Make process groups in `connect`.

        ranks: the ranks that exchange rows.
        traffic: where `exchange` counts the bytes that it sends.
        """
        self.ranks = ranks
        self.traffic = traffic

    def connect(self) -> object:
        """Makes the process groups that an exchange needs for itself. A collective; here it does nothing.

        The layer calls this method each time that its ranks have compared their options, the first time in
        its first call. So a second call of the method must be cheap. The layer ignores the result.
        """
        return None

    def relay_counts(self, send_FW: Tensor, recv_FW: Tensor) -> Tensor | None:
        """Returns how many rows this rank will pass on for other ranks, (F, X) int64; None if there are none.

        Override this method in an exchange that sends rows through other ranks. These ranks must know how
        many rows to expect.

        Rows are counted in F bins, which are equal ranges of a rank's tokens. For each bin the result has X
        numbers; the subclass chooses X and the meaning of the numbers. A chunk (micro-batch) consists of
        neighbouring bins. The layer adds the numbers of these bins, and passes the X sums to `exchange` as
        the argument ``relayed``.

        A collective. All tensors are on the rows' device, because the host has not read any count yet.

        Args:
            send_FW: (F, W) int64, for each bin the number of rows that this rank has for each of the W ranks
                among which rows are exchanged.
            recv_FW: (F, W) int64, for each bin the number of rows that each of these ranks has for this rank.
        """
        return None

    @abc.abstractmethod
    def exchange(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts = ()
    ) -> dist.Work | None:
        """Sends each rank a block of ``rows``. Writes the blocks that arrive from all ranks into ``out``.

        Args:
            rows: contiguous (N,) or (N, M), of any dtype: N rows of M columns. The block for rank 0 comes
                first, then the block for rank 1, and so on.
            send_rows: send_rows[r] is the number of rows for rank r.
            out: contiguous, of the width and dtype of ``rows``. Takes the received blocks in order of rank.
            recv_rows: recv_rows[r] is the number of rows from rank r.
            relayed: the numbers that `relay_counts` returned for these rows; () if it returned None.

        Returns a Work; ``out`` may be read after the Work's wait(). Returns None if the exchange has ended
        already.
        """


class Dispatch(Exchange):
    """Sends rows to the ranks of their experts.

    In forward the rows are tokens. In backward they are rows of the gradient of the layer's output.
    """


class Combine(Exchange):
    """Sends rows from the ranks of the experts back to the ranks of their tokens.

    In forward the rows are the experts' results. In backward they are gradients of the rows that were
    dispatched in forward.
    """


# ---- flat: one irregular all-to-all sends each routed row straight to its rank, without padding


class FlatAllToAll(Dispatch, Combine):
    """Sends all rows straight to their ranks in one collective. It serves as dispatch and as combine.

    ``recv_rows`` must have exactly the numbers of rows that the other ranks send; otherwise the backend may
    abort the process. The layer takes these numbers from the exchange of row counts (`pmoe.comm.counts`).
    """

    def exchange(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts = ()
    ) -> dist.Work | None:
        self.traffic.add(rows, rows.shape[0] - send_rows[self.ranks.rank])
        if self.ranks.group is None:
            out.copy_(rows)
            return None
        return all_to_all(rows, send_rows, out, recv_rows, self.ranks.group)


@functools.cache
def _asynchronous() -> dist.AllToAllOptions:
    """Returns the options of an all-to-all that the caller awaits later.

    They are no constant, because a torch that was built without torch.distributed lacks their class.
    """
    options = dist.AllToAllOptions()
    options.asyncOp = True
    return options


def all_to_all(
    rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, group: dist.ProcessGroup
) -> dist.Work:
    """Starts one irregular all-to-all and returns its Work. After the Work's wait(), ``out`` may be read.

    rows: contiguous (N,) or (N, M): N rows of M columns. The block for rank 0 of the group comes first, then
        the block for rank 1, and so on. float8 rows are sent as bytes, because not every backend knows their
        dtype.
    send_rows, recv_rows: the number of rows for each rank of the group, and from each rank.
    out: contiguous, of the width and dtype of ``rows``. Takes the received blocks in order of rank.
    group: the process group.
    """
    if rows.is_floating_point() and rows.element_size() == 1:
        rows = rows.view(torch.uint8)
        out = out.view(torch.uint8)
    collectives.begun += 1
    # The method of the group, without `dist.all_to_all_single` around it. That function checks the types of
    # its arguments again in Python, which takes a third of the host's time of the call. Before torch 2.13
    # the method's name was `alltoall_base`.
    has_name = hasattr(group, "all_to_all_single")
    start: Callable[..., dist.Work] = group.all_to_all_single if has_name else group.alltoall_base
    return start(out, rows, recv_rows, send_rows, _asynchronous())
