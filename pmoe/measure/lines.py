"""Kinds of work of one lane, in pieces of any size, and the line of their seconds by size.

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
FIRST_ROWS = {"cpu": 64, "cuda": 256}
"""By device type: the number of rows that the measured weight is applied to grows from the first to the most,
until a product is long enough to be timed."""

FIRST_BYTES, MAX_BYTES = 2**14, 2**26
"""What travels grows likewise."""

TRIES = 7
"""Of each size in that search. Beside other processes a message may take many times its fastest."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """piece_seconds: the longest size of each line. span_seconds: how long lanes run side by side. repeats:
    of each size. rounds: of each combination of lanes."""

    piece_seconds: float
    span_seconds: float
    repeats: int
    rounds: int


QUICK = Effort(piece_seconds=2e-3, span_seconds=0.024, repeats=9, rounds=2)
USUAL = Effort(piece_seconds=5e-3, span_seconds=0.1, repeats=15, rounds=7)


@dataclass(frozen=True, kw_only=True)
class LaneWork:
    """A kind of work, in units of ``size`` multiply-adds or bytes. make(units) gives one piece of it."""

    lane: str
    size: int
    first_units: int
    max_units: int
    make: Callable[[int], TimedCall]


def products(device: torch.device, dtype: torch.dtype) -> LaneWork:
    """A unit is a row that the weight is applied to."""
    width = WIDTH[device.type]
    generator = torch.Generator(device).manual_seed(0)  # the caller's random numbers stay as they are

    def make(rows: int) -> TimedCall:
        x, weight, y = (
            torch.randn(each, width, dtype=dtype, device=device, generator=generator)
            for each in (rows, width, rows)
        )
        return lambda: torch.mm(x, weight, out=y)

    first, most = FIRST_ROWS[device.type], MAX_ROWS[device.type]
    return LaneWork(lane=COMPUTE, size=width * width, first_units=first, max_units=most, make=make)


def transfer(
    lane: str, size: int, make: Callable[[int], TimedCall], first_bytes: int = FIRST_BYTES
) -> LaneWork:
    """Of something that travels, ``size`` bytes a unit."""
    first, most = max(16, first_bytes // size), max(64, MAX_BYTES // size)
    return LaneWork(lane=lane, size=size, first_units=first, max_units=most, make=make)


def messages(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> LaneWork:
    """All-to-alls with equal splits. A unit is an element for each other rank; there must be others."""
    others = ranks.size - 1

    def make(elements: int) -> TimedCall:
        # ones have been written, so that they have memory of their own
        sent, received = torch.ones(2, others * elements, dtype=dtype, device=device)
        return lambda: exchange(ranks, sent, received, elements)

    return transfer(COMMUNICATE, others * dtype.itemsize, make)


def longest_units(bench: Bench, work: LaneWork, piece_seconds: float) -> int:
    """Enough for a piece of ``piece_seconds``, and for three times the seconds of the first try: where a task
    costs much whatever its size, size must show beside it. The fastest of a few tries counts, since an
    interruption would make pieces too small."""
    units = work.first_units
    first = seconds = seconds_of(bench, work.lane, work.make(units), TRIES, min)
    while units < work.max_units and (seconds < piece_seconds / 2 or seconds < 3 * first):
        units = min(work.max_units, 4 * units)
        seconds = seconds_of(bench, work.lane, work.make(units), TRIES, min)
    if seconds < piece_seconds:
        units = min(work.max_units, int(units * piece_seconds / seconds))
    return units


def measured_line(bench: Bench, work: LaneWork, sizes: Iterable[int], repeats: int) -> Fit:
    """Through some sizes, in units, measured twice where they are on no line. Where caches or noise make the
    smaller cheaper than any line from zero or above, the line goes from zero through the largest."""
    sizes = list(sizes)
    for _ in range(2):
        samples = {
            float(units * work.size): seconds_of(bench, work.lane, work.make(units), repeats)
            for units in sizes
        }
        found = fit(samples.items(), relative=True)
        if not (found.line.alpha_seconds and found.line.beta_seconds):
            found = from_zero(samples)
        if found.r_squared >= GOOD_FIT:
            break
    return found
