"""The device memory of a pass, taken from a pool that all layers of a device share.

A schedule may let chunks take turns in a few buffers of fixed size, called ring slots. A pass takes the
memory of its ring slots from the pool when it starts, and gives the memory back when it ends. So layers that
run one after another use the same memory. Between two passes, only the tensors that a layer keeps for
backward use memory.

Host memory for offloaded tensors comes from another pool (`pmoe.engine.buffers.host_pool`).
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from pmoe.arguments import check_place
from pmoe.schedule.buffer_sizes import BufferSizes, slot_layout
from pmoe.schedule.tasks import Schedule

if TYPE_CHECKING:
    from pmoe.engine.buffers.host_pool import HostPool


class Arena:
    """The memory of the ring slots of one pass, in one tensor.

    A ring slot is a buffer of fixed size in which several chunks take turns.

    pool: the pool from which the memory is taken.
    schedule: the schedule of the pass, which says which buffers lie in which ring slots.
    sizes: the rows and columns of every buffer.
    like: a tensor with the dtype and device of the memory.
    buffers: the tensor (rows, columns) of each buffer that lies in a ring slot. The key is name and chunk,
        such as "T_DI.0". There is no entry for a buffer without rows.
    """

    def __init__(self, pool: DevicePool, schedule: Schedule, sizes: BufferSizes, like: Tensor) -> None:
        self._pool = pool
        self.buffers: dict[str, Tensor] = {}
        self._memory: Tensor | None = None
        if not schedule.slots:  # every buffer has memory of its own
            self._memory = pool.take(0, like, self)
            return
        layout = slot_layout(schedule, sizes, like.element_size())
        self._memory = pool.take(layout.total, like, self)
        # unsafe_split gives each slot a version counter of its own. Ordinary views share one counter, so for
        # autograd a write to one slot would change all slots.
        slots = torch.unsafe_split_with_sizes(self._memory, layout.spans)
        views = [
            slots[slot].as_strided((rows, columns), (columns, 1)) for slot, rows, columns in layout.views
        ]
        self.buffers = {buffer: views[view] for buffer, view in layout.view_of_buffer.items()}

    def close(self) -> None:
        """Gives the memory back to the pool. Called on the compute lane, after all lanes have ended."""
        if self._memory is not None:
            self._pool.give_back(self)
            self._memory = None
            self.buffers.clear()

    def __del__(self) -> None:
        self.close()  # a pass that failed before it ran has not called it


LARGE_BYTES = 1 << 16  # smaller blocks need no pool: the C library's malloc reuses memory for them


class DevicePool:
    """The device memory that passes take for their buffers, and the count of bytes in use.

    On a GPU torch's caching allocator provides and reuses the memory. On the CPU torch would request new
    pages from the operating system in each pass, so the pool keeps memory of its own (`HostPool`).

    peak_bytes: the largest value that `bytes_in_use` has had.
    """

    peak_bytes: int

    def __init__(self, device: torch.device) -> None:
        self.peak_bytes = 0
        self._device = device
        self._running: dict[int, int] = {}  # the bytes of each running pass, by the `id` of its record

    @property
    def bytes_in_use(self) -> int:
        """The bytes of the ring slots (buffers in which chunks take turns) of all passes that run now."""
        return sum(self._running.values())

    @functools.cached_property
    def _own(self) -> HostPool:
        """Memory for the buffers of passes on the CPU, where the "device" is the host.

        The pool is created when it is first needed. It is separate from `Pool.host`, the pool for offloaded
        tensors.
        """
        from pmoe.engine.buffers.host_pool import HostPool

        return HostPool(self._device)

    @property
    def kept_bytes(self) -> int:
        """An upper bound of the free bytes that the pool keeps for later passes.

        It is 0 on a GPU, where torch's allocator keeps free memory.
        """
        return self._own.kept_bytes if "_own" in self.__dict__ else 0

    def new(self, like: Tensor, *shape: int) -> Tensor:
        """Returns an uninitialised tensor of the given shape, with the dtype and device of ``like``.

        When no tensor uses the memory any more, the pool can use the memory again. While torch's profiler
        runs, the memory comes from torch's allocator and not from the pool, so that the profiler counts it.
        """
        is_plain = like.device.type == "cpu" and type(like) in (Tensor, torch.nn.Parameter)
        if is_plain and math.prod(shape) * like.element_size() >= LARGE_BYTES and not _profiler_enabled():
            return self._own.new(like, shape)
        return like.new_empty(shape)

    def take(self, elements: int, like: Tensor, arena: object) -> Tensor:
        """Returns memory (elements,) for the ring slots of a pass, and counts its bytes as in use.

        Ring slots are buffers in which chunks take turns.

        elements: the number of elements.
        like: a tensor with the dtype and device of the result.
        arena: the pass's record of this memory, an `Arena` or another object of the pass. `trim` raises an
            error until `give_back` is called with this record, which must happen before the record is freed.
        """
        memory = self.new(like, elements)
        self._running[id(arena)] = memory.nbytes
        self.peak_bytes = max(self.peak_bytes, sum(self._running.values()))
        return memory

    def give_back(self, arena: object) -> None:
        """Counts the memory of a pass as no longer in use.

        arena: the object that was passed to `take` as ``arena``.
        """
        self._running.pop(id(arena), None)

    def trim(self) -> None:
        """Gives the free memory of this pool back: to the operating system, or on a GPU to the CUDA driver.

        On a GPU this empties the cache of torch's allocator. Raises RuntimeError while a pass of a layer
        runs.
        """
        if self._running:
            raise RuntimeError(
                f"the pool of {self._device} must not be trimmed while a pass of a layer runs: call trim() "
                "between passes"
            )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.keep_at_most(0)

    def keep_at_most(self, num_bytes: int) -> None:
        """Gives free memory back to the operating system, except for about ``num_bytes`` bytes."""
        if (excess := self.kept_bytes - num_bytes) > 0:
            self._own.trim(excess)


class Pool:
    """The two pools of memory that all layers on a device share.

    device: memory on the device, for the buffers of passes.
    host: memory on the host, for offloaded tensors.
    """

    device: DevicePool

    def __init__(self, device: torch.device) -> None:
        self.device = DevicePool(device)
        self._of = device

    @functools.cached_property
    def host(self) -> HostPool:
        """The pool of host memory for offloaded tensors. Created when it is first needed.

        For layers on the CPU, the pool of buffers (`device`) is host memory, too, but a separate pool. So the
        limit and the counts of bytes of this pool are for offloaded tensors only.
        """
        from pmoe.engine.buffers.host_pool import HostPool

        return HostPool(self._of)

    def trim(self) -> None:
        """Gives the free memory of both pools back to the system.

        The pools hold device memory for buffers, and host memory for offloaded tensors. Host memory goes back
        to the operating system, memory of a GPU to the CUDA driver. Raises RuntimeError while a pass of a
        layer runs.
        """
        self.device.trim()
        if "host" in self.__dict__:
            self.host.trim()


_pools: dict[torch.device, Pool] = {}


def pool(device: torch.device | str = "cpu") -> Pool:
    """Returns the memory pools of a device, which all layers on it share.

    device: for example "cpu", or "cuda" for the current GPU.

    The result has two pools: ``device`` for the buffers of passes, and ``host`` for tensors that are
    offloaded to the host. Both pools have three attributes:

        bytes_in_use   bytes that are used now
        peak_bytes     the largest value that bytes_in_use has had
        kept_bytes     free bytes that are kept for later passes

    ``host.limit_bytes``, the limit of the host pool, may be set. The method ``trim()`` of the result gives
    the free memory of both pools back to the system.
    """
    if isinstance(device, torch.device) and device in _pools:
        return _pools[device]
    device = check_place(device, None)  # "cuda" becomes the current GPU
    if device not in _pools:
        _pools[device] = Pool(device)
    return _pools[device]


def copy(target: Tensor, source: Tensor) -> None:
    """Copies a tensor between device and host memory. With a GPU the host does not wait for the copy.

    target: the tensor to which the values are copied.
    source: the tensor from which they are copied, of the same shape.
    """
    with torch.no_grad():
        target.copy_(source, non_blocking=True)
