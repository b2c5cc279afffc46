"""How large a heap is, where its regions lie, and how long kernels wait for their peers.

cuda/comet/layout.h says the first two, through the extension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from pmoe.kernels.heap import device_memory

ROW_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class HeapShape:
    """The sizes of a heap, which all ranks agree on.

    num_ranks: W. experts: of a rank.
    rows: that may arrive at a rank. home_rows: that a rank may send, whose results come home.
    d_model, dtype: of a row.

    d_hidden: 0 for COMET's kernels, H for a persistent one (`pmoe.kernels.flashdmoe`): then the heap is its
        layout L, its flags, and what a rank's actors keep from round to round; rows is C, of a cell, in whole
        tiles, and home_rows the most tokens of a rank. The inbox is the first cell of L.
    sends_again: whether its backward may send T_DI again, which takes a round of its own.

    Raises ValueError where a row is not a multiple of 16 bytes; `Launcher` refuses too many ranks or experts.
    """

    num_ranks: int
    experts: int
    rows: int
    home_rows: int
    d_model: int
    dtype: torch.dtype
    d_hidden: int = 0
    sends_again: bool = False

    def __post_init__(self) -> None:
        if self.row_bytes % ROW_ALIGNMENT_BYTES:
            raise ValueError(
                f"d_model ({self.d_model}): a row's bytes ({self.d_model} x {self.dtype.itemsize} = "
                f"{self.row_bytes}) must be a multiple of {ROW_ALIGNMENT_BYTES}"
            )

    @property
    def row_bytes(self) -> int:
        return self.d_model * self.dtype.itemsize

    @property
    def places(self) -> Mapping[str, int]:
        """By a region's name in layout.h, how many bytes it begins behind the heap's base; "bytes": all.

        RuntimeError without the extension.
        """
        cell = (self.d_hidden, self.sends_again) if self.d_hidden else ()
        return _places(self.num_ranks, self.experts, self.rows, self.home_rows, self.row_bytes, *cell)

    @property
    def bytes(self) -> int:
        """Of one rank's heap."""
        return self.places["bytes"]

    def holds(self, other: HeapShape) -> bool:
        """Whether a heap of this shape serves one of the other: the same, with as many rows or more."""
        same = replace(other, rows=self.rows, home_rows=self.home_rows) == self
        return same and other.rows <= self.rows and other.home_rows <= self.home_rows


@cache
def _places(
    ranks: int, experts: int, rows: int, home_rows: int, row_bytes: int, *cell: int
) -> dict[str, int]:
    module = device_memory.loaded_extension()
    layout = module.flashdmoe_layout if cell else module.comet_layout
    return dict(layout(ranks, experts, rows, home_rows, row_bytes, *cell))


# ---- waits of kernels for their peers


WAIT_SECONDS = "PMOE_WAIT_SECONDS"
"""The environment variable: for how long a kernel waits for a peer."""


WAITS = (
    "nothing",
    "rank {peer}: the grant of room for rank {rank}'s rows for its experts",
    "rank {peer}: the arrival of piece {part} of its rows for expert {expert} of rank {rank}",
    "rank {peer} itself: the tiles of column chunk {part}",
    "rank {peer}: the return of column chunk {part} of the rows of rank {rank}'s tokens",
    "rank {peer}: the numbers of its rows for the experts of rank {rank}",
)
PERSISTENT_WAITS = (
    *WAITS[:2],
    "rank {peer}: the dispatch task of tile {part} of its rows for expert {expert} of rank {rank}",
    "rank {peer} itself: processors that take the tasks which its scheduler hands out",
    "rank {peer}: the product tasks of tile {part} of rank {rank}'s rows for its expert {expert}",
    WAITS[5],
)
"""`Wait` of cuda/comet/watch.h in words, for COMET's kernels and for a persistent one."""


def awaited(report: Sequence[int], waits: Sequence[str] = WAITS) -> str:
    """What a rank waited for in vain: `Report` of cuda/comet/watch.h, in words.

    Example: "rank 1: the arrival of piece 2 of its rows for expert 3 of rank 0, in round 7"
    """
    wait, peer, expert, part, epoch, rank = report[:6]
    what = waits[wait].format(peer=peer, expert=expert, part=part, rank=rank)
    return f"{what}, in round {epoch % 2**32}"


class HeapError(RuntimeError):
    """A wait that lasted too long, or use of a heap that is broken or closed."""
