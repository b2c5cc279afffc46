"""1D hierarchical all-to-all: each node gathers its rows at a leader, and the leaders exchange them.

This is HetuMoE's hierarchical all-to-all (Nie et al., arXiv 2203.14685), which FSMoE (section 3.1) calls 1DH.
All rows from one node to another are in a single message. The costs: rows are sent two more times inside a
node, and the leader needs memory for the rows of its whole node.

Rank (a, i) is the i-th rank of node a, and (a, 0) is the leader of node a:

    step 1, inside:  (a, i) -> (a, 0)            all rows
    step 2, across:  (a, 0) -> (b, 0)            rows for each (b, k), sorted by k, then by i
    step 3, inside:  (b, 0) -> (b, k)            rows for (b, k), sorted by source rank
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pmoe.comm.base import RowCounts
from pmoe.comm.hierarchical import HierarchicalExchange, in_order


class HierarchicalAllToAll1D(HierarchicalExchange):
    """Sends rows in three steps: to their node's leader, to the destination's leader, to the destination.

    The leader of a node, and of its ranks, is the node's first rank. Nodes may have different numbers of
    ranks.

    nodes: which ranks share a node: the number of ranks on each node, an id of its node for each rank, or
        None for the number in LOCAL_WORLD_SIZE.
    """

    def relay(self, send_FW: Tensor, recv_FW: Tensor) -> Tensor:
        """Gathers the row counts of the node's L ranks at its leader, which passes on all of their rows.

        send_FW, recv_FW: (F, W) int64, for each of F bins (equal ranges of a rank's tokens) the numbers of
            rows to and from each of W ranks.

        Returns (F, L * 2 * W) on the leader. Its columns are, for the ranks of the node one after another:

            rows of rank 0 for W ranks | rows of W ranks for rank 0 | rows of rank 1 for W ranks | ...

        Here the ranks are numbered in the node, and rank 0 is the leader. Ranks that are not leaders pass on
        nothing, and return (F, 0).
        """
        num_bins = send_FW.shape[0]
        counts = torch.cat([send_FW, recv_FW], dim=1)
        if not self._leads:
            self.traffic.counts += counts.numel() * counts.element_size()
        received = [num_bins * self._leads] * self._local
        gathered = self.step(counts, self._to_leader(num_bins), received, across=False, are_counts=True)
        return gathered.view(-1, num_bins, counts.shape[1]).transpose(0, 1).reshape(num_bins, -1)

    @property
    def _leads(self) -> bool:
        """Whether this rank is the leader of its node, which is the first rank of the node."""
        return self.topology.place(self.ranks.rank) == 0

    @property
    def _local(self) -> int:
        """L, the number of ranks in this rank's node."""
        return len(self.topology.inside(self.ranks.rank))

    def _to_leader(self, rows: int) -> list[int]:
        """Returns a number of rows for each rank of this node: ``rows`` for the leader, else 0."""
        return [rows] + [0] * (self._local - 1)

    def carry(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts
    ) -> None:
        size = self.ranks.size
        tables = [relayed[start : start + size] for start in range(0, len(relayed), size)]
        to_rank = tables[::2]  # for each rank of a leader's node; else empty
        from_rank = tables[1::2]
        gathered = [sum(table) for table in to_rank] if self._leads else [0] * self._local
        rows = self.step(rows, self._to_leader(sum(send_rows)), gathered, across=False)
        if self._leads:
            rows = self._among_leaders(rows, to_rank, from_rank)
        else:
            # This rank's group across nodes has no rows to exchange. It takes part all the same, because
            # every rank must issue the same number of collectives.
            nothing = [0] * len(self.peers(across=True))
            rows = self.step(rows, nothing, nothing, across=True)
        scattered = [sum(table) for table in from_rank] if self._leads else [0] * self._local
        self.step(rows, scattered, self._to_leader(sum(recv_rows)), out, across=False)

    def _among_leaders(
        self, rows: Tensor, to_rank: Sequence[Sequence[int]], from_rank: Sequence[Sequence[int]]
    ) -> Tensor:
        """Sends the rows of this leader's node to the leaders of their destinations' nodes (step 2).

        rows: the rows of the node, sorted by source rank, then by destination rank.
        to_rank: to_rank[i][r] is the number of rows that the i-th rank of the node has for rank r.
        from_rank: from_rank[k][r] is the number of rows that rank r has for the k-th rank of the node.

        Returns the rows for this node, sorted by destination rank in the node, then by source rank.
        """
        size = self.ranks.size
        places = range(len(to_rank))
        mates = [self.topology.inside(rank) for rank in self.peers(across=True)]

        sizes = [count for table in to_rank for count in table]
        rows = in_order(rows, sizes, [i * size + k for node in mates for k in node for i in places])
        sent = [sum(table[k] for table in to_rank for k in node) for node in mates]
        received = [sum(table[s] for table in from_rank for s in node) for node in mates]
        rows = self.step(rows, sent, received, across=True)

        blocks = [(k, source) for node in mates for k in places for source in node]
        sizes = [from_rank[k][source] for k, source in blocks]
        return in_order(rows, sizes, sorted(range(len(blocks)), key=blocks.__getitem__))
