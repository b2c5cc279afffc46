"""Bytes of tensors on the CPU while a function runs, from the allocator's events on the calling thread."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pmoe import MoELayer


class Allocated:
    """Bytes of CPU tensors that a function allocates.

    peak    the most that was allocated at once
    held    allocated at the last call of ``mark``
    left    allocated at the end

    Only blocks that the function itself allocates are counted. torch's profiler also reports the free of a
    block that was allocated under an earlier profile; counting it would make the function look smaller.
    """

    def __init__(self, function: Callable[[Callable[[], None]], object]) -> None:
        """Runs function(mark) once; it calls mark() where ``held`` is to be read."""
        marked_ns = 0

        def mark() -> None:
            nonlocal marked_ns
            marked_ns = time.time_ns()
            time.sleep(1e-3)

        # Garbage in reference cycles of earlier tests would otherwise be freed in the middle of this one.
        # `freeze` keeps the next collection from visiting what is alive now, which would take long.
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            ) as profile:
                result = function(mark)
        finally:
            gc.enable()
        events = sorted(memory_events(profile), key=lambda event: event.start_time_ns)
        assert events
        self.peak = self.held = self.left = 0
        bytes_at: dict[int, int] = {}  # size of each block that is allocated, by its address
        for event in events:
            address = event.extra_fields.ptr
            num_bytes = event.extra_fields.alloc_size
            if num_bytes > 0:
                # A block that another thread freed, as gloo's do: its free is not seen before its next use.
                self.left -= bytes_at.pop(address, 0)
                bytes_at[address] = num_bytes
            elif bytes_at.pop(address, 0) == 0:
                continue  # allocated before the function began
            self.left += num_bytes
            self.peak = max(self.peak, self.left)
            if event.start_time_ns <= marked_ns:
                self.held = self.left
        del result


def memory_events(profile: torch.profiler.profile) -> Iterator[Any]:
    """Yields the allocations (positive ``alloc_size``) and the frees (negative) of a profile, in no order."""
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    waiting = list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            yield event


def peak_of_step(layer: MoELayer, x: Tensor, dy: Tensor) -> int:
    """Returns the most bytes that the second of two steps allocates at once.

    x, dy: (T, M), the input and the gradient of the output. The first step warms up what a layer keeps.
    """

    def step(mark: Callable[[], None]) -> Tensor:
        y = layer(x)
        y.backward(dy)
        return y

    step(lambda: None)
    layer.zero_grad(set_to_none=True)
    layer.l_aux = None  # type: ignore[assignment]  # its graph would hold the first step's tensors
    return Allocated(step).peak
