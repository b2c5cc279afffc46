"""How many tokens trials run on, and the predicted peak of a step with trials, from numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pmoe.planner.degree import DEGREES, all_choices
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.planner.memory import bytes_before_rows
from pmoe.planner.priced_choices import bound
from pmoe.planner.trial_memory import ALIKE, fraction_of_tokens, peak_of_passes, searching_peak
from pmoe.schedule.restore import STRATEGIES


def test_a_trial_takes_the_free_bytes_but_for_some_room() -> None:
    assert fraction_of_tokens(peak=1540, free=1000, routing=0, gradients=100) == pytest.approx(0.5)


def test_the_routing_of_all_tokens_and_a_trial_on_some_of_them_fit_together() -> None:
    fraction = fraction_of_tokens(peak=1630, free=1000, routing=400, gradients=100)
    assert 400 + 100 + fraction * 1530 == pytest.approx(ALIKE * 1000)
    assert fraction_of_tokens(peak=1630, free=1000, routing=1000, gradients=100) == 0


def test_gradients_need_no_room() -> None:
    """Before, 15 % of all free bytes stayed free: with 900 bytes of gradients, no trial could run."""
    assert fraction_of_tokens(peak=1500, free=1000, routing=10, gradients=900) == pytest.approx(80 / 600)


SIZES = sizes_from_options(64, 256, 4, num_ranks=2)
CALL = SIZES.call(4096)
OUTPUT = 4096 * 64 * 4
CANDIDATES = {
    choice: bound(SIZES, CALL, choice, 1.25)
    for choice in all_choices([(n, n) for n in DEGREES], [STRATEGIES["S4"]])
}


def test_a_step_with_trials_needs_at_most_a_tenth_more_than_one_with_their_choice() -> None:
    for memory in CANDIDATES.values():
        most = searching_peak(memory, SIZES, CALL, CANDIDATES.values())
        assert memory.peak <= most <= 1.1 * memory.peak


def test_trials_take_the_memory_of_the_step_without_its_output() -> None:
    smallest = min(CANDIDATES.values(), key=peak_of_passes)
    free = peak_of_passes(smallest) - OUTPUT
    few_tokens = replace(CALL, tokens=16, inner=16, slots=16)
    expected = max(smallest.peak, math.ceil(ALIKE * free))
    assert searching_peak(smallest, SIZES, CALL, CANDIDATES.values()) == expected
    most = searching_peak(smallest, SIZES, few_tokens, CANDIDATES.values())
    assert most == pytest.approx(ALIKE * (peak_of_passes(smallest) - 16 * 64 * 4), abs=1)
    assert most > smallest.peak  # a rank with few tokens, which computes the rows of others


def test_a_step_needs_no_more_than_the_largest_trial_and_the_routing() -> None:
    memory = next(iter(CANDIDATES.values()))
    lower = replace(memory, peak=0)
    most = searching_peak(lower, SIZES, CALL, [memory])
    free = peak_of_passes(memory) - OUTPUT
    assert most == min(peak_of_passes(memory) + bytes_before_rows(SIZES, CALL), math.ceil(ALIKE * free))


def test_with_a_budget_any_choice_within_it_may_be_tried() -> None:
    memory = CANDIDATES[next(reversed(CANDIDATES))]
    largest = max(map(peak_of_passes, CANDIDATES.values()))
    budget = (memory.peak + largest) // 2
    assert searching_peak(memory, SIZES, CALL, CANDIDATES.values(), budget) == budget
    assert searching_peak(memory, SIZES, CALL, CANDIDATES.values(), 2 * largest) == largest
    assert searching_peak(memory, SIZES, CALL, CANDIDATES.values(), 1) == memory.peak
