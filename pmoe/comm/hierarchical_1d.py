"""1D hierarchical all-to-all: each node gathers its rows at a leader, and the leaders exchange them.

It is HetuMoE's hierarchical all-to-all (Nie et al., arXiv 2203.14685), which FSMoE (section 3.1) calls 1DH.
Between two nodes there is one message, as large as it can be. The price is two more trips inside each node,
and memory on the leader for the rows of its whole node.

Node a has the ranks (a, i); its leader is (a, 0):

    step 1, inside:  (a, i) -> (a, 0)            all rows
    step 2, across:  (a, 0) -> (b, 0)            rows for each (b, k), by k, then by i
    step 3, inside:  (b, 0) -> (b, k)            rows for (b, k), by source
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pmoe.comm.base import RowCounts
from pmoe.comm.hierarchical import HierarchicalExchange, in_order


class HierarchicalAllToAll1D(HierarchicalExchange):
    """Sends all rows by way of the leader of their node and the leader of the destination's node.

    nodes: see `pmoe.comm.topology.Nodes`. They may have different numbers of ranks.
    """

    def relay(self, send_FW: Tensor, recv_FW: Tensor) -> Tensor:
        """Gathers the counts of the node's L ranks at the leader: (F, L * 2 * W) there, (F, 0) elsewhere.

        of rank (a, 0): W rows for each rank | W rows from each rank | of rank (a, 1): ...
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
        """Whether this rank is the leader of its node."""
        return self.topology.place(self.ranks.rank) == 0

    @property
    def _local(self) -> int:
        """L, the number of ranks in this rank's node."""
        return len(self.topology.inside(self.ranks.rank))

    def _to_leader(self, rows: int) -> list[int]:
        """Returns a number for each rank of the node: ``rows`` for the leader, 0 for the others."""
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
        """Exchanges the rows of a leader's node with the other leaders (step 2).

        rows: by source in the node, then by destination. to_rank[i][r]: rows of the node's rank i for rank r.
        from_rank[k][r]: rows of rank r for the node's rank k. Returns rows by destination k, then by source.
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
