"""All-gather and reduce-scatter of irregular numbers of rows among the ranks that share experts.

FSMoE, section 2.2, calls them ESP-AllGather and ESP-ReduceScatter. In this file each is one irregular
all-to-all, because no backend has an all-gather or a reduce-scatter in which ranks have different numbers of
rows. A rank sends no more bytes than in the best ring algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pmoe.comm.base import Traffic, all_to_all
from pmoe.comm.failures import wait_for
from pmoe.comm.ranks import Ranks


class ShardCollectives:
    """The all-gather and the reduce-scatter of rows among the L ranks of a node that share experts.

    Each of these ranks holds a part of the hidden columns of the same experts. So each computes a partial
    result for the rows of all L ranks.

    On the CPU a call returns when the collective has ended. On a GPU the current stream waits for the
    collective, and the host does not.

    esp: the L ranks.
    traffic: where the bytes of the collectives are counted.
    """

    esp: Ranks
    traffic: Traffic

    def __init__(self, esp: Ranks, traffic: Traffic) -> None:
        self.esp = esp
        self.traffic = traffic

    def copies(self, own_rows: int) -> int:
        """Returns the size of the scratch memory that `all_gather` needs, in rows.

        `all_gather` runs as an all-to-all, which needs one copy of the rows for each of the L ranks. With two
        ranks the result is 0, because the rows can be sent to the only other rank without a copy.

        own_rows: number of rows that this rank sends.
        """
        return own_rows * self.esp.size if self.esp.size > 2 else 0

    def all_gather(self, rows: Tensor, out: Tensor, counts: Sequence[int], copies: Tensor) -> None:
        """Writes the rows of all L ranks that share experts into ``out``, in order of rank.

        rows: (N, M) or (N,), this rank's N rows, M columns each.
        out: (sum(counts), M) or (sum(counts),).
        counts: counts[r] is the number of rows of rank r.
        copies: scratch memory for R rows, (R, M) or (R,). The method `copies` returns R.
        """
        esp = self.esp
        send = [rows.shape[0]] * esp.size
        recv = list(counts)
        if esp.size == 2:
            first = out[: counts[0]]
            second = out[counts[0] :]
            own, received = (second, first) if esp.rank else (first, second)
            own.copy_(rows)
            send[esp.rank] = recv[esp.rank] = 0
            self._exchange(rows, send, received, recv)
        else:
            torch.cat([rows] * esp.size, out=copies)
            self._exchange(copies, send, out, recv)

    def reduce_scatter(self, rows: Tensor, out: Tensor, counts: Sequence[int], parts: Tensor) -> None:
        """Sums the partial results of L ranks, and writes the sum for this rank's own rows into ``out``.

        The sum is taken in order of rank and rounded once.

        rows: (sum(counts), M) or (sum(counts),), this rank's partial results of M columns for the rows of all
            ranks, in order of rank.
        out: (counts[own rank], M) or (counts[own rank],).
        counts: counts[r] is the number of rows of rank r.
        parts: scratch memory for L times the elements of ``out``, into which the ranks send their partial
            results.
        """
        own = counts[self.esp.rank]
        self._exchange(rows, list(counts), parts, [own] * self.esp.size)
        torch.sum(parts.view(self.esp.size, *out.shape), dim=0, out=out)

    def _exchange(self, rows: Tensor, send: list[int], out: Tensor, recv: list[int]) -> None:
        self.traffic.add(rows, sum(send) - send[self.esp.rank], inside=True)
        assert self.esp.group is not None
        wait_for(all_to_all(rows, send, out, recv, self.esp.group), self.esp.group, rows.is_cuda)
