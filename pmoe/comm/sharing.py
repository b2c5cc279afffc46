"""What the ranks that share experts do inside their node: gather rows, and sum what each made of them (FSMoE,
section 2.2: ESP-AllGather and ESP-ReduceScatter), for irregular numbers of rows.

Both are one irregular all-to-all: no backend has uneven all-gathers and reduce-scatters of its own, and a
rank sends no more bytes so than the best ring would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pmoe.comm.base import Traffic, all_to_all
from pmoe.comm.ranks import Ranks, wait_for


class Sharing:
    """The collectives of the ranks ``inside``. Each call ends before it returns on the CPU, and on a GPU is
    awaited by the current stream."""

    inside: Ranks
    traffic: Traffic

    def __init__(self, inside: Ranks, traffic: Traffic) -> None:
        self.inside, self.traffic = inside, traffic

    def copies(self, own_rows: int) -> int:
        """Rows of the memory that `all_gather` sends from. To one peer it sends the rows themselves."""
        return own_rows * self.inside.size if self.inside.size > 2 else 0

    def all_gather(self, rows: Tensor, out: Tensor, counts: Sequence[int], copies: Tensor) -> None:
        """out: the rows of all ranks inside, counts[r] of rank r, in order of rank."""
        inside, send, recv = self.inside, [rows.shape[0]] * self.inside.size, list(counts)
        if inside.size == 2:
            first, second = out[: counts[0]], out[counts[0] :]
            own, received = (second, first) if inside.rank else (first, second)
            own.copy_(rows)
            send[inside.rank] = recv[inside.rank] = 0
            self._exchange(rows, send, received, recv)
        else:
            torch.cat([rows] * inside.size, out=copies)
            self._exchange(copies, send, out, recv)

    def reduce_scatter(self, rows: Tensor, out: Tensor, counts: Sequence[int], parts: Tensor) -> None:
        """rows: what this rank made of the rows of all ranks inside, counts[r] of rank r. out: the sum of
        what all of them made of this rank's, in order of rank, rounded once. parts: memory for L times
        out."""
        own = counts[self.inside.rank]
        self._exchange(rows, list(counts), parts, [own] * self.inside.size)
        torch.sum(parts.view(self.inside.size, *out.shape), dim=0, out=out)

    def _exchange(self, rows: Tensor, send: list[int], out: Tensor, recv: list[int]) -> None:
        self.traffic.add(rows, sum(send) - send[self.inside.rank], inside=True)
        assert self.inside.group is not None
        wait_for(all_to_all(rows, send, out, recv, self.inside.group), self.inside.group, rows.is_cuda)
