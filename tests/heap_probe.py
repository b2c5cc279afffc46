"""Whether a peer's kernel reaches this rank's while both run. Its flag is the first word of the inbox."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from pmoe.comm.heap.providers import CollectiveSteps
from pmoe.comm.ranks import Ranks
from pmoe.kernels import heap as heap_module
from pmoe.kernels.heap import Heap

_raised: weakref.WeakKeyDictionary[Heap, int] = weakref.WeakKeyDictionary()
"""How often each heap was probed: a flag stays raised."""


def raise_flag(heap: Heap, peer: int, value: int, stream: torch.cuda.Stream) -> None:
    """One launch, of a kernel that writes ``value`` into the flag of a peer, or of this rank."""
    heap.check_usable()
    flag = heap.peer_addresses[peer] + heap.shape.places["inbox"]
    heap_module.loaded_extension().heap_raise_flag(heap.device.index, stream.cuda_stream, flag, value)


def await_flag(heap: Heap, value: int, seconds: float, stream: torch.cuda.Stream) -> Tensor:
    """One launch, of a kernel that waits until this rank's flag has reached ``value``.

    Gives (1,) int64, the nanoseconds, or -1 where it had not within ``seconds``. The host reads it behind the
    stream, and holds it until then.
    """
    heap.check_usable()
    waited = torch.full((1,), -1, dtype=torch.int64, pin_memory=heap.device.type == "cuda")
    heap_module.loaded_extension().heap_await_flag(
        heap.device.index,
        stream.cuda_stream,
        heap.base + heap.shape.places["inbox"],
        value,
        round(seconds * 1e9),
        waited.data_ptr(),
    )
    return waited


def probe_flag(heap: Heap, ranks: Ranks, *, seconds: float = 10.0) -> float | None:
    """Whether a kernel that waits sees a flag that a kernel of another rank raises meanwhile.

    Every rank waits for its flag; when all do, each raises that of the next rank. Gives the seconds of the
    slowest rank, None where some rank's flag did not come within ``seconds``: then the kernels of these
    processes do not run together, and fused ones would wait in vain.

    Collective; the same on every rank. RuntimeError, on every rank, where a launch fails on one.
    """
    steps = CollectiveSteps(ranks, heap.device)
    value = _raised[heap] = _raised.get(heap, 0) + 1
    waited = torch.empty(0)
    waiting, raising = (torch.cuda.Stream(heap.device) for _ in range(2))

    def wait() -> None:
        nonlocal waited
        # Both kernels are loaded before one of them waits: CUDA may load only while none runs.
        raise_flag(heap, ranks.rank, value - 1, raising)
        there = await_flag(heap, value - 1, seconds, raising)
        raising.synchronize()
        del there
        waited = await_flag(heap, value, seconds, waiting)

    def answer() -> int:
        raise_flag(heap, (ranks.rank + 1) % ranks.size, value, raising)
        raising.synchronize()
        waiting.synchronize()
        return int(waited.item())

    try:
        steps.attempt(wait)
        nanoseconds = steps.attempt(answer)
    finally:
        waiting.synchronize()  # a kernel that still waits writes into `waited`
    return None if min(nanoseconds) < 0 else max(nanoseconds) / 1e9
