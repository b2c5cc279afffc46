"""Measures a `Profile`: a line for each kind of work, and how much the kinds of work slow each other.

A line is seconds = alpha + beta * size. `measure` is collective, so the number of runs follows from its
arguments and from numbers on which all ranks agree (`pmoe.measure.timing`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations

import torch

from pmoe.comm.agreement import from_first
from pmoe.comm.ranks import Ranks
from pmoe.measure.bench import Bench, Marks, TimedCall, identity, open_bench, seconds_of
from pmoe.measure.line_fits import (
    QUICK,
    TRIES,
    USUAL,
    WEIGHT_SHARE,
    Effort,
    LaneWork,
    longest_units,
    measured_line,
    messages,
    products,
    transfer,
    within_bytes,
)
from pmoe.measure.timing import timestamp
from pmoe.planner.cost_model import COMMUNICATE, COPY, FACTORS, Interference
from pmoe.planner.costs import FREE, Fit
from pmoe.planner.profile import Profile

FIRST_COPY_BYTES = 2**20
"""Smallest size of a measured copy, in bytes."""

MIN_SPEED = 1e-3
"""Smallest stored speed of computation, messages or copies beside other work; 1 is the speed alone.

A measured speed of 0 is replaced by this number, because code divides by the speed.
"""


def measure(
    ranks: Ranks,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    quick: bool = False,
    most_bytes: float = math.inf,
) -> Profile:
    """Measures the seconds of products, messages and copies on these ranks. Collective.

    Returns a profile, the same on every rank. This takes about ten seconds, or one or two if ``quick``. The
    device and the ranks should do nothing else meanwhile.

    dtype: dtype of the tensors that are multiplied, sent and copied.
    quick: whether to measure smaller sizes with fewer runs.
    most_bytes: about how many bytes the tensors that are measured may take together, the same on every rank.
        With few bytes, only small products and messages can be measured.

    Raises ValueError for a device or dtype that cannot be measured, and RuntimeError if another rank fails.
    """
    begin = time.perf_counter()
    device = torch.device(device)
    own_identity = identity(ranks, device, dtype)
    effort = QUICK if quick else USUAL
    lines: dict[str, Fit] = {"message": FREE}
    pieces: dict[str, list[TimedCall]] = {}
    with torch.inference_mode(False), torch.no_grad(), open_bench(ranks, device) as bench:
        kinds = _kinds(bench, dtype, most_bytes)
        for name, any_size in kinds.items():
            kind = within_bytes(any_size, most_bytes / len(kinds))
            units = longest_units(bench, kind, effort.piece_seconds)
            lines[name] = measured_line(bench, kind, (units // 16, units // 4, units), effort.repeats)
            pieces.setdefault(kind.lane, []).append(bench.made(partial(kind.make, units)))
        by_lane = {lane: partial(_in_turn, of_lane) for lane, of_lane in pieces.items()}
        interference = _interference(bench, by_lane, effort)
    costs = {name: fitted.line for name, fitted in lines.items()}
    profile = Profile(
        **(vars(own_identity) | costs),
        r_squared=min(line.r_squared for line in lines.values()),
        interference=interference,
        seconds=time.perf_counter() - begin,
        when=timestamp(),
    )
    return from_first(ranks, profile, stage="sharing a profile")


def _kinds(bench: Bench, dtype: torch.dtype, most_bytes: float) -> dict[str, LaneWork]:
    """Returns the kinds of work to measure (products, messages, copies), by the names of profile fields.

    Messages are left out if there is a single rank.

    bench: has the ranks and the device.
    dtype: dtype of the tensors.
    most_bytes: about how many bytes the tensors that are measured may take together.
    """
    ranks = bench.ranks
    device = bench.device

    def copy(elements: int, *, out: bool) -> TimedCall:
        pinned = device.type == "cuda"  # copies are asynchronous only from and to pinned memory
        inside = torch.ones(elements, dtype=dtype, device=device)
        outside = torch.ones(elements, dtype=dtype, device="cpu", pin_memory=pinned)
        target, source = (outside, inside) if out else (inside, outside)
        return lambda: target.copy_(source, non_blocking=True)

    kinds = {"compute": products(device, dtype, most_bytes / WEIGHT_SHARE)}
    if ranks.size > 1:
        kinds["message"] = messages(ranks, device, dtype)
    for name, out in (("copy_out", True), ("copy_in", False)):
        kinds[name] = transfer(COPY, dtype.itemsize, partial(copy, out=out), FIRST_COPY_BYTES)
    return kinds


def _in_turn(calls: Sequence[TimedCall]) -> None:
    """Calls several functions one after another.

    So a copy to the host and a copy back can be timed together as one work.
    """
    for call in calls:
        call()


def _interference(bench: Bench, pieces: Mapping[str, TimedCall], effort: Effort) -> Interference:
    """Measures how much computation, messages and copies slow each other when they run at the same time.

    Each of the three is a lane, a queue of tasks that run one after another. Two or three lanes run side by
    side, in every combination. The result for a lane in a combination is its relative speed,

        (runs per second in the combination) / (runs per second alone)

    as a median over rounds, on the slowest rank. The numbers of runs are chosen so that each lane alone would
    take about the same time. All ranks must send equally many messages, so the number of messages is fixed in
    advance. In a combination with messages, the other lanes make twice as many runs as alone, so that they do
    not end before the messages. `speeds` counts only the time in which all lanes are busy.

    Collective.

    bench: runs the work and reads the clock.
    pieces: for each lane, a function that does some work.
    effort: how long and how often the work runs.
    """
    alone = {lane: seconds_of(bench, lane, piece, TRIES, min) for lane, piece in pieces.items()}
    span = max(effort.span_seconds, 4 * max(alone.values()))
    count = {lane: math.ceil(span / seconds) for lane, seconds in alone.items()}

    def run(lanes: Sequence[str]) -> dict[str, float]:
        bench.largest([0.0])  # begin together
        longer = 2 if COMMUNICATE in lanes and len(lanes) > 1 else 1
        counts = {lane: count[lane] * (1 if lane == COMMUNICATE else longer) for lane in lanes}
        return speeds(bench.run({lane: (pieces[lane], counts[lane]) for lane in lanes}))

    together = [lanes for several in (2, 3) for lanes in combinations(pieces, several)]
    relative: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for _ in range(effort.rounds):
        full = {lane: run([lane])[lane] for lane in pieces}
        for lanes in together:
            for lane, speed in run(lanes).items():
                relative.setdefault((lane, lanes), []).append(speed / full[lane])
    # One rank sends no messages. "all" in a field's name then means compute and copy.
    lanes_of = {name: tuple(lane for lane in lanes if lane in pieces) for name, (_, lanes) in FACTORS.items()}
    names = [name for name, (lane, _) in FACTORS.items() if (lane, lanes_of[name]) in relative]
    slowness = [-statistics.median(relative[FACTORS[name][0], lanes_of[name]]) for name in names]
    slowest = bench.largest(slowness)
    return Interference(
        **{name: min(1.0, max(MIN_SPEED, -s)) for name, s in zip(names, slowest, strict=True)}
    )


def speeds(marks: Mapping[str, Marks]) -> dict[str, float]:
    """Returns the runs per second of each lane, during the time in which all lanes are busy.

    A lane is a queue of tasks: computation, messages, or copies. All lanes are busy from the start of the
    last lane to the end of the lane that ends first. A run that is only partly within this time counts as a
    fraction. If all lanes are never busy at once, the time from the first start to the last end is used.

    marks: for each lane, in seconds, when its first run started, then when each of its runs ended.

    Example: {a: 0, 2, 4, 6; b: 1, 5} -> from 1 to 5, a: 2 runs, 0.5 per second, b: 1 run, 0.25 per second.
    """
    import numpy as np  # not needed to import pmoe

    begin, end = max(row[0] for row in marks.values()), min(row[-1] for row in marks.values())
    if end <= begin:
        begin, end = min(row[0] for row in marks.values()), max(row[-1] for row in marks.values())
    done = {lane: np.interp([begin, end], row, range(len(row))) for lane, row in marks.items()}
    return {lane: float(at_end - at_begin) / (end - begin) for lane, (at_begin, at_end) in done.items()}
