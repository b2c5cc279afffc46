"""The bench: times actions alone or side by side on the lanes of a device.

All ranks time the same actions. Actions may be collectives, so all ranks must run an action equally often.
How often follows from numbers that all ranks have agreed on (`Bench.largest`), never from a rank's own
clock.
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
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.agreement import largest
from pmoe.comm.base import all_to_all
from pmoe.comm.ranks import Ranks, at_stage
from pmoe.comm.topology import node_ids
from pmoe.planner.cost_model import COMMUNICATE, COMPUTE, COPY
from pmoe.planner.profile import FORMAT, WIDTH, Identity, Versions

AGREEING = "agreeing on a profile"
"""Stage that an error names when ranks agree on numbers."""

MESSAGES = "measuring messages"
"""Stage that an error names when ranks measure messages."""

TimedCall = Callable[[], object]
"""A piece of work without arguments: a product, a message, a copy."""

Marks = list[float]
"""Times of one lane in seconds, on any clock: when it began, and when it ended each of its actions."""

LaneRuns = Mapping[str, tuple[TimedCall, int]]
"""Maps each lane to (its action, how often it is repeated)."""


@dataclass(frozen=True)
class Bench:
    """Runs actions on three lanes, as the engine would.

    ranks: the ranks that measure together.
    device: where the actions run.
    run: repeats the action of each lane as often as asked, one after another; lanes run side by side.
        Returns the marks of each lane.
    """

    ranks: Ranks
    device: torch.device
    run: Callable[[LaneRuns], dict[str, Marks]]

    def largest(self, values: Sequence[float]) -> list[float]:
        """Returns the largest of each value over all ranks. It is also a barrier.

        Every rank must pass the same number of values.
        """
        return largest(self.ranks, self.device, values, stage=AGREEING)


@contextmanager
def open_bench(ranks: Ranks, device: torch.device) -> Iterator[Bench]:
    """Opens the bench of a device, until the block ends.

    Computation uses the calling thread, or its current stream. Messages and copies have a thread or a
    stream each.
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
    """Runs the lanes side by side, each on its own thread."""
    started = {lane: threads[lane].submit(_repeat, *todo) for lane, todo in work.items() if lane != COMPUTE}
    marks = {COMPUTE: _repeat(*work[COMPUTE])} if COMPUTE in work else {}
    return marks | {lane: future.result() for lane, future in started.items()}


def _run_on_streams(
    device: torch.device, streams: Mapping[str, torch.cuda.Stream], work: LaneRuns
) -> dict[str, Marks]:
    """Runs the lanes side by side on streams. The host only enqueues, and does not wait in between."""

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
    """Runs the action ``count`` times and returns when it began and when each run ended."""
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
    """Returns the seconds of one action that runs alone, on the slowest rank.

    One run before the others does not count. Collective.

    repeats: number of runs that count.
    of: makes one number of their seconds; the median by default.
    """
    bench.largest([0.0])  # begin together
    marks = bench.run({lane: (action, repeats + 1)})[lane][1:]
    return bench.largest([of([end - begin for begin, end in pairwise(marks)])])[0]


def exchange(ranks: Ranks, sent: Tensor, received: Tensor, n: int) -> None:
    """Sends n rows to every other rank and receives n from each, in one all-to-all. Own rows are not sent.

    sent, received: ((W - 1) * n, ...), in order of rank.

    Raises RuntimeError if a peer fails.
    """
    assert ranks.group is not None
    splits = [n] * ranks.size
    splits[ranks.rank] = 0
    with at_stage(MESSAGES, ranks):
        work = all_to_all(sent, splits, received, splits, ranks.group)
        if work is not None:
            work.wait()


def identity(ranks: Ranks, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Identity:
    """Returns the identity of a profile that `pmoe.measure.rates.measure` would measure here.

    Not collective. Raises ValueError for a device that is neither a CPU nor CUDA, and for a dtype that is
    not floating point.
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
"""Environment variables that select the link which messages use."""


def _full_name(device: torch.device) -> str:
    """Returns the name of the device. A CPU's includes the number of threads that compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # of Linux
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    model_line = re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    model = model_line[1] if model_line else platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def _backend(ranks: Ranks, device: torch.device) -> str:
    """Returns the backend of the group for tensors on ``device``; "none" for one rank."""
    if ranks.size == 1:
        return "none"
    config = dist.get_backend_config(ranks.group)  # "cpu:gloo,cuda:nccl"
    by_type = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return by_type.get(device.type, config)
