"""The bound on the rows that a rank receives in a call, if the host does not read row counts.

Two kinds of layers have memory of fixed size for the rows that a rank receives: layers with
fused="persistent", and layers whose passes run as programs over heaps. A heap is memory that all ranks can
write. To find out whether the rows fit, the ranks usually exchange row counts before each call, and the host
waits for the counts. Within `pmoe.BoundedSteps` the device finds it out. If the rows of any rank do not fit,
no rank sends any row:

    rows of the ranks, room for 8     7 6    5 9        8 8
    what the layer computes           all    nothing    all
    exceeded                          0      1          1      read one training step late
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pmoe.call.modules import LayerModules
    from pmoe.comm.heap.program_heap import ProgramHeap
    from pmoe.kernels.comet.backend import Steps
    from pmoe.program.backend import Programs
    from pmoe.program.bounded import DeviceRows, RowBounds
    from pmoe.schedule.restore import Restore


@dataclass(frozen=True, kw_only=True)
class CallKind:
    """The properties that all ranks know before a call, and that decide whether it can be bounded.

    dtype: dtype of the rows that reach the experts.
    has_grad: whether autograd is on. Parameters may be frozen on some ranks only, so they do not count.
    """

    dtype: torch.dtype
    has_grad: bool


class BoundedHeap(Protocol):
    """The interface of a heap that kernels of bounded calls use: memory that all ranks can write.

    is_open: whether the heap has not been closed.
    failures: int32 scalar on the device: not 0 if a kernel of this rank waited too long for another rank. It
        must not be read after the heap was closed.
    """

    @property
    def is_open(self) -> bool: ...
    @property
    def failures(self) -> Tensor: ...
    def raise_if_failed(self) -> None:
        """Raises HeapError, with the awaited rank, if a kernel of this rank has waited too long."""


@dataclass(frozen=True, kw_only=True)
class AgreedBound(abc.ABC):
    """The numbers on which the ranks agreed in a call whose row counts they exchanged.

    max_tokens: the most tokens of a rank for which there is room.
    needs_grad: whether any rank needed gradients.
    """

    max_tokens: int
    needs_grad: bool

    @property
    @abc.abstractmethod
    def is_repeatable(self) -> bool:
        """Whether a CUDA graph can hold calls with this bound. If not, their heap was closed."""

    @abc.abstractmethod
    def repeatable(self) -> Iterable[BoundedHeap]:
        """Returns the heaps of calls with this bound, ready for a CUDA graph. May be a collective."""


@dataclass(frozen=True, kw_only=True)
class KernelBound(AgreedBound):
    """The bound of calls by the persistent kernel.

    steps: the operators that launch the persistent kernel, on the heap of the call in which ranks agreed.
    room: the most rows that a rank may receive.
    """

    steps: Steps
    room: int

    @property
    def is_repeatable(self) -> bool:
        return self.steps.is_repeatable

    def repeatable(self) -> Iterable[BoundedHeap]:
        return self.steps.repeatable()


class ProgramsOfLayer(Protocol):
    """The interface of a record of all on which the programs of a layer depend.

    `pmoe.decide.program_choice.ProgramsKey` implements it.
    """

    def suits(self, modules: LayerModules) -> bool:
        """Returns whether the programs still are those of a layer's modules and options."""


@dataclass(frozen=True, kw_only=True)
class ProgramBound(AgreedBound):
    """The bound of calls that run as pass programs, in chunks.

    programs: the programs of the call in which ranks agreed.
    key: a record of all of the layer on which ``programs`` depend.
    bounds: the most rows of each chunk.
    restore: the restore pair: how backward gets the experts' input and hidden activation.
    heap: a weak reference to the heap of the programs; None if a backend without heaps runs them. A closed
        heap is not opened again: the next call outside of a CUDA graph agrees on a bound with a new heap.
    """

    programs: Programs
    key: ProgramsOfLayer
    bounds: RowBounds
    restore: Restore
    heap: weakref.ref[ProgramHeap] | None

    @property
    def is_repeatable(self) -> bool:
        return self.heap is None or bool(self.repeatable())

    def repeatable(self) -> tuple[BoundedHeap, ...]:
        heap = None if self.heap is None else self.heap()
        return () if heap is None or not heap.is_open else (heap,)


@dataclass(frozen=True, kw_only=True)
class BoundedRows:
    """The rows of one call that is bounded, in n chunks. All tensors are on the device of the rows.

    fits: bool scalar, the same on all ranks: whether the rows of every rank fit.
    send_nPE: (n, W, E) int64, this rank's rows for each of W ranks and each of their E experts.
    recv_nPE: (n, W, E) int64, the rows from each of W ranks for each of this rank's E experts.
    bound: the numbers on which the ranks agreed before.
    lacks_gradients: whether this rank needs gradients, and no rank needed any when the ranks agreed. All
        ranks then drop all rows, and no kernel takes part in a backward pass.
    device_rows: which rows exist, for pass programs; None for the persistent kernel, which computes this
        itself and has one chunk.
    """

    fits: Tensor
    send_nPE: Tensor
    recv_nPE: Tensor
    bound: AgreedBound
    lacks_gradients: bool
    device_rows: DeviceRows | None = None


class RowBound:
    """The bound on a layer's rows, and whether a call exceeded it. `pmoe.BoundedSteps` makes it.

    exceeded: int64 scalar on the device. Each call that exceeds the bound adds 1.
    is_on: whether calls are bounded now. Otherwise the ranks exchange row counts, and no row is lost.
    agreed: the numbers on which the ranks agreed, for each kind of call.
    waiting: the kinds of calls that are not bounded before the next step (`agree`).
    heaps: the heaps of bounded calls. Some may have been closed since. The references are weak, because
        `pmoe.comm.heap.close_heaps` lets go of the heaps that it closes.
    was_bounded: whether the layer's last call was bounded; the same on all ranks.
    """

    exceeded: Tensor
    is_on: bool
    agreed: dict[CallKind, AgreedBound]
    waiting: set[CallKind]
    heaps: weakref.WeakSet[BoundedHeap]
    was_bounded: bool

    def __init__(self, exceeded: Tensor) -> None:
        self.exceeded = exceeded
        self.is_on = False
        self.agreed = {}
        self.waiting = set()
        self.heaps = weakref.WeakSet()
        self.was_bounded = False

    def turn_on(self) -> None:
        """Bounds the calls that follow, until ``is_on`` is set to False."""
        self.is_on = True
        self.waiting.clear()

    def usable(self, kind: CallKind) -> AgreedBound | None:
        """Returns the numbers for calls of a kind; None if the ranks must exchange row counts."""
        return None if kind in self.waiting else self.agreed.get(kind)

    def agree(self, kind: CallKind, bound: AgreedBound, *, may_run_again: bool) -> None:
        """Stores the numbers on which the ranks agreed for a kind of call. May be a collective.

        kind: the kind.
        bound: the numbers.
        may_run_again: whether activation checkpointing may run this call a second time in the same step. The
            second run must not be bounded either, because both must save tensors of the same sizes. So calls
            of this kind wait for the next step.
        """
        self.agreed[kind] = bound
        if may_run_again:
            self.waiting.add(kind)
        self.find_heaps_of(bound)

    def find_heaps(self) -> None:
        """Finds the heaps of bounded calls again, if those on which the ranks agreed were closed. Collective.

        A heap is closed if a layer of the same sizes needs a larger one, perhaps in the same step. The larger
        heap then serves the calls of the closed one, too.
        """
        for bound in self.agreed.values():
            if not bound.is_repeatable:
                self.find_heaps_of(bound)

    def find_heaps_of(self, bound: AgreedBound) -> None:
        """Adds the heaps of calls with a bound, and forgets closed heaps. May be a collective."""
        self.heaps = weakref.WeakSet([*self.open_heaps, *bound.repeatable()])

    @property
    def open_heaps(self) -> list[BoundedHeap]:
        """The heaps of bounded calls that `pmoe.comm.heap.close_heaps` has not closed."""
        return [heap for heap in self.heaps if heap.is_open]

    def raise_if_failed(self) -> None:
        """Raises HeapError, with the awaited rank, if a kernel of a bounded call has waited too long.

        A CUDA graph launches kernels without the host, so the launches themselves do not raise.
        """
        for heap in self.open_heaps:
            heap.raise_if_failed()
