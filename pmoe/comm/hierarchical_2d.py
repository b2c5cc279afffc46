"""2D hierarchical all-to-all: first inside each node, then across nodes among ranks at equal places.

A rank's place is its number among the ranks of its node. Tutel calls this method 2DH (Hwang et al., arXiv
2206.03382); DeepSpeed-MoE also uses it (Rajbhandari et al., arXiv 2201.05596). FSMoE, section 3.1, offers the
method beside the flat all-to-all.

With L ranks on each node, there are L times fewer messages between nodes, each about L times larger. The
cost: rows are sent one more time, inside the node. All ranks do the same work; none is a leader.

Rank (a, j) is at place j of node a. Rows of rank (a, i) for rank (b, j) are sent in two steps:

    step 1, inside:  (a, i) -> (a, j)   rows of (a, i) for (b, j) of all nodes, sorted by node b
    step 2, across:  (a, j) -> (b, j)   rows of all (a, i) for (b, j), sorted by place i
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.comm.base import RowCounts
from pmoe.comm.hierarchical import HierarchicalExchange, in_order


class HierarchicalAllToAll2D(HierarchicalExchange):
    """Sends rows in two steps: inside the own node to another rank, then across nodes to the destination.

    A rank's place is its number among the ranks of its node. The first step sends a row to another rank of
    its own node: the one at the same place as the destination. Every node must have the same number of the
    group's ranks.

    nodes: which ranks share a node: the number of ranks on each node, an id of its node for each rank, or
        None for the number in LOCAL_WORLD_SIZE.
    """

    def check_topology(self) -> None:
        sizes = {len(ranks) for ranks in self.topology.members}
        if len(sizes) > 1:
            raise ValueError(
                f"{self.topology.origin} must put equally many of the group's {self.ranks.size} ranks on "
                f"each node for the 2D hierarchical all-to-all, not {' or '.join(map(str, sorted(sizes)))}"
            )

    def relay(self, send_FW: Tensor, recv_FW: Tensor) -> Tensor:
        """Returns how many rows each rank of this node sends to this rank, to be passed on: (F, L * A).

        There are F bins (equal ranges of a rank's tokens), L ranks on each node and A nodes. This rank is (a,
        j), the j-th rank of node a. Column i * A + b counts the rows that rank (a, i) has for rank (b, j).

        send_FW, recv_FW: (F, W) int64, for each bin the numbers of rows to and from each of W ranks.
        """
        sent_WF = torch.stack([send_FW[:, rank] for rank in self._destinations()])
        nodes = self.topology.num_nodes
        local = self.topology.max_local
        self.traffic.counts += (local - 1) * nodes * send_FW.shape[0] * sent_WF.element_size()
        got_WF = self.step(sent_WF, [nodes] * local, [nodes] * local, across=False, are_counts=True)
        return got_WF.t().contiguous()

    def _destinations(self) -> list[int]:
        """Returns all ranks in the order in which step 1 sends the rows for them: by place, then by node.

        A rank's place is its number among the ranks of its node.
        """
        return [rank for ranks in zip(*self.topology.members, strict=True) for rank in ranks]

    def carry(
        self, rows: Tensor, send_rows: RowCounts, out: Tensor, recv_rows: RowCounts, relayed: RowCounts
    ) -> None:
        members = self.topology.members
        nodes = self.topology.num_nodes
        mates = [self.topology.node(rank) for rank in self.peers(across=True)]  # nodes in group order
        places = range(self.topology.max_local)

        rows = in_order(rows, send_rows, self._destinations())
        sent = [sum(send_rows[node[j]] for node in members) for j in places]
        received = [sum(relayed[i * nodes : (i + 1) * nodes]) for i in places]
        rows = self.step(rows, sent, received, across=False)

        rows = in_order(rows, relayed, [i * nodes + b for b in mates for i in places])
        sent = [sum(relayed[b::nodes]) for b in mates]
        sources = [rank for a in mates for rank in members[a]]
        self.last_step(rows, sent, out, recv_rows, sources, across=True)
