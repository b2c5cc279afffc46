"""Measures what a `Profile` holds: lines of each kind of work, and how much the lanes slow each other.

`measure` is collective: see `pmoe.measure.rounds`.

W ranks, WIDTH the columns and rows of the measured weight.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from pmoe.comm.agreement import from_first
from pmoe.comm.ranks import Ranks
from pmoe.measure.bench import (
    COMMUNICATE,
    COMPUTE,
    COPY,
    Bench,
    Marks,
    TimedCall,
    exchange,
    identity,
    open_bench,
    seconds_of,
)
from pmoe.measure.rounds import timestamp
from pmoe.planner.cost_model import Interference
from pmoe.planner.costs import FREE, Fit, fit, from_zero
from pmoe.planner.profile import GOOD_FIT, WIDTH, Profile

MAX_ROWS = {"cpu": 8192, "cuda": 16384}
FIRST_ROWS = {"cpu": 64, "cuda": 256}
"""By device type: the number of rows that the measured weight is applied to grows from the first to the most,
until a product is long enough to be timed."""

FIRST_MESSAGE_BYTES, FIRST_COPY_BYTES, MAX_BYTES = 2**14, 2**20, 2**26
"""Messages and copies likewise."""

TRIES = 7
"""Of each size in that search. Beside other processes a message may take many times its fastest."""

MIN_SPEED = 1e-3
"""A lane that others bring to a stand has this relative speed, since a factor of zero has no inverse."""


@dataclass(frozen=True, kw_only=True)
class _Effort:
    """piece_seconds: the longest of the three sizes of each line. span_seconds: how long lanes run side by
    side. repeats: of each size. rounds: of each combination of lanes."""

    piece_seconds: float
    span_seconds: float
    repeats: int
    rounds: int


QUICK = _Effort(piece_seconds=2e-3, span_seconds=0.024, repeats=9, rounds=2)
FULL = _Effort(piece_seconds=5e-3, span_seconds=0.1, repeats=15, rounds=7)


def measure(
    ranks: Ranks, device: torch.device | str, dtype: torch.dtype = torch.float32, *, quick: bool = False
) -> Profile:
    """Collective; every rank returns the same profile, after some ten seconds, or one or two where quick.

    The device and the ranks should have nothing else to do meanwhile. Raises as `identity` does, and
    RuntimeError where a peer fails.
    """
    begin = time.perf_counter()
    device = torch.device(device)
    who, effort = identity(ranks, device, dtype), QUICK if quick else FULL
    lines: dict[str, Fit] = {"message": FREE}
    pieces: dict[str, TimedCall] = {}
    with torch.inference_mode(False), torch.no_grad(), open_bench(ranks, device) as bench:
        for name, kind in _kinds(bench, dtype).items():
            units = _units_for(bench, kind, effort)
            lines[name] = _rate_line(bench, kind, units, effort)
            pieces[name] = kind.make(units)
        interference = _interference(bench, _by_lane(pieces), effort)
    costs = {name: found.line for name, found in lines.items()}
    profile = Profile(
        **(vars(who) | costs),
        r_squared=min(line.r_squared for line in lines.values()),
        interference=interference,
        seconds=time.perf_counter() - begin,
        when=timestamp(),
    )
    return from_first(ranks, profile, stage="sharing a profile")


@dataclass(frozen=True, kw_only=True)
class _LaneWork:
    """A kind of work, in units of ``size`` multiply-adds or bytes. make(units) gives one piece of it."""

    lane: str
    size: float
    first_units: int
    max_units: int
    make: Callable[[int], TimedCall]


def _kinds(bench: Bench, dtype: torch.dtype) -> dict[str, _LaneWork]:
    """By the name of their line in a `Profile`."""
    ranks, device = bench.ranks, bench.device
    generator = torch.Generator(device).manual_seed(0)  # the caller's random numbers stay as they are
    others = ranks.size - 1

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

    width = WIDTH[device.type]
    weight = made(width, width)

    def compute(rows: int) -> TimedCall:
        x, y = made(rows, width), made(rows, width)
        return lambda: torch.mm(x, weight, out=y)

    def message(elements: int) -> TimedCall:
        sent, received = made(elements * others), made(elements * others)
        return lambda: exchange(ranks, sent, received, elements)

    def copy(elements: int, *, out: bool) -> TimedCall:
        pinned = device.type == "cuda"  # so that copies need not wait; ones, so that it has been touched
        inside = made(elements)
        outside = torch.ones(elements, dtype=dtype, device="cpu", pin_memory=pinned)
        target, source = (outside, inside) if out else (inside, outside)
        return lambda: target.copy_(source, non_blocking=True)

    def transfer(lane: str, size: int, first_bytes: int, make: Callable[[int], TimedCall]) -> _LaneWork:
        first, most = max(16, first_bytes // size), max(64, MAX_BYTES // size)
        return _LaneWork(lane=lane, size=size, first_units=first, max_units=most, make=make)

    kinds = {
        "compute": _LaneWork(
            lane=COMPUTE,
            size=width * width,
            first_units=FIRST_ROWS[device.type],
            max_units=MAX_ROWS[device.type],
            make=compute,
        )
    }
    if others:
        kinds["message"] = transfer(COMMUNICATE, others * dtype.itemsize, FIRST_MESSAGE_BYTES, message)
    kinds["copy_out"] = transfer(COPY, dtype.itemsize, FIRST_COPY_BYTES, partial(copy, out=True))
    kinds["copy_in"] = transfer(COPY, dtype.itemsize, FIRST_COPY_BYTES, partial(copy, out=False))
    return kinds


def _units_for(bench: Bench, kind: _LaneWork, effort: _Effort) -> int:
    """Enough for a piece of ``effort.piece_seconds``, and for three times the seconds of the first try: where
    a task costs much whatever its size, size must show beside it. The fastest of a few tries counts, since an
    interruption would make pieces too small."""
    units = kind.first_units
    first = seconds = seconds_of(bench, kind.lane, kind.make(units), TRIES, min)
    while units < kind.max_units and (seconds < effort.piece_seconds / 2 or seconds < 3 * first):
        units = min(kind.max_units, 4 * units)
        seconds = seconds_of(bench, kind.lane, kind.make(units), TRIES, min)
    if seconds < effort.piece_seconds:
        units = min(kind.max_units, int(units * effort.piece_seconds / seconds))
    return units


def _rate_line(bench: Bench, kind: _LaneWork, units: int, effort: _Effort) -> Fit:
    """Through three sizes, measured twice where they are on no line. Where caches or noise make the smaller
    cheaper than any line from zero or above, the line goes from zero through the largest."""
    for _ in range(2):
        samples = {
            part * kind.size: seconds_of(bench, kind.lane, kind.make(part), effort.repeats)
            for part in (units // 16, units // 4, units)
        }
        found = fit(samples.items(), relative=True)
        if not (found.line.alpha_seconds and found.line.beta_seconds):
            found = from_zero(samples)
        if found.r_squared >= GOOD_FIT:
            break
    return found


FACTORS = {
    "mu_comp": (COMMUNICATE, (COMPUTE, COMMUNICATE)),
    "mu_mem": (COMMUNICATE, (COMMUNICATE, COPY)),
    "mu_all": (COMMUNICATE, (COMPUTE, COMMUNICATE, COPY)),
    "sigma_comm": (COMPUTE, (COMPUTE, COMMUNICATE)),
    "sigma_mem": (COMPUTE, (COMPUTE, COPY)),
    "sigma_all": (COMPUTE, (COMPUTE, COMMUNICATE, COPY)),
    "eta_comm": (COPY, (COMMUNICATE, COPY)),
    "eta_comp": (COPY, (COMPUTE, COPY)),
    "eta_all": (COPY, (COMPUTE, COMMUNICATE, COPY)),
}
"""Fig. 3: whose speed, and which lanes are busy."""


def _by_lane(pieces: Mapping[str, TimedCall]) -> dict[str, TimedCall]:
    """One piece a lane, in the order of FACTORS; that of the copies goes out and in."""
    copy_out, copy_in = pieces["copy_out"], pieces["copy_in"]
    found = {COMPUTE: pieces["compute"]}
    if "message" in pieces:
        found[COMMUNICATE] = pieces["message"]
    return found | {COPY: lambda: (copy_out(), copy_in())}


def _interference(bench: Bench, pieces: Mapping[str, TimedCall], effort: _Effort) -> Interference:
    """Every lane gets so many pieces that they take about the same time alone. Beside messages, whose number
    all ranks must know beforehand, the others get twice as many, to be busy all the while. Speeds are those
    of the time in which all lanes are busy, so it does not matter which of them ends first."""
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
    # Without messages, "all" are the two lanes that there are.
    lanes_of = {name: tuple(lane for lane in lanes if lane in pieces) for name, (_, lanes) in FACTORS.items()}
    names = [name for name, (lane, _) in FACTORS.items() if (lane, lanes_of[name]) in relative]
    slowness = [-statistics.median(relative[FACTORS[name][0], lanes_of[name]]) for name in names]
    slowest = bench.largest(slowness)
    return Interference(
        **{name: min(1.0, max(MIN_SPEED, -s)) for name, s in zip(names, slowest, strict=True)}
    )


def speeds(marks: Mapping[str, Marks]) -> dict[str, float]:
    """Pieces a second of each lane, from when the last lane began until the first lane ended. A piece under
    way counts by its part in that time. Lanes that never ran together count from the first to the last mark.

    Example: {a: 0, 2, 4, 6; b: 1, 5} -> from 1 to 5, a: 2 pieces, 0.5 a second, b: 1 piece, 0.25 a second.
    """
    import numpy as np  # not needed to import pmoe

    begin, end = max(row[0] for row in marks.values()), min(row[-1] for row in marks.values())
    if end <= begin:
        begin, end = min(row[0] for row in marks.values()), max(row[-1] for row in marks.values())
    done = {lane: np.interp([begin, end], row, range(len(row))) for lane, row in marks.items()}
    return {lane: float(at_end - at_begin) / (end - begin) for lane, (at_begin, at_end) in done.items()}
