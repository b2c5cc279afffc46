"""Bytes of tensors on the CPU while a function runs, from the allocator's events on the calling thread."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch


class Allocated:
    """peak: at once, at most; held: at the last `mark`; left: at the end. Bytes beyond those at the start."""

    def __init__(self, function: Callable[[Callable[[], None]], object]) -> None:
        """function(mark) is run once; it calls mark() where ``held`` is to be read."""
        at = [0]

        def mark() -> None:
            at[0] = time.time_ns()
            time.sleep(1e-3)

        # What earlier tests left in reference cycles would be seen to be freed in the middle of this one.
        # What is alive now is not looked at again the next time: that would take longer than the function.
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
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        assert events
        self.peak = self.held = self.left = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.left += event.nbytes()
            self.peak = max(self.peak, self.left)
            if event.start_ns() <= at[0]:
                self.held = self.left
        del result
