"""Actions, timed alone or side by side on the lanes of a device, the same ones on all ranks.

How often a rank runs an action follows from numbers that all ranks have agreed on (`Bench.largest`), never
from its own clock: actions may be collectives.
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

AGREEING, MESSAGES = "agreeing on a profile", "measuring messages"
"""The stages that errors name."""

TimedCall = Callable[[], object]
"""A piece of work without arguments: a product, a message, a copy."""

Marks = list[float]
"""Seconds on some clock: when a lane began, and when it ended each of its actions."""

LaneRuns = Mapping[str, tuple[TimedCall, int]]
"""By lane its action, and how often it is repeated."""


@dataclass(frozen=True)
class Bench:
    """Runs actions on three lanes, as the engine would.

    run: each lane repeats its action so many times, one after another; the lanes side by side.
    """

    ranks: Ranks
    device: torch.device
    run: Callable[[LaneRuns], dict[str, Marks]]

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest that a rank has. Every rank gives as many. Also a barrier."""
        return largest(self.ranks, self.device, values, stage=AGREEING)


@contextmanager
def open_bench(ranks: Ranks, device: torch.device) -> Iterator[Bench]:
    """The bench of a device. Computes on the calling thread, or on its stream; messages and copies have a
    thread or a stream each, the threads until the block ends."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            streams = {lane: torch.cuda.Stream(device) for lane in (COMMUNICATE, COPY)}
            streams[COMPUTE] = torch.cuda.current_stream(device)
            yield Bench(ranks, device, partial(_run_on_streams, device, streams))
    else:
        with ThreadPoolExecutor(1) as communicate, ThreadPoolExecutor(1) as copy:
            yield Bench(ranks, device, partial(_run_on_threads, {COMMUNICATE: communicate, COPY: copy}))


def _run_on_threads(threads: Mapping[str, ThreadPoolExecutor], work: LaneRuns) -> dict[str, Marks]:
    started = {lane: threads[lane].submit(_repeat, *todo) for lane, todo in work.items() if lane != COMPUTE}
    marks = {COMPUTE: _repeat(*work[COMPUTE])} if COMPUTE in work else {}
    return marks | {lane: future.result() for lane, future in started.items()}


def _run_on_streams(
    device: torch.device, streams: Mapping[str, torch.cuda.Stream], work: LaneRuns
) -> dict[str, Marks]:
    """The host runs ahead."""

    def mark(lane: str) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(streams[lane])
        return event

    torch.cuda.synchronize(device)  # what the caller enqueued, and the buffers' first values
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
    torch.cuda.synchronize(device)  # so the actions' buffers are free to go, too
    return {lane: [origin.elapsed_time(event) / 1e3 for event in row] for lane, row in events.items()}


def _repeat(action: TimedCall, count: int) -> Marks:
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
    """Seconds of one action alone: the median of ``repeats`` (or what ``of`` takes), the slowest rank's.

    One more runs before them and does not count. Collective.
    """
    bench.largest([0.0])  # begin together
    marks = bench.run({lane: (action, repeats + 1)})[lane][1:]
    return bench.largest([of([end - begin for begin, end in pairwise(marks)])])[0]


def exchange(ranks: Ranks, sent: Tensor, received: Tensor, n: int) -> None:
    """Sends n rows to every other rank and receives as many, in one all-to-all; own rows are not sent.

    sent, received: ((W - 1) * n, ...), by rank. W ranks. Raises RuntimeError where a peer fails.
    """
    assert ranks.group is not None
    splits = [n] * ranks.size
    splits[ranks.rank] = 0
    with at_stage(MESSAGES, ranks):
        work = all_to_all(sent, splits, received, splits, ranks.group)
        if work is not None:
            work.wait()


def identity(ranks: Ranks, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Identity:
    """Of the profile that `pmoe.measure.rates.measure` would take here. Not collective.

    Raises ValueError for a device that is neither a CPU nor CUDA, and a dtype that is not floating point.
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
"""Variables that change which link the messages take."""


def _full_name(device: torch.device) -> str:
    """Of a CPU with the number of threads that compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # of Linux
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    model = found[1] if found else platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def _backend(ranks: Ranks, device: torch.device) -> str:
    """Of the group, for tensors on ``device``."""
    if ranks.size == 1:
        return "none"
    config = dist.get_backend_config(ranks.group)  # "cpu:gloo,cuda:nccl"
    by_type = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return by_type.get(device.type, config)
