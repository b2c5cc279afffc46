"""Faults that tests put into the fused kernels on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pmoe.kernels.comet.launcher import Divide, Launcher
from pmoe.kernels.heap import Heap

WAITS = ("nothing", "grant", "arrival", "tiles", "returned")
"""`Wait` of cuda/peers/watch.h, in words."""


@dataclass(frozen=True, kw_only=True)
class InjectedFaults:
    """delay_seed: every warp sleeps now and then; 0 lets none sleep. not_waited: waits that are left out, of
    "grant", "arrival", "tiles", "returned"."""

    delay_seed: int = 0
    not_waited: tuple[str, ...] = ()

    @property
    def fields(self) -> dict[str, int]:
        """As cuda/comet/read.h reads them."""
        return {
            "delay_seed": self.delay_seed,
            "not_waited": sum(1 << WAITS.index(name) for name in self.not_waited),
        }

    def launcher(self, heaps: Sequence[Heap], divide: Divide) -> FaultyLauncher:
        return FaultyLauncher(heaps, divide, self)


class FaultyLauncher(Launcher):
    """Every launch has these faults."""

    def __init__(self, heaps: Sequence[Heap], divide: Divide, faults: InjectedFaults) -> None:
        super().__init__(heaps, divide)
        self.faults = faults

    def rank_fields(self, heap: Heap) -> dict[str, int]:
        return {**super().rank_fields(heap), **self.faults.fields}
