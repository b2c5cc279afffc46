"""The grid of a layer's W = P * L ranks (FSMoE).

Experts are spread over P ranks across nodes (EP), and the hidden columns of each expert are split over L
ranks inside a node (ESP).
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
    """The W = P * L ranks of a layer, and the two groups in which this rank is.

    all: the W ranks, which exchange row counts.
    ep: the P ranks that hold the same part of other experts (expert parallel). Rows are dispatched among
        them.
    esp: the L ranks that hold the other parts of the same experts (expert-sharding parallel). Rows are
        gathered among them.
    order: (W,), the rank in ``all`` of each place of the grid, line by line. Gathered rows lie in this order.

    Example: P = 3, L = 2, and a rank's place in ``order`` is esp.rank * P + ep.rank:

        esp 0       order[0]   order[1]   order[2]
        esp 1       order[3]   order[4]   order[5]
                    ep 0       ep 1       ep 2
    """

    all: Ranks
    ep: Ranks
    esp: Ranks
    order: tuple[int, ...] = ()

    @staticmethod
    def of_group(group: dist.ProcessGroup | Ranks | None) -> Grid:
        """Returns the grid of a group whose experts are not sharded: all ranks across, this one inside."""
        ranks = group if isinstance(group, Ranks) else Ranks(group)
        return Grid(ranks, ranks, Ranks.single(), tuple(range(ranks.size)))

    @functools.cached_property
    def is_sharded(self) -> bool:
        """Whether several ranks share each expert (L > 1)."""
        return self.esp.size > 1

    def to_owners(self, counts_FPX: Tensor) -> Tensor:
        """Repeats counts for P places (F, P, X) as counts for W ranks (F, W, X).

        All L ranks at a place hold a part of the same experts, so all of them get the place's counts.
        """
        if not self.is_sharded:
            return counts_FPX
        across = {rank: at % self.ep.size for at, rank in enumerate(self.order)}
        places = tuple(across[rank] for rank in range(self.all.size))
        return counts_FPX.index_select(1, _index(places, counts_FPX.device))

    def by_arrival(self, recv_FWX: Tensor) -> Tensor:
        """Reorders counts (F, W, X): from the order of ranks to the order in which gathered rows lie."""
        if not self.is_sharded:
            return recv_FWX
        return recv_FWX.index_select(1, _index(self.order, recv_FWX.device))

    def of_own_place(self, arrival_FWX: Tensor) -> Tensor:
        """Returns the part (F, P, X) of `by_arrival` that is dispatched to this rank itself.

        The rest (F, W - P, X) is dispatched to the other ranks inside, and gathered from them.
        """
        start = self.esp.rank * self.ep.size
        return arrival_FWX[:, start : start + self.ep.size]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Layers that were pickled before hold ``ep`` and ``esp`` under their old names.
        old_names = {"across": "ep", "inside": "esp"}
        self.__dict__.update({old_names.get(name, name): value for name, value in state.items()})

    def reconnect(self) -> bool:
        """Takes the default group again after unpickling, or after it was destroyed: see `Ranks.reconnect`.

        Raises ValueError if the grid is of a mesh, which pickling loses: the layer must be built again.
        """
        if self.is_sharded and self.all.group is None:
            raise ValueError(
                "mesh (lost by pickling) must be passed again: build the layer, and load its state"
            )
        return self.all.reconnect()


@functools.lru_cache(maxsize=64)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns places as a tensor. Cached, because each copy to a GPU would be a synchronisation."""
    return torch.tensor(places, device=device)


# Layers that were pickled before this file existed look for the class there; an import would be a circle.
vars(old_place)["Grid"] = Grid
