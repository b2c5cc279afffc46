"""Places of rows for a backward pass that has other chunks than its forward.

Both passes cut the same bins (`pmoe.engine.plan.make_plan`). In a chunk, rows are sorted by expert, then by
bin. Example with experts a and b, bins 0 and 1, forward in 1 chunk and backward in 2:

    forward, chunk 0     a0 a1 b0 b1       (a0: the rows of expert a in bin 0)
    backward, chunk 0    a0 b0             copied from runs 0 and 2 of forward's chunk 0
    backward, chunk 1    a1 b1             copied from runs 1 and 3

Letters: N rows, E experts, W ranks, L bins.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.experts.base import Runs

ChunkRuns = tuple[tuple[tuple[int, Runs], ...], ...]
"""The sources of each backward chunk: a pair (forward chunk, runs of its rows) for each that it needs."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Places of backward's rows in forward's chunks.

    received: the sources of backward's chunks of received rows.
    local: the sources of backward's pieces, of rows that stayed on this rank.
    weight_map: (N,) int64, for each received row in backward's order, its number in forward's order.
    """

    received: ChunkRuns
    local: ChunkRuns
    weight_map: Tensor


def join_chunks(
    recv_LWE: Tensor, recv_device_LWE: Tensor, stay_LE: Tensor, n: int, n_backward: int
) -> Joined:
    """Returns the places of backward's rows in forward's chunks, from row counts by bin.

    recv_LWE: (L, W, E) received rows by bin, source rank and expert, on the host.
    recv_device_LWE: the same where the rows are.
    stay_LE: (L, E) rows that stay on this rank, on the host.
    n, n_backward: chunks of forward and of backward; both divide L.
    """
    return Joined(
        received=_join(recv_LWE.sum(1), n, n_backward),
        local=_join(stay_LE, n, n_backward),
        weight_map=_forward_index(recv_device_LWE.sum(1), n, n_backward, int(recv_LWE.sum())),
    )


def _join(counts_LE: Tensor, n: int, n_backward: int) -> ChunkRuns:
    """Returns the sources of each backward chunk. Runs that are neighbours in both passes become one.

    counts_LE: (L, E) rows by bin and expert, on the host.
    """
    rows, begin = (numbers.view(n_backward, -1).tolist() for numbers in _pieces(counts_LE, n, n_backward))
    forward_chunk = counts_LE.unflatten(0, (n, -1)).sum((1, 2))
    chunk_begin = (forward_chunk.cumsum(0) - forward_chunk).tolist()
    joined = []
    for block_rows, block_begins in zip(rows, begin, strict=True):
        runs: dict[int, list[tuple[slice, slice]]] = {}
        end = 0
        for num_rows, block_begin in zip(block_rows, block_begins, strict=True):
            if not num_rows:
                continue
            chunk = bisect_right(chunk_begin, block_begin) - 1
            chunk_runs = runs.setdefault(chunk, [])
            # The block's first row, counted in forward's chunk and in backward's chunk.
            forward_start = block_begin - chunk_begin[chunk]
            start = end
            end = end + num_rows
            if chunk_runs and (chunk_runs[-1][0].stop, chunk_runs[-1][1].stop) == (forward_start, start):
                # The block follows the last run in both chunks: they become one run.
                forward_start, start = chunk_runs[-1][0].start, chunk_runs.pop()[1].start
            chunk_runs.append((slice(forward_start, forward_start + end - start), slice(start, end)))
        joined.append(tuple((i, tuple(chunk_runs)) for i, chunk_runs in sorted(runs.items())))
    return tuple(joined)


def _forward_index(counts_LE: Tensor, n: int, n_backward: int, num_rows: int) -> Tensor:
    """Returns the result of `_join` as an index: (num_rows,) the forward row of each backward row.

    counts_LE: (L, E) rows by bin and expert, where the rows are.
    num_rows: their sum, on the host.
    """
    rows, begin = _pieces(counts_LE, n, n_backward)
    shift = begin - (rows.cumsum(0) - rows)
    return shift.repeat_interleave(rows, output_size=num_rows) + torch.arange(num_rows, device=rows.device)


def _pieces(counts_LE: Tensor, n: int, n_backward: int) -> tuple[Tensor, Tensor]:
    """Returns (rows, first forward row) of each block of backward; a block has one bin and one expert.

    Both are (L * E,) int64 in backward's order of rows: chunk, expert, bin.
    """

    def by_chunk(per_bin: Tensor, chunks: int) -> Tensor:
        """Flattens (L, E) to the order of rows in a pass: chunk, expert, bin of the chunk."""
        bins: Tensor = per_bin.unflatten(0, (chunks, -1))
        return bins.transpose(1, 2).reshape(-1)

    forward = by_chunk(counts_LE, n)
    place = by_chunk(torch.arange(counts_LE.numel(), device=counts_LE.device).view_as(counts_LE), n)
    begin = torch.empty_like(forward).scatter_(0, place, forward.cumsum(0) - forward)
    return by_chunk(counts_LE, n_backward), by_chunk(begin.view_as(counts_LE), n_backward)
