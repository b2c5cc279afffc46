"""The common part of both hierarchical all-to-alls: steps inside and across nodes, and row orders."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from pmoe.comm.base import Combine, Dispatch, RowCounts, Traffic, all_to_all
from pmoe.comm.ranks import Ranks, wait_for
from pmoe.comm.topology import NodeGroups, Nodes, Topology, connect, find_topology


class HierarchicalExchange(Dispatch, Combine):
    """An irregular all-to-all whose rows go by way of other ranks of a node, in several collectives.

    The result is that of `pmoe.comm.base`, bit by bit. Where all ranks are on one node, or each on its own,
    one flat collective remains. It has process groups of its own, so another thread may use the layer's group
    meanwhile. Rows wait between steps in memory that torch allocates, up to two copies of what a rank relays.
    Counts in `relay_counts` must be those of the rows that will travel.
    """

    in_steps = True
    topology: Topology

    def __init__(self, nodes: Nodes = None) -> None:
        self._nodes = nodes

    def bind(self, ranks: Ranks, traffic: Traffic) -> None:
        """A collective. Raises ValueError or TypeError on every rank, before any group is made."""
        super().bind(ranks, traffic)
        self.topology = find_topology(ranks, self._nodes)
        self.check_topology()
        if ranks.size > 1:
            self.connect()

    def check_topology(self) -> None:
        """Raises ValueError for nodes that it cannot serve."""

    def connect(self) -> NodeGroups:
        """The process groups, looked up and not held, so that layers can be copied and pickled.

        An unpickled layer makes its own at its first exchange of counts.
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
        """`relay_counts` where there are two levels."""

    @abc.abstractmethod
    def carry(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts
    ) -> None:
        """`exchange` where there are two levels."""

    def exchange(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts = ()
    ) -> None:
        """Ends before it returns; on CUDA the current stream waits, not the host."""
        if rows.is_floating_point() and rows.element_size() == 1:
            rows, out = rows.view(torch.uint8), out.view(torch.uint8)  # not everything knows float8
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
        """The ranks of this one's group across nodes, or inside its node."""
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
        """One collective, inside the node or across nodes: the received rows, in ``out`` if it is given.
        are_counts: they are no rows, whose traffic is counted here."""
        if not are_counts:
            own = self.peers(across).index(self.ranks.rank)
            self.traffic.add(rows, sum(send_rows) - send_rows[own], inside=not across)
        if out is None:
            out = rows.new_empty((sum(recv_rows), *rows.shape[1:]))
        groups = self.connect()
        group = groups.across if across else groups.inside
        assert group is not None
        work = all_to_all(rows, send_rows, out, recv_rows, group)
        wait_for(work, self.ranks.group, rows.is_cuda)  # which is where failures are told
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
        """A step that brings rows from all ranks, in the order of ``sources``.

        They go to ``out`` in order of rank. recv_rows: from each rank.
        """
        sizes = [recv_rows[rank] for rank in sources]
        order = sorted(range(len(sources)), key=sources.__getitem__)
        shares = len(sources) // len(self.peers(across))
        received = [sum(sizes[start : start + shares]) for start in range(0, len(sizes), shares)]
        straight = _nothing_moves(sizes, order)
        got = self.step(rows, send_rows, received, out if straight else None, across=across)
        if not straight:
            in_order(got, sizes, order, out)


def in_order(rows: Tensor, sizes: Sequence[int], order: Sequence[int], out: Tensor | None = None) -> Tensor:
    """Blocks of rows, one of each of ``sizes``, in another order, which names each once. The very same tensor
    where nothing moves; else one copy, into ``out`` where it is given, whatever the number of blocks.

    Example: rows a bb c with sizes (1, 2, 1) in order (1, 0, 2) -> bb a c.
    """
    if _nothing_moves(sizes, order):
        return rows
    blocks = rows.split_with_sizes(list(sizes))
    return torch.cat([blocks[block] for block in order if sizes[block]], out=out)


def _nothing_moves(sizes: Sequence[int], order: Sequence[int]) -> bool:
    """Empty blocks may change places."""
    filled = [block for block in order if sizes[block]]
    return filled == sorted(filled)
