"""How much memory a step really takes, from the allocator's own events: exact for any allocation.

Counted on the CPU are all tensors that this thread makes. What another thread frees (gloo's do, now and then,
what they have sent) is seen to go when its place is taken again: a count may be too high, never too low.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def step_peak_bytes(module: nn.Module, x: Tensor, dy: Tensor) -> int:
    """Bytes of module(x) and its backward from dy, at once at most, beyond what was held before.

    y and the gradients are held until the end. Clears the module's gradients.
    """
    device = next(module.parameters()).device
    module.zero_grad(set_to_none=True)
    peak = _peak_on_cuda(module, x, dy, device) if device.type == "cuda" else _peak_on_cpu(module, x, dy)
    module.zero_grad(set_to_none=True)
    return peak


def _peak_on_cuda(module: nn.Module, x: Tensor, dy: Tensor, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    y = module(x)
    y.backward(dy)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(module: nn.Module, x: Tensor, dy: Tensor) -> int:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        y = module(x)
        y.backward(dy)
    live: dict[int, int] = {}  # bytes by address
    held = peak = 0
    for event in events_of(profile):
        if event.name == "[memory]" and torch.device(event.typed[1].device).type == "cpu":
            address, change = event.typed[1].ptr, event.typed[1].alloc_size
            held -= live.pop(address, 0)
            if change > 0:
                live[address] = change
                held += change
            peak = max(peak, held)
    return peak


def events_of(profile: torch.profiler.profile) -> list[Any]:
    """What a profile has seen, allocations included, in the order of time."""
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    found, left = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        found.append(event)
        left.extend(event.children)
    return sorted(found, key=lambda event: event.start_time_ns)
