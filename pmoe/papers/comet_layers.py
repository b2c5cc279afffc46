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

from pmoe.planner.division import COLUMNS

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
