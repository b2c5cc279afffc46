"""COMET's fused kernels as lists of tasks of thread blocks and links, for the simulator.

See section 3.1 of the paper. Its layer 0 is dispatch and the first product. Its layer 1 is the second
product, the sum of each token's rows, and combine.

A lane is a queue that runs its tasks one after another. Each thread block is a lane, and so is the link. A
task computes a tile of a product or sends a piece (16 rows, which are sent together). A rank has B persistent
blocks. n_c of them communicate, and the other G = B - n_c compute. The tiles of a product are in a list, from
which computing block b takes the tiles b, b + G, b + 2 G, ... A communicating block sends one piece after
another, at the rate of all its warps together. (In cuda/comet its warps send pieces side by side.)

The level of a row says how many ranks away its source rank is: rows from rank + level have this level. By
assumption, all ranks do the same at the same time, so only one rank is simulated. While this rank receives
rows from rank + level, it sends the same number of its own rows to rank - level. So one lane stands for both
directions of its link.

In layer 0, an expert's rows are sorted by level. This rank's own rows have level 0, those of rank + 1 have
level 1, and so on. Communicating blocks write pieces level by level (to this rank, to rank - 1, ...), so that
every rank receives rows of level 1, 2, ... in order. A tile starts when its pieces have arrived.

    computing blocks      . L L L C1 C1 C1 C2 C2 ...
    communicating blocks  S0 S1 S1 S2 S2 S3 ...
    link                  . . S1 S1 S2 S2 ...

    L    a tile whose rows are all from this rank (level 0)
    C1   a tile that is complete when rows of level 1 have arrived
    S1   pieces of rows for rank - 1, which receives them as rows of level 1

In layer 1, the columns of the result are cut into chunks of T_N columns, and tiles are computed chunk by
chunk. A rank owns the tokens of its own batch. When a chunk is computed, the communicating blocks sum the
rows that each token has on this rank. They write the sums to the tokens' owners (to this rank, to rank + 1,
...). Each owner adds the sums that it gets from all ranks. A rank sends the sums of chunk c before it adds
those of chunk c - 1 (section 3.1.2, Fig. 6).

    computing blocks      E0 E0 E1 E1 E2 E2
    communicating blocks  .  .  R0 .  R1 O0 R2 O1 O2

    E0   a tile of chunk 0
    R0   sums of this rank's rows in chunk 0, written to the ranks that own the tokens
    O0   sums of all ranks in chunk 0, for the tokens that this rank owns

Letters: T tokens of this rank, W ranks (and W levels), E experts of a rank, B blocks, n_c communicating
blocks, T_N columns of a chunk.
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
    """Rates of a rank's device. Any rate may be infinite.

    blocks: persistent thread blocks of a kernel, one for each multiprocessor.
    block_flops: floating-point operations per second of a computing block.
    block_local_bytes: bytes per second that a communicating block reads or writes in its own rank's memory.
        The block reads and writes one after the other, so a local copy runs at half this rate.
    block_peer_bytes: bytes per second that a communicating block writes to the memory of another rank.
    link_bytes: bytes per second that all blocks of a rank together send.
    signal_seconds: seconds from the last write until the block that waits for it sees the signal.
    """

    blocks: int
    block_flops: float
    block_local_bytes: float
    block_peer_bytes: float
    link_bytes: float
    signal_seconds: float

    def tile_seconds(self, reduction: int) -> float:
        """Returns the seconds in which a computing block computes one tile. A tile may have empty rows.

        reduction: the number of elements of a row before the product. The product sums over them.
        """
        return 2 * TILE_ROWS * TILE_COLUMNS * reduction / self.block_flops


@dataclass(frozen=True, kw_only=True)
class Arriving:
    """Sizes of COMET's layer 0 on one rank: rows arrive, and are multiplied by the experts' first weights.

    rows_WE: rows_WE[level][expert] is the number of rows that arrive for one of this rank's experts from rank
        + level (level 0 is this rank itself). All ranks do the same, so this rank also sends this number of
        rows to rank - level.
    reduction: elements of a row (d_model).
    columns: columns of the product (d_hidden).
    element_size: bytes of an element.
    """

    rows_WE: tuple[tuple[int, ...], ...]
    reduction: int
    columns: int
    element_size: int = 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that arrives."""
        return self.reduction * self.element_size

    @property
    def rows_E(self) -> tuple[int, ...]:
        """Number of rows of each expert, from all source ranks."""
        return tuple(map(sum, zip(*self.rows_WE, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Returning:
    """Sizes of COMET's layer 1 on one rank: rows are multiplied, summed by token, and sent back.

    rows_E: number of rows of each expert of this rank.
    partials_W: partials_W[level] is the number of sums that this rank sends to rank + level (level 0 is this
        rank itself): one sum for each token of that rank that has rows here. All ranks do the same, so this
        number of sums also arrives from rank - level.
    tokens: tokens of this rank's batch.
    reduction: elements of a row before the product (d_hidden).
    columns: columns of the product (d_model).
    element_size: bytes of an element.
    """

    rows_E: tuple[int, ...]
    partials_W: tuple[int, ...]
    tokens: int
    reduction: int
    columns: int
    element_size: int = 2


class Model(NamedTuple):
    """Sizes of a model in COMET's Table 2.

    E: experts.
    topk: experts of a token.
    N: columns of a row (d_model).
    K: columns of a hidden layer (d_hidden).
    """

    E: int
    topk: int
    N: int
    K: int


def even_layer(model: Model, tokens: int, *, ep: int, tp: int = 1) -> tuple[Arriving, Returning]:
    """Returns one rank's work in COMET's layers 0 and 1, for even routing over ep * tp ranks.

    Layer 0 is dispatch and the first product, layer 1 the second product and combine.

    The tp ranks of a tensor-parallel (TP) group hold the same experts, with 1 / tp of the hidden units each.
    So every row goes to all tp ranks of the group. Each rank sums its partial results of a token's rows, and
    sends the sum to the token's own rank. Experts are chosen at random, so the number of tokens that have
    rows on a rank is an expected value.

    model: sizes of the layer.
    tokens: tokens of all ranks, divided evenly among them.
    ep: number of tensor-parallel groups over which the experts are distributed.
    tp: number of ranks of a tensor-parallel group.
    """
    ranks = ep * tp
    own_tokens = tokens // ranks
    local_experts = model.E // ep
    # Experts get whole numbers of rows, whose running sums are the exact shares rounded down.
    ends = [own_tokens * model.topk * e // model.E for e in range(local_experts + 1)]
    rows_E = tuple(end - start for start, end in itertools.pairwise(ends))
    chance = 1 - math.comb(model.E - local_experts, model.topk) / math.comb(model.E, model.topk)
    partials = min(round(own_tokens * chance), sum(rows_E))
    arriving = Arriving(rows_WE=(rows_E,) * ranks, reduction=model.N, columns=model.K // tp)
    returning = Returning(
        rows_E=arriving.rows_E,
        partials_W=(partials,) * ranks,
        tokens=own_tokens,
        reduction=model.K // tp,
        columns=model.N,
    )
    return arriving, returning


# ---- tasks of blocks and links

BAND = 16
"""Number of row tiles (128 rows each) in a band.

All tiles of a band are computed before the next band, so that the band's rows stay in the cache.
"""
PIECE_ROWS = 16
"""Rows of a piece. One signal tells the receiver that all rows of a piece have arrived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedTask:
    """A task of a fused kernel in the simulation. A thread block or the link runs it.

    name: the task's name, unique in a launch of the kernel.
    lane: the queue that runs the task. "block 17" is a computing block, "comm 3" a communicating block,
        "link" the link to other ranks. A signal, or the end of a chunk, is a task in a lane of its own, so it
        delays only the tasks that wait for it.
    waits: names of the tasks that must end before this task starts.
    kind: a key of `pmoe.planner.timeline.LEGEND`, which gives the task's colour and meaning.
    part: in COMET's layer 0 (dispatch and first product) the level of the rows: how many ranks away the
        sending rank is. In layer 1 (second product and combine) the index of the chunk of columns.
    seconds: seconds of the task if no other task slows it.
    """

    name: str
    lane: str
    waits: tuple[str, ...]
    kind: str
    part: int
    seconds: float


class Launch:
    """Collects the tasks of one launch of a fused kernel.

    device: rates of the device.
    n_c: number of communicating blocks.
    """

    def __init__(self, device: DeviceRates, n_c: int) -> None:
        self.tasks: list[FusedTask] = []
        self._device = device
        self._on_link: list[list[str]] = [[] for _ in range(n_c)]  # for each block, its tasks on the link

    def add(
        self, name: str, lane: str, kind: str, part: int, seconds: float, waits: Iterable[str] = ()
    ) -> str:
        """Adds a task, and returns its name.

        name: the task's name, unique in the launch.
        lane: thread block or link that runs the task.
        kind: key of the timeline's legend (`pmoe.planner.timeline.LEGEND`).
        part: in COMET's layer 0 (dispatch and first product) how many ranks away the source rank is; in layer
            1 (second product and combine) the index of the chunk of columns.
        seconds: seconds of the task if no other task slows it.
        waits: names of the tasks that must end before it starts.
        """
        step = FusedTask(name=name, lane=lane, waits=tuple(waits), kind=kind, part=part, seconds=seconds)
        self.tasks.append(step)
        return name

    def meet(self, name: str, kind: str, part: int, seconds: float, waits: Iterable[str]) -> str:
        """Adds a task that starts when all of ``waits`` have ended, and returns its name.

        Later tasks can then wait for this one task instead of for each of ``waits``. The task has a lane of
        its own, so it delays no other tasks.

        name: the task's name, unique in the launch.
        kind: key of the timeline's legend (`pmoe.planner.timeline.LEGEND`).
        part: in COMET's layer 0 (dispatch and first product) how many ranks away the source rank is; in layer
            1 (second product and combine) the index of the chunk of columns.
        seconds: seconds of the task, for example the time of a signal; 0 if the task only stands for the end
            of all ``waits``.
        waits: names of the tasks that must end before this task starts.
        """
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
        """Adds the tasks with which a communicating block reads rows, and writes them to a rank's memory.

        The block reads the memory of its own rank. Bytes for another rank then pass the link, one write after
        another. When the block starts, at most one earlier write of the block still waits for the link.

        Returns the name of the task that ends when all bytes have arrived.

        name: name of the task of the block. The task of the link gets the letter N in front of this name.
        block: number of the communicating block.
        level: how many ranks away the rank is to which the block writes; 0 is its own rank.
        kind: key of the timeline's legend (`pmoe.planner.timeline.LEGEND`).
        part: in COMET's layer 0 (dispatch and first product) the same number as ``level``; in layer 1 (second
            product and combine) the index of the chunk of columns.
        read_bytes, write_bytes: numbers of bytes that the block reads and writes.
        waits: names of the tasks that must end before the block starts.
        """
        device = self._device
        sent = self._on_link[block]
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
    """A tile of the product in COMET's layer 0: 128 rows x 256 columns, all of one expert.

    The level of a row says how many ranks away its source is: rows from rank + 2 have level 2, and rows of
    this rank itself have level 0. Rows arrive level by level.

    level: the tile can start when the rows of this level have arrived. It is the highest level of the tile's
        rows. But a tile with fewer than 128 rows, at the end of an expert's rows, has the largest level of
        all (`tile_order`).
    expert: number of the expert on this rank.
    row, column: position of the tile in the grid of the expert's tiles.
    """

    level: int
    expert: int
    row: int
    column: int


def tile_order(layer: Arriving) -> list[Tile]:
    """Returns layer 0's tiles in the order in which computing blocks take them (section 3.1.2 and Fig. 5).

    An expert's result is a grid of tiles. Rows of level l come from rank + l, and the level of a tile is the
    highest level of its rows. Tiles are sorted by these keys, the most important key first:

    1. the level (so the first tiles are those whose rows are all from this rank)
    2. the expert
    3. the band (16 neighbouring rows of the grid)
    4. the column of the grid
    5. the row of the grid

    There is an exception, as in cuda/comet/order.h: if the tiles in the last row of a grid have fewer than
    128 rows, their level is W - 1, the largest of all (W is the number of ranks).
    """
    column_tiles = math.ceil(layer.columns / TILE_COLUMNS)
    arrived = [0] * len(layer.rows_E)
    complete = [0] * len(layer.rows_E)  # row tiles of each expert in ``order``
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
    """Returns the tasks of COMET's layer 0: sending pieces of rows, and tiles of the product.

    A piece is at most 16 rows. The communicating blocks take the pieces in turn. A tile waits for the pieces
    that hold its rows.

    layer: numbers and sizes of the rows.
    device: rates of the device.
    n_c: number of communicating blocks.
    """
    kernel = Launch(device, n_c)
    landed: dict[tuple[int, int], list[str]] = {}  # (expert, row tile) -> writes that bring its rows
    piece = itertools.count()
    rows_before = [0] * len(layer.rows_E)  # rows of each expert from lower levels
    for level, rows_E in enumerate(layer.rows_WE):
        for expert, rows in enumerate(rows_E):
            for first in range(0, rows, PIECE_ROWS):
                p = next(piece)
                count = min(PIECE_ROWS, rows - first)
                size = count * layer.row_bytes
                end = kernel.write(f"S{p}", p % n_c, level, "S", level, read_bytes=size, write_bytes=size)
                at = rows_before[expert] + first
                for row in range(at // TILE_ROWS, (at + count - 1) // TILE_ROWS + 1):
                    landed.setdefault((expert, row), []).append(end)
            rows_before[expert] += rows
    for (expert, row), ends in landed.items():
        kernel.meet(f"A{expert}.{row}", "S", 0, device.signal_seconds, ends)
    seconds = device.tile_seconds(layer.reduction)
    for i, tile in enumerate(tile_order(layer)):
        lane = f"block {i % (device.blocks - n_c)}"
        kind = "C" if tile.level else "L"
        kernel.add(f"T{i}", lane, kind, tile.level, seconds, (f"A{tile.expert}.{tile.row}",))
    return kernel.tasks


# ---- layer 1


def fused_combine_tasks(
    layer: Returning, device: DeviceRates, n_c: int, chunk_columns: int
) -> list[FusedTask]:
    """Returns the tasks of COMET's layer 1: tiles of the product, and two sums for each token.

    See section 3.1.2 and Fig. 6. A chunk is a range of T_N columns of the product. The product is computed
    chunk by chunk, and each chunk is summed when it is computed. There are two sums:

    1. Each rank that has rows of a token adds these rows. The result is a partial sum, which the rank sends
       to the token's owner (the rank that the token came from).
    2. The owner adds the partial sums of all ranks.

    Partial sums are sent in pieces of 16 rows. The pieces for this rank's own tokens come first, then those
    for rank + 1, and so on. The communicating blocks take the pieces in turn. They also share the second
    sums, those of this rank's own tokens.

    To simulate fewer tasks, many tiles or pieces are one task:

        computing block       all its tiles of a chunk
        communicating block   all its pieces of a chunk for one rank, which pass the link as one message

    layer: numbers and sizes of the rows.
    device: rates of the device.
    n_c: number of communicating blocks.
    chunk_columns: T_N, the number of columns of a chunk.
    """
    kernel = Launch(device, n_c)
    computing = device.blocks - n_c
    tile_seconds = device.tile_seconds(layer.reduction)
    rows = sum(layer.rows_E)
    partials = sum(layer.partials_W)
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
    """Deals groups of rows to blocks in pieces. Returns how many rows of every group each block gets.

    The blocks take pieces in turn, also across groups: if block 0 gets the last piece of a group, block 1
    gets the first piece of the next group.

    counts: number of rows of each group.
    blocks: number of blocks.
    height: number of rows of a piece.

    The result has a list for each group, with a number for each block. Example: counts [3, 1], 2 blocks,
    height 1 -> [[2, 1], [0, 1]].
    """
    dealt = [[0] * blocks for _ in counts]
    turn = itertools.cycle(range(blocks))
    for share, count in zip(dealt, counts, strict=True):
        for first in range(0, count, height):
            share[next(turn)] += min(height, count - first)
    return dealt


def chunk_widths(layer: Returning, chunk_columns: int) -> list[int]:
    """Returns the number of columns of each chunk of the result. The last chunk may be narrower.

    layer: COMET's layer 1. Its result has ``layer.columns`` columns.
    chunk_columns: columns of a chunk (T_N).
    """
    return [min(chunk_columns, layer.columns - begin) for begin in range(0, layer.columns, chunk_columns)]


def row_tiles(rows_E: Sequence[int]) -> int:
    """Returns the number of row tiles of all experts together.

    A row tile is a strip of 128 rows of an expert, across all columns. The last strip of an expert may have
    fewer rows, because no tile has rows of two experts.

    rows_E: number of rows of each expert.
    """
    return sum(math.ceil(rows / TILE_ROWS) for rows in rows_E)
