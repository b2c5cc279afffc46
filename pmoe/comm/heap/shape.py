"""How large a heap is, and where its regions lie: cuda/comet/layout.h says it, through the extension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from pmoe.comm.heap import device_memory

FLAG_BYTES = 1024
"""Behind the layout: a flag, by which tests see whether kernels of several processes run together."""

MOST_ROWS = 2**31 - 1
ROW_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class HeapShape:
    """The sizes of a heap, which all ranks agree on.

    num_ranks: W. experts: of a rank.
    rows: that may arrive at a rank. home_rows: that a rank may send, whose results come home.
    d_model, dtype: of a row.

    Raises ValueError, naming the number, where that cannot be.
    """

    num_ranks: int
    experts: int
    rows: int
    home_rows: int
    d_model: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name, least in (("num_ranks", 1), ("experts", 1), ("rows", 0), ("home_rows", 0), ("d_model", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_ROWS:
                raise ValueError(f"{name} ({value!r}) must be a whole number from {least} to {MOST_ROWS}")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"dtype ({self.dtype!r}) must be a floating-point type of torch")
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

        ValueError for more ranks or experts than the kernels know; RuntimeError without the extension.
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
def _places(ranks: int, experts: int, rows: int, home_rows: int, row_bytes: int) -> Mapping[str, int]:
    module = device_memory.loaded_extension()
    limits = module.comet_limits
    if ranks > limits["ranks"]:
        raise ValueError(f"num_ranks ({ranks}) must be {limits['ranks']} at most")
    if ranks * experts > limits["experts"]:
        raise ValueError(
            f"experts ({experts}): those of all {ranks} ranks ({ranks * experts}) must be "
            f"{limits['experts']} at most"
        )
    found: dict[str, int] = module.comet_layout(ranks, experts, rows, home_rows, row_bytes)
    return found
