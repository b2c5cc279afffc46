"""Chooses the numbers of chunks to try on a batch: MPipeMoE's searchBestGran(B), with fewer trials.

Each trial takes the time of a training step. So an n is tried only if, by the results of earlier searches, it
may be the fastest. A `GranularityTable` holds these results: ranges of B, each with its fastest n. For a B
that is in no range, these n are tried:

    B between two ranges     the n of both ranges, and all n between them (n never falls as B grows)
    B below or above all     the n of the nearest range, the next smaller n and the next larger n
    no range, no profile     every n but the largest
    no range, but a profile  every n

If the rates of the machine were measured (a profile), the seconds of each n are predicted. An n is left out
if it is predicted to take more than NEAR times the seconds of the n that is predicted to be the fastest.
After the trials, further trials follow in these cases:

    the trials show                                        tried next
    the smallest or largest n tried is clearly faster      the next smaller or the next larger n
    than its neighbour among the n that were tried
    forward is fastest with another n than backward        this pair of n, one for each pass
    measured and predicted seconds are far apart           all n that were left out by the prediction
    an n is clearly slower than both of its neighbours     this n once more
    among the n that were tried

Letters: B tokens of a batch, n the number of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pmoe.planner.granularity import GranularityTable, PassDegrees, rounded
from pmoe.planner.timed_rounds import MOST_ROUNDS, PassTimes

NEAR = 1.25
"""An n is tried if it is predicted to take at most this many times the seconds of the fastest n."""

LATER_ROUNDS = 3
"""Largest number of timed rounds of a search if the table already has results of an earlier search.

The first search may take MOST_ROUNDS. Later searches need fewer: they try only numbers of chunks near the
earlier results, and a new result is averaged with neighbouring results (`BatchRange.joined`).
"""

WRONG = 2.0
"""If measured and predicted seconds of any n differ by more than this factor, predictions are not used."""

Measure = Callable[[Sequence[PassDegrees], int], Mapping[PassDegrees, PassTimes]]
"""A function that measures steps with several degrees (numbers of chunks of both passes).

Its second argument is the largest number of timed rounds. Its result has no entry for degrees that cannot
run. It may have entries for further degrees that the function measured.
"""


def near_numbers(predicted: Mapping[int, float] | None) -> list[int] | None:
    """Returns the numbers of chunks that are predicted to be nearly the fastest, in order of seconds.

    A number is in the result if its predicted seconds are at most NEAR times those of the fastest number. The
    two fastest numbers are always in the result.

    predicted: predicted seconds of a step by number of chunks. If it is None (nothing is predicted), the
        result is None too.
    """
    if predicted is None:
        return None
    ordered = sorted(predicted, key=lambda n: (predicted[n], n))
    return [n for n in ordered if n in ordered[:2] or predicted[n] <= NEAR * predicted[ordered[0]]]


def is_contradicted(predicted: Mapping[int, float], times: Mapping[PassDegrees, PassTimes]) -> bool:
    """Returns whether any measured and predicted seconds of a step differ by more than a factor of WRONG.

    If they do, the predictions are wrong: the profile (measured rates) is from a different machine, or
    routing is skewed. The caller then does not use the predictions.

    predicted: predicted seconds of a step by number of chunks, equal in both passes.
    times: measured times of a step by degrees (numbers of chunks of both passes).
    """
    measured = {degrees.forward: timed.step for degrees, timed in times.items() if degrees.are_equal}
    return any(not 1 / WRONG <= measured[n] / predicted[n] <= WRONG for n in measured if predicted[n])


def degrees_to_try(
    table: GranularityTable, B: int, numbers: Sequence[int], predicted: Mapping[int, float] | None = None
) -> list[PassDegrees]:
    """Returns the degrees that may be the fastest for a batch of B tokens.

    Degrees are the numbers of chunks of both passes.

    table: results of earlier measurements: ranges of B with the fastest degrees of each.
    B: number of tokens.
    numbers: the numbers of chunks that may be chosen, in rising order.
    predicted: predicted seconds of a step by n; None if nothing is predicted.

    The n with the fewest predicted seconds, and the degrees of the ranges next to B, are always tried. The
    largest n is left out if the table has no range and nothing is predicted: `further_degrees` asks for it if
    the second largest is clearly the fastest.

    Examples, for numbers (1, 2, 4, 8, 16), without a prediction:

        no range in the table                   1, 2, 4, 8
        one range, with n = 2, and B above it   1, 2, 4
        n = 2 below B, n = 8 above B            2, 4, 8
    """
    neighbours = [neighbour.degrees for neighbour in table.neighbours(rounded(B)) if neighbour is not None]
    lowest, highest = 0, len(numbers) - 1
    if not neighbours and predicted is None:
        # The largest number is rarely the fastest. It is tried next if the second largest is clearly fastest.
        highest = max(highest - 1, 0)
    if neighbours:
        known = [numbers.index(n) for degrees in neighbours for n in (degrees.forward, degrees.backward)]
        steps_beyond = 1 if len(neighbours) == 1 else 0
        lowest = max(min(known) - steps_beyond, 0)
        highest = min(max(known) + steps_beyond, highest)
    allowed = list(numbers[lowest : highest + 1])
    near = near_numbers(predicted)
    if near is not None:
        allowed = [near[0], *(n for n in near if n in allowed)]
    return sorted({PassDegrees(n, n) for n in allowed}.union(neighbours))


def further_degrees(
    times: Mapping[PassDegrees, PassTimes],
    numbers: Sequence[int],
    predicted: Mapping[int, float] | None = None,
    *,
    apart: bool,
) -> list[PassDegrees]:
    """Returns the degrees (numbers of chunks of both passes) to try next, which follow from measurements.

    If the smallest or largest n that was tried is the fastest, and clearly faster than its neighbour among
    the n that were tried, the next n beyond it is tried. If forward and backward are fastest with different
    n, the pair of both n is tried.

    times: measured times of a step by degrees.
    numbers: the numbers of chunks that may be chosen, in rising order. If it is empty, no n beyond those that
        were tried is returned, only a pair of n that were tried.
    predicted: predicted seconds of a step by n; None if nothing is predicted.
    apart: whether forward and backward may have different n.
    """
    further = []
    equal = {degrees.forward: timed for degrees, timed in times.items() if degrees.are_equal}
    fastest = min(equal, key=lambda n: (equal[n].step, n))
    near = near_numbers(predicted)
    order = [n for n in numbers if n in equal]
    for ordered, tried in ((numbers, order), (numbers[::-1], order[::-1])):
        if tried and fastest == tried[-1] != ordered[-1]:
            beyond = ordered[ordered.index(fastest) + 1]
            inner = equal[tried[-2]] if len(tried) > 1 else None
            is_near = near is None or beyond in near
            if is_near and (inner is None or inner.is_slower_than(equal[fastest])):
                further.append(PassDegrees(beyond, beyond))
    if apart:
        forward = min(equal, key=lambda n: (equal[n].forward, n))
        backward = min(equal, key=lambda n: (equal[n].backward, n))
        best = min(times.values(), key=lambda timed: timed.step)
        seconds = equal[forward].forward + equal[backward].backward
        if seconds * (1 + best.resolution(best)) < best.step:
            further.append(PassDegrees(forward, backward))
    return [degrees for degrees in further if degrees not in times]


def hills(times: Mapping[PassDegrees, PassTimes]) -> list[PassDegrees]:
    """Returns the degrees that took clearly longer than the next smaller and the next larger degrees.

    Degrees are the numbers of chunks of both passes. As their number grows, the seconds of a step first fall,
    because more is overlapped, and then rise, because each chunk has a cost of its own. Usually the seconds
    have no hill, so a hill usually means that other work on the machine has slowed every run of these
    degrees. With ring slots (buffers that chunks share) a hill can be real
    (`pmoe.planner.degree_search.best_degree`). It is then measured once more in vain.

    times: measured times of a step by degrees. Only degrees with equal numbers in both passes are compared.

    Example: 114, 135, 107 and 117 ms with 1, 2, 4 and 8 chunks -> [2 chunks].
    """
    order = sorted(degrees for degrees in times if degrees.are_equal)
    return [
        middle
        for fewer, middle, more in zip(order, order[1:], order[2:], strict=False)
        if times[middle].is_slower_than(times[fewer]) and times[middle].is_slower_than(times[more])
    ]


def times_by_trials(
    table: GranularityTable,
    B: int,
    numbers: Sequence[int],
    measure: Measure,
    *,
    predicted: Mapping[int, float] | None = None,
    apart: bool,
) -> dict[PassDegrees, PassTimes]:
    """Measures the degrees (numbers of chunks of both passes) that may be fastest, and returns their times.

    The first degrees to try follow from the table and from predictions, further degrees from the
    measurements. The speed of a machine drifts. So when further degrees are measured, the fastest degrees so
    far are measured again in the same rounds. The seconds of the further degrees are then multiplied by
    (earlier seconds) / (new seconds) of the fastest degrees, to make them comparable with the earlier
    seconds. Degrees of `hills` are measured once more, and the smaller of both results counts. The result is
    empty if no degrees can run.

    table: results of earlier measurements.
    B: number of tokens of the batch.
    numbers: the numbers of chunks that may be chosen, in rising order.
    measure: measures steps with given degrees (`Measure`).
    predicted: predicted seconds of a step by number of chunks; None if nothing is predicted. The predictions
        are ignored as soon as measurements contradict them (`is_contradicted`).
    apart: whether forward and backward may have different numbers of chunks.
    """
    most_rounds = LATER_ROUNDS if table.ranges else MOST_ROUNDS
    lies_between = None not in table.neighbours(rounded(B))
    asked = degrees_to_try(table, B, numbers, predicted)
    times = dict(measure(asked, most_rounds))
    repeated: set[PassDegrees] = set()
    while True:
        if predicted is not None and is_contradicted(predicted, times):
            predicted = None
        if any(degrees.are_equal for degrees in times):
            further = [
                *degrees_to_try(table, B, numbers, predicted),
                *further_degrees(times, () if lies_between else numbers, predicted, apart=apart),
            ]
        else:  # no degrees that were asked for could run, so all others are tried
            further = [PassDegrees(n, n) for n in numbers]
        further = [
            degrees for degrees in dict.fromkeys(further) if degrees not in asked and degrees not in times
        ]
        doubtful = [degrees for degrees in hills(times) if degrees not in repeated]
        repeated.update(doubtful)
        further += doubtful
        if not further:
            break
        asked += further
        fastest = min(times, key=lambda degrees: (times[degrees].step, degrees), default=None)
        if fastest is None:
            times = dict(measure(further, most_rounds))
            continue
        beside = measure([fastest, *further], most_rounds)
        if fastest in beside:
            factor = times[fastest].step / beside[fastest].step
            for degrees, timed in beside.items():
                if degrees == fastest:
                    continue
                scaled = timed.scaled(factor)
                times[degrees] = min(scaled, times.get(degrees, scaled), key=lambda timed: timed.step)
    return times
