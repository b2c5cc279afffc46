"""Where a pass's buffers lie: the ring slots of its schedule, and the pools behind them.

One pool a device serves all layers. A pass takes its slots when it starts and gives them back when it ends,
so layers that run one after another share the same memory, and between the passes only what a restore pair
keeps is held. Host memory for offloaded tensors is another pool, counted apart.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pmoe.schedule.slots import BufferSizes, arena_elements, slot_elements
from pmoe.schedule.tasks import Schedule

if TYPE_CHECKING:
    from pmoe.engine.host_pool import HostPool


class Arena:
    """The slots of one pass, in one piece of device memory. buffers: those with rows, where they lie."""

    def __init__(self, pool: DevicePool, schedule: Schedule, sizes: BufferSizes, like: Tensor) -> None:
        self._pool = pool
        spans, total = arena_elements(slot_elements(schedule, sizes), like.element_size())
        self._memory: Tensor | None = pool.take(total, like)
        # unsafe: writes to one slot are no changes of the others' tensors.
        pieces = torch.unsafe_split_with_sizes(self._memory, list(spans.values()))
        of_slot = dict(zip(spans, pieces, strict=True))
        shapes = {name: sizes.of(name) for _, name, _, _ in schedule.turns}
        self.buffers: dict[str, Tensor] = {}
        for buffer, name, chunk, slot in schedule.turns:
            rows, columns = shapes[name]
            if rows[chunk]:
                self.buffers[buffer] = of_slot[slot].as_strided((rows[chunk], columns), (columns, 1))

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
            self.buffers.clear()


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


class Pool:
    """What all layers of a device share: memory on the device, and on the host for what is offloaded."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._of = DevicePool(), device

    @functools.cached_property
    def host(self) -> HostPool:
        from pmoe.engine.host_pool import HostPool

        return HostPool(self._of)


_pools: dict[torch.device, Pool] = {}


def pool(device: torch.device | str = "cpu") -> Pool:
    """The pool of ``device``: ``.device`` and ``.host``, each with bytes_in_use and peak_bytes; host has a
    ``limit_bytes`` that may be set."""
    device = torch.empty(0, device=device).device  # "cuda" is one of them
    if device not in _pools:
        _pools[device] = Pool(device)
    return _pools[device]


def copy(target: Tensor, source: Tensor) -> None:
    """Between device and host, without the host waiting where one of them is a GPU's."""
    with torch.no_grad():
        target.copy_(source, non_blocking=True)
