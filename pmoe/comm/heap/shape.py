"""How large a heap is, where its regions lie, and how long kernels wait for their peers.

cuda/comet/layout.h says the first two, through the extension.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import ClassVar

import torch

from pmoe.comm.heap import device_memory
from pmoe.comm.ranks import Ranks
from pmoe.comm.subgroups import timeout_of

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
    waits: ClassVar[Sequence[str]] = (
        "nothing",
        "rank {peer}: the grant of room for rank {rank}'s rows for its experts",
        "rank {peer}: the arrival of piece {part} of its rows for expert {expert} of rank {rank}",
        "rank {peer} itself: the tiles of column chunk {part}",
        "rank {peer}: the return of column chunk {part} of the rows of rank {rank}'s tokens",
        "rank {peer}: the numbers of its rows for the experts of rank {rank}",
    )

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


@dataclass(frozen=True)
class CellShape(HeapShape):
    """The heap of a persistent kernel (`pmoe.kernels.flashdmoe`): FlashDMoE's layout L, its flags, and what
    a rank's actors keep from round to round.

    rows: C, of a cell, in whole tiles. home_rows: the most tokens of a rank. d_hidden: H.
    sends_again: whether backward may send T_DI again, which takes a round of its own.
    """

    d_hidden: int
    sends_again: bool = False
    waits: ClassVar[Sequence[str]] = (
        *HeapShape.waits[:2],
        "rank {peer}: the dispatch task of tile {part} of its rows for expert {expert} of rank {rank}",
        "rank {peer} itself: processors that take the tasks which its scheduler hands out",
        "rank {peer}: the product tasks of tile {part} of rank {rank}'s rows for its expert {expert}",
        HeapShape.waits[5],
    )

    @cached_property
    def places(self) -> Mapping[str, int]:
        """As of `HeapShape`, by cuda/flashdmoe/bind.cpp. The inbox is the first cell of L."""
        sizes = (self.num_ranks, self.experts, self.rows, self.home_rows, self.row_bytes, self.d_hidden)
        return dict(device_memory.loaded_extension().flashdmoe_layout(*sizes, self.sends_again))


@cache
def _places(ranks: int, experts: int, rows: int, home_rows: int, row_bytes: int) -> dict[str, int]:
    return dict(device_memory.loaded_extension().comet_layout(ranks, experts, rows, home_rows, row_bytes))


# ---- waits of kernels for their peers


WAIT_SECONDS = "PMOE_WAIT_SECONDS"
"""The environment variable: for how long a kernel waits for a peer."""

DEFAULT_WAIT_SECONDS, MAX_WAIT_SECONDS = 600.0, 86400.0


def awaited(report: Sequence[int], waits: Sequence[str]) -> str:
    """What a rank waited for in vain: `Report` and `Wait` of cuda/comet/watch.h, in `HeapShape.waits`' words.

    Example: "rank 1: the arrival of piece 2 of its rows for expert 3 of rank 0, in round 7"
    """
    wait, peer, expert, part, epoch, rank = report[:6]
    what = waits[wait].format(peer=peer, expert=expert, part=part, rank=rank)
    return f"{what}, in round {epoch % 2**32}"


class HeapError(RuntimeError):
    """A wait that lasted too long, or use of a heap that is broken or closed."""


def wait_seconds(ranks: Ranks) -> float:
    """For how long kernels of this rank wait: $PMOE_WAIT_SECONDS, at most the group's timeout; else that one.

    A peer may be late by what a collective may: a checkpoint, an evaluation, a rank of another group. 600 s
    for a group without a timeout. Raises ValueError for a variable that is not a number of seconds.
    """
    text = os.environ.get(WAIT_SECONDS)
    timeout = None if ranks.group is None else timeout_of(ranks.group)
    longest = DEFAULT_WAIT_SECONDS if timeout is None else timeout.total_seconds()
    if text is not None:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_WAIT_SECONDS:
            raise ValueError(
                f"{WAIT_SECONDS} ({text!r}) must be a number of seconds, more than 0 and at most "
                f"{MAX_WAIT_SECONDS:g}"
            )
        return seconds if timeout is None else min(seconds, longest)
    return min(longest, MAX_WAIT_SECONDS)
