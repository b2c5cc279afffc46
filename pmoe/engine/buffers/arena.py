"""The memory of a pass: the ring slots of its schedule, taken from a pool that all layers share.

Each device has one pool. A pass takes its slots when it starts and gives them back when it ends, so layers
that run one after another use the same memory. Between passes only the tensors that a restore pair keeps are
in use. Host memory for offloaded tensors is a pool of its own.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from pmoe.arguments import check_place
from pmoe.schedule.buffer_sizes import BufferSizes, arena_elements, slot_elements
from pmoe.schedule.tasks import Schedule

if TYPE_CHECKING:
    from pmoe.engine.buffers.host_pool import HostPool


class Arena:
    """The ring slots of one pass, in one piece of device memory.

    buffers: the buffers that lie in slots, (rows, columns) by name; those without rows are left out.
    """

    def __init__(self, pool: DevicePool, schedule: Schedule, sizes: BufferSizes, like: Tensor) -> None:
        self._pool = pool
        spans, total = arena_elements(slot_elements(schedule, sizes), like.element_size())
        self._memory: Tensor | None = pool.take(total, like, self)
        # unsafe_split: autograd gives each slot a version of its own, so a write to one does not count as a
        # change of the others.
        pieces = torch.unsafe_split_with_sizes(self._memory, list(spans.values()))
        of_slot = dict(zip(spans, pieces, strict=True))
        self.buffers: dict[str, Tensor] = {}
        for name, turns in schedule.turns.items():
            rows, columns = sizes.of(name)
            for buffer, chunk, slot in turns:
                if rows[chunk]:
                    self.buffers[buffer] = of_slot[slot].as_strided((rows[chunk], columns), (columns, 1))

    def close(self) -> None:
        """Gives the memory back. Called on the compute lane, after all lanes have ended."""
        if self._memory is not None:
            self._pool.give_back(self._memory, self)
            self._memory = None
            self.buffers.clear()


LARGE_BYTES = 1 << 16  # the C library takes smaller blocks from memory that it has already


class DevicePool:
    """The memory of all passes on one device, and the count of their ring slots.

    On a GPU it is torch's memory, which torch reuses. On the CPU torch would take it from the system, page by
    page, for each pass, so the pool keeps its own (`HostPool`).

    bytes_in_use: the bytes of ring slots of passes that run now.
    peak_bytes: the most that were in use.
    """

    peak_bytes: int
    bytes_in_use: int

    def __init__(self, device: torch.device) -> None:
        self.bytes_in_use = 0
        self.peak_bytes = 0
        self._device = device
        self._running: weakref.WeakSet[Arena] = weakref.WeakSet()

    @functools.cached_property
    def _own(self) -> HostPool:
        """The pool's memory on the CPU, made when it is first needed."""
        from pmoe.engine.buffers.host_pool import HostPool

        return HostPool(self._device)

    @property
    def kept_bytes(self) -> int:
        """An upper bound of the bytes kept free for later passes. 0 on a GPU, where torch keeps them."""
        return self._own.kept_bytes if "_own" in self.__dict__ else 0

    def new(self, like: Tensor, *shape: int) -> Tensor:
        """Returns an uninitialised tensor like ``like`` of another shape; it is free when its last view dies.

        While torch's profiler runs, it is torch's memory, which the profiler can count.
        """
        is_plain = like.device.type == "cpu" and type(like) in (Tensor, torch.nn.Parameter)
        if is_plain and math.prod(shape) * like.element_size() >= LARGE_BYTES and not _profiler_enabled():
            return self._own.new(like, shape)
        return like.new_empty(shape)

    def take(self, elements: int, like: Tensor, arena: Arena) -> Tensor:
        """Returns memory (elements,) for the slots of ``arena``, and counts its bytes as in use."""
        memory = self.new(like, elements)
        self._running.add(arena)
        self.bytes_in_use += memory.nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
        return memory

    def give_back(self, memory: Tensor, arena: Arena) -> None:
        """Ends the use of the memory that ``arena`` took."""
        self._running.discard(arena)
        self.bytes_in_use -= memory.nbytes

    def trim(self) -> None:
        """Gives all free memory back to the system. Raises RuntimeError while a pass runs."""
        if self._running:
            raise RuntimeError(
                f"the pool of {self._device} must not be trimmed while a pass of a layer runs: call trim() "
                "between passes"
            )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.keep_at_most(0)

    def keep_at_most(self, num_bytes: int) -> None:
        """Gives free memory beyond ``num_bytes`` back to the system."""
        if (excess := self.kept_bytes - num_bytes) > 0:
            self._own.trim(excess)


class Pool:
    """The memory that all layers of a device share.

    device: memory on the device.
    host: host memory for offloaded tensors.
    """

    device: DevicePool

    def __init__(self, device: torch.device) -> None:
        self.device = DevicePool(device)
        self._of = device

    @functools.cached_property
    def host(self) -> HostPool:
        """Host memory for offloaded tensors, made when it is first needed."""
        from pmoe.engine.buffers.host_pool import HostPool

        return HostPool(self._of)

    def trim(self) -> None:
        """Gives all free memory back to the system, on a GPU also torch's cache.

        Raises RuntimeError while a pass of a layer runs.
        """
        self.device.trim()
        if "host" in self.__dict__:
            self.host.trim()


_pools: dict[torch.device, Pool] = {}


def pool(device: torch.device | str = "cpu") -> Pool:
    """Returns the pool of ``device``, which all layers on it share.

    Its ``device`` and ``host`` each have bytes_in_use, peak_bytes and kept_bytes. ``host.limit_bytes`` may be
    set. ``trim()`` gives free memory back to the system.
    """
    device = check_place(device, None)  # "cuda" becomes the current GPU
    if device not in _pools:
        _pools[device] = Pool(device)
    return _pools[device]


def copy(target: Tensor, source: Tensor) -> None:
    """Copies a tensor between device and host. If one of them is on a GPU, the host does not wait."""
    with torch.no_grad():
        target.copy_(source, non_blocking=True)
