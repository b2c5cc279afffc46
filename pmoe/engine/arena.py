"""Where a pass's buffers lie: the ring slots of its schedule, and the pools behind them.

One pool a device serves all layers. A pass takes its slots when it starts and gives them back when it ends,
so layers that run one after another share the same memory, and between them only what a restore pair keeps is
in use; the rest waits for the next pass. Host memory for offloaded tensors is another pool, counted apart.
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
from pmoe.schedule.slots import BufferSizes, arena_elements, slot_elements
from pmoe.schedule.tasks import Schedule

if TYPE_CHECKING:
    from pmoe.engine.host_pool import HostPool


class Arena:
    """The slots of one pass, in one piece of device memory. buffers: those with rows, where they lie."""

    def __init__(self, pool: DevicePool, schedule: Schedule, sizes: BufferSizes, like: Tensor) -> None:
        self._pool = pool
        spans, total = arena_elements(slot_elements(schedule, sizes), like.element_size())
        self._memory: Tensor | None = pool.take(total, like, self)
        # unsafe: writes to one slot are no changes of the others' tensors.
        pieces = torch.unsafe_split_with_sizes(self._memory, list(spans.values()))
        of_slot = dict(zip(spans, pieces, strict=True))
        self.buffers: dict[str, Tensor] = {}
        for name, turns in schedule.turns.items():
            rows, columns = sizes.of(name)
            for buffer, chunk, slot in turns:
                if rows[chunk]:
                    self.buffers[buffer] = of_slot[slot].as_strided((rows[chunk], columns), (columns, 1))

    def close(self) -> None:
        """Gives the memory back: after all lanes have ended, on the compute lane."""
        if self._memory is not None:
            self._pool.give_back(self._memory, self)
            self._memory = None
            self.buffers.clear()


LARGE_BYTES = 1 << 16  # malloc does not ask the system for less


class DevicePool:
    """Counts the ring slots of one device's passes, and has memory for all that passes take: on a GPU
    torch's, on the CPU its own, where torch's comes from the system page by page."""

    peak_bytes: int
    bytes_in_use: int

    def __init__(self, device: torch.device) -> None:
        self.bytes_in_use = self.peak_bytes = 0
        self._device = device
        self._running: weakref.WeakSet[Arena] = weakref.WeakSet()

    @functools.cached_property
    def _own(self) -> HostPool:
        from pmoe.engine.host_pool import HostPool

        return HostPool(self._device)

    @property
    def kept_bytes(self) -> int:
        """What is kept free for passes to come, at most; 0 on a GPU, where torch's allocator does."""
        return self._own.kept_bytes if "_own" in self.__dict__ else 0

    def new(self, like: Tensor, *shape: int) -> Tensor:
        """Uninitialised, until its last tensor dies. While torch's profiler watches it is torch's own."""
        is_plain = like.device.type == "cpu" and type(like) in (Tensor, torch.nn.Parameter)
        if is_plain and math.prod(shape) * like.element_size() >= LARGE_BYTES and not _profiler_enabled():
            return self._own.new(like, shape)
        return like.new_empty(shape)

    def take(self, elements: int, like: Tensor, arena: Arena) -> Tensor:
        memory = self.new(like, elements)
        self._running.add(arena)
        self.bytes_in_use += memory.nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
        return memory

    def give_back(self, memory: Tensor, arena: Arena) -> None:
        self._running.discard(arena)
        self.bytes_in_use -= memory.nbytes

    def trim(self) -> None:
        if self._running:
            raise RuntimeError(f"the pool of {self._device} must not be trimmed while a pass of a layer runs")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.keep_at_most(0)

    def keep_at_most(self, num_bytes: int) -> None:
        if (excess := self.kept_bytes - num_bytes) > 0:
            self._own.trim(excess)


class Pool:
    """What all layers of a device share: memory on the device, and on the host for what is offloaded."""

    device: DevicePool

    def __init__(self, device: torch.device) -> None:
        self.device, self._of = DevicePool(device), device

    @functools.cached_property
    def host(self) -> HostPool:
        from pmoe.engine.host_pool import HostPool

        return HostPool(self._of)

    def trim(self) -> None:
        """Gives back what is kept, on a GPU torch's cache, too. Raises RuntimeError while a pass runs."""
        self.device.trim()
        if "host" in self.__dict__:
            self.host.trim()


_pools: dict[torch.device, Pool] = {}


def pool(device: torch.device | str = "cpu") -> Pool:
    """The pool of ``device``: ``.device`` and ``.host``, each with bytes_in_use, peak_bytes and kept_bytes;
    host has a ``limit_bytes`` that may be set. ``trim()`` gives back what is kept."""
    device = check_place(device, None)  # "cuda" is one of them
    if device not in _pools:
        _pools[device] = Pool(device)
    return _pools[device]


def copy(target: Tensor, source: Tensor) -> None:
    """Between device and host, without the host waiting where one of them is a GPU's."""
    with torch.no_grad():
        target.copy_(source, non_blocking=True)
