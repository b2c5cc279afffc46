"""Where a rank stands among the ranks of a layer: across the nodes (EP) and inside its node (ESP).

Letters: W ranks of the layer, P of them across (experts are spread over these), L inside (each expert's
hidden columns are split over these); W = P * L."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.ranks import Ranks


@dataclass(frozen=True)
class Grid:
    """all: the W ranks, who exchange row counts. across: those P that hold the same part of other experts,
    among whom rows are dispatched. inside: the L that hold the other parts of the same experts.

    order: (W,) the rank in ``all`` of each place, by (inside, across): the order in which gathered rows lie.
    """

    all: Ranks
    across: Ranks
    inside: Ranks
    order: tuple[int, ...] = field(default=())

    @staticmethod
    def of_group(group: dist.ProcessGroup | Ranks | None) -> Grid:
        """All ranks across, none inside."""
        ranks = group if isinstance(group, Ranks) else Ranks(group)
        return Grid(ranks, ranks, Ranks.single(), tuple(range(ranks.size)))

    @property
    def is_sharded(self) -> bool:
        return self.inside.size > 1

    def to_owners(self, counts_FPX: Tensor) -> Tensor:
        """What each of the W ranks is told, (F, W, X), of counts for the P places across: every rank that
        holds a part of an expert hears of its rows."""
        if not self.is_sharded:
            return counts_FPX
        return counts_FPX.index_select(1, _index(self._across_of, counts_FPX.device))

    def by_arrival(self, recv_FWX: Tensor) -> Tensor:
        """What each of the W ranks has for this one, in the order in which gathered rows lie."""
        if not self.is_sharded:
            return recv_FWX
        return recv_FWX.index_select(1, _index(self.order, recv_FWX.device))

    def of_own_place(self, arrival_FWX: Tensor) -> Tensor:
        """Of `by_arrival`, what comes to this rank itself, (F, P, X), before it is gathered."""
        start = self.inside.rank * self.across.size
        return arrival_FWX[:, start : start + self.across.size]

    @property
    def _across_of(self) -> tuple[int, ...]:
        """Of each rank of all, its place across."""
        place = [0] * self.all.size
        for at, rank in enumerate(self.order):
            place[rank] = at % self.across.size
        return tuple(place)

    def reconnect(self) -> None:
        """After unpickling: see `Ranks.reconnect`. A layer of a mesh must be built anew."""
        if self.is_sharded and self.all.group is None:
            raise ValueError("mesh (lost by pickling) must be given anew: build the layer and load its state")
        self.all.reconnect()


@functools.lru_cache(maxsize=64)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once: each copy to a GPU would be a synchronisation."""
    return torch.tensor(places, device=device)
