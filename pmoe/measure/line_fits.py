"""Measures work of different sizes and fits a line: seconds = alpha + beta * size.

The work is a matrix product, a message or a copy. A product multiplies a number of rows by a square weight of
WIDTH rows and columns. Work runs in a lane (computation, messages, copies): a queue of tasks that run one
after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch

from pmoe.comm.ranks import Ranks
from pmoe.measure.bench import Bench, TimedCall, exchange, seconds_of
from pmoe.planner.cost_model import COMMUNICATE, COMPUTE
from pmoe.planner.costs import Fit, fit, from_zero
from pmoe.planner.profile import GOOD_FIT, WIDTH

MAX_ROWS = {"cpu": 8192, "cuda": 16384}
"""Largest number of rows that are multiplied in a measured product, by device type."""

FIRST_ROWS = {"cpu": 64, "cuda": 256}
"""Smallest number of rows in a measured product. The number grows until a product takes long enough."""

FIRST_BYTES = 2**14
"""Smallest size of a message or a copy, in bytes."""

MAX_BYTES = 2**26
"""Largest size of a message or a copy, in bytes. Sizes grow until a message takes long enough."""

SMALLEST = 16
"""Smallest number of units of work (such as rows) that can be measured, and smallest width of a weight.

A line is also measured at a sixteenth of its largest size, which must be at least one unit.
"""

WEIGHT_SHARE = 16
"""The weight of measured products takes at most this fraction (1 / WEIGHT_SHARE) of the allowed bytes."""

TRIES = 7
"""Number of runs of each size while a size is searched that takes long enough. The fastest run counts.

Several runs are needed, because a message may take many times as long as usual if other processes run.
"""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The effort of a measurement: how long and how often work runs.

    piece_seconds: seconds that the largest work of each line (seconds = alpha + beta * size) should take.
    span_seconds: seconds for which computation, messages and copies run side by side, to measure how much
        they slow each other.
    repeats: number of runs of each size.
    rounds: number of runs of each combination of computation, messages and copies.
    """

    piece_seconds: float
    span_seconds: float
    repeats: int
    rounds: int


QUICK = Effort(piece_seconds=2e-3, span_seconds=0.024, repeats=9, rounds=2)
USUAL = Effort(piece_seconds=5e-3, span_seconds=0.1, repeats=15, rounds=7)


@dataclass(frozen=True, kw_only=True)
class LaneWork:
    """A kind of work that can be timed in different sizes: matrix products, messages or copies.

    The size of the work is a number of units. A unit is a row of a product, an element of a copy, or an
    element for each receiver of a message.

    lane: the queue in which the work runs: computation, messages or copies.
    size: multiply-adds or bytes of one unit.
    unit_bytes: bytes of memory that one unit takes while the work exists.
    first_units, max_units: smallest and largest number of units to try.
    make: a function that takes a number of units, and returns a function that does work of this size.
    """

    lane: str
    size: int
    unit_bytes: int
    first_units: int
    max_units: int
    make: Callable[[int], TimedCall]


def products(device: torch.device, dtype: torch.dtype, most_bytes: float = math.inf) -> LaneWork:
    """Returns matrix products as work to be timed: a number of rows multiplied by one square weight.

    The weight has WIDTH rows and columns.

    device: the device that multiplies.
    dtype: dtype of the rows and of the weight.
    most_bytes: how many bytes the weight may take. If it takes more, its width is halved until it fits.
    """
    width = WIDTH[device.type]
    while width > SMALLEST and width * width * dtype.itemsize > most_bytes:
        width //= 2
    generator = torch.Generator(device).manual_seed(0)  # leaves the caller's random numbers as they are

    def make(rows: int) -> TimedCall:
        x, weight, y = (
            torch.randn(num_rows, width, dtype=dtype, device=device, generator=generator)
            for num_rows in (rows, width, rows)
        )
        return lambda: torch.mm(x, weight, out=y)

    first_units = FIRST_ROWS[device.type]
    max_units = MAX_ROWS[device.type]
    return LaneWork(
        lane=COMPUTE,
        size=width * width,
        unit_bytes=2 * width * dtype.itemsize,
        first_units=first_units,
        max_units=max_units,
        make=make,
    )


def transfer(
    lane: str,
    size: int,
    make: Callable[[int], TimedCall],
    first_bytes: int = FIRST_BYTES,
    unit_bytes: int | None = None,
) -> LaneWork:
    """Returns messages or copies as work to be timed in different sizes.

    lane: the queue in which the messages or copies run.
    size: bytes that one unit sends or copies. The size of the work is a number of units.
    make: a function that takes a number of units. It returns a function without arguments that sends or
        copies this number of units.
    first_bytes: smallest size to try, in bytes.
    unit_bytes: bytes of memory that one unit takes. None stands for 2 * size: half for the tensor that is
        read, half for the tensor that is written.
    """
    first_units = max(16, first_bytes // size)
    max_units = max(64, MAX_BYTES // size)
    return LaneWork(
        lane=lane,
        size=size,
        unit_bytes=2 * size if unit_bytes is None else unit_bytes,
        first_units=first_units,
        max_units=max_units,
        make=make,
    )


def within_bytes(work: LaneWork, most_bytes: float) -> LaneWork:
    """Returns the same kind of work with sizes that take at most ``most_bytes`` bytes of memory."""
    max_units = max(SMALLEST, int(min(work.max_units, most_bytes / work.unit_bytes)))
    first_units = min(work.first_units, max(SMALLEST, max_units // 4))
    return replace(work, first_units=first_units, max_units=max_units)


def messages(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> LaneWork:
    """Returns all-to-alls as work to be timed.

    The size of the work is a number of units. With n units, each rank sends n elements to every other rank.

    ranks: two or more ranks, which exchange the messages.
    device: the device of the tensors that are sent.
    dtype: dtype of the elements.
    """
    others = ranks.size - 1

    def make(elements: int) -> TimedCall:
        # Ones, because the operating system provides a page of memory only when it is first written.
        sent, received = torch.ones(2, others * elements, dtype=dtype, device=device)
        return lambda: exchange(ranks, sent, received, elements)

    return transfer(COMMUNICATE, others * dtype.itemsize, make)


def longest_units(bench: Bench, work: LaneWork, piece_seconds: float) -> int:
    """Returns the largest size of work to measure for a line: a size that takes about ``piece_seconds``.

    Work of this size also takes at least three times as long as work of the smallest size: in smaller work,
    the fixed cost of a task would hide the effect of its size. The fastest of a few runs counts, because a
    run that another process interrupts would make the size too small.

    Collective, because the work may be a collective. The result is a number of units (`LaneWork`).

    bench: runs the work and reads the clock.
    work: the kind of work.
    piece_seconds: about how many seconds the work should take.
    """
    units = work.first_units
    first_seconds = seconds = seconds_of(bench, work.lane, bench.made(partial(work.make, units)), TRIES, min)
    while units < work.max_units and (seconds < piece_seconds / 2 or seconds < 3 * first_seconds):
        units = min(work.max_units, 4 * units)
        seconds = seconds_of(bench, work.lane, bench.made(partial(work.make, units)), TRIES, min)
    if seconds < piece_seconds:
        units = min(work.max_units, int(units * piece_seconds / seconds))
    return units


def measured_line(bench: Bench, work: LaneWork, sizes: Iterable[int], repeats: int) -> Fit:
    """Measures how long work of several sizes takes, and fits the line seconds = alpha + beta * size.

    If the measured points are not close to a line, all sizes are measured once more. The second result is
    then returned, even if its points are not close to a line either. Caches or noise can falsify the seconds
    of small sizes so much that the best line has alpha = 0 or beta = 0. In this case, the line goes through
    zero and the point of the largest size.

    The work may be a collective. So all ranks must call this function together.

    bench: runs the work and reads the clock.
    work: the kind of work, such as matrix products or messages.
    sizes: the sizes to measure, each a number of units of the work. A unit is, for example, one row of a
        product (`LaneWork`). The ``size`` in the line counts multiply-adds or bytes, not units.
    repeats: runs of each size.
    """
    sizes = list(sizes)
    for _ in range(2):
        samples = {}
        for units in sizes:
            action = bench.made(partial(work.make, units))
            samples[float(units * work.size)] = seconds_of(bench, work.lane, action, repeats)
        fitted = fit(samples.items(), relative=True)
        if not (fitted.line.alpha_seconds and fitted.line.beta_seconds):
            fitted = from_zero(samples)
        if fitted.r_squared >= GOOD_FIT:
            break
    return fitted
