"""First searches of a layer while other work disturbs the machine: what do they lose?

The search is pmoe's own, the seconds are those of bench_choices with 3 % of noise. One of 20 runs takes twice
as long.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.disturbed_searches import COUNT, KINDS, Disturbance, Outcome, row_of
from bench.searches import BASE_TOKENS, SIZES, machine_profile
from pmoe.choose import search
from pmoe.planner.degree import DEGREES, Choice
from pmoe.planner.priced_choices import Chooser, PricedChoice, bound, within_budget
from pmoe.planner.timed_rounds import PassTimes
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES, Restore


@functools.cache
def outcomes(kind: str, disturbance: Disturbance) -> list[Outcome]:
    return [KINDS[kind](number, disturbance) for number in range(COUNT)]


@pytest.mark.parametrize(
    ("kind", "mean", "high", "steps"),
    list(zip(KINDS, (0.0035, 0.011, 0.012), (0.034, 0.07, 0.06), (13, 20, 20), strict=True)),
    ids=KINDS,
)
def test_disturbed_searches_lose_little(kind: str, mean: float, high: float, steps: float) -> None:
    """Before, one slowed run could decide: 3.3 % and 2.6 % were lost on average with memory_reuse=True.

    Restore pairs were then compared with n = 4, whatever n was found: 1.9 % were lost.
    """
    found = outcomes(kind, Disturbance())
    regrets = sorted(outcome.regret for outcome in found)
    assert statistics.fmean(regrets) <= mean
    assert regrets[int(0.99 * COUNT)] <= high
    assert statistics.median(outcome.steps for outcome in found) <= steps


@pytest.mark.parametrize(("kind", "steps"), list(zip(KINDS, (12.5, 18, 14), strict=True)), ids=KINDS)
def test_searches_that_nothing_disturbs_take_few_runs(kind: str, steps: float) -> None:
    found = outcomes(kind, Disturbance(noise=0.0, share=0.0, first=1.0))
    assert statistics.median(outcome.steps for outcome in found) <= steps


def test_the_page_has_the_simulated_numbers() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "choosing.md").read_text(encoding="utf-8")
    for kind in KINDS:
        row = row_of(kind, outcomes(kind, Disturbance()))
        cells = [f"{row['steps, median']:.1f}"]
        cells += [f"{row[name]:.1f} %" for name in ("mean regret %", "median %", "worst %")]
        assert f"| {kind} | {' | '.join(cells)} |" in text


# ---- which trials a profile may save


PROFILE = machine_profile(link=0.5, message=0.02, product=0.003, copies=8.0)
"""A machine with slow copies, on which S4 alone is near the fastest by Eq. 10."""
DOUBTFUL = replace(PROFILE, r_squared=0.5)


class Trials:
    """Stands in for trials: returns given seconds, and records which choices were asked for."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.asked: list[list[str]] = []

    def tried(self, pairs: Sequence[Restore]) -> list[PassTimes]:
        self.asked.append([str(pair) for pair in pairs])
        times = [self.seconds[pair.strategy or str(pair)] for pair in pairs]
        return [PassTimes(0.0, step, step=step, runs=2, noise=0.03) for step in times]


def test_a_profile_that_describes_the_machine_badly_leaves_out_no_restore_pair() -> None:
    """S1 is within the noise of S4, the pair that the bad profile finds the fastest, and yet S1 is taken."""
    for profile, asked, taken in ((PROFILE, 0, "S4"), (DOUBTFUL, 4, "S1")):
        trials = Trials({"S1": 1.0, "S2": 2.0, "S3": 2.0, "S4": 1.05})
        chooser = Chooser(pairs=tuple(STRATEGIES.values()), budget=None, slack=1.25)
        pair = chooser.pair(SIZES, BASE_TOKENS, lambda profile=profile: profile, trials.tried)
        assert sum(map(len, trials.asked)) == asked
        assert pair == STRATEGIES[taken]


def test_a_pair_is_predicted_without_trials_until_trials_have_chosen_one() -> None:
    """The search for n runs with the predicted pair; then trials with this n choose among the pairs."""
    chooser = Chooser(pairs=tuple(STRATEGIES.values()), budget=None, slack=1.25)
    trials = Trials({"S1": 1.0, "S2": 2.0, "S3": 1.2, "S4": 1.3})
    assert chooser.predicted_pair(SIZES, BASE_TOKENS, lambda: DOUBTFUL) == STRATEGIES["S4"]
    assert chooser.pair(SIZES, BASE_TOKENS, lambda: DOUBTFUL, trials.tried) == STRATEGIES["S1"]
    assert chooser.predicted_pair(SIZES, BASE_TOKENS, lambda: DOUBTFUL) == STRATEGIES["S1"]
    assert chooser.pair(SIZES, BASE_TOKENS, lambda: DOUBTFUL, trials.tried) == STRATEGIES["S1"]
    assert len(trials.asked) == 1


def fitting_asks(profile: Any, budget_of: Choice) -> list[set[str]]:
    """Returns which choices a chooser with a budget asks for, trial by trial.

    budget_of: the choice whose bytes are the budget.
    """
    asked: list[set[str]] = []

    def tried(few: Sequence[PricedChoice]) -> list[PassTimes]:
        asked.append({f"{choice.forward} {choice.restore}" for choice in few})
        times = [1.0 + abs(choice.forward - 4) for choice in few]
        return [PassTimes(0.0, step, step=step, runs=2, noise=0.0) for step in times]

    budget = bound(SIZES, SIZES.call(BASE_TOKENS), budget_of, 1.25).promised
    chooser = Chooser(pairs=ALL_PAIRS, budget=budget, slack=1.25)
    choices = [Choice(forward=n, backward=n, restore=pair) for n in DEGREES for pair in ALL_PAIRS]
    chooser.fitting(SIZES, BASE_TOKENS, choices, lambda: profile, tried)
    return asked


def test_within_a_budget_other_pairs_are_tried_only_if_the_profile_is_bad_and_none_keeps_all() -> None:
    roomy = Choice(forward=1, backward=1, restore=KEEP)
    scarce = Choice(forward=4, backward=4, restore=Restore("keep", "offload"))
    assert len(fitting_asks(DOUBTFUL, roomy)) == 1
    assert len(fitting_asks(PROFILE, scarce)) == 1
    first, second = fitting_asks(DOUBTFUL, scarce)
    assert len(second) > 1 and len(first & second) == 1
    assert {name.split()[0] for name in second} == {"4"}
    assert {"4 keep/offload", "4 keep/recompute"} <= second and "4 communicate/recompute" not in second


def test_of_equally_fast_choices_within_a_budget_the_one_with_the_least_work_is_taken() -> None:
    """The prediction counts hidden work as free. In bench_choices, keep/keep was 10 % faster than S4."""

    def priced(pair: Restore, work: float, promised: int) -> PricedChoice:
        choice = Choice(forward=4, backward=4, restore=pair)
        memory = replace(bound(SIZES, SIZES.call(BASE_TOKENS), choice, 1.25), promised=promised)
        return PricedChoice(**vars(choice), seconds=1.0, work=work, memory=memory)

    kept, sent_again = priced(KEEP, 2.0, 90), priced(STRATEGIES["S4"], 3.0, 50)
    assert within_budget([sent_again, kept], 100) is kept
    assert within_budget([sent_again, kept], 60) is sent_again


def test_a_profile_that_describes_the_machine_badly_predicts_no_n() -> None:
    class Batch:
        counts: Any = type("Counts", (), {"max_tokens": BASE_TOKENS})
        sizes = SIZES

        def __init__(self, profile: Any) -> None:
            self.stored_profile = lambda: profile

    good: Any = Batch(PROFILE)
    bad: Any = Batch(DOUBTFUL)
    assert set(search.predicted_seconds(good, KEEP, (1, 2)) or {}) == {1, 2}
    assert search.predicted_seconds(bad, KEEP, (1, 2)) is None
