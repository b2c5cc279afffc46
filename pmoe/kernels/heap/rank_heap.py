"""One rank's heap: its rounds, its views, and what becomes of it after a wait in vain."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.kernels.heap import device_memory
from pmoe.kernels.heap.shape import PERSISTENT_WAITS, WAIT_SECONDS, WAITS, HeapError, HeapShape, awaited

MAX_EPOCHS = 2**31 - 1
"""Later than that a flag that was never raised would count as raised (cuda/comet/protocol.h)."""

REPORT_WORDS = 8

MAKE_ANEW = "a new heap must be made, on every rank (pmoe.comm.heap.close_heaps drops the old ones)"


@dataclass(eq=False, kw_only=True)
class Heap:
    """One rank's heap, and where it sees those of all.

    base: the address.
    peer_addresses: of all ranks' heaps as this rank sees them; peers: the same as (W,) int64 on the device.
    bound_seconds: for how long a kernel may wait.
    release: gives the memory back, once.
    epoch: the last round that was begun; the first is 1.
    report: (8,) int32 in memory that host and device reach, a `Report` of cuda/comet/watch.h.

    Use of a broken or closed heap raises HeapError.
    """

    shape: HeapShape
    rank: int
    device: torch.device
    base: int
    peer_addresses: Sequence[int]
    bound_seconds: float
    release: Callable[[], None] | None
    epoch: int = 0

    def __post_init__(self) -> None:
        shape, device, places = self.shape, self.device, self.shape.places
        self.peers = torch.tensor(self.peer_addresses, dtype=torch.int64, device=device)
        self.report = torch.zeros(REPORT_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._words = (ctypes.c_int32 * REPORT_WORDS).from_address(self.report.data_ptr())
        inbox, weights = self.base + places["inbox"], self.base + places["weights"]
        self._inbox = device_memory.tensor_at(inbox, (shape.rows, shape.d_model), shape.dtype, device)
        self._weights = device_memory.tensor_at(weights, (shape.rows,), torch.float32, device)
        self._unusable: str | None = None
        self._process_stays = True

    @property
    def bound_nanoseconds(self) -> int:
        return round(self.bound_seconds * 1e9)

    @property
    def counters(self) -> int:
        """The address of `Counters`, whose first word says that this rank has failed."""
        return self.base + self.shape.places["counters"]

    def next_epoch(self) -> int:
        """The number of the round that begins, for one launch on every rank. Raises as `raise_if_failed`."""
        self.raise_if_failed()
        if self.epoch + 1 >= MAX_EPOCHS:
            self._unusable = f"this heap of rank {self.rank} has had {self.epoch} rounds, the most there are"
            self.check_usable()
        self.epoch += 1
        return self.epoch

    def give_up(self, why: str) -> None:
        """A round of this rank was left in the middle: later flags would be taken for those of this round."""
        if self._unusable is None:
            self._unusable = f"this heap of rank {self.rank} was given up in round {self.epoch}: {why}"

    def rows(self, count: int) -> Tensor:
        """(count, M) the first rows of the inbox: the memory itself, which later rounds overwrite."""
        return self._first(self._inbox, count)

    def row_weight(self, count: int) -> Tensor:
        """(count,) float32, their routing weights: the memory itself."""
        return self._first(self._weights, count)

    def _first(self, of_rows: Tensor, count: int) -> Tensor:
        self.check_usable()
        if not 0 <= count <= self.shape.rows:
            raise ValueError(f"count ({count}) must be from 0 to the heap's {self.shape.rows} rows")
        return of_rows[:count]

    def check_usable(self) -> None:
        """Raises HeapError for a heap that is broken or closed."""
        if self._unusable is not None:
            remedy = MAKE_ANEW if self._process_stays else "this process must end"
            raise HeapError(f"pmoe: {self._unusable}; {remedy}")

    def raise_if_failed(self) -> None:
        """Raises HeapError where a wait of an earlier launch is known to have lasted too long.

        Called before each launch: it waits for nothing.
        """
        self.check_usable()
        if self._words[0] == 0:
            return
        self._unusable = f"this heap of rank {self.rank} is broken since round {self.epoch}"
        what = awaited(list(self._words), PERSISTENT_WAITS if self.shape.d_hidden else WAITS)
        raise HeapError(
            f"pmoe: rank {self.rank} waited {self.bound_seconds:g} s in vain for {what}. That rank has "
            f"ended, failed before, or was slower ({WAIT_SECONDS} sets the bound). What this round computed "
            "is worthless, and the heap is broken, also on ranks that wait for this one. This process stays "
            f"usable; {MAKE_ANEW}"
        )

    def check(self) -> None:
        """Waits for the device and raises HeapError where any wait lasted too long, or the device is lost."""
        self.check_usable()
        try:
            device_memory.synchronize(self.device)
        except RuntimeError as error:
            self._unusable = f"this heap of rank {self.rank} is on a device that is lost"
            self._process_stays = False
            raise HeapError(
                f"pmoe: rank {self.rank}: {self.device} failed in round {self.epoch} or before, and this "
                f"process cannot use it any more: it must end ({error})"
            ) from error
        self.raise_if_failed()

    def close(self) -> None:
        """Gives the memory back, once its device has come to an end. Later calls do nothing.

        Tensors on the memory must not be used any more. Collective for heaps of several processes, broken
        ones too.

        RuntimeError where a peer does not come: this rank's memory then stays, as the peer may use it.
        """
        release, self.release = self.release, None
        if release is None:
            return
        self._unusable = f"this heap of rank {self.rank} is closed"
        release()
        open_heaps.discard(self)


open_heaps: set[Heap] = set()
"""They are held here: kernels may still write into their reports."""
