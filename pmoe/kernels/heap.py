"""The symmetric heap: memory of the same layout on every rank, which peers write into while kernels run.

`pmoe.comm.heap.providers` makes heaps. Addresses are integers. The memory does not come from torch's pool,
because another process can only open whole allocations of CUDA's.

A kernel that waits for a peer gives up after a time limit. It reports what it waited for into memory that the
host reads, and ends (`Heap.check`). The heap is broken then, and every rank must make a new one. The process
goes on.

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
    """Allocates a heap's memory with CUDA, and opens other processes' memory with CUDA IPC.

    The processes must be on the same device, or on devices that can reach each other's memory. Each method
    raises RuntimeError with a sentence if it fails.
    """

    collective = False
    """Whether allocate and free are collectives: either all ranks call them, or none does."""

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        """Returns the address of new memory that holds zeros."""
        try:
            return self._allocate(device, num_bytes)
        except RuntimeError:
            with torch.cuda.device(device):
                torch.cuda.empty_cache()  # torch's pool may hold the missing memory unused
            return self._allocate(device, num_bytes)

    def _allocate(self, device: torch.device, num_bytes: int) -> int:
        return int(loaded_extension().heap_allocate(device.index, num_bytes))

    def free(self, device: torch.device, base: int) -> None:
        """Gives memory back that `allocate` returned."""
        loaded_extension().heap_free(device.index, base)

    def handle(self, device: torch.device, base: int) -> bytes:
        """Returns the handle with which another process of the node opens this memory."""
        return bytes(loaded_extension().heap_handle(device.index, base))

    def open(self, device: torch.device, handle: bytes) -> int:
        """Returns the address at which this process sees another process's memory."""
        return int(loaded_extension().heap_open(device.index, handle))

    def close(self, device: torch.device, peer: int) -> None:
        """Closes memory of a peer that `open` opened."""
        loaded_extension().heap_close(device.index, peer)

    def place(self, device: torch.device) -> tuple[str, str]:
        """Returns the code that the driver loaded on the device (`Architecture`), and this node's name."""
        return str(extension.loaded_architecture(device)), host_name()


def loaded_extension() -> Any:
    """Returns the extension. Raises RuntimeError, with the reason, if it is not loaded."""
    module = extension.load()
    if module is None:
        raise RuntimeError(f"a symmetric heap needs pmoe._cuda: {extension.why_missing()}")
    return module


def synchronize(device: torch.device) -> None:
    """Waits on the host until a CUDA device has finished; does nothing for other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_name() -> str:
    """Returns a text that tells this node from others: the boot id of its kernel, or else the host name.

    A host name is not enough: two nodes may have the same, and containers on one node have several.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
    return f"boot {boot}"


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a contiguous tensor over existing memory, without a copy.

    address: where its first element lies.

    The memory must outlive the tensor: the tensor does not keep it alive.

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


# ---- size and regions of a heap, asked of the extension: cuda/comet/layout.h defines them


ROW_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class HeapShape:
    """The sizes of a heap. All ranks must use the same.

    num_ranks: W.
    experts: E, of one rank.
    rows: the most rows that may arrive at a rank.
    home_rows: the most rows that a rank may send; their results come home into as many rows.
    d_model, dtype: of a row.
    d_hidden: 0 for COMET's kernels. H for the persistent kernel (`pmoe.kernels.flashdmoe`), whose heap is its
        layout L, its flags, and the state that its actors keep between rounds. rows is then C, the rows of a
        cell, in whole tiles, home_rows is the most tokens of a rank, and the inbox is the first cell of L.
    sends_again: whether backward may send T_DI again, which takes a round of its own.
    is_pool: whether all cells of a rank share C rows, of which each cell takes whole tiles.

    Raises ValueError if a row is not a multiple of 16 bytes. `Launcher` refuses too many ranks or experts.
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
        """Bytes of one row."""
        return self.d_model * self.dtype.itemsize

    @property
    def places(self) -> Mapping[str, int]:
        """Byte offsets of the heap's regions, by their names in layout.h; "bytes" is the whole size.

        Raises RuntimeError without the extension.
        """
        cell = (self.d_hidden, self.sends_again, self.is_pool) if self.d_hidden else ()
        return _places(self.num_ranks, self.experts, self.rows, self.home_rows, self.row_bytes, *cell)

    @property
    def bytes(self) -> int:
        """Bytes of one rank's heap."""
        return self.places["bytes"]

    def holds(self, other: HeapShape) -> bool:
        """Returns whether a heap of this shape can serve calls of another shape.

        It can if all sizes are equal, except that it may have more rows and home_rows.
        """
        same = replace(other, rows=self.rows, home_rows=self.home_rows) == self
        return same and other.rows <= self.rows and other.home_rows <= self.home_rows


@cache
def _places(
    ranks: int, experts: int, rows: int, home_rows: int, row_bytes: int, *cell: int
) -> dict[str, int]:
    """Returns the byte offsets of a heap's regions. The extension computes them once for each shape."""
    module = loaded_extension()
    layout = module.flashdmoe_layout if cell else module.comet_layout
    return dict(layout(ranks, experts, rows, home_rows, row_bytes, *cell))


# ---- what kernels wait for, in words


WAIT_SECONDS = "PMOE_WAIT_SECONDS"
"""The environment variable that limits how long a kernel waits for a peer."""


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
"""Texts of `Wait` of cuda/peers/watch.h: WAITS for COMET's kernels, this for the persistent kernel."""


def awaited(report: Sequence[int], waits: Sequence[str] = WAITS) -> str:
    """Returns the text of a kernel's report: what the rank waited for until its time limit.

    report: `Report` of cuda/peers/watch.h as numbers.

    Example: "rank 1: the arrival of piece 2 of its rows for expert 3 of rank 0, in round 7"
    """
    wait, peer, expert, part, epoch, rank = report[:6]
    what = waits[wait].format(peer=peer, expert=expert, part=part, rank=rank)
    return f"{what}, in round {epoch % 2**32}"


class HeapError(RuntimeError):
    """The error for a wait that reached its time limit, and for use of a broken or closed heap."""


# ---- one rank's heap: its rounds, its tensors, and how it fails and closes


MAX_EPOCHS = 2**31 - 1
"""The most rounds of a heap.

Beyond it a flag that was never raised would count as raised (cuda/peers/protocol.h).
"""

REPORT_WORDS = 8

MAKE_ANEW = "make a new heap on every rank (pmoe.comm.heap.close_heaps drops the old ones)"


@dataclass(eq=False, kw_only=True)
class Heap:
    """One rank's heap, and the addresses at which this rank sees the heaps of all ranks.

    A round is one launch that dispatches, with the launches behind it that use its rows. All ranks count
    the same rounds: a flag in the heap holds the number of the last round in which it was raised.

    shape: the heap's sizes.
    rank: this rank.
    device: where the memory is.
    base: the heap's address.
    peer_addresses: addresses of all ranks' heaps, as this rank sees them.
    peers: (W,) int64, the same addresses on the device.
    bound_seconds: how long a kernel may wait for a peer.
    release: gives the memory back; None after it was called.
    epoch: number of the last round that began; the first is 1.
    report: (8,) int32, a `Report` of cuda/peers/watch.h, in memory that host and device reach.

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
        shape = self.shape
        device = self.device
        places = self.shape.places
        self.peers: Tensor = torch.tensor(self.peer_addresses, dtype=torch.int64, device=device)
        self.report: Tensor = torch.zeros(REPORT_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._words = (ctypes.c_int32 * REPORT_WORDS).from_address(self.report.data_ptr())
        inbox = self.base + places["inbox"]
        weights = self.base + places["weights"]
        self._inbox = tensor_at(inbox, (shape.rows, shape.d_model), shape.dtype, device)
        self._weights = tensor_at(weights, (shape.rows,), torch.float32, device)
        self._unusable: str | None = None
        self._process_stays = True

    @property
    def bound_nanoseconds(self) -> int:
        """Returns the nanoseconds that a kernel may wait for a peer."""
        return round(self.bound_seconds * 1e9)

    @property
    def counters(self) -> int:
        """Address of `Counters`. Its first word says that this rank has failed."""
        return self.base + self.shape.places["counters"]

    def next_epoch(self) -> int:
        """Begins a round and returns its number. Called for one launch on every rank.

        Raises HeapError as `raise_if_failed` does, and after the last possible round.
        """
        self.raise_if_failed()
        if self.epoch + 1 >= MAX_EPOCHS:
            self._unusable = f"this heap of rank {self.rank} has had {self.epoch} rounds, which is the limit"
            self.check_usable()
        self.epoch += 1
        return self.epoch

    def give_up(self, why: str) -> None:
        """Makes the heap unusable because this rank left a round before its end.

        A peer's flags of a later round would otherwise be taken for those of this round.
        """
        if self._unusable is None:
            self._unusable = f"this heap of rank {self.rank} was given up in round {self.epoch}: {why}"

    def rows(self, count: int) -> Tensor:
        """Returns the first rows of the inbox, (count, M): the memory itself. Later rounds overwrite it."""
        return self._first(self._inbox, count)

    def row_weight(self, count: int) -> Tensor:
        """Returns the routing weights of these rows, (count,) float32: the memory itself."""
        return self._first(self._weights, count)

    def _first(self, of_rows: Tensor, count: int) -> Tensor:
        """Returns the first ``count`` rows of a tensor of the heap. Raises ValueError if it has fewer."""
        self.check_usable()
        if not 0 <= count <= self.shape.rows:
            raise ValueError(f"count ({count}) must be from 0 to the heap's {self.shape.rows} rows")
        return of_rows[:count]

    def check_usable(self) -> None:
        """Raises HeapError if the heap is broken or closed."""
        if self._unusable is not None:
            remedy = MAKE_ANEW if self._process_stays else "this process must end"
            raise HeapError(f"pmoe: {self._unusable}; {remedy}")

    def raise_if_failed(self) -> None:
        """Raises HeapError if a kernel of an earlier launch has already reported that it waited too long.

        Called before each launch. It does not wait for the device.
        """
        self.check_usable()
        if self._words[0] == 0:  # the kernel writes this word last, so a report is complete or absent
            return
        self._unusable = f"this heap of rank {self.rank} is broken since round {self.epoch}"
        what = awaited(list(self._words), PERSISTENT_WAITS if self.shape.d_hidden else WAITS)
        raise HeapError(
            f"pmoe: rank {self.rank} waited {self.bound_seconds:g} s in vain for {what}. That rank has "
            f"ended, has failed before, or needs more time ({WAIT_SECONDS} sets the limit). The results of "
            "this round are wrong, and the heap is broken, also on ranks that wait for this one. This "
            f"process stays usable; {MAKE_ANEW}"
        )

    def check(self) -> None:
        """Waits for the device, and raises HeapError if any kernel waited too long or the device is lost."""
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
        """Gives the memory back after the device has finished. Later calls do nothing.

        Tensors on the memory must not be used any more. For heaps of several processes this is a collective,
        for broken heaps too.

        Raises RuntimeError if a peer does not come. The memory then stays allocated, because the peer may
        still use it.
        """
        release = self.release
        self.release = None
        if release is None:
            return
        self._unusable = f"this heap of rank {self.rank} is closed"
        release()
        open_heaps.discard(self)


open_heaps: set[Heap] = set()
"""Heaps that are not closed. The set keeps them alive, because kernels may still write into their reports."""
