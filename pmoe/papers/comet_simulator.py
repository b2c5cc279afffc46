"""COMET's fused kernels on the simulator: how long they take, and how many blocks should communicate.

Blocks and links are lanes, tiles and pieces are tasks (COMET, sections 3.1 and 3.2). Of the B persistent
blocks of a rank n_c communicate and G = B - n_c compute, block b the tiles b, b + G, ... of one list.

Layer 0, dispatch and product: the rows of an expert lie by the level of their source, this rank's own (0)
first, then those of rank + 1, rank + 2, ... Communicating blocks write pieces of rows, level by level (to
this rank, to rank - 1, ...), so that every rank receives level 1, 2, ... in turn. A tile begins when its
pieces have arrived.

    computing blocks      . L L L C1 C1 C1 C2 C2 ...     tiles by the level that completes their rows
    communicating blocks  S0 S1 S1 S2 S2 S3 ...
    link                  . . S1 S1 S2 S2 ...

Layer 1, product, sum of a token's rows and combine: tiles by chunks of T_N columns. When a chunk is computed,
the communicating blocks sum the rows that each token has here and write the sums to the tokens' owners (to
this rank, to rank + 1, ...); the sums of all ranks for chunk c - 1 are added after chunk c has been sent.

    computing blocks      E0 E0 E1 E1 E2 E2
    communicating blocks  .  .  R0 .  R1 O0 R2 O1 O2

All ranks are taken to do the same at the same time: what rank + l sends here arrives when what is sent to
rank - l arrives there, so one rank stands for all, and one lane for both directions of its link. The warps of
a communicating block take a piece each (cuda/comet); here a block takes one piece after another, at its whole
rate.

Letters: T tokens of this rank, W ranks (levels), E experts of a rank, n_c communicating blocks, T_N columns
of a chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pmoe.planner.division import COLUMNS, Division, all_columns
from pmoe.planner.simulator import Simulated, makespan, simulate
from pmoe.planner.timeline import Bar

TILE_ROWS = 128
TILE_COLUMNS = COLUMNS
BAND = 16
"""Row tiles that are computed beside each other, column after column: their rows stay in the cache."""
PIECE_ROWS = 16
"""Rows that are signalled together."""

MAX_TILES = 20_000
MAX_PIECES = 8_192
"""Beyond these, neighbouring tiles and pieces are one task: see `tile_order` and `piece_rows`."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a rank's device can do. Any rate may be infinite.

    blocks: persistent blocks, one a multiprocessor. block_flops: floating-point operations a second of a
    computing block. block_local_bytes, block_peer_bytes: bytes a second that a communicating block reads or
    writes in its own rank's memory, and writes to a peer's; one after the other, so that a copy from here to
    here runs at half the local rate. link_bytes: bytes a second that leave a rank, of all its blocks.
    signal_seconds: from the last write to the block that waited for it.
    Raises ValueError for fewer than 2 blocks, a rate not above 0, and a signal below 0.
    """

    blocks: int
    block_flops: float
    block_local_bytes: float
    block_peer_bytes: float
    link_bytes: float
    signal_seconds: float

    def __post_init__(self) -> None:
        if self.blocks < 2:
            raise ValueError(f"blocks ({self.blocks}) must be at least 2: one computes, one communicates")
        for name in ("block_flops", "block_local_bytes", "block_peer_bytes", "link_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be above 0")
        if not 0 <= self.signal_seconds < math.inf:
            raise ValueError(f"signal_seconds ({self.signal_seconds}) must be a finite number of at least 0")

    def tile_seconds(self, reduction: int) -> float:
        """Of a whole tile; one that is not full costs the same."""
        return 2 * TILE_ROWS * TILE_COLUMNS * reduction / self.block_flops


@dataclass(frozen=True, kw_only=True)
class Arriving:
    """Layer 0 of a rank: rows_WE[level][expert] rows arrive from rank + level for each expert here, and as
    many leave for rank - level. They are ``reduction`` elements wide (M), their product ``columns``.
    Raises ValueError for no level, levels of unlike lengths, negative rows, and sizes below 1.
    """

    rows_WE: tuple[tuple[int, ...], ...]
    reduction: int
    columns: int
    element_size: int = 2

    def __post_init__(self) -> None:
        if not self.rows_WE or len({len(rows) for rows in self.rows_WE}) != 1:
            raise ValueError(f"rows_WE ({self.rows_WE}) must hold a count an expert for every level")
        if min(itertools.chain((0,), *self.rows_WE)) < 0:
            raise ValueError(f"rows_WE ({self.rows_WE}) must hold counts of at least 0")
        _check_sizes(self)

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
    Raises ValueError for negative counts, more sums than rows, rows without sums, sums without tokens, and
    sizes below 1.
    """

    rows_E: tuple[int, ...]
    partials_W: tuple[int, ...]
    tokens: int
    reduction: int
    columns: int
    element_size: int = 2

    def __post_init__(self) -> None:
        if not self.partials_W or min((self.tokens, *self.rows_E, *self.partials_W)) < 0:
            raise ValueError(
                f"rows_E ({self.rows_E}), partials_W ({self.partials_W}) and tokens ({self.tokens}) must be "
                "counts of at least 0, for at least one rank"
            )
        rows, partials = sum(self.rows_E), sum(self.partials_W)
        if partials > rows or (rows > 0 and partials == 0):
            raise ValueError(
                f"partials_W ({self.partials_W}) must hold at least 1 and at most {rows} sums of {rows} rows"
            )
        if max(self.partials_W) > self.tokens:
            raise ValueError(f"partials_W ({self.partials_W}) must be at most tokens ({self.tokens}) each")
        _check_sizes(self)


def _check_sizes(layer: Arriving | Returning) -> None:
    for name in ("reduction", "columns", "element_size"):
        if getattr(layer, name) < 1:
            raise ValueError(f"{name} ({getattr(layer, name)}) must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A task of a fused kernel. kind: of `pmoe.planner.timeline.MEANING`. part: its level, or its chunk.
    lane: "block 17" computes, "comm 3" communicates, "link"; a signal and the end of a chunk have lanes of
    their own, for they hold up nothing but who waits for them."""

    name: str
    lane: str
    waits: tuple[str, ...]
    kind: str
    part: int
    seconds: float


class _Kernel:
    """The tasks of one launch, as they are added."""

    def __init__(self, machine: Machine, n_c: int) -> None:
        _check_division(n_c, machine)
        self.tasks: list[Step] = []
        self._machine = machine
        self._on_link: list[list[str]] = [[] for _ in range(n_c)]  # by block: what it has sent

    def add(
        self, name: str, lane: str, kind: str, part: int, seconds: float, waits: Iterable[str] = ()
    ) -> str:
        step = Step(name=name, lane=lane, waits=tuple(waits), kind=kind, part=part, seconds=seconds)
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
        machine, sent = self._machine, self._on_link[block]
        rate = machine.block_peer_bytes if level else machine.block_local_bytes
        seconds = read_bytes / machine.block_local_bytes + write_bytes / rate
        self.add(name, f"comm {block}", kind, part, seconds, (*waits, *sent[-2:-1]))
        if level == 0:
            return name
        sent.append(self.add(f"N{name}", "link", kind, part, write_bytes / machine.link_bytes, (name,)))
        return sent[-1]


# ---- layer 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """level: of the source that completes its rows. row: of its expert's row tiles. ``width`` tiles of
    columns from ``column`` on are one task."""

    level: int
    expert: int
    row: int
    column: int
    width: int = 1


def tile_order(layer: Arriving) -> list[Tile]:
    """Layer 0's tiles in the order in which blocks take them: by level, inside it by expert, inside that in
    bands of 16 row tiles, column after column (section 3.1.2 and Fig. 5: what needs no other rank goes
    first). An expert's last tile, where it is not full, goes with the last level, as in cuda/comet/order.h.

    Beyond 20,000 tiles neighbouring columns are one task, as few as it takes to stay below: loads of blocks,
    over 150 tasks each on 132, are then less even by about a task.
    """
    height = sum(math.ceil(rows / TILE_ROWS) for rows in layer.rows_E)
    column_tiles = math.ceil(layer.columns / TILE_COLUMNS)
    parts = min(column_tiles, max(1, MAX_TILES // max(height, 1)))
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
                for part in range(parts):
                    column, after = column_tiles * part // parts, column_tiles * (part + 1) // parts
                    order += [
                        Tile(level=level, expert=expert, row=row, column=column, width=after - column)
                        for row in range(band, min(band + BAND, end))
                    ]
    return order


def piece_rows(layer: Arriving) -> int:
    """Rows of a piece: 16, doubled until there are at most 8,192 pieces or a piece is as high as a tile."""
    rows = PIECE_ROWS
    while rows < TILE_ROWS and _num_pieces(layer, rows) > MAX_PIECES:
        rows *= 2
    return rows


def _num_pieces(layer: Arriving, rows: int) -> int:
    return sum(math.ceil(count / rows) for level in layer.rows_WE for count in level)


def dispatch_tasks(layer: Arriving, machine: Machine, n_c: int) -> list[Step]:
    """Layer 0 with ``n_c`` communicating blocks, which take pieces in turn.

    Raises ValueError for an n_c that leaves no block to compute or to communicate.
    """
    kernel = _Kernel(machine, n_c)
    landed: dict[tuple[int, int], list[str]] = {}  # (expert, row tile) -> what its rows wait for
    height, piece = piece_rows(layer), itertools.count()
    before = [0] * len(layer.rows_E)  # rows of each expert from lower levels
    for level, rows_E in enumerate(layer.rows_WE):
        for expert, rows in enumerate(rows_E):
            for first in range(0, rows, height):
                p, count = next(piece), min(height, rows - first)
                size = count * layer.row_bytes
                end = kernel.write(f"S{p}", p % n_c, level, "S", level, read_bytes=size, write_bytes=size)
                at = before[expert] + first
                for row in range(at // TILE_ROWS, (at + count - 1) // TILE_ROWS + 1):
                    landed.setdefault((expert, row), []).append(end)
            before[expert] += rows
    for (expert, row), ends in landed.items():
        kernel.meet(f"A{expert}.{row}", "S", 0, machine.signal_seconds, ends)
    seconds = machine.tile_seconds(layer.reduction)
    for i, tile in enumerate(tile_order(layer)):
        kernel.add(
            f"T{i}",
            f"block {i % (machine.blocks - n_c)}",
            "C" if tile.level else "L",
            tile.level,
            seconds * tile.width,
            (f"A{tile.expert}.{tile.row}",),
        )
    return kernel.tasks


# ---- layer 1


def combine_tasks(layer: Returning, machine: Machine, n_c: int, chunk_columns: int) -> list[Step]:
    """Layer 1 with ``n_c`` communicating blocks and chunks of ``chunk_columns``, T_N (section 3.1.2, Fig. 6).

    Sums leave in pieces of 16, which blocks take in turn, for this rank first; this rank's tokens are dealt
    out singly. What a block does without waiting between is one task: its tiles of a chunk, at no loss, and
    its pieces for one rank, which pass the link together.
    Raises ValueError for an n_c that leaves no block to compute or to communicate, and for a T_N that is no
    multiple of 256.
    """
    kernel = _Kernel(machine, n_c)
    _check_chunk(chunk_columns)
    computing = machine.blocks - n_c
    tile_seconds = machine.tile_seconds(layer.reduction)
    rows, partials = sum(layer.rows_E), sum(layer.partials_W)
    sums_WB = _dealt(layer.partials_W, n_c, PIECE_ROWS)
    (tokens_B,) = _dealt([layer.tokens], n_c, 1)
    widths = _chunk_widths(layer, chunk_columns)

    def sum_at_home(c: int) -> None:
        for block, tokens in enumerate(tokens_B):
            if tokens:
                seconds = widths[c] * layer.element_size * _touched(layer, tokens) / machine.block_local_bytes
                kernel.add(f"O{c}.{block}", f"comm {block}", "O", c, seconds, (f"A{c}",))

    tiles = 0
    for c, columns in enumerate(widths):
        first, tiles = tiles, tiles + _row_tiles(layer) * math.ceil(columns / TILE_COLUMNS)
        counts = [_congruent(tiles, b, computing) - _congruent(first, b, computing) for b in range(computing)]
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
                    sent.append(
                        kernel.write(
                            name, block, level, "R", c, read_bytes=read, write_bytes=size, waits=(done,)
                        )
                    )
        kernel.meet(f"A{c}", "R", c, machine.signal_seconds if sent else 0.0, sent)
        if c > 0:
            sum_at_home(c - 1)
    sum_at_home(len(widths) - 1)
    return kernel.tasks


def _dealt(counts: Sequence[int], blocks: int, height: int) -> list[list[int]]:
    """Of each count what each block gets: pieces of ``height`` in turn, each count going on where the one
    before ended."""
    dealt, turn = [], 0
    for count in counts:
        pieces = math.ceil(count / height)
        share = [height * _congruent(pieces, (block - turn) % blocks, blocks) for block in range(blocks)]
        if pieces:
            share[(turn + pieces - 1) % blocks] -= pieces * height - count
        turn += pieces
        dealt.append(share)
    return dealt


def _congruent(end: int, block: int, blocks: int) -> int:
    """How many of 0 ... end - 1 are ``block`` modulo ``blocks``."""
    return (end - block + blocks - 1) // blocks if end > block else 0


def _chunk_widths(layer: Returning, chunk_columns: int) -> list[int]:
    return [min(chunk_columns, layer.columns - begin) for begin in range(0, layer.columns, chunk_columns)]


def _touched(layer: Returning, tokens: int) -> float:
    """Elements of a column that are read and written to sum so many of this rank's tokens."""
    return tokens * (sum(layer.partials_W) / layer.tokens + 1) if tokens else 0.0


def _row_tiles(layer: Returning) -> int:
    return sum(math.ceil(rows / TILE_ROWS) for rows in layer.rows_E)


def _check_division(n_c: int, machine: Machine) -> None:
    if not 1 <= n_c < machine.blocks:
        raise ValueError(f"n_c ({n_c}) must be at least 1 and below blocks ({machine.blocks})")


def _check_chunk(chunk_columns: int) -> None:
    if chunk_columns < TILE_COLUMNS or chunk_columns % TILE_COLUMNS:
        raise ValueError(f"chunk_columns ({chunk_columns}) must be a multiple of {TILE_COLUMNS}, and not 0")


# ---- both


def fused_run(
    layer: Arriving | Returning, machine: Machine, n_c: int, chunk_columns: int = TILE_COLUMNS
) -> list[Simulated[Step]]:
    """A fused kernel, simulated; chunk_columns is for layer 1. Raises ValueError as its tasks do."""
    if isinstance(layer, Arriving):
        tasks = dispatch_tasks(layer, machine, n_c)
    else:
        tasks = combine_tasks(layer, machine, n_c, chunk_columns)
    return simulate(tasks, lambda task: task.seconds)


def fused_seconds(
    layer: Arriving | Returning, machine: Machine, n_c: int, chunk_columns: int = TILE_COLUMNS
) -> float:
    """Of one fused kernel. Raises ValueError as its tasks do."""
    return makespan(fused_run(layer, machine, n_c, chunk_columns))


@dataclass(frozen=True, kw_only=True)
class Found:
    """A division of a kernel's blocks and its seconds (of layer 0, chunk_columns mean nothing). simulated:
    how many divisions were simulated to find it."""

    division: Division
    seconds: float
    simulated: int


def best_division(
    layer: Arriving | Returning,
    machine: Machine,
    *,
    divisions: Iterable[int] | None = None,
    chunks: Iterable[int] | None = None,
) -> Found:
    """The fastest n_c, for layer 1 with its T_N: that of all candidates on the simulator; of equals the least
    n_c, then the fewest chunks (the division point of section 3.2.2, simulated where COMET profiles).

    divisions: n_c to choose from, default 1 to blocks - 1. chunks: T_N, default 256, 512, ... and all
    columns. Candidates are simulated in the order of `least_seconds` until that exceeds what has been found.
    Raises ValueError for none to choose from, chunks for layer 0, and bad ones among them.
    """
    if isinstance(layer, Arriving):
        if chunks is not None:
            raise ValueError(f"chunks ({chunks}) must be left out for layer 0, which has none")
        widths = [TILE_COLUMNS]
    else:
        widths = list(all_chunks(layer.columns) if chunks is None else chunks)
    allowed = list(range(1, machine.blocks) if divisions is None else divisions)
    if not allowed or not widths:
        raise ValueError(f"divisions ({allowed}) and chunks ({widths}) must hold something to choose from")
    candidates = sorted(
        (least_seconds(layer, machine, n_c, width), n_c, -width)
        for n_c in dict.fromkeys(allowed)
        for width in dict.fromkeys(widths)
    )
    best = (math.inf, 0, 0)
    simulated = 0
    for least, n_c, negative in candidates:
        if least * (1 - 1e-9) > best[0]:  # sums in another order differ by rounding
            break
        simulated += 1
        best = min(best, (fused_seconds(layer, machine, n_c, -negative), n_c, negative))
    seconds, n_c, negative = best
    division = Division(n_c) if isinstance(layer, Arriving) else Division(n_c, -negative)
    return Found(division=division, seconds=seconds, simulated=simulated)


def all_chunks(columns: int) -> list[int]:
    """T_N to choose from: 256, 512, ... and what holds all columns.

    Example: 1100 -> 256, 512, 1024, 1280.
    """
    every = all_columns(columns)
    doubled = (COLUMNS << i for i in itertools.count())
    return [*itertools.takewhile(lambda width: width < every, doubled), every]


def least_seconds(
    layer: Arriving | Returning, machine: Machine, n_c: int, chunk_columns: int = TILE_COLUMNS
) -> float:
    """What no simulation of a division falls below: the computing blocks' work with what must come before or
    after it, that of the communicating blocks, and the link's.

    Raises ValueError as the kernels' tasks do.
    """
    _check_division(n_c, machine)
    tile = machine.tile_seconds(layer.reduction)
    computing, local = machine.blocks - n_c, machine.block_local_bytes
    if isinstance(layer, Arriving):
        tiles = sum(math.ceil(rows / TILE_ROWS) for rows in layer.rows_E)
        tiles *= math.ceil(layer.columns / TILE_COLUMNS)
        if not tiles:
            return 0.0
        here, away = sum(layer.rows_WE[0]), sum(map(sum, layer.rows_WE[1:]))
        written = layer.row_bytes * (here * 2 / local + away * (1 / local + 1 / machine.block_peer_bytes))
        return max(
            machine.signal_seconds + math.ceil(tiles / computing) * tile,
            written / n_c + machine.signal_seconds + tile,
            layer.row_bytes * away / machine.link_bytes + (machine.signal_seconds + tile) * (away > 0),
        )
    _check_chunk(chunk_columns)
    here, partials = layer.partials_W[0], sum(layer.partials_W)
    widths = _chunk_widths(layer, chunk_columns)
    sums_WB = _dealt(layer.partials_W, n_c, PIECE_ROWS)
    (tokens_B,) = _dealt([layer.tokens], n_c, 1)
    # seconds of a block for each column, the busiest one's: it has as much to do in every chunk
    read = sum(layer.rows_E) / partials if partials else 0.0
    sums: list[float] = [
        layer.element_size
        * (sum(each) * read / local + each[0] / local + sum(each[1:]) / machine.block_peer_bytes)
        for each in zip(*sums_WB, strict=True)
    ]
    outputs = [layer.element_size * _touched(layer, tokens) / local for tokens in tokens_B]
    busiest = max(one + other for one, other in zip(sums, outputs, strict=True))
    tiles, free, done, first = 0, 0.0, 0.0, 0.0
    for columns in widths:
        tiles += _row_tiles(layer) * math.ceil(columns / TILE_COLUMNS)
        done = math.ceil(tiles / computing) * tile
        first = first or done
        free = max(free, done) + columns * busiest
    sent = max(
        done + widths[-1] * max(sums),
        first + layer.columns * layer.element_size * (partials - here) / machine.link_bytes,
    )
    return max(free, sent + machine.signal_seconds * (partials > 0) + widths[-1] * max(outputs))


# ---- shapes


def even_layer(
    *, tokens: int, top_k: int, num_experts: int, d_model: int, d_hidden: int, ep: int, tp: int = 1
) -> tuple[Arriving, Returning]:
    """Both layers of a rank of ep * tp ranks under even routing; tokens: of all ranks, dealt evenly.

    The ranks of a TP group hold the same experts, 1 / tp of their hidden units each. So every row goes to all
    tp of them, and each sums what its units make of a token's rows and sends that to the token's owner. A
    token has rows on a rank with the chance that one of its top_k experts, each as likely as another, is
    there.
    Raises ValueError where sizes do not divide.
    """
    ranks = ep * tp
    for name, size, divisor, rule in (
        ("tokens", tokens, ranks, "ep * tp"),
        ("num_experts", num_experts, ep, "ep"),
        ("d_hidden", d_hidden, tp, "tp"),
    ):
        if size % divisor:
            raise ValueError(f"{name} ({size}) must be divisible by {rule} ({divisor})")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be at least 1 and at most num_experts ({num_experts})")
    own, local = tokens // ranks, num_experts // ep
    # whole rows whose sums over experts are those of exact shares, as near as whole numbers can be
    ends = [own * top_k * e // num_experts for e in range(local + 1)]
    rows_E = tuple(end - start for start, end in itertools.pairwise(ends))
    here = 1 - math.comb(num_experts - local, top_k) / math.comb(num_experts, top_k)
    partials = min(round(own * here), sum(rows_E))
    arriving = Arriving(rows_WE=(rows_E,) * ranks, reduction=d_model, columns=d_hidden // tp)
    returning = Returning(
        rows_E=arriving.rows_E,
        partials_W=(partials,) * ranks,
        tokens=own,
        reduction=d_hidden // tp,
        columns=d_model,
    )
    return arriving, returning


# ---- drawing

_RESOLUTION = 200


def busy_bars(run: Sequence[Simulated[Step]], machine: Machine, n_c: int, origin: float = 0.0) -> list[Bar]:
    """A fused kernel on three lanes: the share of the computing and of the communicating blocks that is at
    work on each level or chunk, and the link. origin: when it begins, in seconds.

    Time is cut into 200 steps; neighbours that look alike are one bar.
    """
    total = makespan(run)
    drawn: list[Bar] = []
    if not total:
        return drawn
    for lane, prefix, size in (
        ("link", "link", 1),
        ("communicating blocks", "comm ", n_c),
        ("computing blocks", "block ", machine.blocks - n_c),
    ):
        here = [item for item in run if item.task.lane.startswith(prefix) and item.end > item.start]
        work: dict[tuple[str, int], list[float]] = {}
        for item in here:
            busy = work.setdefault((item.task.kind, item.task.part), [0.0] * _RESOLUTION)
            first, last = item.start / total * _RESOLUTION, item.end / total * _RESOLUTION
            for step in range(int(first), min(math.ceil(last), _RESOLUTION)):
                busy[step] += (min(last, step + 1) - max(first, step)) / size
        drawn += _stacked(work, lane, origin, total / _RESOLUTION)
    return drawn


def _stacked(work: dict[tuple[str, int], list[float]], lane: str, origin: float, seconds: float) -> list[Bar]:
    open_bars: dict[tuple[str, int], tuple[int, float, float]] = {}  # -> first step, base, share
    drawn = []

    def close(key: tuple[str, int], end: int) -> None:
        first, base, share = open_bars.pop(key)
        kind, part = key
        drawn.append(
            Bar(
                direction="forward",
                name=kind if kind == "L" else f"{kind}{part}",
                kind=kind,
                chunk=part,
                lane=lane,
                start=origin + first * seconds,
                end=origin + end * seconds,
                base=base,
                share=share,
            )
        )

    for step in range(_RESOLUTION):
        base = 0.0
        for key, busy in work.items():
            share = busy[step]
            if key in open_bars:
                _, was_base, was_share = open_bars[key]
                if max(abs(was_base - base), abs(was_share - share)) > 0.04 or share < 1e-9:
                    close(key, step)
            if share >= 1e-9 and key not in open_bars:
                open_bars[key] = (step, base, share)
            base += share
    for key in list(open_bars):
        close(key, _RESOLUTION)
    return sorted(drawn, key=lambda bar: bar.start)
