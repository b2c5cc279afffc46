"""Symmetric heaps for pass programs, whose exchanges write rows into the memory of other ranks.

A symmetric heap is device memory of each rank that kernels of all ranks can write. ``cuda/program/push.h``
describes the layout of these heaps and the protocol. All layers of a group share one heap on a device:

    flags, landing places     a size that depends on the number of ranks
    arena                     `ARENA_MIB` of memory for the ring slots of a pass

If the ring slots of a pass find room in the arena, rows are written where they belong. Otherwise they go
through the landing places in pieces, which gives the same results in more time. So the size of the arena need
not be the same on all ranks, and no heap is ever replaced by a larger one.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.heap.providers import CollectiveSteps, NoHeapError, call_all, quietly, wait_seconds
from pmoe.comm.ranks import Ranks
from pmoe.kernels.heap import REPORT_WORDS, DeviceMemory, HeapError, loaded_extension, synchronize

ARENA_MIB = "PMOE_PROGRAM_HEAP_MIB"
"""Name of the environment variable with the size of a heap's arena, in MiB."""

DEFAULT_ARENA_MIB = 256

MOST_ARENA_MIB = 1 << 20


@dataclass(eq=False)
class ProgramHeap:
    """One rank's heap for pass programs. Implements `pmoe.call.row_bound.BoundedHeap`.

    exchanger: exchanges rows through the heap: ``HeapExchanger`` of the extension.
    report: (8,) int32 in host memory that the device can write (`Report` of cuda/peers/watch.h). The first
        number is not 0 if a kernel of this rank has waited too long for another rank.
    steps: frees the memory.
    is_open: whether the heap has not been closed.
    """

    exchanger: Any
    report: Tensor
    steps: _HeapSteps
    is_open: bool = True

    @property
    def failures(self) -> Tensor:
        """int32 scalar on the device: not 0 if a kernel of this rank waited too long for another rank.

        The copy from the host's memory follows all work that was enqueued on the current stream before. So it
        sees the report of a kernel in a CUDA graph, too.
        """
        return self.report[0].to(self.steps.device, non_blocking=True)

    def raise_if_failed(self) -> None:
        """Raises HeapError, with the awaited rank, if a kernel has reported that it waited too long.

        The host does not wait for kernels that still run.
        """
        try:
            self.exchanger.throw_failure()
        except RuntimeError as error:
            raise HeapError(f"pmoe: {error}") from None

    def close(self) -> None:
        """Refuses all later passes, and frees the memory. Collective."""
        self.is_open = False
        self.steps.heap = (
            None  # a reference cycle, which would keep this object until the garbage collector runs
        )
        self.exchanger.close()
        self.steps.release()


_heaps: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, ProgramHeap]] = (
    weakref.WeakKeyDictionary()
)
"""The open heaps, by group and device."""

_refusals: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, str]] = weakref.WeakKeyDictionary()
"""Why ranks cannot have a heap, by group and device. `close_program_heaps` forgets it."""

_closings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How often heaps of a group were closed, or refusals of heaps forgotten."""

_open_heaps: list[ProgramHeap] = []
"""Keeps open heaps alive, because kernels of other ranks may still write into them."""


def arena_bytes() -> int:
    """Returns the bytes of a heap's arena.

    Raises ValueError if the environment variable `ARENA_MIB` is not a number from 0 to 1,048,576.
    """
    text = os.environ.get(ARENA_MIB, str(DEFAULT_ARENA_MIB))
    if not text.isdecimal() or int(text) > MOST_ARENA_MIB:
        raise ValueError(f"{ARENA_MIB} ({text!r}) must be a number of MiB from 0 to {MOST_ARENA_MIB}")
    return int(text) << 20


def program_heap(ranks: Ranks, device: torch.device, *, memory: DeviceMemory | None = None) -> ProgramHeap:
    """Returns the heap that all layers of a group share for pass programs. The first call is a collective.

    If the ranks have found out that they cannot have a heap, later calls raise the same error at once, until
    `close_program_heaps`.

    ranks: the ranks, more than one, all on one node.
    device: this rank's device.
    memory: where the memory comes from; None means CUDA, and CUDA IPC for the memory of other ranks.

    Raises on every rank, with the numbers of the ranks:

    - NoHeapError if there can be no heap: ranks are on several nodes, have loaded different kernels, cannot
      open each other's memory, have not enough memory, or are too many.
    - ValueError if an environment variable of a rank is wrong: `ARENA_MIB` or PMOE_WAIT_SECONDS.

    Raises the error of a collective that fails, perhaps on one rank only.
    """
    assert ranks.group is not None
    heaps = _heaps.setdefault(ranks.group, {})
    refusals = _refusals.setdefault(ranks.group, {})
    if device in refusals:
        raise NoHeapError(refusals[device])
    if device not in heaps:
        try:
            heaps[device] = _HeapSteps(ranks, device, memory or DeviceMemory()).build()
        except NoHeapError as error:
            refusals[device] = str(error)
            raise
        _open_heaps.append(heaps[device])
    return heaps[device]


def close_program_heaps(ranks: Ranks) -> None:
    """Closes the heaps of pass programs of a group. Collective. Later calls of layers make new heaps.

    If a heap cannot be closed, the others are closed, too. Then the first error is raised.
    """
    if ranks.group is None:
        return
    heaps = _heaps.pop(ranks.group, {})
    refusals = _refusals.pop(ranks.group, {})
    # The closing is counted first. So even if it fails, later calls look for no heap that was closed.
    _closings[ranks.group] = num_closings(ranks) + bool(heaps or refusals)
    for heap in heaps.values():
        _open_heaps.remove(heap)
    call_all([heap.close for heap in heaps.values()])


def open_program_heap(ranks: Ranks, device: torch.device) -> ProgramHeap | None:
    """Returns the open heap of a group for pass programs; None if there is none. It makes no heap.

    ranks: the ranks of a layer.
    device: this rank's device.
    """
    return None if ranks.group is None else _heaps.get(ranks.group, {}).get(device)


def check_program_heaps(ranks: Ranks) -> None:
    """Raises RuntimeError if a pass program of this rank has waited too long for another rank.

    First waits for the devices that have heaps. A pass raises this error only if the host can read it when
    the pass begins. Call this function before gradients are used, or after the last pass, to be sure. It is
    not a collective, and other ranks may see no error.

    ranks: the ranks of a layer. Nothing is checked if they have no heaps.
    """
    heaps = {} if ranks.group is None else _heaps.get(ranks.group, {})
    for device, heap in heaps.items():
        synchronize(device)
        heap.exchanger.throw_failure()


def num_closings(ranks: Ranks) -> int:
    """Returns how often heaps of pass programs of a group were closed, or refusals of heaps forgotten.

    The number is the same on all ranks.
    """
    return 0 if ranks.group is None else _closings.get(ranks.group, 0)


class _HeapSteps(CollectiveSteps):
    """The steps in which all ranks make and free a heap.

    memory: where the memory comes from.
    base: address of this rank's memory; None before it is allocated.
    num_bytes: bytes of this rank's memory.
    opened: for each peer, by rank, the address at which this process can write the peer's memory.
    heap: the heap; None before the memory of all peers is open.
    """

    def __init__(self, ranks: Ranks, device: torch.device, memory: DeviceMemory) -> None:
        super().__init__(ranks, device)
        self.memory = memory
        self.base: int | None = None
        self.num_bytes: int = 0
        self.opened: dict[int, int] = {}
        self.heap: ProgramHeap | None = None

    def build(self) -> ProgramHeap:
        """Makes the heap. Collective. If a step fails on one rank, all ranks free their memory and raise.

        Raises the errors of `program_heap`.
        """
        facts = self.attempt(self._facts)
        if len(set(facts)) > 1:
            texts = "; ".join(f"rank {rank}: {' on '.join(fact[:2])}" for rank, fact in enumerate(facts))
            raise NoHeapError(
                f"ranks with heaps must have the same kernels loaded, and be on one node, not {texts}"
            )
        handles = self.attempt(self._allocate, self.release)
        self.attempt(lambda: self._open(handles), self.release)
        assert self.heap is not None
        return self.heap

    def _facts(self) -> tuple[str, str, int]:
        """Returns what must be the same on all ranks: loaded kernels, node, and bytes of the flags.

        Raises ValueError if an environment variable is wrong, and RuntimeError if there can be no heap.
        """
        wait_seconds(self.ranks)  # checks an environment variable, as the next line does
        num_arena_bytes = arena_bytes()
        module = loaded_extension()
        if self.ranks.size > module.PROGRAM_MOST_HEAPS:
            raise RuntimeError(f"ranks ({self.ranks.size}) must be at most {module.PROGRAM_MOST_HEAPS}")
        kernels, host = self.memory.place(self.device)
        flag_bytes = int(module.program_heap_bytes(self.ranks.size))
        self.num_bytes = flag_bytes + num_arena_bytes
        return kernels, host, flag_bytes

    def _allocate(self) -> bytes:
        """Allocates this rank's memory. Returns a handle with which peers open it."""
        try:
            self.base = self.memory.allocate(self.device, self.num_bytes)
        except RuntimeError as error:
            raise RuntimeError(
                f"could not allocate {self.num_bytes} bytes on {self.device} ({ARENA_MIB} sets the size): "
                f"{error}"
            ) from error
        return self.memory.handle(self.device, self.base)

    def _open(self, handles: list[bytes]) -> None:
        """Opens the peers' memory, and makes the heap.

        handles: for each rank, the handle of its memory.
        """
        assert self.base is not None
        addresses = []
        for rank, handle in enumerate(handles):
            if rank != self.ranks.rank:
                try:
                    self.opened[rank] = self.memory.open(self.device, handle)
                except RuntimeError as error:
                    raise RuntimeError(f"could not open the heap of rank {rank}: {error}") from error
            addresses.append(self.opened.get(rank, self.base))
        pins = self.device.type == "cuda" and torch.cuda.is_available()
        report = torch.zeros(REPORT_WORDS, dtype=torch.int32, pin_memory=pins)
        exchanger = loaded_extension().HeapExchanger(
            heaps=addresses,
            rank=self.ranks.rank,
            device=self.device.index or 0,
            bytes=self.num_bytes,
            report=report.data_ptr(),
            seconds=wait_seconds(self.ranks),
        )
        self.heap = ProgramHeap(exchanger, report, self)

    def release(self) -> None:
        """Closes the peers' memory, then frees this rank's memory. Collective.

        The exchange between the two steps is a barrier: a rank frees its memory when no peer has it open.
        """
        quietly(synchronize, self.device)
        for peer in self.opened.values():
            quietly(self.memory.close, self.device, peer)
        self.opened.clear()
        self.gather(None)
        if self.base is not None:
            quietly(self.memory.free, self.device, self.base)
        self.base = None
