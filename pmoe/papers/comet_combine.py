"""Layer 1 of COMET's fused kernels: product, sum of a token's rows and combine, by chunks of T_N columns.

When a chunk is computed, the communicating blocks sum the rows that each token has here and write the sums to
the tokens' owners (to this rank, to rank + 1, ...); the sums of all ranks for chunk c - 1 are added after
chunk c has been sent (section 3.1.2, Fig. 6).

    computing blocks      E0 E0 E1 E1 E2 E2
    communicating blocks  .  .  R0 .  R1 O0 R2 O1 O2

Letters: n_c communicating blocks, T_N columns of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pmoe.papers.comet_layers import TILE_COLUMNS, TILE_ROWS, DeviceRates, Returning
from pmoe.papers.comet_tasks import PIECE_ROWS, FusedTask, Launch


def fused_combine_tasks(
    layer: Returning, device: DeviceRates, n_c: int, chunk_columns: int
) -> list[FusedTask]:
    """Layer 1 with ``n_c`` communicating blocks and chunks of ``chunk_columns``, T_N (section 3.1.2, Fig. 6).

    Sums leave in pieces of 16, which blocks take in turn, for this rank first; this rank's tokens are dealt
    out singly. What a block does without waiting between is one task: its tiles of a chunk, at no loss, and
    its pieces for one rank, which pass the link together.
    Raises ValueError for an n_c that leaves no block to compute or to communicate, and for a T_N that is no
    multiple of 256.
    """
    kernel = Launch(device, n_c)
    check_chunk(chunk_columns)
    computing = device.blocks - n_c
    tile_seconds = device.tile_seconds(layer.reduction)
    rows, partials = sum(layer.rows_E), sum(layer.partials_W)
    sums_WB = dealt(layer.partials_W, n_c, PIECE_ROWS)
    (tokens_B,) = dealt([layer.tokens], n_c, 1)
    widths = chunk_widths(layer, chunk_columns)

    def sum_at_home(c: int) -> None:
        for block, tokens in enumerate(tokens_B):
            if tokens:
                seconds = (
                    widths[c]
                    * layer.element_size
                    * touched_elements(layer, tokens)
                    / device.block_local_bytes
                )
                kernel.add(f"O{c}.{block}", f"comm {block}", "O", c, seconds, (f"A{c}",))

    tiles = 0
    for c, columns in enumerate(widths):
        first, tiles = tiles, tiles + row_tiles(layer) * math.ceil(columns / TILE_COLUMNS)
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
        kernel.meet(f"A{c}", "R", c, device.signal_seconds if sent else 0.0, sent)
        if c > 0:
            sum_at_home(c - 1)
    sum_at_home(len(widths) - 1)
    return kernel.tasks


def dealt(counts: Sequence[int], blocks: int, height: int) -> list[list[int]]:
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


def chunk_widths(layer: Returning, chunk_columns: int) -> list[int]:
    return [min(chunk_columns, layer.columns - begin) for begin in range(0, layer.columns, chunk_columns)]


def touched_elements(layer: Returning, tokens: int) -> float:
    """Elements of a column that are read and written to sum so many of this rank's tokens."""
    return tokens * (sum(layer.partials_W) / layer.tokens + 1) if tokens else 0.0


def row_tiles(layer: Returning) -> int:
    return sum(math.ceil(rows / TILE_ROWS) for rows in layer.rows_E)


def check_chunk(chunk_columns: int) -> None:
    if chunk_columns < TILE_COLUMNS or chunk_columns % TILE_COLUMNS:
        raise ValueError(f"chunk_columns ({chunk_columns}) must be a multiple of {TILE_COLUMNS}, and not 0")
