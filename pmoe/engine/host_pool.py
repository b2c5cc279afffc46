"""Host memory that lives on: for offloaded tensors, pinned where the device is a GPU; and for the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmoe.schedule.slots import ALIGNMENT, aligned


class HostMemoryError(RuntimeError):
    """The host pool has no room for what should be offloaded."""


@dataclass(eq=False)
class _Segment:
    """memory: a mapping, or a pinned tensor. free: (start, bytes), by start. top: the end of what was handed
    out since the last trim; a mapping has no pages beyond it."""

    memory: Any
    address: int
    num_bytes: int
    free: list[tuple[int, int]]
    top: int = 0

    def give_back(self, start: int, size: int) -> None:
        pieces = sorted([*self.free, (start, size)])
        self.free = joined = pieces[:1]
        for at, room in pieces[1:]:
            if sum(joined[-1]) == at:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((at, room))

    def trim(self, most: int) -> int:
        """``most`` free bytes go back to the system in whole pages, the last first: the first are handed out
        first. Their addresses stay. Returns how many it had not."""
        for start, room in reversed(self.free):
            end = min(start + room, self.top)
            first = max(start, end - most)
            page = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
            if (size := (end - page) // mmap.PAGESIZE * mmap.PAGESIZE) > 0:
                self.memory.madvise(mmap.MADV_DONTNEED, page, size)
            if start + room == self.num_bytes:
                self.top = min(self.top, first)
            most -= max(end - first, 0)
        return most


_MAPPED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
_use_count = torch._C._storage_Use_Count
_storage: Any = torch._C._construct_storage_from_data_pointer
_Block = tuple[torch.UntypedStorage, _Segment, int, int]
"""(what tensors hold, where it lies: segment, start, bytes)"""


class HostPool:
    """Host memory, handed out as tensors; a block is free again when nobody else holds its storage: no graph,
    no user, no thread of gloo's (which may outlive Python, and so must not be made to call it).

    limit_bytes: what it may grow to; by default half of the memory that was available, shared by the ranks of
    a node. Blocks are first fit in segments; neighbours that are free are joined.
    """

    limit_bytes: int
    peak_bytes: int

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

    def trim(self, most: int = sys.maxsize) -> None:
        """Gives ``most`` bytes of what is free back to the system; of pinned memory, all free segments."""
        with self._lock:
            self._collect()
            if self._pinned:
                self._drop_free_segments()
            for segment in () if self._pinned else reversed(self._segments):
                most = segment.trim(most)

    def new(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Of this memory where there is room, else of torch's."""
        try:
            return self.take(shape, like.dtype)
        except HostMemoryError:
            return like.new_empty(shape)

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
                raise _error(f"{wanted} bytes wanted, {left} of {self.limit_bytes} left")
            segment, start = self._place(size, wanted)
            storage = _storage(segment.address + start, torch.device("cpu"), wanted)
            self._blocks.append((storage, segment, start, size))
            self._in_use += size
            self.peak_bytes = max(self.peak_bytes, self._in_use)
            empty: Any = torch.empty(0, dtype=dtype, device="cpu")
            taken: Tensor = empty.set_(storage, 0, tuple(shape))
            return taken

    def _place(self, size: int, wanted: int) -> tuple[_Segment, int]:
        found = self._find(size)
        if found is None or found[0].free[found[1]][0] + size > found[0].top:  # before new pages are touched
            self._collect()
            found = self._find(size) or self._grow(size)
        if found is None:
            raise _error(f"no piece of {wanted} bytes is left of {self.limit_bytes}")
        segment, i = found
        start, room = segment.free[i]
        segment.free[i : i + 1] = [(start + size, room - size)] if room > size else []
        segment.top = max(segment.top, start + size)
        return segment, start

    def _find(self, size: int) -> tuple[_Segment, int] | None:
        """The first free piece that is large enough: its segment, and its number there."""
        pieces = ((each, i) for each in self._segments for i in range(len(each.free)))
        return next(((each, i) for each, i in pieces if each.free[i][1] >= size), None)

    def _grow(self, size: int) -> tuple[_Segment, int] | None:
        if self._room() < size:  # segments that nobody uses, but each too small
            self._drop_free_segments()
        if (room := self._room()) >= size:
            with contextlib.suppress(RuntimeError, OSError):  # a machine that has less is as if it were full
                self._segments.append(self._segment(max(size, min(256 << 20, room)), room))
        return self._find(size)

    def _segment(self, pinned_size: int, size: int) -> _Segment:
        if self._pinned:
            pinned = torch.empty(pinned_size, dtype=torch.uint8, pin_memory=True)
            return _Segment(pinned, pinned.data_ptr(), pinned_size, [(0, pinned_size)])
        # Addresses for all there may be; pages come when they are first written.
        memory = mmap.mmap(-1, size, flags=_MAPPED)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # messages may be under way when Python ends
        return _Segment(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)), size, [(0, size)])

    def _drop_free_segments(self) -> None:
        if self._pinned:
            torch.cuda.synchronize(self._device)  # copies that read what has been given back
        for segment in [each for each in self._segments if each.free == [(0, each.num_bytes)]]:
            self._segments.remove(segment)
            if not self._pinned:
                segment.memory.close()

    def _room(self) -> int:
        """Bytes by which the segments may grow."""
        return self.limit_bytes // ALIGNMENT * ALIGNMENT - sum(each.num_bytes for each in self._segments)

    def _collect(self) -> None:
        """Blocks that only this pool holds are free."""
        held: list[_Block] = []
        for block, holders in zip(self._blocks, _holders(self._blocks), strict=True):
            if holders > _NONE:
                held.append(block)
            else:
                block[1].give_back(*block[2:])
                self._in_use -= block[3]
        self._blocks = held


def _error(text: str) -> HostMemoryError:
    return HostMemoryError(f"host memory for offloading: {text}")


def _holders(blocks: Sequence[_Block]) -> list[int]:
    """References to each block's storage: by tensors, and to its Python object."""
    return [_use_count(each[0]._cdata) + sys.getrefcount(each[0]) for each in blocks]


def _available_bytes() -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_NONE = _holders([(torch.empty(1).untyped_storage(), _Segment(None, 0, 0, []), 0, 0)])[0]
"""Holders of a storage that nobody but a pool has."""
