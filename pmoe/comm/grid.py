"""The grid of a layer's W = P * L ranks (FSMoE).

Experts are spread over P ranks across nodes (expert parallel, EP). The hidden columns of each expert are
split over L ranks inside a node (expert-sharding parallel, ESP).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm import ranks as old_place
from pmoe.comm.ranks import Ranks


@dataclass(frozen=True)
class Grid:
    """The W = P * L ranks of a layer, and the two process groups of this rank within them.

    all: the W ranks. They exchange row counts.
    ep: the P ranks that hold the same columns of different experts. Rows are dispatched among them.
    esp: the L ranks that hold different columns of the same experts. Rows are gathered among them.
    order: (W,), the ranks (their numbers in ``all``) in the order of the grid, line by line. After the
        all-gather among ``esp``, rows are sorted by source rank in this order.

    Example: P = 3, L = 2. The place of a rank in ``order`` is esp.rank * P + ep.rank:

        esp 0    order[0]   order[1]   order[2]
        esp 1    order[3]   order[4]   order[5]
                 ep 0       ep 1       ep 2
    """

    all: Ranks
    ep: Ranks
    esp: Ranks
    order: tuple[int, ...] = ()

    @staticmethod
    def of_group(group: dist.ProcessGroup | Ranks | None) -> Grid:
        """Returns the grid of a group without sharded experts.

        Experts are spread over all P ranks of the group, and each expert is on L = 1 rank.
        """
        ranks = group if isinstance(group, Ranks) else Ranks(group)
        return Grid(ranks, ranks, Ranks.single(), tuple(range(ranks.size)))

    @functools.cached_property
    def is_sharded(self) -> bool:
        """Whether several ranks share each expert (L > 1)."""
        return self.esp.size > 1

    def shards(self, expert_TK: Tensor, num_experts: int) -> Tensor:
        """Returns the L shards of each chosen expert, as one number for each shard.

        Shard s of an expert is the part of its hidden columns that rank s of the expert's node holds. Let r
        be the rank that holds a shard, and e the index of the expert among the E experts of that rank. The
        number of the shard is r * E + e.

        expert_TK: (T, K) integers, the K experts that each of T tokens chose among all experts.
        num_experts: E, the number of experts of a rank.

        Returns (T, K * L) with the dtype of ``expert_TK``: the L shards of a token's first choice, then the L
        shards of its second choice, and so on.
        """
        ep_rank_TK = expert_TK // num_experts
        ranks = _index(self.order, expert_TK.device).view(-1, self.ep.size)  # (L, P)
        rank_TKL = ranks.t()[ep_rank_TK.long()]
        shard_TKL = rank_TKL * num_experts + (expert_TK % num_experts).unsqueeze(2)
        return shard_TKL.flatten(1).to(expert_TK.dtype)

    def to_owners(self, counts_FPX: Tensor) -> Tensor:
        """Repeats counts of rows: each rank that shares an expert gets the expert's counts.

        Rows are dispatched among P ranks. Each expert is split over L ranks, and all L ranks must know how
        many rows the expert gets. This method only copies numbers of a tensor: nothing is sent.

        counts_FPX: (F, P, X), X counts for each of F bins (equal ranges of a rank's tokens) and each of the P
            ranks.

        Returns (F, W, X) for the W = P * L ranks of the layer (`all`). The L ranks that share experts have
        equal counts.
        """
        if not self.is_sharded:
            return counts_FPX
        across = {rank: at % self.ep.size for at, rank in enumerate(self.order)}
        places = tuple(across[rank] for rank in range(self.all.size))
        return counts_FPX.index_select(1, _index(places, counts_FPX.device))

    def by_arrival(self, recv_FWX: Tensor) -> Tensor:
        """Reorders counts of received rows: from rank order to the order of rows after an all-gather.

        L ranks of a node share experts. After the all-gather, each of these L ranks has all rows that the L
        ranks have received. The counts are those of each source rank (a rank that sent rows).

        recv_FWX: (F, W, X), X counts for each of F bins (equal ranges of a rank's tokens) and each of W
            source ranks, in order of rank.

        Returns (F, W, X), with the source ranks in the order of the grid's list of ranks (``order``).
        """
        if not self.is_sharded:
            return recv_FWX
        return recv_FWX.index_select(1, _index(self.order, recv_FWX.device))

    def by_rank(self, arrival_FWX: Tensor) -> Tensor:
        """Reorders counts of received rows: from the order of rows after an all-gather to rank order.

        This is the inverse of `by_arrival`.

        arrival_FWX: (F, W, X), X counts for each of F bins (equal ranges of a rank's tokens) and each of W
            source ranks, in the order that `by_arrival` returns.

        Returns (F, W, X), with the source ranks in order of rank.
        """
        if not self.is_sharded:
            return arrival_FWX
        return arrival_FWX.index_select(1, self.places(arrival_FWX.device))

    def places(self, device: torch.device) -> Tensor:
        """Returns (W,) int64 on a device: for each rank its place in the grid's list of ranks (``order``)."""
        return _index(tuple(sorted(range(len(self.order)), key=self.order.__getitem__)), device)

    def of_own_place(self, arrival_FWX: Tensor) -> Tensor:
        """Returns the counts of the P ranks that dispatch rows directly to this rank.

        arrival_FWX: (F, W, X), X counts for each of F bins (equal ranges of a rank's tokens) and each of W
            source ranks, in the order that `by_arrival` returns.

        Returns (F, P, X). The W - P other ranks dispatch their rows to the ranks that share this rank's
        experts, from which this rank gets the rows by the all-gather.
        """
        start = self.esp.rank * self.ep.size
        return arrival_FWX[:, start : start + self.ep.size]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Layers that an older version of pmoe has pickled have ``ep`` and ``esp`` under their old names.
        old_names = {"across": "ep", "inside": "esp"}
        self.__dict__.update({old_names.get(name, name): value for name, value in state.items()})

    def reconnect(self) -> bool:
        """Takes the default process group if the layer's group was lost by pickling or destroyed.

        Returns whether a new group replaces a destroyed group (`Ranks.reconnect`).

        Raises ValueError if the grid was made from a device mesh, because pickling loses the mesh: the layer
        must be built again. Raises RuntimeError or ValueError if no group can replace the old group.
        """
        if self.is_sharded and self.all.group is None:
            raise ValueError(
                "mesh (lost by pickling) must be passed again: build the layer, and load its state"
            )
        return self.all.reconnect()


@functools.lru_cache(maxsize=64)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns an int64 tensor with the given numbers on a device. Equal arguments return the same tensor.

    The tensors are cached, because each copy from the host to a GPU makes the host wait.

    places: the numbers.
    device: the device.
    """
    return torch.tensor(places, device=device)


# Layers that were pickled before this file existed look for `Grid` in pmoe.comm.ranks. That file cannot
# import this file, because this file imports it.
vars(old_place)["Grid"] = Grid
