"""Base class of both hierarchical all-to-alls: steps inside a node and across nodes, and row orders."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from pmoe.comm.base import Combine, Dispatch, RowCounts, Traffic, all_to_all
from pmoe.comm.ranks import Ranks, wait_for
from pmoe.comm.topology import NodeGroups, Nodes, Topology, connect, find_topology


class HierarchicalExchange(Dispatch, Combine):
    """An irregular all-to-all in several collectives, which sends rows by way of other ranks of a node.

    The result equals that of `pmoe.comm.base.FlatAllToAll`, bit by bit. If all ranks are on one node, or each
    is on a node of its own, there is one level only, and one flat collective does all.

    - It has process groups of its own, so another thread may use the layer's group at the same time.
    - Between steps, rows are in memory that torch allocates: up to two copies of the rows that a rank relays.
    - `relay_counts` must get the counts of the rows that will travel.

    nodes: which ranks share a node, see `pmoe.comm.topology.Nodes`.
    """

    in_steps = True
    topology: Topology

    def __init__(self, nodes: Nodes = None) -> None:
        self._nodes = nodes

    def bind(self, ranks: Ranks, traffic: Traffic) -> None:
        """Finds the nodes of the ranks and makes the process groups. A collective.

        Raises ValueError or TypeError on every rank, before any group is made.
        """
        super().bind(ranks, traffic)
        self.topology = find_topology(ranks, self._nodes)
        self.check_topology()
        if ranks.size > 1:
            self.connect()

    def check_topology(self) -> None:
        """Raises ValueError if the exchange cannot work with these nodes."""

    def connect(self) -> NodeGroups:
        """Returns the process groups; makes them at the first call, which is a collective.

        They are looked up each time and not stored here, so that layers can be copied and pickled. An
        unpickled layer makes its groups at its first exchange of counts.
        """
        assert self.ranks.group is not None
        return connect(self.ranks.group, self.topology)

    def relay_counts(self, send_FW: Tensor, recv_FW: Tensor) -> Tensor | None:
        if self.ranks.size == 1:
            return None
        self.connect()
        return None if self.topology.is_level else self.relay(send_FW, recv_FW)

    @abc.abstractmethod
    def relay(self, send_FW: Tensor, recv_FW: Tensor) -> Tensor:
        """Returns the numbers of `relay_counts`, (F, X). It is called only if there are two levels."""

    @abc.abstractmethod
    def carry(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts
    ) -> None:
        """Does the work of `exchange`. It is called only if there are two levels."""

    def exchange(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts = ()
    ) -> None:
        """Exchanges rows (N,) or (N, M) as `Exchange.exchange` does, and returns when all steps have ended.

        On CUDA the current stream waits for the steps, and the host does not.
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
        """Returns the ranks of this rank's process group, across nodes or inside its node, in group order."""
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

        send_rows, recv_rows: a number for each rank of `peers`.
        out: takes the received rows; None allocates memory for them.
        are_counts: whether ``rows`` holds counts. The caller then adds them to the traffic.
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
        """Runs the last step, after which ``out`` holds the rows from all ranks, in order of rank.

        send_rows: a number for each rank of `peers`.
        recv_rows: a number for each of the W ranks.
        sources: the W ranks, in the order in which their rows arrive. Each peer delivers the rows of equally
            many consecutive ranks of this list.
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
    """Returns ``rows``, which are consecutive blocks, with the blocks in another order.

    sizes: the number of rows of each block.
    order: the number of each block, in the new order.
    out: takes the result; None allocates memory for it.

    Makes one copy. If nothing moves it makes none and returns ``rows``; ``out`` is not written then.

    Example: rows a bb c with sizes (1, 2, 1) in order (1, 0, 2) -> bb a c.
    """
    if _nothing_moves(sizes, order):
        return rows
    blocks = rows.split_with_sizes(list(sizes))
    return torch.cat([blocks[block] for block in order if sizes[block]], out=out)


def _nothing_moves(sizes: Sequence[int], order: Sequence[int]) -> bool:
    """Returns whether all rows stay where they are. Empty blocks may change places."""
    filled = [block for block in order if sizes[block]]
    return filled == sorted(filled)
