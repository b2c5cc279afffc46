"""Pools of host memory: pinned for tensors offloaded from a GPU, pageable for passes on the CPU."""

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

from pmoe.arguments import ranks_in_environment
from pmoe.schedule.buffer_sizes import ALIGNMENT, aligned


class HostMemoryError(RuntimeError):
    """Raised if the host pool has no room for a tensor that should be offloaded."""


@dataclass(eq=False)
class _Segment:
    """One contiguous allocation of the pool. The pool gives parts of it, called blocks, to tensors.

    memory: the mmap object, or the pinned tensor.
    address, num_bytes: the address of the segment's first byte, and the segment's size in bytes.
    free: the free ranges as (offset, bytes), sorted by offset. Offsets are in bytes from the address.
    top: the largest offset, in bytes, to which any block has reached. A trim may lower it. In a mapping
        (``mmap``), only pages below this offset may use physical memory.
    """

    memory: Any
    address: int
    num_bytes: int
    free: list[tuple[int, int]]
    top: int = 0

    def give_back(self, start: int, size: int) -> None:
        """Marks a range of bytes as free, and joins it with the free ranges next to it.

        start, size: the range's offset in the segment and its length, in bytes.
        """
        pieces = sorted([*self.free, (start, size)])
        self.free = joined = pieces[:1]
        for piece_start, room in pieces[1:]:
            if sum(joined[-1]) == piece_start:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((piece_start, room))

    def trim(self, most: int) -> int:
        """Gives up to ``most`` free bytes back to the operating system, in whole pages.

        The addresses stay reserved, so that later blocks can use them again. Ranges at the end of the segment
        are given back first, because new blocks are taken from the beginning. Returns ``most`` minus the
        bytes that were given back.
        """
        for start, room in reversed(self.free):
            end = min(start + room, self.top)
            first_byte = max(start, end - most)
            page = -(-first_byte // mmap.PAGESIZE) * mmap.PAGESIZE
            if (size := (end - page) // mmap.PAGESIZE * mmap.PAGESIZE) > 0:
                self.memory.madvise(mmap.MADV_DONTNEED, page, size)
            if start + room == self.num_bytes:
                self.top = min(self.top, first_byte)
            most -= max(end - first_byte, 0)
        return most


_MAPPED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
_use_count = torch._C._storage_Use_Count
_storage: Any = torch._C._construct_storage_from_data_pointer
_Block = tuple[torch.UntypedStorage, _Segment, int, int]
"""A block in use: its storage, which tensors share; its segment; its offset in the segment and size in bytes.
"""


class HostPool:
    """A pool of host memory for tensors, which reuses the memory of tensors that no longer exist.

    device: the device of the layers that use the pool. For a GPU the memory is pinned.
    limit_bytes: the number of bytes to which the pool may grow. By default it is half of the memory that was
        available when the pool was created, divided by the number of ranks on the node.
    peak_bytes: the largest number of bytes that were in use.

    A new tensor gets a block of memory in the first free range that is large enough. The block is free again
    when no tensor refers to its storage. When the pool needs memory, it finds free blocks by their reference
    counts. A callback when the last reference disappears would be unsafe, because a thread of gloo may
    release a tensor after the Python interpreter has ended.
    """

    limit_bytes: int
    peak_bytes: int

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._segments: list[_Segment] = []
        self._blocks: list[_Block] = []
        self._blocks_of_size: dict[int, list[_Block]] = {}  # the same blocks, by the bytes of their storage
        self._lock = threading.Lock()
        self.limit_bytes = _available_bytes() // 2 // ranks_in_environment("LOCAL_WORLD_SIZE", 1)
        self._in_use = 0
        self.peak_bytes = 0

    @property
    def bytes_in_use(self) -> int:
        """The bytes of all blocks whose storage a tensor still uses."""
        with self._lock:
            self._collect()
            return self._in_use

    @property
    def free_bytes(self) -> int:
        """The bytes that may still be taken: ``limit_bytes`` minus the bytes in use."""
        return max(self.limit_bytes - self.bytes_in_use, 0)

    @property
    def kept_bytes(self) -> int:
        """An upper bound of the free bytes that the pool has not given back to the operating system."""
        return sum(segment.top for segment in self._segments) - self.bytes_in_use

    def trim(self, most: int = sys.maxsize) -> None:
        """Gives up to ``most`` free bytes back to the operating system.

        A pinned allocation cannot be given back in parts. So a pinned pool ignores ``most``, and gives back
        every segment (contiguous allocation) in which no block is in use.
        """
        with self._lock:
            self._collect()
            if self._pinned:
                self._drop_free_segments()
            for segment in () if self._pinned else reversed(self._segments):
                most = segment.trim(most)

    def new(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns an uninitialised CPU tensor with the dtype of ``like``, in the pool's memory.

        If the pool is full, torch allocates the tensor elsewhere.
        """
        try:
            return self.take(shape, like.dtype)
        except HostMemoryError:
            return like.new_empty(shape)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialised CPU tensor in the pool's memory.

        Raises HostMemoryError if the pool would exceed its limit, or has no free contiguous range that is
        large enough. The message has the numbers of bytes.
        """
        wanted = math.prod(shape) * dtype.itemsize
        if wanted == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        with self._lock:
            storage = self._released(wanted) or self._new_block(wanted)
            empty: Any = torch.empty(0, dtype=dtype, device="cpu")
            taken: Tensor = empty.set_(storage, 0, tuple(shape))
            return taken

    def _released(self, wanted: int) -> torch.UntypedStorage | None:
        """Returns a storage of exactly ``wanted`` bytes that no tensor uses any more; None if there is none.

        Steps of a training run need the same sizes again and again, so most tensors get a storage that was
        used before. That takes a third of the time that a new block takes.
        """
        for block in self._blocks_of_size.get(wanted, ()):
            if _holders(block) == _NONE:
                return block[0]
        return None

    def _new_block(self, wanted: int) -> torch.UntypedStorage:
        """Returns the storage of a new block of ``wanted`` bytes.

        Raises HostMemoryError if the pool would exceed its limit, or has no free contiguous range that is
        large enough.
        """
        size = aligned(wanted)
        # Looks for released blocks only if the bytes might not suffice, because it takes a loop over all.
        if self._in_use + size > min(self.peak_bytes, self.limit_bytes):
            self._collect()
        bytes_left = max(self.limit_bytes - self._in_use, 0)
        if size > bytes_left:
            raise _error(f"{wanted} bytes wanted, {bytes_left} of {self.limit_bytes} left")
        segment, start = self._place(size, wanted)
        storage: torch.UntypedStorage = _storage(segment.address + start, torch.device("cpu"), wanted)
        block = (storage, segment, start, size)
        self._blocks.append(block)
        self._blocks_of_size.setdefault(wanted, []).append(block)
        self._in_use += size
        self.peak_bytes = max(self.peak_bytes, self._in_use)
        return storage

    def _place(self, size: int, wanted: int) -> tuple[_Segment, int]:
        """Reserves ``size`` bytes for a block, and returns its segment and its offset there, in bytes.

        wanted: the size before it was rounded up. It is only for the message of the HostMemoryError that is
            raised if the pool is full.
        """
        place = self._find(size)
        # Reuses released blocks before it writes to pages that have no physical memory yet.
        if place is None or place[0].free[place[1]][0] + size > place[0].top:
            self._collect()
            place = self._find(size) or self._grow(size)
        if place is None:
            raise _error(f"no free piece has {wanted} bytes, although the limit is {self.limit_bytes}")
        segment, i = place
        start, room = segment.free[i]
        segment.free[i : i + 1] = [(start + size, room - size)] if room > size else []
        segment.top = max(segment.top, start + size)
        return segment, start

    def _find(self, size: int) -> tuple[_Segment, int] | None:
        """Returns the first free range of at least ``size`` bytes: its segment, and its index in ``free``.

        Returns None if there is none.
        """
        pieces = ((segment, i) for segment in self._segments for i in range(len(segment.free)))
        return next(((segment, i) for segment, i in pieces if segment.free[i][1] >= size), None)

    def _grow(self, size: int) -> tuple[_Segment, int] | None:
        """Adds a segment with room for ``size`` bytes. Returns its free range (segment, index in ``free``).

        Returns None if the pool's limit or the machine's memory does not allow the new segment.
        """
        if self._room() < size:  # unused segments, each too small, may take up the limit
            self._drop_free_segments()
        if (room := self._room()) >= size:
            with contextlib.suppress(RuntimeError, OSError):  # the machine has less memory than the limit
                self._segments.append(self._segment(max(size, min(256 << 20, room)), room))
        return self._find(size)

    def _segment(self, pinned_size: int, size: int) -> _Segment:
        """Allocates a segment: of pinned_size bytes if the pool is pinned, else a mapping of ``size`` bytes.

        Pinned memory is physical memory from the beginning, so a pinned segment is as small as possible. A
        mapping gets physical memory only when its pages are first written, so it may have the size of all
        memory that the pool may use.
        """
        if self._pinned:
            pinned = torch.empty(pinned_size, dtype=torch.uint8, pin_memory=True)
            return _Segment(pinned, pinned.data_ptr(), pinned_size, [(0, pinned_size)])
        # Reserves addresses for all bytes that the pool may use. A page gets memory when it is first written.
        memory = mmap.mmap(-1, size, flags=_MAPPED)
        # The interpreter must not unmap it when it ends, because messages may still read it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        return _Segment(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)), size, [(0, size)])

    def _drop_free_segments(self) -> None:
        """Frees the segments in which no block is in use."""
        if self._pinned:
            torch.cuda.synchronize(self._device)  # copies may still read blocks that were released
        for segment in [one for one in self._segments if one.free == [(0, one.num_bytes)]]:
            self._segments.remove(segment)
            if not self._pinned:
                segment.memory.close()

    def _room(self) -> int:
        """Returns the bytes by which the segments may still grow until they reach the limit."""
        return self.limit_bytes // ALIGNMENT * ALIGNMENT - sum(
            segment.num_bytes for segment in self._segments
        )

    def _collect(self) -> None:
        """Frees the blocks to whose storage no tensor refers any more."""
        blocks_in_use: list[_Block] = []
        self._blocks_of_size = {}
        for block in self._blocks:
            if _holders(block) > _NONE:
                blocks_in_use.append(block)
                self._blocks_of_size.setdefault(block[0].nbytes(), []).append(block)
            else:
                block[1].give_back(*block[2:])
                self._in_use -= block[3]
        self._blocks = blocks_in_use


def _error(text: str) -> HostMemoryError:
    """Returns a HostMemoryError with ``text`` as its reason."""
    return HostMemoryError(f"host memory for offloading: {text}")


def _holders(block: _Block) -> int:
    """Returns the number of references to a block's storage, from tensors and from Python."""
    return int(_use_count(block[0]._cdata) + sys.getrefcount(block[0]))


def _available_bytes() -> int:
    """Returns the bytes of memory that are available on the machine; its whole memory if that is unknown."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_NONE = _holders((torch.empty(1).untyped_storage(), _Segment(None, 0, 0, []), 0, 0))
"""The number of references to a storage that belongs to the pool and that no tensor uses."""
