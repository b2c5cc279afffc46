"""Actions, timed alone or side by side on the lanes of a device, the same ones on all ranks.

How often a rank runs an action follows from numbers that all ranks have agreed on (`Group`), never from its
own clock: actions may be collectives.
"""

from __future__ import annotations

import abc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from pmoe.comm.agree import largest
from pmoe.comm.ranks import Ranks

COMPUTE, COMMUNICATE, COPY = "compute", "communicate", "copy"

Action = Callable[[], object]
"""A piece of work without arguments: a product, a message, a copy."""

Marks = list[float]
"""Seconds on some clock: when a lane began, and when it ended each of its actions."""


class Group:
    """The ranks that measure together, and the device of their reductions."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest that a rank has. Every rank gives as many. Also a barrier."""
        return largest(self.ranks, self.device, values, stage="agreeing on a profile")


class Bench(abc.ABC):
    """Runs actions on three lanes, as the engine would."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @abc.abstractmethod
    def run(self, work: Mapping[str, tuple[Action, int]]) -> dict[str, Marks]:
        """Each lane repeats its action so many times, one after another; the lanes side by side."""

    @abc.abstractmethod
    def host_buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        """On the host, already touched, and such that copies there need not wait."""


class _CpuBench(Bench):
    """Computes on the calling thread; messages and copies have a thread each."""

    def __init__(self, group: Group, threads: Mapping[str, ThreadPoolExecutor]) -> None:
        super().__init__(group)
        self._threads = threads

    def run(self, work: Mapping[str, tuple[Action, int]]) -> dict[str, Marks]:
        started = {
            lane: self._threads[lane].submit(_repeat, *todo) for lane, todo in work.items() if lane != COMPUTE
        }
        marks = {COMPUTE: _repeat(*work[COMPUTE])} if COMPUTE in work else {}
        return marks | {lane: future.result() for lane, future in started.items()}

    def host_buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.ones(elements, dtype=dtype, device="cpu")


class _CudaBench(Bench):
    """Computes on the current stream; messages and copies have a stream each. The host runs ahead."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        device = group.device
        self._streams = {
            COMPUTE: torch.cuda.current_stream(device),
            COMMUNICATE: torch.cuda.Stream(device),
            COPY: torch.cuda.Stream(device),
        }

    def run(self, work: Mapping[str, tuple[Action, int]]) -> dict[str, Marks]:
        def mark(lane: str) -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._streams[lane])
            return event

        torch.cuda.synchronize(self.group.device)  # what the caller enqueued, and the buffers' first values
        origin = mark(COMPUTE)
        for lane in work:
            self._streams[lane].wait_event(origin)
        events = {lane: [mark(lane)] for lane in work}
        for i in range(max(count for _, count in work.values())):
            for lane, (action, count) in work.items():
                if i < count:
                    with torch.cuda.stream(self._streams[lane]):
                        action()
                    events[lane].append(mark(lane))
        torch.cuda.synchronize(self.group.device)  # so the actions' buffers are free to go, too
        return {lane: [origin.elapsed_time(event) / 1e3 for event in row] for lane, row in events.items()}

    def host_buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.ones(elements, dtype=dtype, device="cpu", pin_memory=True)


@contextmanager
def open_bench(group: Group) -> Iterator[Bench]:
    """The bench of the group's device. On a CPU it has two threads of its own until the block ends."""
    if group.device.type == "cuda":
        with torch.cuda.device(group.device):
            yield _CudaBench(group)
    else:
        with ThreadPoolExecutor(1) as communicate, ThreadPoolExecutor(1) as copy:
            yield _CpuBench(group, {COMMUNICATE: communicate, COPY: copy})


def _repeat(action: Action, count: int) -> Marks:
    marks = [time.perf_counter()]
    for _ in range(count):
        action()
        marks.append(time.perf_counter())
    return marks


def seconds_of(
    bench: Bench,
    lane: str,
    action: Action,
    repeats: int,
    of: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Seconds of one action alone: the median of ``repeats`` (or what ``of`` takes), the slowest rank's.

    One more runs before them and does not count. Collective.
    """
    bench.group.largest([0.0])  # begin together
    marks = bench.run({lane: (action, repeats + 1)})[lane][1:]
    return bench.group.largest([of([end - begin for begin, end in pairwise(marks)])])[0]
