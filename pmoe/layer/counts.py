"""The row counts that a call leaves for those who ask afterwards: by where they are known.

Letters: E experts of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pmoe.comm.counts import RankCounts


class CallCounts(Protocol):
    """Row counts of a call. max_tokens: the largest number of any rank's tokens."""

    @property
    def max_tokens(self) -> int: ...

    def rows(self) -> RankCounts:
        """As the call's rows travelled, on the host."""

    def kept_E(self) -> Tensor:
        """(E,) int64 on the CPU: kept rows of this rank for each expert."""


@dataclass(frozen=True)
class ExactCounts:
    """Counts that were exchanged."""

    counts: RankCounts

    @property
    def max_tokens(self) -> int:
        return self.counts.max_tokens

    def rows(self) -> RankCounts:
        return self.counts

    def kept_E(self) -> Tensor:
        return self.counts.send.sum(0).flatten()


@dataclass(frozen=True)
class PaddedCounts:
    """Counts of padded rows, and (E,) those of them that are no padding, on the device."""

    counts: RankCounts
    kept_device_E: Tensor
    max_tokens: int

    def rows(self) -> RankCounts:
        return self.counts

    def kept_E(self) -> Tensor:
        return self.kept_device_E.to("cpu", copy=True)


@dataclass(frozen=True)
class OneRankCounts:
    """(E,) counts still on the device. Reading them synchronizes; a replayed CUDA graph changes them."""

    device_E: Tensor
    max_tokens: int
    needs_grad: bool

    def rows(self) -> RankCounts:
        counts = self.device_E.to("cpu").long().view(1, 1, -1)
        return RankCounts(
            send=counts,
            recv=counts,
            recv_device=counts,
            max_tokens=self.max_tokens,
            needs_grad=self.needs_grad,
        )

    def kept_E(self) -> Tensor:
        return self.rows().send.flatten()
