"""COMET's fused kernels as tasks: a rank's device, its two layers, and what its blocks do (3.1).

Layer 0 is dispatch and product, layer 1 product, sum of a token's rows and combine. All ranks are taken to do
the same at the same time: what rank + l sends here arrives when what is sent to rank - l arrives there, so
one rank stands for all, and one lane for both directions of its link.

Blocks and links are lanes, tiles and pieces are tasks. Of the B persistent blocks of a rank n_c communicate
and G = B - n_c compute, block b the tiles b, b + G, ... of one list. The warps of a communicating block take
a piece each (cuda/comet); here a block takes one piece after another, at its whole rate.

Layer 0: the rows of an expert lie by the level of their source, this rank's own (0) first, then those of
rank + 1, rank + 2, ... Communicating blocks write pieces of rows, level by level (to this rank, to rank - 1,
...), so that every rank receives level 1, 2, ... in turn. A tile begins when its pieces have arrived.

    computing blocks      . L L L C1 C1 C1 C2 C2 ...     tiles by the level that completes their rows
    communicating blocks  S0 S1 S1 S2 S2 S3 ...
    link                  . . S1 S1 S2 S2 ...

Layer 1: tiles by chunks of T_N columns. When a chunk is computed, the communicating blocks sum the rows that
each token has here and write the sums to the tokens' owners (to this rank, to rank + 1, ...); the sums of all
ranks for chunk c - 1 are added after chunk c has been sent (section 3.1.2, Fig. 6).

    computing blocks      E0 E0 E1 E1 E2 E2
    communicating blocks  .  .  R0 .  R1 O0 R2 O1 O2

Letters: T tokens of this rank, W ranks (levels), E experts of a rank, n_c communicating blocks, T_N columns
of a chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pmoe.kernels.comet.launcher import COLUMNS

TILE_ROWS = 128
TILE_COLUMNS = COLUMNS


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What a rank's device can do. Any rate may be infinite.

    blocks: persistent blocks, one a multiprocessor. block_flops: floating-point operations a second of a
    computing block. block_local_bytes, block_peer_bytes: bytes a second that a communicating block reads or
    writes in its own rank's memory, and writes to a peer's; one after the other, so that a copy from here to
    here runs at half the local rate. link_bytes: bytes a second that leave a rank, of all its blocks.
    signal_seconds: from the last write to the block that waited for it.
    """

    blocks: int
    block_flops: float
    block_local_bytes: float
    block_peer_bytes: float
    link_bytes: float
    signal_seconds: float

    def tile_seconds(self, reduction: int) -> float:
        """Of a whole tile; one that is not full costs the same."""
        return 2 * TILE_ROWS * TILE_COLUMNS * reduction / self.block_flops


@dataclass(frozen=True, kw_only=True)
class Arriving:
    """Layer 0 of a rank: rows_WE[level][expert] rows arrive from rank + level for each expert here, and as
    many leave for rank - level. They are ``reduction`` elements wide (M), their product ``columns``.
    """

    rows_WE: tuple[tuple[int, ...], ...]
    reduction: int
    columns: int
    element_size: int = 2

    @property
    def row_bytes(self) -> int:
        return self.reduction * self.element_size

    @property
    def rows_E(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.rows_WE, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Returning:
    """Layer 1 of a rank: the rows of each expert here, ``reduction`` wide (H), make ``columns`` columns (M).

    partials_W[level]: tokens of rank + level with rows here, whose sums go there; as many come from rank -
    level. tokens: those of this rank, T.
    """

    rows_E: tuple[int, ...]
    partials_W: tuple[int, ...]
    tokens: int
    reduction: int
    columns: int
    element_size: int = 2


class Model(NamedTuple):
    """A row of Table 2: E experts, topk of them for a token; N wide rows, K wide hidden layers."""

    E: int
    topk: int
    N: int
    K: int


def even_layer(
    model: Model, tokens: int, *, ep: int, tp: int = 1, element_size: int = 2
) -> tuple[Arriving, Returning]:
    """Both layers of a rank of ep * tp ranks under even routing; tokens: of all ranks, dealt evenly.

    The ranks of a TP group hold the same experts, 1 / tp of their hidden units each. So every row goes to all
    tp of them, and each sums what its units make of a token's rows and sends that to the token's owner. A
    token has rows on a rank with the chance that one of its experts, each as likely as another, is there.
    """
    ranks = ep * tp
    own, local = tokens // ranks, model.E // ep
    # whole rows whose sums over experts are those of exact shares, as near as whole numbers can be
    ends = [own * model.topk * e // model.E for e in range(local + 1)]
    rows_E = tuple(end - start for start, end in itertools.pairwise(ends))
    here = 1 - math.comb(model.E - local, model.topk) / math.comb(model.E, model.topk)
    partials = min(round(own * here), sum(rows_E))
    arriving = Arriving(
        rows_WE=(rows_E,) * ranks, reduction=model.N, columns=model.K // tp, element_size=element_size
    )
    returning = Returning(
        rows_E=arriving.rows_E,
        partials_W=(partials,) * ranks,
        tokens=own,
        reduction=model.K // tp,
        columns=model.N,
        element_size=element_size,
    )
    return arriving, returning


# ---- tasks of blocks and links

BAND = 16
"""Row tiles that are computed beside each other, column after column: their rows stay in the cache."""
PIECE_ROWS = 16
"""Rows that are signalled together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedTask:
    """A task of a fused kernel. kind: of `pmoe.planner.timeline.LEGEND`. part: its level, or its chunk.
    lane: "block 17" computes, "comm 3" communicates, "link"; a signal and the end of a chunk have lanes of
    their own, for they hold up nothing but who waits for them."""

    name: str
    lane: str
    waits: tuple[str, ...]
    kind: str
    part: int
    seconds: float


class Launch:
    """The tasks of one launch, as they are added."""

    def __init__(self, device: DeviceRates, n_c: int) -> None:
        self.tasks: list[FusedTask] = []
        self._device = device
        self._on_link: list[list[str]] = [[] for _ in range(n_c)]  # by block: what it has sent

    def add(
        self, name: str, lane: str, kind: str, part: int, seconds: float, waits: Iterable[str] = ()
    ) -> str:
        step = FusedTask(name=name, lane=lane, waits=tuple(waits), kind=kind, part=part, seconds=seconds)
        self.tasks.append(step)
        return name

    def meet(self, name: str, kind: str, part: int, seconds: float, waits: Iterable[str]) -> str:
        """What several wait for: it has a lane to itself, and holds up nobody else."""
        return self.add(name, name, kind, part, seconds, waits)

    def write(
        self,
        name: str,
        block: int,
        level: int,
        kind: str,
        part: int,
        *,
        read_bytes: float,
        write_bytes: float,
        waits: Iterable[str] = (),
    ) -> str:
        """A communicating block reads here and writes to the rank at a level; returns the task with whose end
        all is there.

        Bytes for a peer pass the link behind those of other blocks. A block begins nothing before its last
        but one has passed, so that little is under way.
        """
        device, sent = self._device, self._on_link[block]
        rate = device.block_peer_bytes if level else device.block_local_bytes
        seconds = read_bytes / device.block_local_bytes + write_bytes / rate
        self.add(name, f"comm {block}", kind, part, seconds, (*waits, *sent[-2:-1]))
        if level == 0:
            return name
        sent.append(self.add(f"N{name}", "link", kind, part, write_bytes / device.link_bytes, (name,)))
        return sent[-1]


# ---- layer 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """level: of the source that completes its rows. row, column: of its expert's tiles."""

    level: int
    expert: int
    row: int
    column: int


def tile_order(layer: Arriving) -> list[Tile]:
    """Layer 0's tiles in the order in which blocks take them: by level, inside it by expert, inside that in
    bands of 16 row tiles, column after column (section 3.1.2 and Fig. 5: what needs no other rank goes
    first). An expert's last tile, where it is not full, goes with the last level, as in cuda/comet/order.h.
    """
    column_tiles = math.ceil(layer.columns / TILE_COLUMNS)
    arrived = [0] * len(layer.rows_E)
    complete = [0] * len(layer.rows_E)  # row tiles of each expert
    order = []
    for level, rows_E in enumerate(layer.rows_WE):
        last = level + 1 == len(layer.rows_WE)
        for expert, rows in enumerate(rows_E):
            arrived[expert] += rows
            first, end = complete[expert], arrived[expert] // TILE_ROWS
            complete[expert] = end = end + (last and arrived[expert] % TILE_ROWS > 0)
            for band in range(first, end, BAND):
                order += [
                    Tile(level=level, expert=expert, row=row, column=column)
                    for column in range(column_tiles)
                    for row in range(band, min(band + BAND, end))
                ]
    return order


def fused_dispatch_tasks(layer: Arriving, device: DeviceRates, n_c: int) -> list[FusedTask]:
    """Layer 0 with ``n_c`` communicating blocks, which take pieces in turn."""
    kernel = Launch(device, n_c)
    landed: dict[tuple[int, int], list[str]] = {}  # (expert, row tile) -> what its rows wait for
    piece = itertools.count()
    before = [0] * len(layer.rows_E)  # rows of each expert from lower levels
    for level, rows_E in enumerate(layer.rows_WE):
        for expert, rows in enumerate(rows_E):
            for first in range(0, rows, PIECE_ROWS):
                p, count = next(piece), min(PIECE_ROWS, rows - first)
                size = count * layer.row_bytes
                end = kernel.write(f"S{p}", p % n_c, level, "S", level, read_bytes=size, write_bytes=size)
                at = before[expert] + first
                for row in range(at // TILE_ROWS, (at + count - 1) // TILE_ROWS + 1):
                    landed.setdefault((expert, row), []).append(end)
            before[expert] += rows
    for (expert, row), ends in landed.items():
        kernel.meet(f"A{expert}.{row}", "S", 0, device.signal_seconds, ends)
    seconds = device.tile_seconds(layer.reduction)
    for i, tile in enumerate(tile_order(layer)):
        lane, kind = f"block {i % (device.blocks - n_c)}", "C" if tile.level else "L"
        kernel.add(f"T{i}", lane, kind, tile.level, seconds, (f"A{tile.expert}.{tile.row}",))
    return kernel.tasks


# ---- layer 1


def fused_combine_tasks(
    layer: Returning, device: DeviceRates, n_c: int, chunk_columns: int
) -> list[FusedTask]:
    """Layer 1 with ``n_c`` communicating blocks and chunks of ``chunk_columns``, T_N (section 3.1.2, Fig. 6).

    Sums leave in pieces of 16, which blocks take in turn, for this rank first; this rank's tokens are dealt
    out singly. What a block does without waiting between is one task: its tiles of a chunk, at no loss, and
    its pieces for one rank, which pass the link together.
    """
    kernel = Launch(device, n_c)
    computing = device.blocks - n_c
    tile_seconds = device.tile_seconds(layer.reduction)
    rows, partials = sum(layer.rows_E), sum(layer.partials_W)
    sums_WB = dealt(layer.partials_W, n_c, PIECE_ROWS)
    (tokens_B,) = dealt([layer.tokens], n_c, 1)
    widths = chunk_widths(layer, chunk_columns)

    def sum_at_home(c: int) -> None:
        for block, tokens in enumerate(tokens_B):
            if tokens:
                touched = tokens * (partials / layer.tokens + 1)  # elements of a column, read and written
                seconds = widths[c] * layer.element_size * touched / device.block_local_bytes
                kernel.add(f"O{c}.{block}", f"comm {block}", "O", c, seconds, (f"A{c}",))

    tiles = 0
    for c, columns in enumerate(widths):
        first, tiles = tiles, tiles + row_tiles(layer.rows_E) * math.ceil(columns / TILE_COLUMNS)
        counts = [len(range(b, tiles, computing)) - len(range(b, first, computing)) for b in range(computing)]
        computed = [
            kernel.add(f"E{c}.{block}", f"block {block}", "E", c, count * tile_seconds)
            for block, count in enumerate(counts)
            if count
        ]
        done = kernel.meet(f"D{c}", "E", c, 0.0, computed)
        sent = []
        for level, sums_B in enumerate(sums_WB):
            for block, sums in enumerate(sums_B):
                if sums:
                    size = sums * columns * layer.element_size
                    read = size * rows / partials
                    name = f"R{c}.{level}.{block}"
                    end = kernel.write(
                        name, block, level, "R", c, read_bytes=read, write_bytes=size, waits=(done,)
                    )
                    sent.append(end)
        kernel.meet(f"A{c}", "R", c, device.signal_seconds if sent else 0.0, sent)
        if c > 0:
            sum_at_home(c - 1)
    sum_at_home(len(widths) - 1)
    return kernel.tasks


def dealt(counts: Sequence[int], blocks: int, height: int) -> list[list[int]]:
    """Of each count what each block gets: pieces of ``height`` in turn, each count going on where the one
    before ended."""
    dealt = [[0] * blocks for _ in counts]
    turn = itertools.cycle(range(blocks))
    for share, count in zip(dealt, counts, strict=True):
        for first in range(0, count, height):
            share[next(turn)] += min(height, count - first)
    return dealt


def chunk_widths(layer: Returning, chunk_columns: int) -> list[int]:
    return [min(chunk_columns, layer.columns - begin) for begin in range(0, layer.columns, chunk_columns)]


def row_tiles(rows_E: Sequence[int]) -> int:
    return sum(math.ceil(rows / TILE_ROWS) for rows in rows_E)
