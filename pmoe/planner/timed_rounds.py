"""PassTimes rounds: measures several choices on a noisy machine, and stops as soon as the fastest is clear.

A choice is timed in runs of both passes of a layer. Equal runs take different times, so a difference between
two choices counts only if it is larger than the differences between equal runs:

    noise        relative standard deviation of one run, from the repeated runs of all choices together
    resolution   smallest relative difference between two choices that counts: CLEAR standard errors of it

    round     n=1  n=2  n=4  n=8        the first round is not timed: it allocates buffers
      0        *    *    *    *
      1        *    *    *    *         n=8 is slower by more than FAR, in this round and the one before
      2        *    *    *              n=1 is slower beyond the resolution
      3             *    *              the resolution has come down to FINE: what is left counts as equal

All ranks pass the same seconds (those of the slowest rank), so all ranks measure the same choices equally
often. This file measures nothing: `pmoe.choose.trials` runs the rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")

FAR = 1.25
"""A choice that takes more than this many times the fastest choice's seconds is not measured twice."""

CLEAR = 2.0
"""Standard errors of a difference beyond which it is no accident."""

FINE = 0.02
"""Relative difference that is not worth more runs."""

MOST_ROUNDS = 9
"""Largest number of timed rounds, unless the caller says otherwise."""

USUAL_NOISE = 0.01
"""Relative standard deviation of one run that is assumed before any run is repeated.

A few repeats may agree by accident. This number counts like `USUAL_RUNS` repeats."""

USUAL_RUNS = 2

LOWER_MEDIAN = 1.2
"""Standard error of the lower median of r runs, times sqrt(r), for runs with standard deviation 1.

By simulation of normal distributions: 1.17, 1.17, 1.20 and 1.20 for r = 2, 3, 4 and 5."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of both passes with one choice, and how far they can be trusted.

    forward, backward: seconds of each pass: the lower medians of the runs.
    step: seconds of both passes together: the lower median of the runs.
    runs: number of runs.
    noise: relative standard deviation of one run, by all choices of the same rounds.
    """

    forward: float
    backward: float
    step: float
    runs: int
    noise: float

    def scaled(self, factor: float) -> PassTimes:
        """Returns the same measurement with all seconds multiplied by ``factor``."""
        return replace(
            self, forward=self.forward * factor, backward=self.backward * factor, step=self.step * factor
        )

    def standard_error(self, other: PassTimes) -> float:
        """Returns the standard error of the relative difference to another choice's seconds."""
        noise = max(self.noise, other.noise)
        return LOWER_MEDIAN * noise * math.sqrt(1 / self.runs + 1 / other.runs)

    def resolution(self, other: PassTimes) -> float:
        """Returns the smallest relative difference to another choice's seconds that counts."""
        return CLEAR * self.standard_error(other)

    def is_slower_than(self, other: PassTimes) -> bool:
        """Whether this choice takes longer than another one, beyond the resolution."""
        return self.step > other.step * (1 + self.resolution(other))


def relative_noise(samples: Sequence[Sequence[float]]) -> float:
    """Returns the relative standard deviation of one run.

    The largest deviation of all is left out, so that one run which something else slowed does not hide the
    differences of all others.

    samples: the seconds of the runs of each choice.

    Example: no choice has two runs -> USUAL_NOISE.
    """
    squares = sorted(
        (seconds / statistics.median(runs) - 1) ** 2 for runs in samples if len(runs) > 1 for seconds in runs
    )[:-1]
    # A choice with r runs has r - 1 deviations that are independent.
    freedom = max(sum(len(runs) - 1 for runs in samples if runs) - 1, 0)
    return math.sqrt((sum(squares) + USUAL_RUNS * USUAL_NOISE**2) / (freedom + USUAL_RUNS))


def timed_rounds(
    choices: Sequence[T],
    run_round: Callable[[Sequence[T]], Sequence[tuple[float, float]]],
    most_rounds: int = MOST_ROUNDS,
) -> dict[T, PassTimes]:
    """Measures choices in rounds until the fastest is clear. Returns the seconds of each.

    A choice is left out of later rounds

    - if it is slower by more than FAR, in the first timed round and the round before;
    - if it is slower than the fastest choice beyond the resolution, from the second timed round on.

    The rounds end if one choice is left, if the resolution of those that are left is at most FINE, or after
    ``most_rounds``. The fastest choice is timed at least twice.

    choices: the choices to measure, each once.
    run_round: runs each of the given choices once. It returns the seconds of (forward, backward) of each, the
        same on every rank. Infinite seconds say that a choice cannot run: it is not run again, and the result
        does not have it.
    most_rounds: largest number of timed rounds.

    Returns a dict in the order of ``choices``.
    """
    first_runs = dict(zip(choices, run_round(choices), strict=True))
    samples: dict[T, list[tuple[float, float]]] = {
        choice: [] for choice, passes in first_runs.items() if not math.isinf(sum(passes))
    }
    left = list(samples)
    times: dict[T, PassTimes] = {}
    for number in range(1, most_rounds + 1):
        if not left:
            break
        for choice, passes in zip(left, run_round(left), strict=True):
            samples[choice].append(passes)
            if math.isinf(sum(passes)):
                del samples[choice]
        times = _timed(samples, first_runs)
        left = [choice for choice in left if choice in samples]
        if not left:
            break
        fastest = min((times[choice] for choice in left), key=lambda timed: timed.step)
        if number == 1:
            left = [choice for choice in left if times[choice].step <= FAR * fastest.step]
            continue
        left = [choice for choice in left if not times[choice].is_slower_than(fastest)]
        if len(left) == 1 or fastest.resolution(fastest) <= FINE:
            break
    return {choice: times[choice] for choice in choices if choice in times}


def _timed(
    samples: Mapping[T, Sequence[tuple[float, float]]], first_runs: Mapping[T, tuple[float, float]]
) -> dict[T, PassTimes]:
    """Returns the seconds and the noise of the timed runs of each choice.

    samples: (forward, backward) seconds of each timed run.
    first_runs: the same of the run before, which counts only for a choice that was timed once: of two runs
        the lower median is the faster one, so one run that something else slowed does no harm.
    """
    noise = relative_noise([[sum(passes) for passes in runs] for runs in samples.values()])
    times = {}
    for choice, runs in samples.items():
        counted = runs if len(runs) > 1 else [*runs, first_runs[choice]]
        forward, backward, step = (
            statistics.median_low(seconds)
            for seconds in zip(*((f, b, f + b) for f, b in counted), strict=True)
        )
        times[choice] = PassTimes(forward, backward, step, len(counted), noise)
    return times
