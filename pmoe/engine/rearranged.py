"""A backward pass with another number of chunks than its forward: where its chunks' rows are among forward's.

Letters: N rows, E experts, W ranks, L bins, the smallest chunks of either pass.
"""

from __future__ import annotations

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
    counts: list[list[int]] = counts_LE.tolist()
    finest, num_experts = len(counts), len(counts[0])
    start: dict[int, dict[tuple[int, int], int]] = {}  # by the number of chunks
    for each in (n, n_backward):
        width, start[each] = finest // each, {}
        for chunk in range(each):
            row = 0
            for expert in range(num_experts):
                for at in range(chunk * width, (chunk + 1) * width):
                    start[each][at, expert] = row
                    row += counts[at][expert]
    forward_width, backward_width = finest // n, finest // n_backward
    joined = []
    for chunk in range(n_backward):
        runs: dict[int, list[tuple[slice, slice]]] = {}
        for expert in range(num_experts):
            for at in range(chunk * backward_width, (chunk + 1) * backward_width):
                rows = counts[at][expert]
                if not rows:
                    continue
                of = runs.setdefault(at // forward_width, [])
                there, here = start[n][at, expert], start[n_backward][at, expert]
                if of and (of[-1][0].stop, of[-1][1].stop) == (there, here):
                    there, here, rows = of[-1][0].start, of[-1][1].start, rows + there - of.pop()[0].start
                of.append((slice(there, there + rows), slice(here, here + rows)))
        joined.append(tuple((i, tuple(of)) for i, of in sorted(runs.items())))
    return tuple(joined)


def _forward_index(counts_LE: Tensor, n: int, n_backward: int, num_rows: int) -> Tensor:
    """What `_join` says, as an index of each of backward's rows, in order, among forward's."""
    finest, num_experts = counts_LE.shape

    def by_chunk(per_bin: Tensor, chunks: int) -> Tensor:
        """(L, E) in the order of a pass's rows: chunk, expert, bin of the chunk."""
        bins: Tensor = per_bin.unflatten(0, (chunks, -1))
        return bins.transpose(1, 2).reshape(-1)

    group = torch.arange(finest * num_experts, device=counts_LE.device)
    place = torch.empty_like(group)
    place[by_chunk(group.view(finest, num_experts), n_backward)] = group
    forward_place = by_chunk(place.view(finest, num_experts), n)
    rows = forward_place.repeat_interleave(by_chunk(counts_LE, n), output_size=num_rows)
    return rows.argsort(stable=True)
