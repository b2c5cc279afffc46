"""The base class of the two hierarchical all-to-alls, which send rows in steps inside and across nodes."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from pmoe.comm.base import Combine, Dispatch, RowCounts, Traffic, all_to_all
from pmoe.comm.failures import wait_for
from pmoe.comm.ranks import Ranks
from pmoe.comm.topology import NodeGroups, Nodes, Topology, connect, own_topology


class HierarchicalExchange(Dispatch, Combine):
    """An irregular all-to-all in several collectives, which sends rows through other ranks.

    The result equals that of the flat all-to-all (`pmoe.comm.base.FlatAllToAll`), bit by bit. If all ranks
    are on one node, or each rank is on a node of its own, a single flat collective sends all rows.

    - The exchange has process groups of its own, so another thread may use the layer's group at the same
      time.
    - Between the collectives, torch allocates memory for up to two copies of the rows that a rank passes on.
    - `exchange` needs the numbers that `relay_counts` returned for the same rows.

    nodes: which ranks share a node (`pmoe.comm.topology.Nodes`): the number of ranks on each node, an id of
        its node for each rank, or None for the number in LOCAL_WORLD_SIZE. `bind` replaces the attribute by a
        text, which the ranks of a layer compare.
    topology: the nodes of the ranks. `bind` sets it.
    """

    in_steps = True
    topology: Topology
    nodes: str

    def __init__(self, nodes: Nodes = None) -> None:
        self._nodes = nodes

    def bind(self, ranks: Ranks, traffic: Traffic) -> None:
        """Finds the nodes of the ranks, from this rank's argument ``nodes``.

        traffic: the counter of sent bytes.

        Raises ValueError or TypeError if ``nodes`` is invalid or the exchange cannot work with these nodes.
        """
        super().bind(ranks, traffic)
        self.topology = own_topology(ranks, self._nodes)
        self.nodes = self.topology.origin
        self.check_topology()

    def check_topology(self) -> None:
        """Raises ValueError if the exchange cannot work with the nodes of its ranks.

        Subclasses override it.
        """

    def connect(self) -> NodeGroups:
        """Returns this rank's process groups inside its node and across nodes.

        The first call makes the groups, and is a collective. The groups are not stored in this object, so
        that layers can be copied and pickled.

        The argument ``nodes`` must be the same on all ranks. The layer has compared it between ranks.
        """
        group = self.ranks.group
        return NodeGroups(None, None) if group is None else connect(group, self.topology)

    def relay_counts(self, send_FW: Tensor, recv_FW: Tensor) -> Tensor | None:
        if self.ranks.size == 1:
            return None
        self.connect()
        return None if self.topology.is_level else self.relay(send_FW, recv_FW)

    @abc.abstractmethod
    def relay(self, send_FW: Tensor, recv_FW: Tensor) -> Tensor:
        """Returns how many rows this rank will pass on for other ranks, (F, X) int64. A collective.

        The method is called only if there are several nodes and some node has several ranks. Rows are counted
        in F bins, equal ranges of a rank's tokens. The subclass decides on the X numbers of a bin.
        `relay_counts` returns these numbers, or None if this rank passes on no rows.

        send_FW, recv_FW: (F, W) int64, for each bin the numbers of rows to and from each of W ranks.
        """

    @abc.abstractmethod
    def carry(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts
    ) -> None:
        """Exchanges rows in several collectives. `exchange` calls this method if it needs several.

        Several are needed if there are several nodes and some node has several ranks. `exchange` passes on
        its own arguments:

        rows, out: contiguous (N,) or (N, M): N rows of M columns. ``rows`` has a block for each rank, and
            ``out`` takes a block from each rank, in order of rank.
        send_rows, recv_rows: the number of rows for each rank, and from each rank.
        relayed: X numbers for the chunk: the sums, over the bins of the chunk, of the numbers that `relay`
            has returned.
        """

    def exchange(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts = ()
    ) -> None:
        """Sends each rank a block of ``rows``, in several collectives, and receives a block from each rank.

        The method returns after the last collective. On a GPU the current stream waits for the collectives,
        and the host does not.

        rows: contiguous (N,) or (N, M): N rows of M columns, in blocks for the ranks, in order of rank.
        send_rows: send_rows[r] is the number of rows for rank r.
        out: contiguous, of the width and dtype of ``rows``. Takes the received blocks in order of rank.
        recv_rows: recv_rows[r] is the number of rows from rank r.
        relayed: the numbers that `relay_counts` returned for these rows; () if it returned None.
        """
        if rows.is_floating_point() and rows.element_size() == 1:
            rows = rows.view(torch.uint8)  # not every operator knows float8
            out = out.view(torch.uint8)
        if self.ranks.size == 1:
            out.copy_(rows)
        elif self.topology.is_level:
            across = self.topology.max_local == 1
            peers = self.peers(across)
            sent = [send_rows[rank] for rank in peers]
            self.last_step(in_order(rows, send_rows, peers), sent, out, recv_rows, peers, across=across)
        else:
            self.carry(rows, send_rows, out, recv_rows, relayed)

    def peers(self, across: bool) -> tuple[int, ...]:
        """Returns the ranks of one of this rank's two process groups, in group order.

        across: True for the group across nodes, False for the group inside the node.
        """
        return (self.topology.across if across else self.topology.inside)(self.ranks.rank)

    def step(
        self,
        rows: Tensor,
        send_rows: RowCounts,
        recv_rows: RowCounts,
        out: Tensor | None = None,
        *,
        across: bool,
        are_counts: bool = False,
    ) -> Tensor:
        """Runs one collective, inside the node or across nodes, and returns the received rows.

        rows: (N,) or (N, M): N rows of M columns, in blocks for the ranks of the process group, in group
            order.
        send_rows, recv_rows: the number of rows for each rank of the process group, and from each.
        out: takes the received rows, in group order; None allocates memory for them.
        across: True for the process group across nodes, False for the group inside the node.
        are_counts: whether ``rows`` holds row counts, whose bytes the caller counts.
        """
        if not are_counts:
            own = self.peers(across).index(self.ranks.rank)
            self.traffic.add(rows, sum(send_rows) - send_rows[own], inside=not across)
        if out is None:
            out = rows.new_empty((sum(recv_rows), *rows.shape[1:]))
        groups = self.connect()
        group = groups.across if across else groups.inside
        assert group is not None
        work = all_to_all(rows, send_rows, out, recv_rows, group)
        wait_for(work, self.ranks.group, rows.is_cuda)  # the layer's group: failures are published for it
        return out

    def last_step(
        self,
        rows: Tensor,
        send_rows: RowCounts,
        out: Tensor,
        recv_rows: RowCounts,
        sources: Sequence[int],
        *,
        across: bool,
    ) -> None:
        """Runs the last collective of an exchange, and puts received rows into ``out`` in order of rank.

        Rows arrive in the order of ``sources`` and are copied into ``out`` in order of rank. If both orders
        are the same, the collective writes straight into ``out``.

        rows: (N,) or (N, M): N rows of M columns, in blocks for the ranks of the process group, in group
            order.
        send_rows: the number of rows for each rank of the process group.
        recv_rows: the number of rows that come from each of the W ranks among which rows are exchanged.
        sources: the W ranks, in the order in which their rows arrive. The first of the process group's G
            ranks sends the rows of the first W / G ranks in this list, and so on.
        across: True for the process group across nodes, False for the group inside the node.
        """
        sizes = [recv_rows[rank] for rank in sources]
        order = sorted(range(len(sources)), key=sources.__getitem__)
        shares = len(sources) // len(self.peers(across))
        received = [sum(sizes[start : start + shares]) for start in range(0, len(sizes), shares)]
        straight = _nothing_moves(sizes, order)
        arrived = self.step(rows, send_rows, received, out if straight else None, across=across)
        if not straight:
            in_order(arrived, sizes, order, out)


def in_order(rows: Tensor, sizes: Sequence[int], order: Sequence[int], out: Tensor | None = None) -> Tensor:
    """Returns ``rows`` with its blocks in a new order. A block is a range of consecutive rows.

    sizes: the number of rows of each block.
    order: the indices of the blocks, in the new order.
    out: takes the result; None allocates memory for it.

    The rows are copied once. But if the new order moves no row, the result is ``rows`` itself, and ``out`` is
    not written.

    Example: rows a bb c with sizes (1, 2, 1) in order (1, 0, 2) -> bb a c.
    """
    if _nothing_moves(sizes, order):
        return rows
    blocks = rows.split_with_sizes(list(sizes))
    return torch.cat([blocks[block] for block in order if sizes[block]], out=out)


def _nothing_moves(sizes: Sequence[int], order: Sequence[int]) -> bool:
    """Returns whether no row moves if blocks of these sizes are put in this order.

    The result is also True if only empty blocks move.
    """
    filled = [block for block in order if sizes[block]]
    return filled == sorted(filled)
