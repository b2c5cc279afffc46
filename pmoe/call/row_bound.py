"""The bound on the rows that a rank receives in a call, if the host does not read row counts.

A layer with fused="persistent" receives rows in a heap, memory of fixed size that all ranks can write. To
find out whether the rows fit, the ranks usually exchange row counts before each call, and the host waits for
the counts. Within `pmoe.BoundedSteps` the device finds it out. If the rows of any rank do not fit, no rank
sends any row:

    rows of the ranks, room for 8     7 6    5 9        8 8
    what the layer computes           all    nothing    all
    exceeded                          0      1          1      read one training step late
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pmoe.kernels.comet.backend import Steps
    from pmoe.kernels.heap import Heap


@dataclass(frozen=True, kw_only=True)
class CallKind:
    """The properties that all ranks know before a call, and that decide whether it can be bounded.

    dtype: dtype of the rows that reach the experts.
    has_grad: whether autograd is on. Parameters may be frozen on some ranks only, so they do not count.
    """

    dtype: torch.dtype
    has_grad: bool


@dataclass(frozen=True, kw_only=True)
class AgreedBound:
    """The numbers on which the ranks agreed in a call whose row counts they exchanged.

    steps: the operators that launch the persistent kernel, on the heap of that call.
    max_tokens: the most tokens of a rank for which the heap has room.
    room: the most rows that a rank may receive.
    needs_grad: whether any rank needed gradients.
    """

    steps: Steps
    max_tokens: int
    room: int
    needs_grad: bool


@dataclass(frozen=True, kw_only=True)
class BoundedRows:
    """The rows of one call that is bounded. All tensors are on the device of the rows.

    fits: bool scalar, the same on all ranks: whether the rows of every rank fit into its heap.
    send_1PE: (1, W, E) int64, this rank's rows for each of W ranks and each of their E experts.
    recv_1PE: (1, W, E) int64, the rows from each of W ranks for each of this rank's E experts.
    bound: the numbers on which the ranks agreed before.
    lacks_gradients: whether this rank needs gradients, and no rank needed any when the ranks agreed. All
        ranks then drop all rows, and no kernel takes part in a backward pass.
    """

    fits: Tensor
    send_1PE: Tensor
    recv_1PE: Tensor
    bound: AgreedBound
    lacks_gradients: bool


class RowBound:
    """The bound on a layer's rows, and whether a call exceeded it. `pmoe.BoundedSteps` makes it.

    exceeded: int64 scalar on the device. Each call that exceeds the bound adds 1.
    is_on: whether calls are bounded now. Otherwise the ranks exchange row counts, and no row is lost.
    agreed: the numbers on which the ranks agreed, for each kind of call.
    heaps: the heaps of bounded calls. Some may have been closed since.
    """

    exceeded: Tensor
    is_on: bool
    agreed: dict[CallKind, AgreedBound]
    heaps: set[Heap]

    def __init__(self, exceeded: Tensor) -> None:
        self.exceeded = exceeded
        self.is_on = False
        self.agreed = {}
        self.heaps = set()

    def agree(self, kind: CallKind, bound: AgreedBound, heaps: Iterable[Heap]) -> None:
        """Stores the numbers on which the ranks agreed for a kind of call.

        kind: the kind.
        bound: the numbers.
        heaps: the heaps on which ``bound.steps`` launches kernels.
        """
        self.agreed[kind] = bound
        self.heaps = {*self.open_heaps, *heaps}

    def find_heaps(self) -> None:
        """Finds the heaps of bounded calls again, if those on which the ranks agreed were closed. Collective.

        A heap is closed if a layer of the same sizes needs a larger one, perhaps in the same step. The larger
        heap then serves the calls of the closed one, too.
        """
        for bound in self.agreed.values():
            if not bound.steps.is_repeatable:
                self.heaps = {*self.open_heaps, *bound.steps.repeatable()}

    @property
    def open_heaps(self) -> list[Heap]:
        """The heaps of bounded calls that `pmoe.comm.heap.close_heaps` has not closed."""
        return [heap for heap in self.heaps if heap.release is not None]

    def raise_if_failed(self) -> None:
        """Raises HeapError, with the awaited rank, if a kernel of a bounded call has waited too long.

        A CUDA graph launches kernels without the host, so the launches themselves do not raise.
        """
        for heap in self.open_heaps:
            heap.raise_if_failed()
