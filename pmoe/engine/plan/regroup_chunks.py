"""Maps rows of backward's chunks to forward's chunks, if the passes have different numbers of chunks.

Both passes consist of the same bins, small ranges of tokens (`pmoe.engine.plan.make_plan`). In a chunk, rows
are sorted by expert, then by bin. Example with experts a and b, bins 0 and 1, forward in 1 chunk and backward
in 2:

    forward, chunk 0     a0 a1 b0 b1       (a0: the rows of expert a in bin 0)
    backward, chunk 0    a0 b0             copied from blocks 0 and 2 of forward's chunk 0
    backward, chunk 1    a1 b1             copied from blocks 1 and 3

Letters: N rows, E experts, W ranks, L bins.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.experts.base import Runs

ChunkRuns = tuple[tuple[tuple[int, Runs], ...], ...]
"""The forward chunks from which the rows of each backward chunk are copied.

An entry of a backward chunk is (number of a forward chunk, pairs of slices). A pair says which rows of the
forward chunk become which rows of the backward chunk.
"""


@dataclass(frozen=True, kw_only=True)
class ChunkRegrouping:
    """The map from the rows of backward's chunks to the rows of forward's chunks.

    received: for the rows that experts receive, the rows of forward chunks from which each backward chunk is
        copied.
    local: the same map for the rows that are not sent, because their experts are on this rank; with blocks of
        these rows (`PassPlan.pieces`) in place of chunks.
    weight_map: (N,) int64. Entry i is for received row i in backward's order: the row's number in forward's
        order.
    """

    received: ChunkRuns
    local: ChunkRuns
    weight_map: Tensor


def join_chunks(
    recv_LWE: Tensor, recv_device_LWE: Tensor, stay_LE: Tensor, n: int, n_backward: int
) -> ChunkRegrouping:
    """Returns the rows of forward chunks from which each backward chunk is put together.

    A bin is a range of tokens. There are L bins, W ranks and E local experts.

    recv_LWE: (L, W, E), numbers of received rows by bin, source rank and expert, on the host.
    recv_device_LWE: the same numbers, on the device of the rows.
    stay_LE: (L, E), numbers of rows that stay on this rank, by bin and expert, on the host.
    n, n_backward: numbers of chunks of forward and of backward; both divide L.
    """
    return ChunkRegrouping(
        received=_join(recv_LWE.sum(1), n, n_backward),
        local=_join(stay_LE, n, n_backward),
        weight_map=_forward_index(recv_device_LWE.sum(1), n, n_backward, int(recv_LWE.sum())),
    )


def _join(counts_LE: Tensor, n: int, n_backward: int) -> ChunkRuns:
    """Returns the rows of forward chunks from which each backward chunk is put together.

    The result is for the received rows, or for the rows that stay on their rank. Blocks of rows that are
    neighbours in both passes are joined, so that fewer copies are needed.

    counts_LE: (L, E), numbers of rows by L bins (ranges of tokens) and E experts, on the host.
    n, n_backward: numbers of chunks of forward and of backward.
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
            # The block's first row: its number in forward's chunk (forward_start) and in backward's (start).
            forward_start = block_begin - chunk_begin[chunk]
            start = end
            end = end + num_rows
            if chunk_runs and (chunk_runs[-1][0].stop, chunk_runs[-1][1].stop) == (forward_start, start):
                # The block follows the previous one in both chunks, so one copy serves both.
                forward_start, start = chunk_runs[-1][0].start, chunk_runs.pop()[1].start
            chunk_runs.append((slice(forward_start, forward_start + end - start), slice(start, end)))
        joined.append(tuple((i, tuple(chunk_runs)) for i, chunk_runs in sorted(runs.items())))
    return tuple(joined)


def _forward_index(counts_LE: Tensor, n: int, n_backward: int, num_rows: int) -> Tensor:
    """Returns for each row, in backward's order, its number in forward's order: (num_rows,) int64.

    The rows of all chunks of a pass are numbered one after another.

    counts_LE: (L, E), numbers of rows by L bins (ranges of tokens) and E experts, on the device of the rows.
    n, n_backward: numbers of chunks of forward and of backward.
    num_rows: the sum of counts_LE, known on the host.
    """
    rows, begin = _pieces(counts_LE, n, n_backward)
    shift = begin - (rows.cumsum(0) - rows)
    return shift.repeat_interleave(rows, output_size=num_rows) + torch.arange(num_rows, device=rows.device)


def _pieces(counts_LE: Tensor, n: int, n_backward: int) -> tuple[Tensor, Tensor]:
    """Returns the size of each block of rows (one bin, one expert), and its first row in forward's order.

    A bin is a range of tokens; a chunk consists of whole bins. Both results are (L * E,) int64, for L bins
    and E experts. Blocks are in the order of backward's rows: by chunk, then expert, then bin.

    counts_LE: (L, E), numbers of rows by bin and expert.
    n, n_backward: numbers of chunks of forward and of backward.
    """

    def by_chunk(per_bin: Tensor, chunks: int) -> Tensor:
        """Flattens values (L, E), by bin and expert, to the order of rows: chunk, then expert, then bin.

        per_bin: (L, E), a value for each of L bins and E experts.
        chunks: the number of chunks of the pass.
        """
        bins: Tensor = per_bin.unflatten(0, (chunks, -1))
        return bins.transpose(1, 2).reshape(-1)

    forward = by_chunk(counts_LE, n)
    place = by_chunk(torch.arange(counts_LE.numel(), device=counts_LE.device).view_as(counts_LE), n)
    begin = torch.empty_like(forward).scatter_(0, place, forward.cumsum(0) - forward)
    return by_chunk(counts_LE, n_backward), by_chunk(begin.view_as(counts_LE), n_backward)
