"""The symmetric heap: memory of one shape on every rank, which its peers write into while kernels run.

`pmoe.comm.heap.providers` makes heaps. Addresses are integers. torch's own pool does not serve their memory:
another process opens whole allocations of CUDA's.

A rank that waits in vain reports it into memory that the host reads, and its kernel ends (`Heap.check`).
That heap is broken then: a new one must be made, on every rank. The process goes on.

Letters: W ranks, E experts of a rank, M = d_model.
"""

from __future__ import annotations

import ctypes
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pmoe.kernels import extension


class DeviceMemory:
    """Where the memory of heaps comes from: CUDA's, opened by other processes through CUDA IPC.

    They are on the same device, or on one that reaches it. Each method raises RuntimeError, with a sentence,
    if it cannot.
    """

    collective = False
    """Whether allocate and free are so by themselves: all ranks call them, or none."""

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        """The address of memory that holds zeros, and nothing else's."""
        try:
            return self._allocate(device, num_bytes)
        except RuntimeError:
            with torch.cuda.device(device):
                torch.cuda.empty_cache()  # what torch holds without using it may be what is missing
            return self._allocate(device, num_bytes)

    def _allocate(self, device: torch.device, num_bytes: int) -> int:
        return int(loaded_extension().heap_allocate(device.index, num_bytes))

    def free(self, device: torch.device, base: int) -> None:
        loaded_extension().heap_free(device.index, base)

    def handle(self, device: torch.device, base: int) -> bytes:
        """By which another process of the node opens this memory."""
        return bytes(loaded_extension().heap_handle(device.index, base))

    def open(self, device: torch.device, handle: bytes) -> int:
        """The address at which this process sees another one's memory."""
        return int(loaded_extension().heap_open(device.index, handle))

    def close(self, device: torch.device, peer: int) -> None:
        loaded_extension().heap_close(device.index, peer)

    def place(self, device: torch.device) -> tuple[str, str]:
        """The code that the driver has loaded there (see `Architecture`), and what tells nodes apart."""
        return str(extension.loaded_architecture(device)), host_name()


def loaded_extension() -> Any:
    """The extension; RuntimeError, with the reason, where it is not there."""
    module = extension.load()
    if module is None:
        raise RuntimeError(f"a symmetric heap needs pmoe._cuda: {extension.why_missing()}")
    return module


def synchronize(device: torch.device) -> None:
    """The host waits for a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_name() -> str:
    """A name alone does not tell nodes apart, and one node's containers have several."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
    return f"boot {boot}"


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor on that memory, without a copy. The memory must outlive it: nobody keeps it.

    Example: tensor_at(base + 4096, (n, 64), torch.bfloat16, device) begins 4096 bytes behind base.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cuda":
        interface = {"data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "version": 2}
        flat = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
    else:
        flat = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
    if flat.data_ptr() != address:
        raise RuntimeError(f"memory at {address:#x} is not of {device}: torch made a copy of it")
    return flat.view(dtype).view(shape)


# ---- how large a heap is, and where its regions lie: cuda/comet/layout.h says it, through the extension


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
    is_pool: whether all cells of a rank share C rows, in whole tiles for each.

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
    is_pool: bool = False

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
        cell = (self.d_hidden, self.sends_again, self.is_pool) if self.d_hidden else ()
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
    module = loaded_extension()
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
    "rank {peer} itself: processors that place its tokens' rows",
    "rank {peer}: the offsets of rank {rank}'s rows for its experts",
    "rank {rank} itself: room for the rows of rank {peer}",
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


# ---- one rank's heap: its rounds, its views, and what becomes of it after a wait in vain


MAX_EPOCHS = 2**31 - 1
"""Later than that a flag that was never raised would count as raised (cuda/comet/protocol.h)."""

REPORT_WORDS = 8

MAKE_ANEW = "a new heap must be made, on every rank (pmoe.comm.heap.close_heaps drops the old ones)"


@dataclass(eq=False, kw_only=True)
class Heap:
    """One rank's heap, and where it sees those of all.

    base: the address.
    peer_addresses: of all ranks' heaps as this rank sees them; peers: the same as (W,) int64 on the device.
    bound_seconds: for how long a kernel may wait.
    release: gives the memory back, once.
    epoch: the last round that was begun; the first is 1.
    report: (8,) int32 in memory that host and device reach, a `Report` of cuda/comet/watch.h.

    Use of a broken or closed heap raises HeapError.
    """

    shape: HeapShape
    rank: int
    device: torch.device
    base: int
    peer_addresses: Sequence[int]
    bound_seconds: float
    release: Callable[[], None] | None
    epoch: int = 0

    def __post_init__(self) -> None:
        shape, device, places = self.shape, self.device, self.shape.places
        self.peers: Tensor = torch.tensor(self.peer_addresses, dtype=torch.int64, device=device)
        self.report: Tensor = torch.zeros(REPORT_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._words = (ctypes.c_int32 * REPORT_WORDS).from_address(self.report.data_ptr())
        inbox, weights = self.base + places["inbox"], self.base + places["weights"]
        self._inbox = tensor_at(inbox, (shape.rows, shape.d_model), shape.dtype, device)
        self._weights = tensor_at(weights, (shape.rows,), torch.float32, device)
        self._unusable: str | None = None
        self._process_stays = True

    @property
    def bound_nanoseconds(self) -> int:
        return round(self.bound_seconds * 1e9)

    @property
    def counters(self) -> int:
        """The address of `Counters`, whose first word says that this rank has failed."""
        return self.base + self.shape.places["counters"]

    def next_epoch(self) -> int:
        """The number of the round that begins, for one launch on every rank. Raises as `raise_if_failed`."""
        self.raise_if_failed()
        if self.epoch + 1 >= MAX_EPOCHS:
            self._unusable = f"this heap of rank {self.rank} has had {self.epoch} rounds, the most there are"
            self.check_usable()
        self.epoch += 1
        return self.epoch

    def give_up(self, why: str) -> None:
        """A round of this rank was left in the middle: later flags would be taken for those of this round."""
        if self._unusable is None:
            self._unusable = f"this heap of rank {self.rank} was given up in round {self.epoch}: {why}"

    def rows(self, count: int) -> Tensor:
        """(count, M) the first rows of the inbox: the memory itself, which later rounds overwrite."""
        return self._first(self._inbox, count)

    def row_weight(self, count: int) -> Tensor:
        """(count,) float32, their routing weights: the memory itself."""
        return self._first(self._weights, count)

    def _first(self, of_rows: Tensor, count: int) -> Tensor:
        self.check_usable()
        if not 0 <= count <= self.shape.rows:
            raise ValueError(f"count ({count}) must be from 0 to the heap's {self.shape.rows} rows")
        return of_rows[:count]

    def check_usable(self) -> None:
        """Raises HeapError for a heap that is broken or closed."""
        if self._unusable is not None:
            remedy = MAKE_ANEW if self._process_stays else "this process must end"
            raise HeapError(f"pmoe: {self._unusable}; {remedy}")

    def raise_if_failed(self) -> None:
        """Raises HeapError where a wait of an earlier launch is known to have lasted too long.

        Called before each launch: it waits for nothing.
        """
        self.check_usable()
        if self._words[0] == 0:
            return
        self._unusable = f"this heap of rank {self.rank} is broken since round {self.epoch}"
        what = awaited(list(self._words), PERSISTENT_WAITS if self.shape.d_hidden else WAITS)
        raise HeapError(
            f"pmoe: rank {self.rank} waited {self.bound_seconds:g} s in vain for {what}. That rank has "
            f"ended, failed before, or was slower ({WAIT_SECONDS} sets the bound). What this round computed "
            "is worthless, and the heap is broken, also on ranks that wait for this one. This process stays "
            f"usable; {MAKE_ANEW}"
        )

    def check(self) -> None:
        """Waits for the device and raises HeapError where any wait lasted too long, or the device is lost."""
        self.check_usable()
        try:
            synchronize(self.device)
        except RuntimeError as error:
            self._unusable = f"this heap of rank {self.rank} is on a device that is lost"
            self._process_stays = False
            raise HeapError(
                f"pmoe: rank {self.rank}: {self.device} failed in round {self.epoch} or before, and this "
                f"process cannot use it any more: it must end ({error})"
            ) from error
        self.raise_if_failed()

    def close(self) -> None:
        """Gives the memory back, once its device has come to an end. Later calls do nothing.

        Tensors on the memory must not be used any more. Collective for heaps of several processes, broken
        ones too.

        RuntimeError where a peer does not come: this rank's memory then stays, as the peer may use it.
        """
        release, self.release = self.release, None
        if release is None:
            return
        self._unusable = f"this heap of rank {self.rank} is closed"
        release()
        open_heaps.discard(self)


open_heaps: set[Heap] = set()
"""They are held here: kernels may still write into their reports."""
