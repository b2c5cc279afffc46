"""The symmetric heap: device memory with the same layout on all ranks, into which all ranks can write.

Fused kernels send rows by writing them straight into the heap of the rank that computes them.
`pmoe.comm.heap.providers` makes heaps. Addresses are integers. The memory is allocated by CUDA itself and not
by torch's caching allocator, because another process can open only whole CUDA allocations.

If a kernel waits for another rank longer than a time limit, it writes a report into memory that the host can
read, and ends. The report says for which event the kernel waited. `Heap.check` raises an error with this
report. The heap is then unusable, and every rank must make a new heap, but the process can go on.

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
from pmoe.kernels.launch_order import LaunchOrder, records_graph


class DeviceMemory:
    """Allocates a symmetric heap's memory with CUDA, and opens other processes' memory with CUDA IPC.

    The processes must use the same device, or devices that can read and write each other's memory. A method
    that fails raises RuntimeError with a readable reason.
    """

    collective = False
    """Whether `allocate` and `free` are collectives, which all ranks must call together."""

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        """Allocates memory on the device, filled with zeros, and returns its address.

        If memory is short, it frees the unused memory of torch's caching allocator and tries once more.
        """
        try:
            return self._allocate(device, num_bytes)
        except RuntimeError:
            with torch.cuda.device(device):
                torch.cuda.empty_cache()  # torch's caching allocator may hold unused memory
            return self._allocate(device, num_bytes)

    def _allocate(self, device: torch.device, num_bytes: int) -> int:
        return int(loaded_extension().heap_allocate(device.index, num_bytes))

    def free(self, device: torch.device, base: int) -> None:
        """Frees memory that `allocate` returned.

        base: the address of that memory.
        """
        loaded_extension().heap_free(device.index, base)

    def handle(self, device: torch.device, base: int) -> bytes:
        """Returns a CUDA IPC handle with which another process of the node can open memory of this process.

        base: the address of that memory.
        """
        return bytes(loaded_extension().heap_handle(device.index, base))

    def open(self, device: torch.device, handle: bytes) -> int:
        """Opens memory of another process, and returns the address that it has in this process.

        handle: the result of `handle` in the other process.
        """
        return int(loaded_extension().heap_open(device.index, handle))

    def close(self, device: torch.device, peer: int) -> None:
        """Closes memory of another process.

        peer: the address that `open` returned.
        """
        loaded_extension().heap_close(device.index, peer)

    def place(self, device: torch.device) -> tuple[str, str]:
        """Returns two texts, which ranks compare to find out if they can write into each other's heaps.

        The first text names the kernel code that the driver loaded on the device (`Architecture`). This text
        must be equal on all ranks. The second text is the result of `host_name`. Two ranks with equal second
        texts are on one node.
        """
        return str(extension.loaded_architecture(device)), host_name()


def loaded_extension() -> Any:
    """Returns the extension module. Raises RuntimeError, with the reason, if it cannot be loaded."""
    module = extension.load()
    if module is None:
        raise RuntimeError(f"a symmetric heap needs pmoe._cuda: {extension.why_missing()}")
    return module


def has_puts() -> bool:
    """Returns whether FlashDMoE's kernels can send to ranks whose memory cannot be mapped.

    They can if `pmoe._nvshmem` was built and can be loaded: its kernels call NVSHMEM's device functions.
    """
    return extension.load_puts() is not None


def synchronize(device: torch.device) -> None:
    """Blocks the host until all work on a CUDA device has finished. It does nothing for other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_name() -> str:
    """Returns a text that is the same for all processes of a node and different on other nodes.

    The text is the boot id of the node's Linux kernel, or the host name if there is no boot id. The host name
    is not reliable: two nodes may have the same name, and each container of a node may have a different name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
    return f"boot {boot}"


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a contiguous tensor over existing memory, without a copy.

    address: the address of the tensor's first element.
    shape, dtype, device: the shape, dtype and device of the tensor.

    The tensor does not keep the memory alive: the memory must not be freed while the tensor is in use.

    Raises RuntimeError if the memory is not on the device.

    Example: tensor_at(base + 4096, (n, 64), torch.bfloat16, device) begins 4096 bytes after the address base.
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


# ---- sizes of a heap, and its regions, whose offsets come from layout.h of cuda/comet and cuda/flashdmoe


ROW_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class HeapShape:
    """The sizes that determine the layout of a symmetric heap. They must be equal on all ranks.

    Two sets of kernels use heaps: COMET's (`pmoe.kernels.comet`) and FlashDMoE's (`pmoe.kernels.flashdmoe`).

    num_ranks: number of ranks.
    experts: number of experts of one rank.
    rows: COMET: the most rows that a rank can receive. FlashDMoE: the most rows that one rank can send to one
        expert, rounded up to whole tiles; with is_pool, the most rows that a rank can receive.
    home_rows: COMET: the most rows that a rank can send. The results of these rows are written back into its
        heap. FlashDMoE: the most tokens of a rank.
    d_model, dtype: number of columns and dtype of a row.
    d_hidden: FlashDMoE: the experts' hidden size. The sizes of the kernels' own buffers in the heap depend on
        it. COMET: 0.
    sends_again: FlashDMoE only: whether backward may dispatch the layer's input a second time. The heap then
        needs room for this input beside the dispatched gradients.
    is_pool: FlashDMoE only: if False, there is a separate buffer of ``rows`` rows for each pair of a sending
        rank and an expert. If True, one buffer of ``rows`` rows has all rows that a rank receives.
    is_staged: FlashDMoE only: whether the heap also has room for outgoing rows, which NVSHMEM copies to ranks
        whose memory cannot be mapped. Providers of heaps set it (`pmoe.comm.heap.providers.nvshmem_heap`).

    Raises ValueError if the bytes of a row are not a multiple of 16. Whether the kernels support the numbers
    of ranks and experts is checked later, by `pmoe.kernels.comet.launcher.Launcher`.
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
    is_staged: bool = False

    def __post_init__(self) -> None:
        if self.row_bytes % ROW_ALIGNMENT_BYTES:
            raise ValueError(
                f"d_model ({self.d_model}): a row's bytes ({self.d_model} x {self.dtype.itemsize} = "
                f"{self.row_bytes}) must be a multiple of {ROW_ALIGNMENT_BYTES}"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: d_model * bytes of an element."""
        return self.d_model * self.dtype.itemsize

    @property
    def places(self) -> Mapping[str, int]:
        """Byte offsets of a heap's regions, by their names in layout.h of cuda/comet or cuda/flashdmoe.

        "bytes" is the size of the whole heap. Raises RuntimeError without the extension, which computes the
        layout.
        """
        cell = (self.d_hidden, self.sends_again, self.is_pool, self.is_staged) if self.d_hidden else ()
        return _places(self.num_ranks, self.experts, self.rows, self.home_rows, self.row_bytes, *cell)

    @property
    def bytes(self) -> int:
        """Size of one rank's heap, in bytes."""
        return self.places["bytes"]

    def holds(self, other: HeapShape) -> bool:
        """Returns whether a heap of this shape can be used for calls that ask for the shape ``other``.

        The result is True if ``rows`` and ``home_rows`` of this shape are at least those of ``other``, and
        all other fields but ``is_staged`` are equal. Providers set ``is_staged``; callers do not ask for it.
        """
        asked = replace(other, rows=self.rows, home_rows=self.home_rows, is_staged=self.is_staged)
        same = asked == self
        return same and other.rows <= self.rows and other.home_rows <= self.home_rows


@cache
def _places(
    ranks: int, experts: int, rows: int, home_rows: int, row_bytes: int, *cell: int
) -> dict[str, int]:
    """Returns the byte offsets of a heap's regions, by name.

    The extension computes the offsets once for each shape.

    ranks, experts, rows, home_rows, row_bytes: the sizes of both kinds of heaps, as in `HeapShape`.
    cell: the fields on which only the heap of FlashDMoE's kernels depends: d_hidden, sends_again, is_pool and
        is_staged. Empty for COMET's kernels.
    """
    module = loaded_extension()
    layout = module.flashdmoe_layout if cell else module.comet_layout
    return dict(layout(ranks, experts, rows, home_rows, row_bytes, *cell))


# ---- what kernels wait for, in words


WAIT_SECONDS = "PMOE_WAIT_SECONDS"
"""Name of the environment variable that limits how many seconds a kernel waits for another rank."""


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
"""Texts for error messages: events for which a kernel can wait, by the code `Wait` of cuda/peers/watch.h.

`WAITS` has the events of COMET's kernels, `PERSISTENT_WAITS` the events of FlashDMoE's.
"""


def awaited(report: Sequence[int], waits: Sequence[str] = WAITS) -> str:
    """Returns a text that says for which event a kernel waited until its time limit.

    report: the numbers of the kernel's report, in the order of `Report` in cuda/peers/watch.h.
    waits: the texts of all events: `WAITS` for COMET's kernels, `PERSISTENT_WAITS` for FlashDMoE's.

    Example: "rank 1: the arrival of piece 2 of its rows for expert 3 of rank 0, in round 7". A piece is 16
    rows that are sent together. A round is one launch that dispatches rows, and the later launches that use
    these rows.
    """
    wait, peer, expert, part, _, rank = report[:6]
    what = waits[wait].format(peer=peer, expert=expert, part=part, rank=rank)
    return f"{what}, in round {_round_of(report)}"


def _round_of(report: Sequence[int]) -> int:
    """Returns the number of the round in which a kernel waited too long.

    A round is a launch that dispatches rows, and the launches that use them. Rounds that a CUDA graph replays
    are numbered, too.

    report: the numbers of the kernel's report, in the order of `Report` in cuda/peers/watch.h.
    """
    return report[4] % 2**32


class HeapError(RuntimeError):
    """The error for a kernel that waited too long for another rank, or for use of a broken or closed heap."""


# ---- one rank's heap: its rounds, its tensors, and how it fails and closes


MAX_EPOCHS = 2**31 - 1
"""Largest round number of a heap, which is a signed 32-bit number.

Flags hold the number of the round in which they were raised, and are compared as signed differences
(cuda/peers/protocol.h). After this round a flag that was never raised would count as raised.
"""

REPORT_WORDS = 8

COUNT_BEFORE = "call Heap.count_on_device() on every rank before the capture"

MAKE_ANEW = "make a new heap on every rank (pmoe.comm.heap.close_heaps drops the old ones)"


@dataclass(eq=False, kw_only=True)
class Heap:
    """One rank's symmetric heap, and the addresses at which this process sees the heaps of all ranks.

    A round is one launch that dispatches rows, and the later launches that use these rows. Rounds are
    numbered from 1, the same on all ranks. A flag in the heap holds the number of the last round in which it
    was raised, so flags need no reset.

    shape: the sizes of the heap.
    rank: this rank.
    device: the device of the memory.
    base: address of this rank's heap.
    peer_addresses: address of each rank's heap, as this process sees it; 0 for a rank whose memory cannot be
        mapped. Only FlashDMoE's kernels take heaps with such ranks.
    peers: (W,) int64, the same addresses for all W ranks, on the device.
    bound_seconds: the most seconds that a kernel may wait for another rank.
    release: function that frees the memory; None after `close`.
    epoch: number of the last round that began; 0 before the first. Rounds that a CUDA graph repeats do not
        count.
    round: int32 scalar on the device with the number of the last round, also of those that a CUDA graph
        repeats; None before `count_on_device`.
    is_in_graph: whether a CUDA graph has captured a launch that uses the heap. Replays of the graph use the
        heap without the host, so it must stay open as long as the graph.
    order: lets each launch that uses the heap wait for the launches before it.
    report: (8,) int32 in host memory that the device can write: a description of the event for which a kernel
        of this rank waited too long (`Report` of cuda/peers/watch.h). All numbers are 0 if no kernel waited
        too long.
    failures: int32 scalar on the device, in the heap: not 0 if a kernel of this rank waited too long. It must
        not be read after `close`.

    Methods raise HeapError if the heap is broken or closed.
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
        self.round: Tensor | None = None
        self.is_in_graph: bool = False
        self.order: LaunchOrder = LaunchOrder(device)
        self.failures: Tensor = tensor_at(self.counters, (), torch.int32, device)
        self._unusable: str | None = None
        self._process_stays = True

    @property
    def is_open(self) -> bool:
        """Whether the heap has not been closed."""
        return self.release is not None

    @property
    def bound_nanoseconds(self) -> int:
        """The most nanoseconds that a kernel may wait for another rank."""
        return round(self.bound_seconds * 1e9)

    @property
    def counters(self) -> int:
        """The address of the heap's counters.

        The first counter is not 0 if a kernel of this rank has waited too long.
        """
        return self.base + self.shape.places["counters"]

    def next_epoch(self) -> int:
        """Begins a round and returns its number. All ranks must call it for the same launch.

        A round is one launch that dispatches rows, and the later launches that use these rows.

        Raises HeapError if the heap is broken or closed, if a kernel of an earlier launch waited too long, or
        if the heap has had its last possible round (`MAX_EPOCHS`).
        """
        self.raise_if_failed()
        if self.epoch + 1 >= MAX_EPOCHS:
            self._unusable = f"this heap of rank {self.rank} has had {self.epoch} rounds, which is the limit"
            self.check_usable()
        self.epoch += 1
        if self.round is not None:
            self.round.add_(1)
        return self.epoch

    def count_on_device(self) -> None:
        """Lets kernels read the number of their round on the device from now on.

        A CUDA graph repeats the arguments of its launches. So launches in a graph must not have the number of
        their round as an argument. The number on the device goes on from the last round, so the ranks need
        not begin this at the same round. Further calls do nothing.

        Raises RuntimeError for the first call if a CUDA graph is being captured. Each replay of the graph
        would set the number back, so flags of the replay before would count as raised.
        """
        if self.round is not None:
            return
        if records_graph(self.device):
            raise RuntimeError(
                f"pmoe: the rounds of rank {self.rank}'s heap are counted on the host (round {self.epoch}), "
                "and a capture cannot change that, because each replay would set the number back: "
                f"{COUNT_BEFORE}"
            )
        with self.order.launch():  # the number is set after the last launch, and before the next one
            self.round = torch.full((), self.epoch, dtype=torch.int32, device=self.device)
        self.order.let_graphs_wait()

    def check_repeatable(self) -> None:
        """Raises RuntimeError if launches on this heap cannot be captured in a CUDA graph.

        Call it for each launch that is captured. If rounds are counted on the host, the round's number is an
        argument of the launch. Each replay of the graph would then repeat the number of a past round
        (`count_on_device`).
        """
        if self.round is None:
            raise RuntimeError(
                f"pmoe: a CUDA graph cannot hold a launch on rank {self.rank}'s heap: the rounds are counted "
                f"on the host, and each replay would use round {self.epoch + 1} again: {COUNT_BEFORE}"
            )

    def give_up(self, why: str) -> None:
        """Makes the heap unusable, because this rank left a round before its end.

        A round is one launch that dispatches rows, and the later launches that use these rows. Ranks set
        flags in each other's heaps when they have written rows. If this rank began a new round, the other
        ranks, which still wait in the old round, would mistake its new flags for flags of the old round.

        why: the reason, for the error of later calls.
        """
        if self._unusable is None:
            self._unusable = f"this heap of rank {self.rank} was given up in round {self.epoch}: {why}"

    def rows(self, count: int) -> Tensor:
        """Returns the first ``count`` rows that arrived in the heap, (count, M), without a copy. M = d_model.

        The next dispatch overwrites the result.
        """
        return self._first(self._inbox, count)

    def row_weight(self, count: int) -> Tensor:
        """Returns the routing weights of the first ``count`` arrived rows, (count,) float32, without a copy.

        The next dispatch overwrites the result.
        """
        return self._first(self._weights, count)

    def _first(self, of_rows: Tensor, count: int) -> Tensor:
        """Returns the first ``count`` rows of a tensor in the heap, without a copy.

        of_rows: a tensor in the heap's memory, with an entry for each row that can arrive.

        Raises ValueError if the heap has fewer rows, HeapError if the heap is broken or closed.
        """
        self.check_usable()
        if not 0 <= count <= self.shape.rows:
            raise ValueError(f"count ({count}) must be from 0 to the heap's {self.shape.rows} rows")
        return of_rows[:count]

    def check_usable(self) -> None:
        """Raises HeapError if this heap was already found to be broken, or is closed."""
        if self._unusable is not None:
            remedy = MAKE_ANEW if self._process_stays else "this process must end"
            raise HeapError(f"pmoe: {self._unusable}; {remedy}")

    def raise_if_failed(self) -> None:
        """Raises HeapError if a kernel of an earlier launch has already reported that it waited too long.

        Every launch calls this method first. The host does not wait for kernels that still run; a later call
        of this method raises the errors that they report.
        """
        self.check_usable()
        if self._words[0] == 0:  # the kernel writes this word last, so a report is complete or absent
            return
        report = list(self._words)
        self._unusable = f"this heap of rank {self.rank} is broken since round {_round_of(report)}"
        what = awaited(report, PERSISTENT_WAITS if self.shape.d_hidden else WAITS)
        raise HeapError(
            f"pmoe: rank {self.rank} waited {self.bound_seconds:g} s in vain for {what}. That rank has "
            f"ended, has failed before, or needs more time ({WAIT_SECONDS} sets the limit). The results of "
            "this round are wrong, and the heap is broken, also on ranks that wait for this one. This "
            f"process stays usable; {MAKE_ANEW}"
        )

    def check(self) -> None:
        """Waits until the device is idle, and raises HeapError if any kernel has waited too long.

        It also raises HeapError if the device has failed. This process cannot use the device any more then.
        """
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

    def new_failure(self) -> str:
        """Returns the error's text if a kernel has waited too long and no method has raised it yet; else "".

        Waits until the device is idle. The heap is unusable if the result is not "".
        """
        if self._unusable is not None:
            return ""
        try:
            self.check()
        except HeapError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Waits until the device is idle, and frees the heap's memory. Further calls of `close` do nothing.

        Tensors in the heap's memory must not be used any more. If several processes share heaps, `close` is a
        collective, also for broken heaps.

        Raises RuntimeError if another rank does not call `close`. The memory is then not freed, because
        kernels of that rank may still use it.
        """
        release = self.release
        self.release = None
        if release is None:
            return
        self._unusable = f"this heap of rank {self.rank} is closed"
        release()
        open_heaps.discard(self)


open_heaps: set[Heap] = set()
"""All heaps that are not closed. The set keeps them alive, because kernels may still write their reports."""
