"""Batch sizes that change in every step under a memory budget: few choices are made, and all are right.

The error of a budget that is too small names the least that would do for its batch. A user who takes this
number has batches just below the most tokens that fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bench.searches import SIZES, machine_profile
from pmoe.call.options import LayerOptions
from pmoe.choose import solve
from pmoe.planner.degree import DEGREES, Choice, all_choices
from pmoe.planner.priced_choices import Chooser, PricedChoice, bound, rounded_up, roundings_up
from pmoe.planner.timed_rounds import PassTimes
from pmoe.schedule.restore import STRATEGIES

PAIRS = tuple(STRATEGIES.values())
CHOICES = all_choices([(n, n) for n in DEGREES], PAIRS)
PROFILE = machine_profile(link=0.5, message=0.02, product=0.003, copies=8.0)
SLACK = 1.25
MOST_TOKENS = 5000
ROUNDED = 5120
"""`MOST_TOKENS`, rounded up: does not fit into the budget."""


def promised(tokens: int, choice: Choice) -> int:
    return bound(SIZES, SIZES.call(tokens), choice, SLACK).promised


BUDGET = min(promised(MOST_TOKENS, choice) for choice in CHOICES)


class Counted:
    """A chooser under `BUDGET`, and how often it looked at a profile: once for each choice that it makes."""

    def __init__(self) -> None:
        self.chooser = Chooser(pairs=PAIRS, budget=BUDGET, slack=SLACK)
        self.made = 0

    def profile(self) -> Any:
        self.made += 1
        return PROFILE

    def choose(self, tokens: int) -> Choice:
        return self.chooser.fitting(SIZES, tokens, CHOICES, self.profile, self.tried)

    @staticmethod
    def tried(choices: Sequence[PricedChoice]) -> list[PassTimes]:
        return [PassTimes(0.0, 1.0, step=1.0, runs=2, noise=0.0) for _ in choices]


def test_sizes_just_below_the_most_tokens_of_a_budget_share_few_choices() -> None:
    """Before, each of these sizes ran trials of its own, and the table grew with each."""
    counted = Counted()
    sizes = range(4609, MOST_TOKENS + 1, 3)
    assert {rounded_up(tokens) for tokens in sizes} == {ROUNDED}
    for tokens in sizes:
        assert promised(tokens, counted.choose(tokens)) <= BUDGET
    assert counted.made <= 8


def test_the_size_to_which_others_were_rounded_up_in_vain_is_refused_with_the_least_that_would_do() -> None:
    """Before, it was an AssertionError."""
    counted = Counted()
    counted.choose(MOST_TOKENS)
    with pytest.raises(ValueError, match=rf"memory_budget \({BUDGET} bytes\) must be at least \d+ for these"):
        counted.choose(ROUNDED)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, [0]), (1, [1]), (7, [7]), (9, [10, 9]), (1100, [1280, 1152, 1120, 1104, 1100]), (4096, [4096])],
)
def test_a_number_is_rounded_up_less_and_less(tokens: int, expected: list[int]) -> None:
    assert roundings_up(tokens) == expected


# ---- the solver's numbers of chunks


OPTIONS = LayerOptions(
    d_model=8,
    d_hidden=8,
    num_experts=8,
    pipeline="solve",
    memory_reuse=True,
    memory_budget=BUDGET,
    slack=SLACK,
)


def batch(tokens: int, choosers: dict[Any, Any]) -> Any:
    """Returns what `solve._allowed_degrees` reads of a batch."""
    modules = SimpleNamespace(
        options=OPTIONS,
        degree_pairs=lambda restore: [(n, n) for n in DEGREES],
        cache=SimpleNamespace(choosers=choosers),
    )
    return SimpleNamespace(modules=modules, counts=SimpleNamespace(max_tokens=tokens), sizes=SIZES)


def test_the_solver_remembers_few_lists_of_allowed_numbers_and_refuses_by_name() -> None:
    """As above: each size had a list of its own, and the rounded size was an AssertionError."""
    choosers: dict[Any, Any] = {}
    least = min(CHOICES, key=lambda choice: promised(MOST_TOKENS, choice))
    for tokens in range(4609, MOST_TOKENS + 1, 3):
        pairs, most = solve._allowed_degrees(batch(tokens, choosers), least.restore)
        assert tokens <= most <= MOST_TOKENS
        assert (least.forward, least.backward) in pairs
    assert len(choosers) <= 16
    with pytest.raises(ValueError, match="memory_budget .* must be at least"):
        solve._allowed_degrees(batch(ROUNDED, choosers), least.restore)
