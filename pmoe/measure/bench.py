"""Times work while nothing else runs, or while other work runs beside it, as in a step of the layer.

Work runs in three lanes: computation, messages between ranks, and copies to and from the host. A lane is a
queue of tasks that run one after another. The lanes run side by side.

All ranks time the same work. The work may be a collective, so all ranks must run it equally often. The number
of runs follows from numbers on which all ranks have agreed (`Bench.largest`), never from a rank's own clock.

A rank may run out of memory. It then still takes part in all messages, and leaves out the other work. All
ranks raise the same error where they agree on numbers next, so that no rank waits for another.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.agreement import largest
from pmoe.comm.base import all_to_all
from pmoe.comm.failures import at_stage, lacks_memory
from pmoe.comm.ranks import Ranks
from pmoe.comm.topology import node_ids
from pmoe.planner.cost_model import COMMUNICATE, COMPUTE, COPY
from pmoe.planner.profile import FORMAT, WIDTH, Identity, Versions

AGREEING = "agreeing on a profile"
"""The name, in error messages, of the stage in which ranks agree on numbers of a profile."""

MESSAGES = "measuring messages"
"""The name, in error messages, of the stage in which ranks measure messages."""

TimedCall = Callable[[], object]
"""Work to be timed, as a function without arguments: a product, a message, or a copy."""

Marks = list[float]
"""Times of one lane in seconds: when its first run started, then when each run ended.

A lane is a queue of tasks. Only differences of these times mean anything, because their zero is arbitrary.
"""

LaneRuns = Mapping[str, tuple[TimedCall, int]]
"""The work of each lane (a queue of tasks), by the lane's name: (a function, how often it is called)."""


class TooLittleMemoryError(torch.OutOfMemoryError):
    """Raised on every rank of a measurement if some rank has too little memory for it."""


@dataclass(frozen=True)
class Bench:
    """Runs and times work in three lanes: computation, messages and copies.

    A lane is a queue: its tasks run one after another, while the other lanes run at the same time.

    ranks: the ranks that measure together.
    device: the device on which the work runs.
    run_lanes: a function that runs all lanes side by side (`run`).
    failure: the errors of too little memory on this rank: none or one.
    """

    ranks: Ranks
    device: torch.device
    run_lanes: Callable[[LaneRuns], dict[str, Marks]]
    failure: list[BaseException] = field(default_factory=list)

    def made(self, make: Callable[[], TimedCall]) -> TimedCall:
        """Returns the work that ``make`` returns. If this rank lacks the memory, the work does nothing.

        The next call of `largest` then raises on every rank, before any rank begins the work. `seconds_of`
        begins with such a call.
        """
        works: list[TimedCall] = []
        self.attempt(lambda: works.append(make()))
        return works[0] if works else _nothing

    def run(self, work: LaneRuns) -> dict[str, Marks]:
        """Runs all lanes side by side.

        If a computation or a copy runs out of memory on this rank, the rank leaves out its later computations
        and copies, but no messages. The next call of `largest` then raises on every rank.

        work: for each lane, a function and how often to call it.

        Returns for each lane, in seconds, when its first call started, then when each call ended.
        """
        return self.run_lanes(
            {
                lane: (action if lane == COMMUNICATE else partial(self.attempt, action), count)
                for lane, (action, count) in work.items()
            }
        )

    def attempt(self, action: TimedCall) -> None:
        """Calls a function, unless this rank has run out of memory. Notes an error of too little memory."""
        if self.failure:
            return
        try:
            action()
        except Exception as error:
            if not lacks_memory(error):
                raise
            self.failure.append(error.with_traceback(None))  # a traceback's frames keep tensors alive

    def largest(self, values: Sequence[float]) -> list[float]:
        """Returns the largest of each value over all ranks. Collective, so it also serves as a barrier.

        values: numbers of this rank. All ranks must pass equally many.

        Raises `TooLittleMemoryError` on every rank if any rank has run out of memory in work of this bench.
        """
        own = [*values, float(bool(self.failure))]
        *agreed, failed = largest(self.ranks, self.device, own, stage=AGREEING)
        if failed:
            cause = self.failure[0] if self.failure else None
            raise TooLittleMemoryError(
                "some rank has too little memory to measure the speed of this machine: free memory, or run "
                "`pmoe profile` before training"
            ) from cause
        return agreed


def _nothing() -> None:
    """Stands in for work that a rank has too little memory for."""


@contextmanager
def open_bench(ranks: Ranks, device: torch.device) -> Iterator[Bench]:
    """Returns a context that provides a `Bench`, which times computation, messages and copies on a device.

    On the CPU, computation runs in the calling thread, and messages and copies in a thread each. On CUDA,
    computation runs on the current stream, and messages and copies on a stream each.

    ranks: the ranks that measure together.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            streams = {lane: torch.cuda.Stream(device) for lane in (COMMUNICATE, COPY)}
            streams[COMPUTE] = torch.cuda.current_stream(device)
            yield Bench(ranks, device, partial(_run_on_streams, device, streams))
    else:
        with ThreadPoolExecutor(1) as communicate, ThreadPoolExecutor(1) as copy:
            yield Bench(ranks, device, partial(_run_on_threads, {COMMUNICATE: communicate, COPY: copy}))


def _run_on_threads(threads: Mapping[str, ThreadPoolExecutor], work: LaneRuns) -> dict[str, Marks]:
    """Runs the work of all lanes side by side, each lane on its own thread.

    threads: the threads of the lanes "messages" and "copies". Computation runs on the calling thread.
    work: for each lane, a function and how often it is called.

    Returns for each lane, in seconds, when its first call started, then when each call ended.
    """
    started = {lane: threads[lane].submit(_repeat, *todo) for lane, todo in work.items() if lane != COMPUTE}
    marks = {COMPUTE: _repeat(*work[COMPUTE])} if COMPUTE in work else {}
    return marks | {lane: future.result() for lane, future in started.items()}


def _run_on_streams(
    device: torch.device, streams: Mapping[str, torch.cuda.Stream], work: LaneRuns
) -> dict[str, Marks]:
    """Runs the work of all lanes side by side on CUDA streams, and returns when it has finished.

    The host waits only after it has enqueued all work.

    streams: the stream of each lane: computation, messages and copies.
    work: for each lane, a function and how often it is called.

    Returns for each lane, in seconds, when its first call started, then when each call ended.
    """

    def mark(lane: str) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(streams[lane])
        return event

    torch.cuda.synchronize(device)  # earlier work, such as filling the buffers, must not be timed
    origin = mark(COMPUTE)
    for lane in work:
        streams[lane].wait_event(origin)
    events = {lane: [mark(lane)] for lane in work}
    for i in range(max(count for _, count in work.values())):
        for lane, (action, count) in work.items():
            if i < count:
                with torch.cuda.stream(streams[lane]):
                    action()
                events[lane].append(mark(lane))
    torch.cuda.synchronize(device)  # events can be read now, and the actions' buffers may be freed
    return {lane: [origin.elapsed_time(event) / 1e3 for event in row] for lane, row in events.items()}


def _repeat(action: TimedCall, count: int) -> Marks:
    """Calls a function ``count`` times. Returns when the first call began, then when each call ended.

    The times are in seconds of `time.perf_counter`.
    """
    marks = [time.perf_counter()]
    for _ in range(count):
        action()
        marks.append(time.perf_counter())
    return marks


def seconds_of(
    bench: Bench,
    lane: str,
    action: TimedCall,
    repeats: int,
    of: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Returns the seconds of one call of a function, while nothing else runs, on the slowest rank.

    Collective. One call that is not timed comes first, to warm up.

    bench: runs the function and reads the clock.
    lane: the queue in which the function runs: computation, messages or copies.
    action: the function (`Bench.made`).
    repeats: number of timed calls.
    of: computes the result from the seconds of these calls; the median by default.
    """
    bench.largest([0.0])  # begin together
    marks = bench.run({lane: (action, repeats + 1)})[lane][1:]
    return bench.largest([of([end - begin for begin, end in pairwise(marks)])])[0]


def exchange(ranks: Ranks, sent: Tensor, received: Tensor, n: int) -> None:
    """Sends n rows to every other rank and receives n rows from each, in one all-to-all.

    sent, received: ((W - 1) * n, ...), n rows for each other rank, in the order of ranks. W is the number of
        ranks.

    Raises RuntimeError if another rank fails.
    """
    assert ranks.group is not None
    splits = [n] * ranks.size
    splits[ranks.rank] = 0
    with at_stage(MESSAGES, ranks):
        work = all_to_all(sent, splits, received, splits, ranks.group)
        if work is not None:
            work.wait()


def identity(ranks: Ranks, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Identity:
    """Returns the device, ranks, versions and so on for which a profile that is measured now is valid.

    Not collective. Raises ValueError for a device that is neither a CPU nor CUDA, and for a dtype that is not
    floating point.

    ranks: the ranks that measure together.
    device: the device.
    dtype: dtype of the measured tensors.
    """
    device = torch.device(device)
    if device.type not in WIDTH:
        raise ValueError(f"device ({device}) must be one of the types {', '.join(WIDTH)}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype ({dtype}) must be floating point")
    return Identity(
        device=_full_name(device),
        device_type=device.type,
        num_ranks=ranks.size,
        backend=_backend(ranks, device),
        dtype=str(dtype).removeprefix("torch."),
        versions=Versions(torch=str(torch.__version__), cuda=torch.version.cuda, file=FORMAT),
        num_nodes=len(set(node_ids(None, ranks.members or [0]))),
        link=" ".join(f"{name}={os.environ[name]}" for name in LINKS if name in os.environ),
    )


LINKS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE")
"""Environment variables that select the network over which messages are sent."""


def _full_name(device: torch.device) -> str:
    """Returns the name of the device. For a CPU it includes the number of threads that compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # of Linux
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    model_line = re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    model = model_line[1] if model_line else platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def _backend(ranks: Ranks, device: torch.device) -> str:
    """Returns the backend of the group ("nccl", "gloo") for tensors on ``device``; "none" for one rank."""
    if ranks.size == 1:
        return "none"
    config = dist.get_backend_config(ranks.group)  # "cpu:gloo,cuda:nccl"
    by_type = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return by_type.get(device.type, config)
