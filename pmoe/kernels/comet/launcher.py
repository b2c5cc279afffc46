"""Launches a fused kernel for the ranks of this process, and finds out why a device cannot run it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from pmoe.arguments import check_count
from pmoe.kernels import extension
from pmoe.kernels.extension import path
from pmoe.kernels.gemm import ELEMENTS, FORWARD, INPUT, PLAIN, SPARE
from pmoe.kernels.heap import Heap
from pmoe.kernels.launch_order import records_graph
from pmoe.kernels.operands import cuda_index
from pmoe.schedule.tasks import PassDirection

MAX_RANKS, MAX_EXPERTS, MAX_CHUNKS = 64, 1024, 64
"""The most ranks, experts of all ranks, and groups of columns that a launch can have.

The columns of a group are sent together. cuda/comet/layout.h has the same numbers.
"""

SPARE_BLOCKS = "PMOE_SPARE_BLOCKS"
"""Name of the environment variable with the number of multiprocessors that fused kernels leave free.

Other kernels, such as those of NCCL, run on the free multiprocessors.
"""


def ranks_refusal(device: torch.device, num_ranks: int, experts: int) -> str | None:
    """Returns why the fused kernels cannot run with this number of ranks and experts; None if they can.

    device: the device that would run them.
    num_ranks: number of ranks of the layer.
    experts: number of experts of one rank.
    """
    if num_ranks > MAX_RANKS:
        return f"{num_ranks} ranks: the fused kernels take at most {MAX_RANKS}"
    if num_ranks * experts > MAX_EXPERTS:
        return f"{num_ranks * experts} experts of all ranks: the fused kernels take at most {MAX_EXPERTS}"
    code, why = path(device)
    if code is None:
        return why
    words = int(path_facts(code == "sm_90a")["board_words"])
    if (num_ranks + 1) * experts > words:
        return f"({num_ranks} ranks + 1) x {experts} experts must be at most {words}, the room in a block"
    return None


def loading_refusal(device: torch.device, num_ranks: int) -> str | None:
    """Returns why fused kernels of several processes could deadlock; None if they cannot.

    By default CUDA loads a kernel at its first launch, and loading may wait until running kernels have ended.
    A fused kernel that runs on this rank may wait for another rank, and that rank may wait for this rank's
    next launch. If the next launch must first load a kernel, it waits for the running kernel, and both ranks
    wait forever. With CUDA_MODULE_LOADING=EAGER all kernels are loaded at the start.

    device: the device that runs the kernels.
    num_ranks: number of ranks of the layer.
    """
    if num_ranks == 1 or device.type != "cuda" or extension.module().loads_eagerly():
        return None
    return "CUDA_MODULE_LOADING=EAGER must be set before Python starts: loading a kernel later may never end"


@functools.cache
def path_facts(hopper: bool) -> dict[str, int]:
    """Returns sizes that are compiled into the kernels, by name.

        tile_rows, tile_columns   rows and columns of a product's tile
        board_words               number of int32 values that fit into a table in each block's shared memory.
                                  The table needs (W + 1) * E values. For each of a rank's E experts it has
                                  the index of the first row from each of the W ranks (W values), and the
                                  index behind the expert's last row (1 value)

    hopper: True for the kernels' sm_90a code, False for their sm_80 code.
    """
    facts: dict[str, int] = extension.module().comet_path(hopper)
    return facts


def spare_blocks(num_ranks: int = 1) -> int:
    """Returns the number of multiprocessors that fused kernels leave free, for NCCL and other kernels.

    The number is the environment variable PMOE_SPARE_BLOCKS if that is set. Otherwise it is 0 for one
    process, because one process needs no NCCL, and `SPARE` for several processes.

    num_ranks: number of processes that share the layer.

    Raises ValueError if the variable is not a whole number.
    """
    text = os.environ.get(SPARE_BLOCKS, "0" if num_ranks == 1 else str(SPARE))
    if not text.isdecimal():
        raise ValueError(f"{SPARE_BLOCKS} ({text!r}) must be a whole number of blocks, at least 0")
    return int(text)


def processors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# ---- a launch


MAX_VIRTUAL = 4
"""The most ranks of one process that share a launch: kMostVirtual of cuda/peers/sizes.h."""

FusedKernel = Literal["dispatch", "combine"]

KERNELS: dict[FusedKernel, int] = {"dispatch": 0, "combine": 1}
"""Codes of the two fused kernels: `Kernel` of cuda/comet/launch.h."""

COLUMNS = 256
"""The number of columns that are sent together (`Division.chunk_columns`) must be a multiple of this."""

RULE_COLUMNS = 512
"""The number of columns that the combining kernel sends together if no better number was measured."""


@dataclass(frozen=True, order=True)
class Division:
    """The split of a fused kernel's work: blocks that communicate, and columns that are sent together.

    n_c: number of thread blocks that communicate. All other blocks compute.
    chunk_columns: number of columns that the combining kernel computes before it sends them (T_N in the
        paper), a multiple of 256. The dispatching kernel does not use it.

    Raises TypeError or ValueError if n_c is below 1 or chunk_columns is not a multiple of 256.
    """

    n_c: int
    chunk_columns: int = RULE_COLUMNS

    def __post_init__(self) -> None:
        check_count(n_c=self.n_c, chunk_columns=self.chunk_columns)
        if self.chunk_columns % COLUMNS:
            raise ValueError(f"chunk_columns ({self.chunk_columns}) must be a multiple of {COLUMNS}")


Divide = Callable[[FusedKernel, PassDirection], Division]
"""A function (kernel, direction) that returns how a launch splits its work: a `Division`.

The result must be the same on all ranks.
"""


class Launcher:
    """Launches fused kernels for the ranks of this process.

    A process of a training run has one rank. Tests and measurements put several ranks into one process, so
    that one GPU is enough.

    heaps: the symmetric heap of each rank of this process. Ranks write rows into each other's heaps.
    divide: function that returns how a launch splits its thread blocks between communication and computation.
    device: the device on which all these ranks run.
    hopper: whether the launches run the kernels' sm_90a code.
    blocks: number of thread blocks of each rank.
    tile_columns: number of columns of a tile of a product.
    """

    heaps: tuple[Heap, ...]
    divide: Divide
    device: torch.device
    hopper: bool
    blocks: int
    tile_columns: int

    def __init__(self, heaps: Sequence[Heap], divide: Divide) -> None:
        """Checks that the kernels can run, and stores their launch parameters.

        heaps: the symmetric heap of each rank of this process, 1 to 4 (`MAX_VIRTUAL`), on one device.
        divide: function (kernel, direction) that returns how many thread blocks of a launch communicate, and
            how many columns are sent together.

        Raises ValueError for another number of heaps, or if the device cannot run the kernels.
        """
        if not 1 <= len(heaps) <= MAX_VIRTUAL:
            raise ValueError(
                f"heaps ({len(heaps)}) must be 1 to {MAX_VIRTUAL}, one for each rank of the launch"
            )
        self.heaps = tuple(heaps)
        self.divide = divide
        self.device = heaps[0].device
        shape = heaps[0].shape
        code, why = path(self.device)
        why = why or ranks_refusal(self.device, shape.num_ranks, shape.experts)
        if why is not None:
            raise ValueError(f"the fused kernels cannot run: {why}")
        # Kernels that send by NVSHMEM's puts have only instructions of sm_80, on every device (cuda/nvshmem).
        self.hopper = code == "sm_90a" and not shape.is_staged
        # Multiprocessors are left to NCCL, which only several processes use: count processes, not ranks.
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
        """Launches one kernel for all ranks of this process.

        kernel: "dispatch" or "combine".
        direction: the pass that the launch belongs to, "forward" or "backward".
        ranks: for each rank, the arguments that only this launch needs, by their names in cuda/comet/read.h:
            the result of a function ``..._fields`` of `pmoe.kernels.comet.operators`.
        epilogue: number of the operation that follows the product: PLAIN, HIDDEN or HIDDEN_GRADIENT of
            `pmoe.kernels.gemm`.
        activation: number of the nonlinearity in `pmoe.kernels.gemm.ACTIVATIONS`; 0 for PLAIN.
        """
        division = self.divide(kernel, direction)
        with self.launching(is_round=kernel == "dispatch") as launch_fields:
            extension.module().comet(
                **launch_fields,
                hopper=self.hopper,
                kernel=KERNELS[kernel],
                form=FORWARD if direction == "forward" else INPUT,
                epilogue=epilogue,
                activation=activation,
                ranks=[
                    {**self.rank_fields(heap), **self._divided(division, fields), **fields}
                    for heap, fields in zip(self.heaps, ranks, strict=True)
                ],
            )

    @contextlib.contextmanager
    def launching(self, *, is_round: bool = True) -> Iterator[dict[str, int]]:
        """Returns a with-block for one launch, which orders it among all launches that use the same heaps.

        The launch waits for earlier launches, and later launches wait for it. The value of the with-block is
        a dict with the launch's arguments that do not depend on the rank: device, stream, dtype code, number
        of blocks.

        A round is one launch that dispatches rows, and the later launches that use these rows.

        is_round: whether the launch begins a new round, as dispatch does. A combining launch belongs to the
            round of the dispatch before it.

        Raises HeapError for a broken heap. Raises RuntimeError if a CUDA graph is being captured and a heap
        counts its rounds on the host.
        """
        is_in_graph = records_graph(self.device)
        with contextlib.ExitStack() as launches:
            streams = [launches.enter_context(heap.order.launch()) for heap in self.heaps]
            for heap in self.heaps:
                heap.raise_if_failed()
                if is_in_graph:
                    heap.check_repeatable()
                    heap.is_in_graph = True
                if is_round:
                    heap.next_epoch()
            yield {
                "device": cuda_index(self.device) if self.device.type == "cuda" else 0,
                "stream": streams[0],
                "element": ELEMENTS[self.heaps[0].shape.dtype],
                "blocks": self.blocks,
            }

    def _divided(self, division: Division, own: dict[str, int]) -> dict[str, int]:
        """Returns the arguments of a launch that say how a rank's work is split, by name.

            n_c             number of thread blocks that communicate; the others compute
            chunk_columns   number of columns that the combining kernel sends together
            local_experts   number of experts of the rank

        division: the split that is wanted. If it leaves no block to compute, fewer blocks communicate.
        own: the rank's other arguments of the launch. If own["computes"] is 0, the launch only dispatches
            rows and all blocks communicate.
        """
        n_c = max(1, min(division.n_c, self.blocks - 1)) if own["computes"] else self.blocks
        columns = chunk_columns(division, self.heaps[0].shape.d_model, self.tile_columns)
        return {"n_c": n_c, "chunk_columns": columns, "local_experts": self.heaps[0].shape.experts}

    def rank_fields(self, heap: Heap) -> dict[str, int]:
        """Returns the arguments that every launch needs for one rank, by their names in cuda/comet/read.h.

        heap: the rank's symmetric heap.
        """
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
            "round": 0 if heap.round is None else heap.round.data_ptr(),
            "bound_nanoseconds": heap.bound_nanoseconds,
        }


def chunk_columns(division: Division, columns: int, tile_columns: int) -> int:
    """Returns the number of columns of the result that the combining kernel sends together.

    The number is division.chunk_columns, rounded up to whole tiles, but at most the columns of the whole
    result, also rounded up. The kernels take at most 64 groups of columns, so the number is larger if there
    would be more groups.

    division: how the launch splits its work.
    columns: number of columns of the result.
    tile_columns: number of columns of a tile.

    Example with tiles of 128 columns and a result of 600 columns, which is 5 tiles or 640 columns:
    division.chunk_columns 200 gives 256, and 1000 gives 640.
    """
    all_columns = -(-columns // tile_columns) * tile_columns
    min_columns = max(division.chunk_columns, -(-all_columns // MAX_CHUNKS))
    return min(-(-min_columns // tile_columns) * tile_columns, all_columns)
