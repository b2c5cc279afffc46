"""Computes FlashDMoE's Table 6.2: bytes of the symmetric tensor, in which ranks receive rows.

Each rank has this tensor, with the same shape and address, so each rank can write rows into the tensor of
every other rank. The FlashDMoE thesis calls the bytes of the tensor Size(L), in its sections 5.3 and 6.8.
"""

from __future__ import annotations

import math
from typing import Any

from pmoe.kernels.flashdmoe import TILE_ROWS
from pmoe.papers.assumptions import printed


def symmetric_bytes(ranks: int, experts: int, capacity: int, row_bytes: int) -> int:
    """Returns Size(L), the bytes of a tensor of shape (P, R, B, E, C, H) (section 5.3).

        P   ranks
        R   2 rounds: dispatch and combine
        B   2 buffers: outgoing and incoming
        E   experts of one rank
        C   rows for one expert
        H   elements of a row

    ranks: P, the number of ranks.
    experts: E, the number of experts of one rank.
    capacity: the number of rows that one rank may send to one expert (EC in the thesis). C is this number,
        rounded up to whole tiles of 128 rows.
    row_bytes: bytes of a row of H elements.

    Example: 8 ranks, 2 experts, capacity 256, 4096 bytes -> 64 MiB.
    """
    return ranks * 2 * 2 * experts * math.ceil(capacity / TILE_ROWS) * TILE_ROWS * row_bytes


def table62() -> list[dict[str, Any]]:
    """Returns the rows of Table 6.2, for 8 ranks. All memory is in MB (2^20 bytes).

    tokens                tokens of a rank, such as "4K"
    experts               experts of all ranks
    EC                    rows that one rank may send to one expert
    cell                  EC, but at least 128
    Size(L)               the computed memory of the symmetric tensor
    paper                 the memory of the symmetric tensor that the thesis prints
    bookkeeping, paper    the memory for bookkeeping that the thesis prints
    rest                  the part of "bookkeeping, paper" that is not explained. By assumption the
                          bookkeeping holds a hidden activation: 4096 columns in float32 for each row of a
                          cell. ``rest`` is the memory for bookkeeping minus the memory of this activation
    """
    rows = []
    for thousands, experts, paper, bookkeeping in printed("flashdmoe table 6.2"):
        capacity = thousands * 1024 // experts
        size = symmetric_bytes(8, experts // 8, capacity, 4096) / 2**20
        hidden = symmetric_bytes(8, experts // 8, capacity, 4096 * 4) / 4 / 2**20
        row = {"tokens": f"{thousands}K", "experts": experts, "EC": capacity, "cell": max(128, capacity)}
        row |= {"Size(L)": size, "paper": paper, "bookkeeping, paper": bookkeeping}
        rows.append({**row, "rest": bookkeeping - hidden})
    return rows
