"""The timing loop: calls functions in turn, in rounds, and takes the median seconds of each function.

Each function does some work and returns the seconds of its parts, such as forward and backward. Functions
take turns, so that other work on the machine affects all of them. The number of rounds follows from the
arguments alone, never from a clock, so that the functions may be collectives.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import TypeVar

import torch

from pmoe.comm.agreement import Agree, largest
from pmoe.comm.ranks import Ranks
from pmoe.warn import log

Part = TypeVar("Part")

PROGRESS_SECONDS = 5
"""Seconds between log lines that report progress."""


def timestamp() -> str:
    """Returns the present time in UTC, in ISO 8601 format, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def in_rounds(
    runs: Sequence[Callable[[], Sequence[Part]]],
    rounds: int,
    *,
    warm_up: int = 1,
    begin: Callable[[], object] | None = None,
    rotate: bool = False,
) -> list[list[Sequence[Part]]]:
    """Calls functions in turn for a number of rounds. Returns, for each function, its results of every round.

    Args:
        runs: the functions. Each returns one or more parts, such as the seconds of forward and of backward.
        rounds: number of rounds whose results are returned.
        warm_up: number of rounds before these, whose results are dropped.
        begin: called before each call of a function; for example a barrier of all ranks (`begin_together`).
        rotate: whether each round starts one function later than the round before, so that each function is
            sometimes first and sometimes last.

    Raises ValueError for rounds below 1 and warm_up below 0.

    Example: functions 0 and 1, 2 rounds, 1 warm-up, no rotation -> calls 0 1 (warm-up), 0 1 0 1.
    """
    if rounds < 1 or warm_up < 0:
        raise ValueError(f"rounds ({rounds}) must be at least 1 and warm_up ({warm_up}) at least 0")
    samples: list[list[Sequence[Part]]] = [[] for _ in runs]
    last_report = time.monotonic()
    for turn, place in itertools.product(range(-warm_up, rounds), range(len(runs))):
        if time.monotonic() - last_report > PROGRESS_SECONDS:
            last_report = time.monotonic()
            log.info(
                "measuring: round %d of %d, run %d of %d",
                turn + warm_up + 1,
                rounds + warm_up,
                place + 1,
                len(runs),
            )
        at = (place + turn * rotate) % len(runs)
        if begin is not None:
            begin()
        parts = runs[at]()
        if turn >= 0:
            samples[at].append(parts)
    return samples


def median_seconds(
    runs: Sequence[Callable[[], Sequence[Part]]],
    rounds: int,
    *,
    warm_up: int = 1,
    begin: Callable[[], object] | None = None,
    seconds: Callable[[Part], float] = float,  # type: ignore[assignment]
    agree: Agree | None = None,
) -> list[list[float]]:
    """Calls functions in turn for a number of rounds. Returns, for each function, its parts' median seconds.

    Args:
        runs: the functions. Each returns one or more parts, such as the seconds of forward and of backward.
        rounds: number of rounds whose results are used.
        warm_up: number of rounds before these, whose results are dropped.
        begin: called before each call of a function; for example a barrier of all ranks (`begin_together`).
        seconds: converts a part, which may be a pair of CUDA events, to seconds. It is called when all rounds
            are over, so that the host does not wait for a device between calls.
        agree: takes the largest of each value over the ranks. It is called once, at the end, with all
            medians, so that the result is that of the slowest rank. None returns this rank's medians.
    """
    medians = [
        [statistics.median(map(seconds, part)) for part in zip(*samples, strict=True)]
        for samples in in_rounds(runs, rounds, warm_up=warm_up, begin=begin)
    ]
    if agree is None:
        return medians
    slowest = iter(agree([median for parts in medians for median in parts]))
    return [list(itertools.islice(slowest, len(parts))) for parts in medians]


def begin_together(ranks: Ranks, device: torch.device) -> Callable[[], object] | None:
    """Returns a function that is a barrier of these ranks; None for a single rank.

    `in_rounds` and `median_seconds` take it as the argument ``begin``, so that all ranks start a run
    together. Unlike torch's own barrier, it raises an error that names its stage if a rank dies.

    device: the device whose work is timed.
    """
    if ranks.size == 1:
        return None
    return functools.partial(largest, ranks, device, [0.0], stage="beginning a timed run")


def clock_of(*devices: torch.device) -> Callable[[], float]:
    """Returns a clock in seconds that waits for all work on these CUDA devices before it reads the time.

    Devices that are not CUDA devices are ignored.
    """
    on_gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]

    def when_done() -> float:
        for device in on_gpus:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return when_done


def marked(work: Callable[[], object]) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    """Runs ``work`` between two CUDA events on the current stream. Returns a list with the pair of events.

    The host does not wait for the device. `event_seconds` later returns the seconds between the events.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    return [(begin, end)]


def event_seconds(part: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
    """Returns the seconds between two CUDA events. The host waits for the second one."""
    begin, end = part
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
