"""FlashDMoE's Table 6.2: Size(L), the bytes of its symmetric tensor.

See sections 5.3 and 6.8 of the thesis.
"""

from __future__ import annotations

import math
from typing import Any

from pmoe.kernels.flashdmoe import TILE_ROWS
from pmoe.papers.assumptions import printed


def symmetric_bytes(ranks: int, experts: int, capacity: int, row_bytes: int) -> int:
    """Returns Size(L) of P x R x B x E x C x H (section 5.3), with R = 2 rounds and B = 2 buffers.

    ranks: P.
    experts: E, of one rank.
    capacity: EC, rows for an expert. C is EC rounded up to whole tiles of 128 rows.
    row_bytes: bytes of a row of H elements.

    Example: 8, 2, 256, 4096 -> 64 MiB.
    """
    return ranks * 2 * 2 * experts * math.ceil(capacity / TILE_ROWS) * TILE_ROWS * row_bytes


def table62() -> list[dict[str, Any]]:
    """Returns the lines of Table 6.2 in MB (2^20 bytes), computed and as the paper prints them.

    rest: the paper's bookkeeping less a hidden activation.
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
