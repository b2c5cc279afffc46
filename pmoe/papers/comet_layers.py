"""A rank's device and the two layers of an MoE block, as COMET's fused kernels see them (section 3.1).

Layer 0 is dispatch and product, layer 1 product, sum of a token's rows and combine.

All ranks are taken to do the same at the same time: what rank + l sends here arrives when what is sent to
rank - l arrives there, so one rank stands for all, and one lane for both directions of its link.

Letters: T tokens of this rank, W ranks (levels), E experts of a rank.
"""

from __future__ import annotations

import itertools
import math
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


def even_layer(model: Model, tokens: int, *, ep: int, tp: int = 1) -> tuple[Arriving, Returning]:
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
    arriving = Arriving(rows_WE=(rows_E,) * ranks, reduction=model.N, columns=model.K // tp)
    returning = Returning(
        rows_E=arriving.rows_E,
        partials_W=(partials,) * ranks,
        tokens=own,
        reduction=model.K // tp,
        columns=model.N,
    )
    return arriving, returning
