"""A backward pass with another number of chunks than its forward: where its chunks' rows are among forward's.

Letters: N rows, E experts, W ranks, L bins, the smallest chunks of either pass.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.experts.base import Runs

ChunkRuns = tuple[tuple[tuple[int, Runs], ...], ...]
"""For each chunk of backward, the chunks of forward that it has rows of, and which."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """received, local: of the rows that were received, and of those that stayed. weight_map: (N,) the index
    of each row that backward receives, in order, among forward's."""

    received: ChunkRuns
    local: ChunkRuns
    weight_map: Tensor


def join_chunks(
    recv_LWE: Tensor, recv_device_LWE: Tensor, stay_LE: Tensor, n: int, n_backward: int
) -> Joined:
    """Of row counts by bin, on the host and where the rows are."""
    return Joined(
        received=_join(recv_LWE.sum(1), n, n_backward),
        local=_join(stay_LE, n, n_backward),
        weight_map=_forward_index(recv_device_LWE.sum(1), n, n_backward, int(recv_LWE.sum())),
    )


def _join(counts_LE: Tensor, n: int, n_backward: int) -> ChunkRuns:
    """For each chunk of backward its runs of rows in chunks of forward. counts: rows by bin, L of them, and
    expert, in both passes the order of rows inside an expert's part of a chunk."""
    rows, begin = (each.view(n_backward, -1).tolist() for each in _pieces(counts_LE, n, n_backward))
    forward_chunk = counts_LE.unflatten(0, (n, -1)).sum((1, 2))
    begin_of = (forward_chunk.cumsum(0) - forward_chunk).tolist()
    joined = []
    for of_pieces, begins in zip(rows, begin, strict=True):
        runs: dict[int, list[tuple[slice, slice]]] = {}
        end = 0
        for num_rows, first in zip(of_pieces, begins, strict=True):
            if not num_rows:
                continue
            chunk = bisect_right(begin_of, first) - 1
            of = runs.setdefault(chunk, [])
            there, here, end = first - begin_of[chunk], end, end + num_rows
            if of and (of[-1][0].stop, of[-1][1].stop) == (there, here):
                there, here = of[-1][0].start, of.pop()[1].start
            of.append((slice(there, there + end - here), slice(here, end)))
        joined.append(tuple((i, tuple(of)) for i, of in sorted(runs.items())))
    return tuple(joined)


def _forward_index(counts_LE: Tensor, n: int, n_backward: int, num_rows: int) -> Tensor:
    """What `_join` says, as an index of each of backward's rows, in order, among forward's."""
    rows, begin = _pieces(counts_LE, n, n_backward)
    shift = begin - (rows.cumsum(0) - rows)
    return shift.repeat_interleave(rows, output_size=num_rows) + torch.arange(num_rows, device=rows.device)


def _pieces(counts_LE: Tensor, n: int, n_backward: int) -> tuple[Tensor, Tensor]:
    """The rows of each bin and expert, in the order of backward: how many, and where among forward's rows the
    first is."""

    def by_chunk(per_bin: Tensor, chunks: int) -> Tensor:
        """(L, E) in the order of a pass's rows: chunk, expert, bin of the chunk."""
        bins: Tensor = per_bin.unflatten(0, (chunks, -1))
        return bins.transpose(1, 2).reshape(-1)

    forward = by_chunk(counts_LE, n)
    place = by_chunk(torch.arange(counts_LE.numel(), device=counts_LE.device).view_as(counts_LE), n)
    begin = torch.empty_like(forward).scatter_(0, place, forward.cumsum(0) - forward)
    return by_chunk(counts_LE, n_backward), by_chunk(begin.view_as(counts_LE), n_backward)
