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

    Raises ValueError where a row is not a multiple of 16 bytes; `Launcher` refuses too many ranks or experts.
    """

    num_ranks: int
    experts: int
    rows: int
    home_rows: int
    d_model: int
    dtype: torch.dtype

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
        return _places(self.num_ranks, self.experts, self.rows, self.home_rows, self.row_bytes)

    @property
    def bytes(self) -> int:
        """Of one rank's heap."""
        return self.places["bytes"]

    def holds(self, other: HeapShape) -> bool:
        """Whether a heap of this shape serves one of the other: the same, with as many rows or more."""
        same = replace(other, rows=self.rows, home_rows=self.home_rows) == self
        return same and other.rows <= self.rows and other.home_rows <= self.home_rows


@cache
def _places(ranks: int, experts: int, rows: int, home_rows: int, row_bytes: int) -> dict[str, int]:
    return dict(device_memory.loaded_extension().comet_layout(ranks, experts, rows, home_rows, row_bytes))


# ---- waits of kernels for their peers


WAIT_SECONDS = "PMOE_WAIT_SECONDS"
"""The environment variable: for how long a kernel waits for a peer."""


def awaited(report: Sequence[int]) -> str:
    """What a rank waited for in vain: `Report` and `Wait` of cuda/comet/watch.h, in words.

    Example: "rank 1: the arrival of piece 2 of its rows for expert 3 of rank 0, in round 7"
    """
    wait, peer, expert, part, epoch, rank = report[:6]
    sentences = (
        "nothing",
        f"rank {peer}: the grant of room for rank {rank}'s rows for its experts",
        f"rank {peer}: the arrival of piece {part} of its rows for expert {expert} of rank {rank}",
        f"rank {peer} itself: the tiles of column chunk {part}",
        f"rank {peer}: the return of column chunk {part} of the rows of rank {rank}'s tokens",
        f"rank {peer}: the numbers of its rows for the experts of rank {rank}",
    )
    return f"{sentences[wait]}, in round {epoch % 2**32}"


class HeapError(RuntimeError):
    """A wait that lasted too long, or use of a heap that is broken or closed."""
