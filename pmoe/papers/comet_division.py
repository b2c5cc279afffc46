"""How long COMET's fused kernels take on the simulator, and how many blocks should communicate (3.2.2).

Letters: n_c communicating blocks, T_N columns of a chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pmoe.kernels.comet.launcher import COLUMNS, Division
from pmoe.papers import comet_tasks
from pmoe.papers.comet_layers import TILE_COLUMNS, Arriving, DeviceRates, Returning
from pmoe.planner.division import all_columns
from pmoe.planner.simulator import Simulated, makespan, simulate
from pmoe.planner.timeline import Span


def fused_run(
    layer: Arriving | Returning, device: DeviceRates, n_c: int, chunk_columns: int = TILE_COLUMNS
) -> list[Simulated[comet_tasks.FusedTask]]:
    """A fused kernel, simulated; chunk_columns is for layer 1."""
    if isinstance(layer, Arriving):
        tasks = comet_tasks.fused_dispatch_tasks(layer, device, n_c)
    else:
        tasks = comet_tasks.fused_combine_tasks(layer, device, n_c, chunk_columns)
    return simulate(tasks, lambda task: task.seconds)


@dataclass(frozen=True, kw_only=True)
class BestDivision:
    """A division of a kernel's blocks and its seconds; of layer 0, chunk_columns mean nothing."""

    division: Division
    seconds: float


def best_division(
    layer: Arriving | Returning, device: DeviceRates, *, chunks: Sequence[int] | None = None
) -> BestDivision:
    """The fastest n_c, for layer 1 with its T_N: that of all candidates on the simulator; of equals the least
    n_c, then the fewest chunks (the division point of section 3.2.2, simulated where COMET profiles).

    chunks: T_N to choose from, of layer 1, by default `all_chunks`. Candidates are simulated in the order of
    `min_seconds` until that exceeds what has been found.
    """
    if isinstance(layer, Arriving):
        chunks = [TILE_COLUMNS]
    candidates = sorted(
        (min_seconds(layer, device, n_c, width), n_c, -width)
        for n_c in range(1, device.blocks)
        for width in chunks or all_chunks(layer.columns)
    )
    best = (math.inf, 0, 0)
    for min_rows, n_c, negative in candidates:
        if min_rows * (1 - 1e-9) > best[0]:  # sums in another order differ by rounding
            break
        best = min(best, (makespan(fused_run(layer, device, n_c, -negative)), n_c, negative))
    seconds, n_c, negative = best
    division = Division(n_c) if isinstance(layer, Arriving) else Division(n_c, -negative)
    return BestDivision(division=division, seconds=seconds)


def all_chunks(columns: int) -> list[int]:
    """T_N to choose from: 256, 512, ... and what holds all columns.

    Example: 1100 -> 256, 512, 1024, 1280.
    """
    every = all_columns(columns)
    return [*(COLUMNS << i for i in range(every.bit_length()) if COLUMNS << i < every), every]


def min_seconds(
    layer: Arriving | Returning, device: DeviceRates, n_c: int, chunk_columns: int = TILE_COLUMNS
) -> float:
    """What no simulation of a division falls below: the computing blocks' work, that of the communicating
    blocks, and the link's, each with what must come before or after it."""
    tile = device.tile_seconds(layer.reduction)

    def computed(columns: int) -> float:
        tiles = comet_tasks.row_tiles(layer.rows_E) * math.ceil(columns / TILE_COLUMNS)
        return math.ceil(tiles / (device.blocks - n_c)) * tile

    whole = computed(layer.columns)
    if isinstance(layer, Arriving):
        here, away = sum(layer.rows_WE[0]), sum(map(sum, layer.rows_WE[1:]))
        local_bytes, peer_bytes = layer.row_bytes * (2 * here + away), layer.row_bytes * away
        beside, last_share = min(tile, whole), 0.0  # a tile behind the last piece
    else:
        here, away = layer.partials_W[0], sum(layer.partials_W[1:])
        row_bytes = layer.columns * layer.element_size
        local_bytes = row_bytes * (sum(layer.rows_E) + 2 * here + away + layer.tokens)
        peer_bytes = row_bytes * away
        beside = computed(min(chunk_columns, layer.columns))  # the first chunk
        last_share = comet_tasks.chunk_widths(layer, chunk_columns)[-1] / layer.columns
    moved = (local_bytes / device.block_local_bytes + peer_bytes / device.block_peer_bytes) / n_c
    return max(whole + moved * last_share, beside + moved, beside + peer_bytes / device.link_bytes)


# ---- a simulated kernel as bars of a timeline


_RESOLUTION, _LEVELS = 200, 25


def busy_bars(
    run: Sequence[Simulated[comet_tasks.FusedTask]],
    lanes: Mapping[str, tuple[str | tuple[str, ...], int]],
    origin: float = 0.0,
) -> list[Span]:
    """A fused kernel on few lanes: the share of the blocks that is at work on each level or chunk. lanes: by
    name, how the lanes of its blocks begin, and their number. origin: when it begins, in seconds.

    Time is cut into 200 steps; neighbours of one height, to a 25th of the lane, are one bar.
    """
    total = makespan(run)
    drawn: list[Span] = []
    for lane, (prefix, size) in lanes.items():
        here = [item for item in run if item.task.lane.startswith(prefix) and item.end > item.start]
        work: dict[tuple[str, int], list[float]] = {}
        for item in here:
            busy = work.setdefault((item.task.kind, item.task.part), [0.0] * _RESOLUTION)
            first, last = item.start / total * _RESOLUTION, item.end / total * _RESOLUTION
            for step in range(int(first), min(math.ceil(last), _RESOLUTION)):
                busy[step] += (min(last, step + 1) - max(first, step)) / size
        drawn += _bars_of_lane(work, lane, origin, total / _RESOLUTION)
    return drawn


def _bars_of_lane(
    work: dict[tuple[str, int], list[float]], lane: str, origin: float, seconds: float
) -> Iterator[Span]:
    base = [0.0] * _RESOLUTION
    for (kind, part), busy in work.items():
        heights = [
            (round(below * _LEVELS), round(share * _LEVELS)) for below, share in zip(base, busy, strict=True)
        ]
        for _, group in itertools.groupby(range(_RESOLUTION), key=heights.__getitem__):
            first, *rest = group
            if busy[first] > 1e-9:
                yield Span(
                    direction="forward",
                    name=kind if kind == "L" else f"{kind}{part}",
                    kind=kind,
                    chunk=part,
                    lane=lane,
                    start=origin + first * seconds,
                    end=origin + (first + len(rest) + 1) * seconds,
                    base=base[first],
                    share=busy[first],
                )
        base = [below + share for below, share in zip(base, busy, strict=True)]
