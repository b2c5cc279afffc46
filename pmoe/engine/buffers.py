"""Where a pass's buffers lie: how large each is, the ring slots that they share, and the pools behind them.

One pool a device serves all layers. A pass takes its slots when it starts and gives them back when it ends,
so layers that run one after another share the same memory, and between the passes only what a restore pair
keeps is held. Host memory for offloaded tensors is another pool, counted apart: pinned where the device is a
GPU, one unpinned arena on the CPU.

Letters: n chunks, M = d_model, H = d_hidden; T_DI, T_M, T_DO as in MPipeMoE.
"""

from __future__ import annotations

import collections
import math
import mmap
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from pmoe.experts.base import Columns
from pmoe.schedule.restore import Restore

ALIGNMENT = 256
"""Bytes; every slot starts at a multiple of it."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Rows of one pass by chunk. send: to other ranks; received: from them, as the experts have them; local:
    that stay; home: those of its tokens, dropped ones as one. regrouped: whether received rows must be sorted
    by expert. arrived, gathered: rows that S brought, and AG behind it; None where they are those received.
    inside: ranks that share the experts."""

    send: tuple[int, ...]
    received: tuple[int, ...]
    local: tuple[int, ...]
    home: tuple[int, ...]
    regrouped: tuple[bool, ...]
    arrived: tuple[int, ...] | None = None
    gathered: tuple[int, ...] | None = None
    inside: int = 1


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Rows and columns of every buffer of a pass.

    restore: None where nothing is kept. rearranged: as in `pmoe.schedule.rings`.
    """

    direction: str
    extent: Extent
    d_model: int
    columns: Columns
    restore: Restore | None
    rearranged: bool = False

    def shape(self, buffer: str) -> tuple[int, int]:
        """Example: "T_M_L.3" -> (rows of chunk 3 that stay, H). Buffers that this pass or rank makes no use
        of have no rows."""
        name, _, chunk = buffer.rpartition(".")
        i = int(chunk)
        stays = name.endswith("_L")
        name = name.removesuffix("_L")
        rows = self.extent.local[i] if stays else self.extent.received[i]
        if name in ("send", "send_again"):
            return self.extent.send[i], self.d_model
        name = name.removesuffix("_again")
        if name in ("arrived", "leaving", "copies", "parts"):
            return self._inside_rows(name, i), self.d_model
        if name in ("home", "dhome"):
            return (0 if stays else self.extent.home[i]), self.d_model  # rows that stay are a part of it
        if name.endswith("_sorted"):
            return (rows if self.extent.regrouped[i] else 0), self.d_model
        if name == "T_DI" and not stays and self._stays_where_it_arrived(i):
            return 0, self.d_model
        by_link = name in ("T_DO", "dT_DO", "dT_DI") or (name == "T_DI" and self._restores_by_link)
        if by_link and not stays and self.extent.gathered is not None:
            return self.extent.gathered[i], self.d_model
        if name in ("T_M", "dT_M"):
            return rows, self.columns.hidden
        if name == "active":
            return rows, self._active_columns
        if name == "scratch":
            used = self._expendable
            return (min(rows, self.columns.scratch_rows) if used else 0), self.columns.scratch
        return rows, self.d_model

    def _stays_where_it_arrived(self, i: int) -> bool:
        """Forward's T_DI is kept, and arrives in expert order: no slot holds it."""
        kept = self.restore is not None and self.restore.dispatched == "keep"
        return self.direction == "forward" and kept and not self.extent.regrouped[i]

    def _inside_rows(self, name: str, i: int) -> int:
        """Between S and AG, and between RS and R. copies, parts: what AG is sent from, and what RS sums."""
        arrived, inside = (self.extent.arrived or self.extent.received)[i], self.extent.inside
        if name == "copies":
            return arrived * inside if inside > 2 else 0
        return arrived * inside if name == "parts" else arrived

    @property
    def _restores_by_link(self) -> bool:
        """Whether T_DI is what a collective brings: in forward, and where backward sends it again."""
        if self.direction == "forward":
            return True
        return self.restore is not None and self.restore.dispatched == "communicate"

    @property
    def _expendable(self) -> bool:
        """Whether backward may put the activated hidden into T_M's place."""
        return self.restore is not None and (self.restore.hidden != "keep" or self.rearranged)

    @property
    def _active_columns(self) -> int:
        if self.direction == "forward":
            in_place = self.restore is None or self.restore.hidden == "recompute"
        else:
            in_place = self._expendable
        return self.columns.active if in_place else self.columns.scratch


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def slot_elements(slots: Mapping[str, str], sizes: Sizes) -> dict[str, int]:
    """Elements of each ring slot: as many as the largest of its buffers."""
    largest: dict[str, int] = collections.defaultdict(int)
    for buffer, slot in slots.items():
        largest[slot] = max(largest[slot], math.prod(sizes.shape(buffer)))
    return dict(largest)


def arena_elements(slots: Mapping[str, int], element_size: int) -> tuple[dict[str, int], int]:
    """(where each slot starts, elements of all), each slot aligned."""
    step = max(ALIGNMENT // element_size, 1)
    starts, total = {}, 0
    for slot, elements in slots.items():
        starts[slot] = total
        total += -(-elements // step) * step
    return starts, total


class Arena:
    """The slots of one pass, in one piece of device memory."""

    def __init__(self, pool: DevicePool, slots: Mapping[str, str], sizes: Sizes, like: Tensor) -> None:
        self._pool, self._slots, self._sizes = pool, slots, sizes
        self._starts, total = arena_elements(slot_elements(slots, sizes), like.element_size())
        self._memory: Tensor | None = pool.take(total, like)

    def __contains__(self, buffer: str) -> bool:
        return buffer in self._slots

    def view(self, buffer: str) -> Tensor:
        assert self._memory is not None
        rows, columns = self._sizes.shape(buffer)
        start = self._starts[self._slots[buffer]]
        # .data: other slots' writes are no changes of this tensor.
        return self._memory[start : start + rows * columns].view(rows, columns).data

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in one of the slots."""
        return (
            self._memory is not None
            and tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()
        )

    def close(self) -> None:
        """Gives the memory back: after all lanes have ended, on the compute lane."""
        if self._memory is not None:
            self._pool.give_back(self._memory)
            self._memory = None


class DevicePool:
    """Counts the ring slots of one device's passes. The memory itself comes from torch's allocator, which
    hands what one pass gave back to the next, and to anybody else between the passes."""

    def __init__(self) -> None:
        self.bytes_in_use = 0
        self.peak_bytes = 0

    def take(self, elements: int, like: Tensor) -> Tensor:
        memory = like.new_empty(elements)
        self.bytes_in_use += memory.nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
        return memory

    def give_back(self, memory: Tensor) -> None:
        self.bytes_in_use -= memory.nbytes


class HostMemoryError(RuntimeError):
    """The host pool has no room for what should be offloaded."""


class HostPool:
    """Host memory for offloaded tensors, handed out as tensors that give it back when their storage dies.

    limit_bytes: what it may grow to; by default half of the memory that was available, shared by the ranks of
    a node. Blocks are first fit in segments; neighbours that are free are joined.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        self._segments: list[numpy.ndarray] = []
        self._free: list[list[tuple[int, int]]] = []  # by segment: (start, bytes), by start
        # Finalizers run whenever garbage is collected, even inside take: they only note what is free again.
        self._returned: collections.deque[tuple[int, int, int]] = collections.deque()
        self.limit_bytes = _available_bytes() // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._in_use = 0
        self.peak_bytes = 0

    @property
    def bytes_in_use(self) -> int:
        self._collect()
        return self._in_use

    @property
    def free_bytes(self) -> int:
        return max(self.limit_bytes - self.bytes_in_use, 0)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised. Raises HostMemoryError, with the numbers, where the limit would be passed."""
        wanted = math.prod(shape) * dtype.itemsize
        if wanted == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        size = aligned(wanted)
        if size > self.free_bytes:
            raise HostMemoryError(
                f"host memory for offloading: {wanted} bytes wanted, {self.free_bytes} of "
                f"{self.limit_bytes} left"
            )
        found = self._find(size)
        if found is None:
            self._grow(size)
            found = self._find(size)
            if found is None:
                raise HostMemoryError(
                    f"host memory for offloading: no piece of {wanted} bytes is left of {self.limit_bytes}"
                )
        segment, start = found
        # The array is what the tensor's storage keeps alive, and dies with it.
        block = self._segments[segment][start : start + wanted]
        gone = weakref.finalize(block, self._returned.append, (segment, start, size))
        gone.atexit = False
        self._in_use += size
        self.peak_bytes = max(self.peak_bytes, self._in_use)
        return torch.from_numpy(block).view(dtype).view(tuple(shape))

    def _find(self, size: int) -> tuple[int, int] | None:
        for segment, free in enumerate(self._free):
            for i, (start, room) in enumerate(free):
                if room >= size:
                    free[i : i + 1] = [(start + size, room - size)] if room > size else []
                    return segment, start
        return None

    def _grow(self, size: int) -> None:
        if self._room() < size:  # segments that nobody uses, but each too small
            if self._pinned:
                torch.cuda.synchronize(self._device)  # copies that read what has been given back
            for i, segment in enumerate(self._segments):
                if self._free[i] == [(0, segment.nbytes)]:
                    self._segments[i], self._free[i] = numpy.empty(0, dtype=numpy.uint8), []
        room = self._room()
        if room < size:
            return
        if self._pinned:
            size = max(size, min(256 << 20, room))
            try:
                memory = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            except RuntimeError:  # the machine has less to pin than the limit allows: as if it were full
                return
        else:
            # Addresses for all there may be; pages come when they are first written.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
            memory = numpy.frombuffer(mmap.mmap(-1, room, flags=flags), dtype=numpy.uint8)
        self._segments.append(memory)
        self._free.append([(0, memory.nbytes)])

    def _room(self) -> int:
        """Bytes by which the segments may grow."""
        held = sum(segment.nbytes for segment in self._segments)
        return self.limit_bytes // ALIGNMENT * ALIGNMENT - held

    def _collect(self) -> None:
        while self._returned:
            segment, start, size = self._returned.popleft()
            self._in_use -= size
            pieces = sorted([*self._free[segment], (start, size)])
            joined: list[tuple[int, int]] = []
            for at, room in pieces:
                if joined and sum(joined[-1]) == at:
                    joined[-1] = (joined[-1][0], joined[-1][1] + room)
                else:
                    joined.append((at, room))
            self._free[segment] = joined


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Pool:
    """What all layers of a device share: memory on the device, and on the host for what is offloaded."""

    device: DevicePool
    host: HostPool


_pools: dict[torch.device, Pool] = {}


def pool(device: torch.device | str = "cpu") -> Pool:
    """The pool of ``device``: ``.device`` and ``.host``, each with bytes_in_use and peak_bytes; host has a
    ``limit_bytes`` that may be set."""
    device = torch.empty(0, device=device).device  # "cuda" is one of them
    if device not in _pools:
        _pools[device] = Pool(DevicePool(), HostPool(device))
    return _pools[device]


def copy(target: Tensor, source: Tensor) -> None:
    """Between device and host, without the host waiting where one of them is a GPU's."""
    with torch.no_grad():
        target.copy_(source, non_blocking=True)


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """One warning a process for messages that begin alike, up to a colon."""
    what = message.partition(":")[0]
    if what not in _warned:
        _warned.add(what)
        warnings.warn(f"pmoe: {message}", stacklevel=2)
