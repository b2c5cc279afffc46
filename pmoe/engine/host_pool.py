"""Host memory that lives on: for offloaded tensors, pinned where the device is a GPU; on the CPU also for what
passes take."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pmoe.schedule.slots import ALIGNMENT, aligned


class HostMemoryError(RuntimeError):
    """The host pool has no room for what should be offloaded."""


@dataclass(eq=False)
class _Segment:
    """memory: a mapping of its own, or a pinned tensor. free: (start, bytes), by start. top: where those bytes
    end that were handed out since the last trim; beyond them a mapping has no pages."""

    memory: Any
    address: int
    num_bytes: int
    free: list[tuple[int, int]] = field(default_factory=list)
    top: int = 0

    def __post_init__(self) -> None:
        self.free.append((0, self.num_bytes))

    def give_back(self, start: int, size: int) -> None:
        """Neighbours that are free are joined."""
        joined: list[tuple[int, int]] = []
        for at, room in sorted([*self.free, (start, size)]):
            if joined and sum(joined[-1]) == at:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((at, room))
        self.free = joined

    def trim(self) -> None:
        """Whole pages that are free go back to the system; their addresses stay."""
        for start, room in self.free if isinstance(self.memory, mmap.mmap) else ():
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            pages = (min(start + room, self.top) - first) // mmap.PAGESIZE
            if pages > 0:
                self.memory.madvise(mmap.MADV_DONTNEED, first, pages * mmap.PAGESIZE)
        if self.free and sum(self.free[-1]) == self.num_bytes:
            self.top = min(self.top, self.free[-1][0])


_Block = tuple[torch.UntypedStorage, _Segment, int, int]
"""(what tensors hold, where it lies: segment, start, bytes)"""


class HostPool:
    """Host memory, handed out as tensors; a block is free again when no tensor holds its storage any more,
    whoever that was: a graph, a user, a thread of gloo's. (A storage with a function that is called when it
    dies would need Python for it, in threads that outlive Python.)

    limit_bytes: what it may grow to; by default half of the memory that was available, shared by the ranks of
    a node. Blocks are first fit in segments; neighbours that are free are joined.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        self._segments: list[_Segment] = []
        self._blocks: list[_Block] = []
        self._lock = threading.Lock()
        self.limit_bytes = _available_bytes() // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._in_use = 0
        self.peak_bytes = 0

    @property
    def bytes_in_use(self) -> int:
        with self._lock:
            self._collect()
            return self._in_use

    @property
    def free_bytes(self) -> int:
        return max(self.limit_bytes - self.bytes_in_use, 0)

    @property
    def kept_bytes(self) -> int:
        """What is free, but not given back to the system, at most."""
        return sum(each.top for each in self._segments) - self.bytes_in_use

    def trim(self) -> None:
        """Gives what is free back to the system, but for pinned segments of which a part is in use."""
        with self._lock:
            self._collect()
            for segment in self._segments:
                segment.trim()
            if self._pinned:
                self._drop_free_segments()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised. Raises HostMemoryError, with the numbers, where the limit would be passed."""
        wanted = math.prod(shape) * dtype.itemsize
        if wanted == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        size = aligned(wanted)
        with self._lock:
            # Who still holds what is asked only where it matters: blocks may be many.
            if self._in_use + size > min(self.peak_bytes, self.limit_bytes):
                self._collect()
            left = max(self.limit_bytes - self._in_use, 0)
            if size > left:
                raise HostMemoryError(
                    f"host memory for offloading: {wanted} bytes wanted, {left} of {self.limit_bytes} left"
                )
            segment, start = self._place(size, wanted)
            segment.top = max(segment.top, start + size)
            storage = torch._C._construct_storage_from_data_pointer(
                segment.address + start, torch.device("cpu"), wanted
            )
            self._blocks.append((storage, segment, start, size))
            self._in_use += size
            self.peak_bytes = max(self.peak_bytes, self._in_use)
            return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape))

    def _place(self, size: int, wanted: int) -> tuple[_Segment, int]:
        found = self._find(size)
        if found is None or found[1] + size > found[0].top:
            self._collect()
            found = self._find(size)
        if found is None:
            self._grow(size)
            found = self._find(size)
        if found is None:
            raise HostMemoryError(
                f"host memory for offloading: no piece of {wanted} bytes is left of {self.limit_bytes}"
            )
        segment, i = found[0], found[2]
        start, room = segment.free[i]
        segment.free[i : i + 1] = [(start + size, room - size)] if room > size else []
        return segment, start

    def _find(self, size: int) -> tuple[_Segment, int, int] | None:
        """(segment, start, number in its list) of the first that is large enough."""
        for segment in self._segments:
            for i, (start, room) in enumerate(segment.free):
                if room >= size:
                    return segment, start, i
        return None

    def _grow(self, size: int) -> None:
        if self._room() < size:  # segments that nobody uses, but each too small
            self._drop_free_segments()
        room = self._room()
        if room < size:
            return
        try:
            self._segments.append(_pinned(max(size, min(256 << 20, room))) if self._pinned else _mapped(room))
        except (RuntimeError, OSError):  # the machine has less than the limit allows: as if it were full
            return

    def _drop_free_segments(self) -> None:
        if self._pinned:
            torch.cuda.synchronize(self._device)  # copies that read what has been given back
        for segment in [each for each in self._segments if each.free == [(0, each.num_bytes)]]:
            self._segments.remove(segment)
            if isinstance(segment.memory, mmap.mmap):
                segment.memory.close()

    def _room(self) -> int:
        """Bytes by which the segments may grow."""
        held = sum(segment.num_bytes for segment in self._segments)
        return self.limit_bytes // ALIGNMENT * ALIGNMENT - held

    def _collect(self) -> None:
        """Blocks that only this pool holds are free."""
        held: list[_Block] = []
        for block, holders in zip(self._blocks, _holders(self._blocks), strict=True):
            if holders > _NONE:
                held.append(block)
                continue
            _, segment, start, size = block
            segment.give_back(start, size)
            self._in_use -= size
        self._blocks = held


def _holders(blocks: Sequence[_Block]) -> list[int]:
    """References to each block's storage: by tensors, and to its Python object."""
    return [torch._C._storage_Use_Count(each[0]._cdata) + sys.getrefcount(each[0]) for each in blocks]


def _pinned(size: int) -> _Segment:
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return _Segment(memory, memory.data_ptr(), size)


def _mapped(size: int) -> _Segment:
    """Addresses for all there may be; pages come when they are first written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, size, flags=flags)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # messages may be under way when Python ends
    return _Segment(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)), size)


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_NONE = _holders([(torch.empty(1).untyped_storage(), _Segment(None, 0, 0), 0, 0)])[0]
"""Holders of a storage that nobody but a pool has."""
