"""The numbers of chunks n that a search tries: neighbours of the fastest, limited by predictions and
results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from pmoe.planner.degree import DEGREES
from pmoe.planner.degree_trials import (
    LATER_ROUNDS,
    degrees_to_try,
    is_contradicted,
    near_numbers,
    times_by_trials,
)
from pmoe.planner.granularity import BatchRange, Excess, GranularityTable, PassDegrees
from pmoe.planner.timed_rounds import MOST_ROUNDS, PassTimes


def both(n: int) -> PassDegrees:
    return PassDegrees(n, n)


def known(*ranges: tuple[int, int, PassDegrees]) -> GranularityTable:
    table = GranularityTable()
    for lower, upper, degrees in ranges:
        table.insert(BatchRange(lower, upper, 1, {degrees: Excess(0.0, 0.0)}))
    return table


def tried(table: GranularityTable, B: int, predicted: Mapping[int, float] | None = None) -> list[str]:
    return [str(degrees) for degrees in degrees_to_try(table, B, DEGREES, predicted)]


# Degrees to try that follow from neighbouring ranges


def test_the_first_search_tries_every_n_but_the_largest() -> None:
    """n = 16 is rarely the fastest, and its trials took a fifth of the runs of a first search."""
    assert tried(GranularityTable(), 4096) == ["1/1", "2/2", "4/4", "8/8"]


def test_the_largest_n_is_tried_if_the_second_largest_is_the_fastest() -> None:
    machine = Machine(FALLING, FALLING)
    assert machine.fastest(GranularityTable()) == "16/16"
    assert machine.asked == [["1/1", "2/2", "4/4", "8/8"], ["8/8", "16/16"]]
    machine = Machine((5, 4, 2, 3, 1), (5, 4, 2, 3, 1))
    assert machine.fastest(GranularityTable()) == "4/4"


@pytest.mark.parametrize("B", [1024, 4096])
def test_beyond_all_ranges_the_n_of_the_nearest_and_one_step_to_both_sides_are_tried(B: int) -> None:
    assert tried(known((2048, 3072, both(4))), B) == ["2/2", "4/4", "8/8"]
    assert tried(known((2048, 3072, both(1))), B) == ["1/1", "2/2"]
    assert tried(known((2048, 3072, both(16))), B) == ["8/8", "16/16"]


def test_between_two_ranges_only_their_n_and_those_between_are_tried() -> None:
    assert tried(known((1024, 1024, both(2)), (4096, 4096, both(4))), 2048) == ["2/2", "4/4"]
    assert tried(known((1024, 1024, both(1)), (4096, 4096, both(8))), 2048) == ["1/1", "2/2", "4/4", "8/8"]
    assert tried(known((1024, 1024, both(8)), (4096, 4096, both(2))), 2048) == ["2/2", "4/4", "8/8"]


def test_degrees_that_differ_between_the_passes_are_tried_where_a_neighbour_has_them() -> None:
    assert tried(known((1024, 1024, PassDegrees(2, 4)), (4096, 4096, both(4))), 2048) == ["2/2", "2/4", "4/4"]


# Degrees to try that follow from predictions


def test_what_is_predicted_to_be_a_quarter_slower_is_not_tried() -> None:
    predicted = {1: 1.3, 2: 1.0, 4: 1.1, 8: 1.24, 16: 1.26}
    assert near_numbers(predicted) == [2, 4, 8]
    assert tried(GranularityTable(), 4096, predicted) == ["2/2", "4/4", "8/8"]
    assert tried(known((1024, 1024, both(2))), 4096, predicted) == ["2/2", "4/4"]


def test_two_numbers_are_compared_even_if_one_is_predicted_to_be_far_ahead() -> None:
    assert near_numbers({1: 1.0, 2: 3.0, 4: 2.0, 8: 5.0, 16: 9.0}) == [1, 4]
    assert near_numbers(None) is None


def test_the_predicted_fastest_and_the_neighbours_n_are_tried_in_any_case() -> None:
    predicted = {1: 1.0, 2: 1.2, 4: 2.0, 8: 3.0, 16: 4.0}
    assert tried(known((1024, 1024, both(8))), 4096, predicted) == ["1/1", "8/8"]


def test_predictions_are_contradicted_by_steps_twice_as_slow_or_as_fast() -> None:
    def timed(step: float) -> PassTimes:
        return PassTimes(step / 2, step / 2, step, runs=2, noise=0.0)

    predicted = {2: 1.0, 4: 1.0}
    assert not is_contradicted(predicted, {both(2): timed(1.9), both(4): timed(0.6)})
    assert is_contradicted(predicted, {both(2): timed(1.9), both(4): timed(2.1)})
    assert is_contradicted(predicted, {both(2): timed(0.4)})
    assert not is_contradicted(predicted, {PassDegrees(2, 4): timed(9.0)})


# Degrees to try that follow from measurements


class Machine:
    """Stands in for measurements: returns exact seconds of (forward, backward) by n of each pass.

    ``asked`` records what was measured.
    """

    def __init__(self, forward: Sequence[float], backward: Sequence[float], *, speeds: Sequence[float] = ()):
        self.forward = dict(zip(DEGREES, forward, strict=True))
        self.backward = dict(zip(DEGREES, backward, strict=True))
        self.speeds = list(speeds)
        self.asked: list[list[str]] = []
        self.most_rounds: list[int] = []
        self.cannot_run: set[PassDegrees] = set()

    def measure(self, tried: Sequence[PassDegrees], most_rounds: int) -> dict[PassDegrees, PassTimes]:
        self.asked.append([str(degrees) for degrees in tried])
        self.most_rounds.append(most_rounds)
        slow = self.speeds.pop(0) if self.speeds else 1.0
        times = {}
        for degrees in tried:
            if degrees not in self.cannot_run:
                forward, backward = (
                    slow * self.forward[degrees.forward],
                    slow * self.backward[degrees.backward],
                )
                times[degrees] = PassTimes(forward, backward, forward + backward, runs=3, noise=0.01)
        return times

    def fastest(self, table: GranularityTable, *, apart: bool = False, **options: object) -> str:
        times = times_by_trials(table, 4096, DEGREES, self.measure, apart=apart, **options)  # type: ignore[arg-type]
        return str(min(times, key=lambda degrees: times[degrees].step)) if times else "none"


RISING = (1.0, 2.0, 3.0, 4.0, 5.0)
FALLING = RISING[::-1]


def test_beyond_an_outermost_n_that_is_clearly_the_fastest_the_next_one_is_tried() -> None:
    machine = Machine(RISING, RISING)
    assert machine.fastest(known((1024, 2048, both(8)))) == "1/1"
    assert machine.asked == [["4/4", "8/8", "16/16"], ["4/4", "2/2"], ["2/2", "1/1"]]
    machine = Machine(FALLING, FALLING)
    assert machine.fastest(known((1024, 2048, both(2)))) == "16/16"
    assert machine.asked == [["1/1", "2/2", "4/4"], ["4/4", "8/8"], ["8/8", "16/16"]]


def test_the_next_n_is_not_tried_where_the_outermost_is_as_fast_as_its_neighbour() -> None:
    machine = Machine((3, 2, 1.001, 1, 1), (3, 2, 1.001, 1, 1))
    machine.fastest(known((1024, 2048, both(4))))
    assert machine.asked == [["2/2", "4/4", "8/8"]]


def test_between_two_ranges_the_hypothesis_says_where_to_stop() -> None:
    machine = Machine(RISING, RISING)
    assert machine.fastest(known((1024, 2048, both(2)), (8192, 8192, both(4)))) == "2/2"
    assert machine.asked == [["2/2", "4/4"]]


def test_an_n_that_is_predicted_to_be_slow_is_not_tried_next() -> None:
    machine = Machine(RISING, RISING)
    predicted = {1: 9.0, 2: 4.0, 4: 4.1, 8: 9.0, 16: 9.0}
    assert machine.fastest(known((1024, 2048, both(4))), predicted=predicted) == "2/2"
    assert machine.asked == [["2/2", "4/4"]]


def test_predictions_that_the_trials_contradict_are_not_used() -> None:
    """The predictions are those of another machine: 100 times as fast, and n = 1 and 2 are the fastest."""
    machine = Machine(FALLING, FALLING)
    predicted = {1: 0.01, 2: 0.011, 4: 0.03, 8: 0.04, 16: 0.05}
    assert machine.fastest(GranularityTable(), predicted=predicted) == "16/16"
    assert machine.asked == [["1/1", "2/2"], ["2/2", "4/4", "8/8"], ["8/8", "16/16"]]


def test_each_pass_gets_an_n_of_its_own_where_this_promises_more_than_the_noise() -> None:
    machine = Machine(RISING, FALLING)
    assert machine.fastest(GranularityTable(), apart=True) == "1/8"
    assert machine.asked[1:] == [["1/1", "1/8"]]
    machine = Machine(RISING, FALLING)
    assert machine.fastest(GranularityTable(), apart=False) == "1/1"
    assert len(machine.asked) == 1
    machine = Machine((1.0, 1.001, 2, 2, 2), (1.001, 1.0, 2, 2, 2))
    assert machine.fastest(GranularityTable(), apart=True) == "1/1"
    assert len(machine.asked) == 1


def test_an_n_that_seems_slower_than_both_neighbours_is_measured_once_more() -> None:
    """In bench_choices other work slowed n = 2 in a first search: 114, 135, 107 and 117 ms, 97 later."""

    class Disturbed(Machine):
        def measure(self, tried: Sequence[PassDegrees], most_rounds: int) -> dict[PassDegrees, PassTimes]:
            times = super().measure(tried, most_rounds)
            if len(self.asked) == 1:
                times[both(2)] = times[both(2)].scaled(1.4)
            return times

    seconds = (1.14, 0.97, 1.07, 1.17, 1.3)
    machine = Disturbed(seconds, seconds)
    assert machine.fastest(GranularityTable()) == "2/2"
    assert machine.asked == [["1/1", "2/2", "4/4", "8/8"], ["4/4", "2/2"]]
    hill = Machine((1.14, 1.35, 1.07, 1.17, 1.3), (1.14, 1.35, 1.07, 1.17, 1.3))
    assert hill.fastest(GranularityTable()) == "4/4"
    assert len(hill.asked) == 2, "once, also if it is as slow again"


def test_what_is_tried_later_is_compared_at_the_same_speed_of_the_machine() -> None:
    """The machine is three times as slow while the second trials run."""
    machine = Machine((4, 3, 2, 1.5, 9), (4, 3, 2, 1.5, 9), speeds=[1.0, 3.0])
    assert machine.fastest(known((1024, 2048, both(2)))) == "8/8"


def test_the_first_search_takes_more_rounds_than_later_ones() -> None:
    machine = Machine(RISING, RISING)
    machine.fastest(GranularityTable())
    machine.fastest(known((1024, 2048, both(1))))
    assert machine.most_rounds == [MOST_ROUNDS, LATER_ROUNDS] and LATER_ROUNDS < MOST_ROUNDS


def test_degrees_that_cannot_run_are_left_out_and_never_asked_for_again() -> None:
    machine = Machine(RISING, RISING)
    machine.cannot_run = {both(1), both(2)}
    assert machine.fastest(GranularityTable()) == "4/4"
    assert len(machine.asked) == 1
    machine.cannot_run = {both(n) for n in DEGREES}
    assert machine.fastest(GranularityTable()) == "none"


def test_if_nothing_that_was_asked_for_can_run_all_other_n_are_tried() -> None:
    machine = Machine(RISING, RISING)
    machine.cannot_run = {both(1), both(2), both(4)}
    assert machine.fastest(known((1024, 2048, both(1)))) == "8/8"
    assert machine.asked == [["1/1", "2/2"], ["4/4", "8/8", "16/16"]]
    machine = Machine(RISING, RISING)
    machine.cannot_run = {both(n) for n in DEGREES}
    predicted = {1: 2.0, 2: 4.0, 4: 9.0, 8: 9.0, 16: 9.0}
    assert machine.fastest(GranularityTable(), predicted=predicted) == "none"
    assert machine.asked == [["1/1", "2/2"], ["4/4", "8/8", "16/16"]]
