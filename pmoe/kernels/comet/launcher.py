"""One launch of a fused kernel for the ranks of this process, and what a device can run of them."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from pmoe.arguments import check_count
from pmoe.kernels import extension
from pmoe.kernels.extension import path
from pmoe.kernels.gemm import ELEMENTS, FORWARD, INPUT, PLAIN, SPARE
from pmoe.kernels.heap import Heap
from pmoe.schedule.tasks import PassDirection

MAX_RANKS, MAX_EXPERTS, MAX_CHUNKS = 64, 1024, 64
"""As in cuda/comet/layout.h; chunks are of columns."""

SPARE_BLOCKS = "PMOE_SPARE_BLOCKS"


def ranks_refusal(device: torch.device, num_ranks: int, experts: int) -> str | None:
    """Why the fused kernels do not take so many ranks of so many experts each; None where they do."""
    if num_ranks > MAX_RANKS:
        return f"{num_ranks} ranks are more than {MAX_RANKS}"
    if num_ranks * experts > MAX_EXPERTS:
        return f"{num_ranks * experts} experts of all ranks are more than {MAX_EXPERTS}"
    found, why = path(device)
    if found is None:
        return why
    words = int(path_facts(found == "sm_90a")["board_words"])
    if (num_ranks + 1) * experts > words:
        return (
            f"({num_ranks} ranks + 1) x {experts} experts are more than the {words} that a block has room for"
        )
    return None


def loading_refusal(device: torch.device, num_ranks: int) -> str | None:
    """Why kernels of several processes must not wait for each other in this one; None where they may.

    A kernel that is loaded at its first launch may wait for what runs: for a fused kernel, which waits for a
    rank that waits for this one's next launch.
    """
    if num_ranks == 1 or device.type != "cuda" or extension.module().loads_eagerly():
        return None
    return "CUDA_MODULE_LOADING=EAGER must be set before Python starts: loading a kernel later may never end"


@functools.cache
def path_facts(hopper: bool) -> dict[str, int]:
    """ "tile_rows" and "tile_columns" of a path's kernels; "board_words": see `ranks_refusal`."""
    facts: dict[str, int] = extension.module().comet_path(hopper)
    return facts


def spare_blocks(num_ranks: int = 1) -> int:
    """Multiprocessors that are left to other kernels: $PMOE_SPARE_BLOCKS, else SPARE, or 0 for one rank.

    See `pmoe.comm.heap.providers`. Raises ValueError for a variable that is not a whole number.
    """
    text = os.environ.get(SPARE_BLOCKS, "0" if num_ranks == 1 else str(SPARE))
    if not text.isdecimal():
        raise ValueError(f"{SPARE_BLOCKS} ({text!r}) must be a whole number of blocks, at least 0")
    return int(text)


def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# ---- a launch


MAX_VIRTUAL = 4
"""Ranks of one launch, as in cuda/comet/fused.h."""

FusedKernel = Literal["dispatch", "combine"]

KERNELS: dict[FusedKernel, int] = {"dispatch": 0, "combine": 1}
"""`Kernel` of cuda/comet/launch.h."""

COLUMNS, RULE_COLUMNS = 256, 512
"""A chunk of the combining kernel is a multiple of so many columns; as many as where nothing is measured."""


@dataclass(frozen=True, order=True)
class Division:
    """How a fused kernel's thread blocks are divided.

    n_c: blocks that communicate; the others compute. chunk_columns: T_N, the columns that the combining
    kernel finishes before they leave, a multiple of 256; the dispatching kernel has no use for it.

    Raises TypeError or ValueError for an n_c below 1, and for chunk_columns that are no multiple of 256.
    """

    n_c: int
    chunk_columns: int = RULE_COLUMNS

    def __post_init__(self) -> None:
        check_count(n_c=self.n_c, chunk_columns=self.chunk_columns)
        if self.chunk_columns % COLUMNS:
            raise ValueError(f"chunk_columns ({self.chunk_columns}) must be a multiple of {COLUMNS}")


Divide = Callable[[FusedKernel, PassDirection], Division]
"""The division point of a launch; the same on every rank."""


class Launcher:
    """Launches for the ranks that this process runs, by their heaps, each divided as ``divide`` says."""

    heaps: tuple[Heap, ...]
    divide: Divide
    device: torch.device
    hopper: bool
    blocks: int
    tile_columns: int

    def __init__(self, heaps: Sequence[Heap], divide: Divide) -> None:
        """Raises ValueError where there are more ranks than a launch takes, or none."""
        if not 1 <= len(heaps) <= MAX_VIRTUAL:
            raise ValueError(f"heaps ({len(heaps)}) must be 1 to {MAX_VIRTUAL}: the ranks of one launch")
        self.heaps, self.divide, self.device = tuple(heaps), divide, heaps[0].device
        shape = heaps[0].shape
        found, why = path(self.device)
        why = why or ranks_refusal(self.device, shape.num_ranks, shape.experts)
        if why is not None:
            raise ValueError(f"the fused kernels cannot run: {why}")
        self.hopper = found == "sm_90a"
        # Virtual ranks wait for nobody outside their launch.
        spare = spare_blocks(shape.num_ranks // len(heaps))
        self.blocks = (processors(self.device) - spare) // len(heaps)
        if self.blocks < 2:
            raise ValueError(
                f"the fused kernels cannot run: {self.blocks} blocks of {self.device} for each of "
                f"{len(heaps)} ranks are less than 2, one that communicates and one that computes "
                f"({SPARE_BLOCKS} is {spare})"
            )
        self.tile_columns = path_facts(self.hopper)["tile_columns"]

    def launch(
        self,
        kernel: FusedKernel,
        direction: PassDirection,
        ranks: Sequence[dict[str, int]],
        *,
        epilogue: int = PLAIN,
        activation: int = 0,
    ) -> None:
        """ranks: for each rank the fields of cuda/comet/read.h that are the launch's own; see `launches`."""
        division = self.divide(kernel, direction)
        extension.module().comet(
            **self.begin(is_round=kernel == "dispatch"),
            hopper=self.hopper,
            kernel=KERNELS[kernel],
            form=FORWARD if direction == "forward" else INPUT,
            epilogue=epilogue,
            activation=activation,
            ranks=[
                {**self.rank_fields(heap), **self._divided(division, own), **own}
                for heap, own in zip(self.heaps, ranks, strict=True)
            ],
        )

    def begin(self, *, is_round: bool = True) -> dict[str, int]:
        """Device, stream, type and blocks of the next launch, which comes behind all earlier ones with these
        heaps. is_round: a new round begins. Raises HeapError for a broken heap."""
        stream = _stream_behind(self.heaps, self.device)
        for heap in self.heaps:
            heap.raise_if_failed()
            if is_round:
                heap.next_epoch()
        element = ELEMENTS[self.heaps[0].shape.dtype]
        return {"device": self.device.index or 0, "stream": stream, "element": element, "blocks": self.blocks}

    def _divided(self, division: Division, own: dict[str, int]) -> dict[str, int]:
        """A rank that computes nothing communicates with all its blocks."""
        n_c = max(1, min(division.n_c, self.blocks - 1)) if own["computes"] else self.blocks
        columns = chunk_columns(division, self.heaps[0].shape.d_model, self.tile_columns)
        return {"n_c": n_c, "chunk_columns": columns, "local_experts": self.heaps[0].shape.experts}

    def rank_fields(self, heap: Heap) -> dict[str, int]:
        """The fields that every launch gives for a rank; those of cuda/comet/read.h, too."""
        shape = heap.shape
        return {
            "ranks": shape.num_ranks,
            "experts": shape.experts,
            "heap_rows": shape.rows,
            "heap_home_rows": shape.home_rows,
            "row_bytes": shape.row_bytes,
            "heaps": heap.peers.data_ptr(),
            "rank": heap.rank,
            "failed": heap.counters,
            "report": heap.report.data_ptr(),
            "epoch": heap.epoch,
            "bound_nanoseconds": heap.bound_nanoseconds,
        }


def chunk_columns(division: Division, columns: int, tile_columns: int) -> int:
    """Columns that are sent at a time: whole tiles, and at most 64 chunks.

    Example: chunks of 200 of 600 columns, in tiles of 128 -> 256; of 1000 -> 640, all that there are.
    """
    every = -(-columns // tile_columns) * tile_columns
    min_columns = max(division.chunk_columns, -(-every // MAX_CHUNKS))
    return min(-(-min_columns // tile_columns) * tile_columns, every)


_last_stream: weakref.WeakKeyDictionary[Heap, torch.cuda.Stream] = weakref.WeakKeyDictionary()


def _stream_behind(heaps: Sequence[Heap], device: torch.device) -> int:
    """The current stream, behind whatever was launched with these heaps: their rounds follow each other."""
    stream = torch.cuda.current_stream(device)
    for heap in heaps:
        before = _last_stream.get(heap)
        if before is not None and before != stream:
            stream.wait_stream(before)
        _last_stream[heap] = stream
    return int(stream.cuda_stream)
