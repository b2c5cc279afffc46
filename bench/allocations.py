"""Records which tensors a step allocates, by name, from the allocator's own events.

    with watched() as seen:
        y = layer(x)
        mark(y, "T_O")
    seen.peak_bytes(), seen.live_bytes()

It counts all tensors of one device type that this thread allocates within the block, not those from before.

Another thread may free a tensor, as gloo's sometimes free what they have sent. This is seen only when the
memory is used again. So with several ranks on the CPU a count may be too high, but never too low.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from pmoe.engine.buffers.arena import Arena
from pmoe.measure.step_memory import events_of
from pmoe.planner.memory import GRADIENTS

MARK = "pmoe allocation"
OTHER = "other"


@dataclass
class Allocation:
    """A block of memory that was allocated for tensors.

    num_bytes: its size.
    begin, end: seconds since the first recorded event, at which it was allocated and freed. end is None if it
        was not freed before `watched` ended.
    name: the name that `mark` gave it.
    """

    num_bytes: int
    begin: float
    end: float | None = None
    name: str = OTHER


@dataclass
class Allocations:
    """All allocations within a `watched` block. The object is filled when the block ends.

    records: the allocations, in the order in which they were made.
    moments: seconds since the first recorded event at which `moment` was called, by name.
    """

    records: list[Allocation] = field(default_factory=list)
    moments: dict[str, float] = field(default_factory=dict)

    def live_bytes(self, names: Collection[str] | None = None) -> list[tuple[float, int]]:
        """Returns the bytes in use over time, as (seconds, bytes from then on) pairs.

        names: names of the allocations that count; None counts all.
        """
        changes = []
        for allocation in self.records:
            if names is None or allocation.name in names:
                changes.append((allocation.begin, allocation.num_bytes))
                changes += [] if allocation.end is None else [(allocation.end, -allocation.num_bytes)]
        live = 0
        steps = [(0.0, 0)]
        for moment, change in sorted(changes, key=lambda entry: entry[0]):
            live += change
            steps.append((moment, live))
        return steps

    def peak_bytes(self, without: Collection[str] = ()) -> int:
        """Returns the most bytes that were in use at once.

        without: names of allocations that do not count.
        """
        names = {allocation.name for allocation in self.records} - set(without)
        return max(live for _, live in self.live_bytes(names))


def mark(tensor: Tensor, name: str) -> None:
    """Gives a name to the memory of a tensor, unless it has a name already.

    Without a `watched` block around the call it does almost nothing.
    """
    with torch.profiler.record_function(f"{MARK}|{tensor.untyped_storage().data_ptr()}|{name}"):
        pass


def moment(name: str) -> None:
    """Records the present time under ``name``, in the `Allocations` of the `watched` block around the
    call.
    """
    with torch.profiler.record_function(f"{MARK}|moment|{name}"):
        pass


@contextmanager
def watched(device_type: str = "cpu") -> Iterator[Allocations]:
    """Records everything that is allocated on devices of this type within the block.

    Yields an `Allocations`, which is filled when the block ends.
    """
    seen = Allocations()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        yield seen
    _fill(seen, events_of(profile), device_type)


def _fill(seen: Allocations, events: Sequence[Any], device_type: str) -> None:
    """Fills ``seen`` with the allocations that are among the profiler's events."""
    live: dict[int, Allocation] = {}
    origin = events[0].start_time_ns if events else 0
    for event in events:
        seconds = (event.start_time_ns - origin) / 1e9
        if event.name.startswith(MARK):
            _, where, name = event.name.split("|", 2)
            if where == "moment":
                seen.moments[name] = seconds
            elif int(where) in live and live[int(where)].name == OTHER:
                live[int(where)].name = name
        elif event.name == "[memory]":
            fields = event.typed[1]
            if torch.device(fields.device).type != device_type:
                continue
            if fields.alloc_size > 0:
                if fields.ptr in live:
                    live[fields.ptr].end = seconds
                live[fields.ptr] = Allocation(fields.alloc_size, seconds)
                seen.records.append(live[fields.ptr])
            elif fields.ptr in live:
                live.pop(fields.ptr).end = seconds


@contextmanager
def freed_late(seconds: float = 5e-3) -> Iterator[None]:
    """Lets passes free their buffers some milliseconds late, so that counts on the CPU are exact.

    gloo's thread lets go of a message's buffers a moment after the message has ended, and what is freed on
    that thread is not seen.
    """
    close = Arena.close

    def close_late(arena: Arena) -> None:
        time.sleep(seconds)
        close(arena)

    with mock.patch.object(Arena, "close", close_late):
        yield


@dataclass(frozen=True)
class StepMemory:
    """Bytes that one forward and backward pass needs in addition to those that were in use before.

    peak: most bytes in use at once.
    without_gradients: the same without the gradients of the parameters.
    seconds: time of the step, including the cost of recording.
    """

    peak: int
    without_gradients: int
    seconds: float


MakeInputs = Callable[[], tuple[Tensor, Tensor]]
"""A function that returns the input x of a step and the gradient dy of the module's output."""


def step_memory(module: nn.Module, make_inputs: MakeInputs) -> StepMemory:
    """Runs one forward and backward pass of a module, and returns the bytes that it needed.

    The inputs are (x, dy) = make_inputs(). x, y, dy and the gradients stay allocated until the end. Inputs
    that make_inputs allocates are counted; inputs that existed before are not. On CUDA the counts are those
    of torch's allocator.
    """
    device = next(module.parameters()).device
    module.zero_grad(set_to_none=True)
    counted = _step_on_cuda if device.type == "cuda" else _step_on_cpu
    begin = time.perf_counter()
    peak, without_gradients = counted(module, make_inputs, device)
    module.zero_grad(set_to_none=True)
    return StepMemory(peak, without_gradients, time.perf_counter() - begin)


def _step_on_cpu(module: nn.Module, make_inputs: MakeInputs, device: torch.device) -> tuple[int, int]:
    with watched(device.type) as seen:
        x, dy = make_inputs()
        y = module(x)
        y.backward(dy)
        for parameter in module.parameters():
            if parameter.grad is not None:
                mark(parameter.grad, GRADIENTS)
    return seen.peak_bytes(), seen.peak_bytes(without=(GRADIENTS,))


def _step_on_cuda(module: nn.Module, make_inputs: MakeInputs, device: torch.device) -> tuple[int, int]:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    x, dy = make_inputs()
    y = module(x)
    torch.cuda.synchronize(device)
    forward = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    y.backward(dy)
    torch.cuda.synchronize(device)
    backward = torch.cuda.max_memory_allocated(device) - before
    # Backward allocates the parameters' gradients when it begins and holds them to its end, so its peak has
    # them all.
    gradients = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
    return max(forward, backward), max(forward, backward - gradients)
