"""Kinds of work of one lane, in pieces of any size, and the line of their seconds over size.

WIDTH the columns and rows of the measured weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from pmoe.comm.ranks import Ranks
from pmoe.measure.bench import Bench, TimedCall, exchange, seconds_of
from pmoe.planner.cost_model import COMMUNICATE, COMPUTE
from pmoe.planner.costs import Fit, fit, from_zero
from pmoe.planner.profile import GOOD_FIT, WIDTH

MAX_ROWS = {"cpu": 8192, "cuda": 16384}
"""Largest number of rows that the measured weight is applied to, by device type."""

FIRST_ROWS = {"cpu": 64, "cuda": 256}
"""Smallest number of these rows. It grows up to MAX_ROWS until a product takes long enough to be timed."""

FIRST_BYTES = 2**14
"""Smallest size of a message or a copy."""

MAX_BYTES = 2**26
"""Largest size of a message or a copy. It is reached in the same way as MAX_ROWS."""

TRIES = 7
"""Number of runs of each size in that search.

Beside other processes a message may take many times its fastest.
"""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The effort of a measurement: how long and how often work runs.

    piece_seconds: seconds of the largest size of each line.
    span_seconds: how long lanes run side by side.
    repeats: runs of each size.
    rounds: runs of each combination of lanes.
    """

    piece_seconds: float
    span_seconds: float
    repeats: int
    rounds: int


QUICK = Effort(piece_seconds=2e-3, span_seconds=0.024, repeats=9, rounds=2)
USUAL = Effort(piece_seconds=5e-3, span_seconds=0.1, repeats=15, rounds=7)


@dataclass(frozen=True, kw_only=True)
class LaneWork:
    """A kind of work that comes in units.

    lane: the lane that does it.
    size: multiply-adds or bytes of a unit.
    first_units, max_units: smallest and largest number of units to try.
    make: makes one piece of work of a number of units.
    """

    lane: str
    size: int
    first_units: int
    max_units: int
    make: Callable[[int], TimedCall]


def products(device: torch.device, dtype: torch.dtype) -> LaneWork:
    """Returns products as a kind of work. A unit is a row that the measured weight is applied to."""
    width = WIDTH[device.type]
    generator = torch.Generator(device).manual_seed(0)  # leaves the caller's random numbers as they are

    def make(rows: int) -> TimedCall:
        x, weight, y = (
            torch.randn(num_rows, width, dtype=dtype, device=device, generator=generator)
            for num_rows in (rows, width, rows)
        )
        return lambda: torch.mm(x, weight, out=y)

    first_units = FIRST_ROWS[device.type]
    max_units = MAX_ROWS[device.type]
    return LaneWork(lane=COMPUTE, size=width * width, first_units=first_units, max_units=max_units, make=make)


def transfer(
    lane: str, size: int, make: Callable[[int], TimedCall], first_bytes: int = FIRST_BYTES
) -> LaneWork:
    """Returns messages or copies as a kind of work.

    size: bytes of a unit.
    make: makes a piece of a number of units.
    """
    first_units = max(16, first_bytes // size)
    max_units = max(64, MAX_BYTES // size)
    return LaneWork(lane=lane, size=size, first_units=first_units, max_units=max_units, make=make)


def messages(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> LaneWork:
    """Returns all-to-alls with equal splits as a kind of work, among two or more ranks.

    A unit is one element for each other rank.
    """
    others = ranks.size - 1

    def make(elements: int) -> TimedCall:
        # Ones, because memory that was never written may not be there yet.
        sent, received = torch.ones(2, others * elements, dtype=dtype, device=device)
        return lambda: exchange(ranks, sent, received, elements)

    return transfer(COMMUNICATE, others * dtype.itemsize, make)


def longest_units(bench: Bench, work: LaneWork, piece_seconds: float) -> int:
    """Returns the number of units for the largest size of a line.

    A piece of it takes about ``piece_seconds``, and at least three times as long as the smallest size.
    Otherwise the fixed cost of a task would hide its size. Of a few tries the fastest counts, because an
    interruption would make the size too small.
    """
    units = work.first_units
    first_seconds = seconds = seconds_of(bench, work.lane, work.make(units), TRIES, min)
    while units < work.max_units and (seconds < piece_seconds / 2 or seconds < 3 * first_seconds):
        units = min(work.max_units, 4 * units)
        seconds = seconds_of(bench, work.lane, work.make(units), TRIES, min)
    if seconds < piece_seconds:
        units = min(work.max_units, int(units * piece_seconds / seconds))
    return units


def measured_line(bench: Bench, work: LaneWork, sizes: Iterable[int], repeats: int) -> Fit:
    """Returns the line through the seconds of some sizes.

    If they are not on a line they are measured twice. If caches or noise make the smaller sizes cheaper
    than any line with alpha, beta >= 0 allows, the line goes from zero through the largest size.

    sizes: in units.
    repeats: runs of each size.
    """
    sizes = list(sizes)
    for _ in range(2):
        samples = {
            float(units * work.size): seconds_of(bench, work.lane, work.make(units), repeats)
            for units in sizes
        }
        fitted = fit(samples.items(), relative=True)
        if not (fitted.line.alpha_seconds and fitted.line.beta_seconds):
            fitted = from_zero(samples)
        if fitted.r_squared >= GOOD_FIT:
            break
    return fitted
