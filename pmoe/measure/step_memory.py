"""Measures the peak memory of a real step from events of the allocator. The result is exact on CUDA.

On the CPU, only events of the calling thread are counted. So a tensor that another thread frees still counts,
until the calling thread allocates memory at its address again. (gloo's threads sometimes free tensors that
they have sent.) The measured peak may therefore be too high, but never too low.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def step_peak_bytes(module: nn.Module, x: Tensor, dy: Tensor) -> int:
    """Returns the peak memory of one forward and backward pass, in bytes above those allocated before.

    The output and the gradients stay allocated until the end of the step. The module's gradients are cleared
    before and after the step.

    x: the input, of any shape that the module takes.
    dy: the gradient of the output, from which backward starts; the same shape as the output.
    """
    device = next(module.parameters()).device
    module.zero_grad(set_to_none=True)
    peak = _peak_on_cuda(module, x, dy, device) if device.type == "cuda" else _peak_on_cpu(module, x, dy)
    module.zero_grad(set_to_none=True)
    return peak


def _peak_on_cuda(module: nn.Module, x: Tensor, dy: Tensor, device: torch.device) -> int:
    """Runs forward and backward on CUDA. Returns the peak of allocated bytes, less those allocated before.

    The numbers are the statistics of torch's CUDA allocator.

    x: the input, of any shape that the module takes.
    dy: the gradient of the output, from which backward starts; the same shape as the output.
    device: the CUDA device.
    """
    torch.cuda.synchronize(device)
    bytes_before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    y = module(x)
    y.backward(dy)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - bytes_before


def _peak_on_cpu(module: nn.Module, x: Tensor, dy: Tensor) -> int:
    """Runs forward and backward on the CPU. Returns the peak of the bytes that the step itself allocates.

    The bytes come from the profiler's events of CPU allocations. Tensors that existed before the step are not
    counted.

    x: the input, of any shape that the module takes.
    dy: the gradient of the output, from which backward starts; the same shape as the output.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        y = module(x)
        y.backward(dy)
    live: dict[int, int] = {}  # bytes by address
    held_bytes = peak_bytes = 0
    for event in events_of(profile):
        if event.name == "[memory]" and torch.device(event.typed[1].device).type == "cpu":
            address = event.typed[1].ptr
            change = event.typed[1].alloc_size
            held_bytes -= live.pop(address, 0)
            if change > 0:
                live[address] = change
                held_bytes += change
            peak_bytes = max(peak_bytes, held_bytes)
    return peak_bytes


def events_of(profile: torch.profiler.profile) -> list[Any]:
    """Returns all events of a finished torch profile, allocations included, in order of their start."""
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = []
    pending = list(profile.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        events.append(event)
        pending.extend(event.children)
    return sorted(events, key=lambda event: event.start_time_ns)
