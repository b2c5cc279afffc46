"""Host memory for offloaded tensors: pinned where the device is a GPU, one unpinned piece on the CPU."""

from __future__ import annotations

import collections
import math
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from pmoe.schedule.slots import ALIGNMENT, aligned


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
