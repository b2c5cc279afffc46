"""Timed rounds: measures several choices on a noisy machine, and stops as soon as the fastest is clear.

A choice is, for example, a number of chunks. One run of a choice times both passes of a layer. Equal runs
take different times, so a difference between two choices counts only if it is larger than the differences
between equal runs:

    noise        relative standard deviation of one run, from the repeated runs of all choices together
    resolution   smallest relative difference between two choices that counts as real: CLEAR times the
                 standard error of the difference

An example with four choices, by number of chunks n (* is a run):

    round     n=1  n=2  n=4  n=8
      0        *    *    *    *         not timed: allocates buffers
      1        *    *    *    *         n=8 took over FAR times the fastest's seconds, in rounds 0 and 1
      2        *    *    *              n=1 is slower by more than the resolution
      3             *    *              the resolution is at most FINE: n=2 and n=4 count as equally fast

All ranks use the same seconds (those of the slowest rank), so they measure the same choices in the same
rounds. This file measures nothing: `pmoe.choose.trials` runs the rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")

FAR = 2.5
"""A choice that takes more than FAR times the seconds of the fastest choice is timed only once.

Other work on the machine may double the seconds of a run, and the warm-up run may be as slow because it
allocates buffers. So a choice that is slower by a smaller factor in these two runs may still be the fastest.
"""

CLEAR = 2.0
"""A difference of seconds counts as real if it is larger than CLEAR times its standard error."""

FINE = 0.05
"""Relative difference below which two choices count as equally fast, so that no more rounds are run."""

MOST_ROUNDS = 9
"""Largest number of timed rounds, unless the caller says otherwise."""

USUAL_NOISE = 0.01
"""The relative standard deviation of one run that is assumed as long as no run is repeated.

When runs are repeated, the assumed noise and the measured noise are averaged. The assumed noise counts as
much as `USUAL_RUNS` repeats, because a few repeats may agree by accident.
"""

USUAL_RUNS = 2

SLOWED = 6.0
"""A run counts as slowed if it is slower than usual by more than SLOWED times the usual difference.

A run is compared with the lower median of its choice's runs. The usual difference is that of the runs of all
choices. Other work on the machine slowed the run, so it says nothing about the choice (`longest_usual`).
"""

LOWER_MEDIAN = 1.2
"""Standard error of the lower median of r runs, times sqrt(r), for runs with standard deviation 1.

The lower median is the smaller of the two middle values, if their number is even. A simulation of normal
distributions gives 1.17, 1.17, 1.20 and 1.20 for r = 2, 3, 4 and 5.
"""


@dataclass(frozen=True)
class PassTimes:
    """Measured seconds of both passes with one choice, and the noise of the measurement.

    Each number of seconds is the lower median over the runs: with an even number of runs, the smaller of the
    two middle values.

    forward, backward: seconds of each pass.
    step: seconds of both passes together.
    runs: number of timed runs that count, without those that other work slowed.
    noise: relative standard deviation of one run, estimated from the runs of all choices in the same rounds.
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
        """Returns the standard error of (seconds of this choice / seconds of another choice - 1)."""
        noise = max(self.noise, other.noise)
        return LOWER_MEDIAN * noise * math.sqrt(1 / self.runs + 1 / other.runs)

    def resolution(self, other: PassTimes) -> float:
        """Returns the smallest relative difference to another choice's seconds that counts as real.

        Smaller differences may come from noise. The result is `CLEAR` times the standard error of the
        difference.
        """
        return CLEAR * self.standard_error(other)

    def is_slower_than(self, other: PassTimes) -> bool:
        """Whether a step with this choice takes longer than with ``other`` by more than noise explains."""
        return self.step > other.step * (1 + self.resolution(other))


OUT_OF_MEMORY = PassTimes(math.inf, math.inf, step=math.inf, runs=1, noise=0.0)
"""The times of a choice for which a rank had too little memory."""


def longest_usual(samples: Sequence[Sequence[float]]) -> list[float]:
    """Returns for each choice a limit in seconds: slower runs count as slowed by other work on the machine.

        difference = |seconds of a run / lower median of the seconds of its choice's runs - 1|
        usual      = the median of the differences of all runs of all choices, at least USUAL_NOISE
        limit      = lower median of the choice * (1 + SLOWED * usual)

    The run that is itself the lower median of its choice has no difference, and is never slowed.

    samples: for each choice, the seconds of its runs.

    Example: [[1.0, 1.02, 2.0], [3.0, 3.06]]: the lower medians are 1.02 and 3.0, the differences 2 %, 96 %
    and 2 %, so usual is 2 %, and the limits are [1.14, 3.36].
    """
    middles = [statistics.median_low(runs) if runs else 0.0 for runs in samples]
    differences = [
        abs(seconds / middle - 1)
        for runs, middle in zip(samples, middles, strict=True)
        for place, seconds in enumerate(sorted(runs))
        if place != (len(runs) - 1) // 2
    ]
    usual = max(statistics.median(differences), USUAL_NOISE) if differences else USUAL_NOISE
    return [middle * (1 + SLOWED * usual) for middle in middles]


def relative_noise(samples: Sequence[Sequence[float]]) -> float:
    """Returns the relative standard deviation of one run, from the repeated runs of all choices.

    Other work on the machine slows some runs, and the noise would then look larger than the differences
    between choices. So runs that were slowed do not count (`longest_usual`). Of the other runs, the one with
    the largest deviation does not count either.

    samples: for each choice, the seconds of its runs.

    The assumed USUAL_NOISE counts as if it came from `USUAL_RUNS` more repeats. If no choice has two runs, it
    is the result.
    """
    usual = [
        [seconds for seconds in runs if seconds <= longest]
        for runs, longest in zip(samples, longest_usual(samples), strict=True)
    ]
    squares = sorted(
        (seconds / statistics.median(runs) - 1) ** 2 for runs in usual if len(runs) > 1 for seconds in runs
    )[:-1]
    # A choice with r runs has r - 1 deviations that are independent.
    freedom = max(sum(len(runs) - 1 for runs in usual if runs) - 1, 0)
    return math.sqrt((sum(squares) + USUAL_RUNS * USUAL_NOISE**2) / (freedom + USUAL_RUNS))


def timed_rounds(
    choices: Sequence[T],
    run_round: Callable[[Sequence[T]], Sequence[tuple[float, float]]],
    most_rounds: int = MOST_ROUNDS,
) -> dict[T, PassTimes]:
    """Measures choices in rounds until the fastest is clear. Returns the seconds of each choice.

    Each round runs every choice that is left. Round 0 warms up. A choice is left out of later rounds

    - if it takes more than FAR times the seconds of the fastest choice, both in the warm-up round and in the
      first timed round;
    - from the second timed round on, if it is slower than the fastest choice by more than noise explains
      (`PassTimes.resolution`).

    A slower choice stays if other work on the machine may have slowed its runs (`_is_doubtful`). The rounds
    end if one choice is left, if the resolution is at most FINE and no doubtful choice is left, or after
    ``most_rounds``. The fastest choice is timed at least twice.

    choices: the choices to measure, without repeats.
    run_round: a function that runs each of the given choices once. It returns the seconds of (forward,
        backward) of each choice, the same on every rank. Infinite seconds mean that a choice cannot run. This
        choice is then not run again, and is left out of the result.
    most_rounds: largest number of timed rounds.

    Returns a dict in the order of ``choices``.
    """
    first_runs = dict(zip(choices, run_round(choices), strict=True))
    samples: dict[T, list[tuple[float, float]]] = {
        choice: [] for choice, passes in first_runs.items() if not math.isinf(sum(passes))
    }
    remaining = list(samples)
    times: dict[T, PassTimes] = {}
    for number in range(1, most_rounds + 1):
        if not remaining:
            break
        for choice, passes in zip(remaining, run_round(remaining), strict=True):
            samples[choice].append(passes)
            if math.isinf(sum(passes)):
                del samples[choice]
        times = _timed(samples, first_runs)
        remaining = [choice for choice in remaining if choice in samples]
        if not remaining:
            break
        fastest = min((times[choice] for choice in remaining), key=lambda timed: timed.step)
        if number == 1:
            remaining = [choice for choice in remaining if times[choice].step <= FAR * fastest.step]
            continue
        slower = [choice for choice in remaining if times[choice].is_slower_than(fastest)]
        doubtful = [
            choice
            for choice in slower
            if _is_doubtful(times[choice], fastest, [first_runs[choice], *samples[choice]])
        ]
        remaining = [choice for choice in remaining if choice not in slower or choice in doubtful]
        if len(remaining) == 1 or (not doubtful and fastest.resolution(fastest) <= FINE):
            break
    return {choice: times[choice] for choice in choices if choice in times}


def _is_doubtful(timed: PassTimes, fastest: PassTimes, runs: Sequence[tuple[float, float]]) -> bool:
    """Whether other work may have slowed the runs of a choice that seems to be slower than the fastest.

    There are two signs of this: one run was as fast as the fastest choice, or the timed runs took clearly
    longer than the first run, which is usually the slowest because it allocates buffers.

    timed: the times of the choice.
    fastest: the times of the fastest choice.
    runs: the (forward, backward) seconds of all runs of the choice, beginning with its first run.
    """
    seconds = [sum(passes) for passes in runs]
    return min(seconds) <= fastest.step or seconds[0] * (1 + timed.resolution(timed)) < timed.step


def _timed(
    samples: Mapping[T, Sequence[tuple[float, float]]], first_runs: Mapping[T, tuple[float, float]]
) -> dict[T, PassTimes]:
    """Returns the median seconds of each choice, and the noise of its runs.

    Runs that other work on the machine slowed do not count (`longest_usual`).

    samples: for each choice, the (forward, backward) seconds of each timed run.
    first_runs: for each choice, the (forward, backward) seconds of the warm-up run. They are used only for a
        choice that was timed once. Its result is then the faster of the two runs, so a single run that
        another process slowed does no harm.
    """
    steps = [[sum(passes) for passes in runs] for runs in samples.values()]
    noise = relative_noise(steps)
    times = {}
    for (choice, runs), longest in zip(samples.items(), longest_usual(steps), strict=True):
        usual = [passes for passes in runs if sum(passes) <= longest]
        counted = usual if len(runs) > 1 else [*runs, first_runs[choice]]
        forward, backward, step = (
            statistics.median_low(seconds)
            for seconds in zip(*((f, b, f + b) for f, b in counted), strict=True)
        )
        times[choice] = PassTimes(forward, backward, step, len(usual), noise)
    return times
