"""The choices of a layer are the best that it can make, if measured seconds are replaced by given ones."""

from __future__ import annotations

import math
import os
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import pmoe
from pmoe import warn
from pmoe.call.sizes import memory_shape
from pmoe.choose import open_choice, search, trials
from pmoe.choose.trials import TrialBatch
from pmoe.comm.agreement import largest
from pmoe.comm.ranks import Ranks
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.forward import Forward
from pmoe.planner.cost_model import Interference
from pmoe.planner.costs import LineCost
from pmoe.planner.degree import DEGREES, Choice
from pmoe.planner.layer_seconds import step_seconds
from pmoe.planner.priced_choices import Chooser, bound
from pmoe.planner.profile import FORMAT, Profile, Versions
from pmoe.planner.timed_rounds import PassTimes
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES, Restore
from tests.gloo.kit import build
from tests.kit import D_HIDDEN, D_MODEL, tokens
from tests.pool import ranks

COUNT = 2048
"""Number of tokens of a rank: the fewest for which n is tried."""
SLACK = 2.0
"""A slack with which no routing of these tests makes layers cut their chunks finer."""


def step(layer: pmoe.MoELayer, rank: int) -> Any:
    """Runs one step, and returns the layer's report of it."""
    layer.zero_grad(set_to_none=True)
    layer(tokens(COUNT, rank).requires_grad_()).sum().backward()
    return layer.ran


# ---- pipeline=True: the clock is stood still, and each pass moves it on


class StatedClock:
    """A clock on which passes take given seconds for their n.

    The first timed pass with n = 4 takes ``hiccup`` times as long.
    """

    def __init__(self, forward: dict[int, float], backward: dict[int, float], hiccup: float) -> None:
        self.now, self.hiccup = 0.0, hiccup
        self.seconds = {"forward": forward, "backward": backward}
        self.runs: dict[tuple[str, int], int] = {}

    def passed(self, direction: str, n: int) -> None:
        run = self.runs[direction, n] = self.runs.get((direction, n), 0) + 1
        is_slowed = n == 4 and run == 2  # the first one warms up
        self.now += self.seconds[direction][n] * (self.hiccup if is_slowed else 1)


def tried_job(
    rank: int,
    world: int,
    stated: tuple[dict[str, Any], ...],
    options: dict[str, Any],
    lanes: dict[str, LineCost] | None = None,
) -> tuple[list[tuple[int, int]], dict[tuple[str, int], int]]:
    """Returns n of both passes in three calls, and the number of passes by direction and n.

    lanes: costs of a stored profile; None if there is none.
    """
    clock = StatedClock(**stated[rank])
    stored = None if lanes is None else profile(**lanes)
    ahead, back = Forward.run, Backward.run

    def forward(self: Any) -> Any:
        clock.passed("forward", len(self.pass_plan.chunks))
        return ahead(self)

    def backward(self: Any) -> Any:
        clock.passed("backward", len(self.pass_plan.chunks))
        return back(self)

    search._LEARNED.clear()
    with (
        mock.patch.dict(os.environ, PMOE_CACHE=""),  # no file of an earlier run answers
        mock.patch.object(trials, "stored_profile_of", lambda *_: stored),
        mock.patch.object(trials, "clock_of", lambda *_: lambda: clock.now),
        mock.patch.object(Forward, "run", forward),
        mock.patch.object(Backward, "run", backward),
    ):
        layer = build(pipeline=True, top_k=1, slack=SLACK, **options)
        found = [step(layer, rank) for _ in range(3)]
    search._LEARNED.clear()
    return [(ran.forward, ran.backward) for ran in found], clock.runs


def seconds(best: int, least: float = 1.0) -> dict[int, float]:
    """Returns seconds by n: they grow with the distance from the best n."""
    at = DEGREES.index(best)
    return {n: least * (1 + abs(i - at)) for i, n in enumerate(DEGREES)}


def stated(forward: dict[int, float], backward: dict[int, float], hiccup: float = 1.0) -> dict[str, Any]:
    return {"forward": forward, "backward": backward, "hiccup": hiccup}


FLAT = dict.fromkeys(DEGREES, 1.0)
ONE_PASS_OF_ITS_OWN = stated(seconds(2), seconds(8, least=2.0))

TRIED = {
    "n = 1": ([stated(seconds(1), seconds(1))] * 2, {}, (1, 1)),
    "n = 4": ([stated(seconds(4), seconds(4))] * 2, {}, (4, 4)),
    "n = 16": ([stated(seconds(16), seconds(16))] * 2, {}, (16, 16)),
    "of equals the fewest chunks": ([stated(FLAT, FLAT)] * 2, {}, (1, 1)),
    "each pass its own": ([ONE_PASS_OF_ITS_OWN] * 2, {"memory_reuse": "S4"}, (2, 8)),
    "one n for both": ([ONE_PASS_OF_ITS_OWN] * 2, {}, (8, 8)),  # 3 + 2 at 8; at 2, 1 + 6; at 4, 2 + 4
    "the slowest rank decides": (
        [stated(seconds(2), seconds(2)), stated({**seconds(8, 3.0), 8: 3.5}, seconds(8, 3.0))],
        {},
        (8, 8),
    ),
    "one slow run is no measure": ([stated(seconds(4), seconds(4), hiccup=100)] * 2, {}, (4, 4)),
}


QUICK = ("each pass its own", "the slowest rank decides", "one slow run is no measure")


@pytest.mark.parametrize(
    "given, options, expected",
    [
        pytest.param(*case, marks=() if name in QUICK else pytest.mark.slow, id=name)
        for name, case in TRIED.items()
    ],
)
def test_the_fastest_n_by_trials_is_what_a_layer_runs_with(
    given: list[dict[str, Any]], options: dict[str, Any], expected: tuple[int, int]
) -> None:
    (first, runs), (second, same_runs) = ranks(2).run(tried_job, tuple(given), options)
    assert first == second == [expected] * 3
    assert runs == same_runs  # ranks with other seconds run the same trials equally often


def test_an_n_that_is_clearly_slower_is_timed_twice_and_one_that_is_far_slower_once() -> None:
    """A pass takes one second with n = 4, two with 2 and 8, three with 1. The first run is not timed.

    n = 16 is not tried, because 8 is not the fastest. Three calls run n = 4 in addition to the trials.
    """
    (_, runs), _ = ranks(2).run(tried_job, (stated(seconds(4), seconds(4)),) * 2, {})
    expected = {1: 2, 2: 3, 4: 3 + 3, 8: 3}
    assert runs == {(direction, n): expected[n] for direction in ("forward", "backward") for n in expected}


def test_only_what_a_stored_profile_predicts_to_be_near_the_fastest_is_tried() -> None:
    """Products take a second for each chunk of any size: the profile predicts that few chunks are fast."""
    lanes = lanes_of(1, 1, 1, alpha=1.0)
    sizes = ranks(2).run(chosen_job, lanes, {})[0][1]
    predicted = {n: step_seconds(sizes, profile(**lanes), COUNT, both_passes(n, KEEP)) for n in DEGREES}
    assert predicted[2] < 1.25 * predicted[1] < predicted[4], predicted
    each = {n: predicted[n] / 2 for n in DEGREES}
    (took, runs), _ = ranks(2).run(tried_job, (stated(each, each),) * 2, {}, lanes)
    assert {n for _, n in runs} == {1, 2} and took == [(min(each, key=each.__getitem__),) * 2] * 3


def test_a_stored_profile_that_the_trials_contradict_does_not_hide_the_fastest_n() -> None:
    """The profile says that n = 1 is the fastest. The real steps are slower, and n = 16 is the fastest."""
    lanes = lanes_of(1, 1, 1, alpha=1.0)
    given = (stated(seconds(16, least=100.0), seconds(16, least=100.0)),) * 2
    (took, runs), _ = ranks(2).run(tried_job, given, {}, lanes)
    assert {n for _, n in runs} == set(DEGREES) and took == [(16, 16)] * 3


def pairs_job(rank: int, world: int) -> tuple[list[str], list[tuple[int, int]], list[str]]:
    """Returns the names of the tables, n of two layers, and the restore pairs that were tried.

    The layers have memory_reuse=True.
    """
    search._LEARNED.clear()
    pairs_tried: list[str] = []
    real = search.measure_in_stages

    def measure(batch: Any, choices: Any, *most: Any) -> Any:
        pairs_tried.extend(str(each.restore) for each in choices)
        return real(batch, choices, *most)

    taken = []
    with (
        mock.patch.dict(os.environ, PMOE_CACHE=""),
        mock.patch.object(search, "measure_in_stages", measure),
        mock.patch.object(open_choice, "_check_profile_with_a_step", lambda _, choice: choice),
    ):
        for name in ("S1", "S4"):
            with (
                mock.patch.object(Chooser, "predicted_pair", lambda *_, name=name: STRATEGIES[name]),
                mock.patch.object(Chooser, "pair", lambda *_, name=name: STRATEGIES[name]),
            ):
                ran = step(build(pipeline=True, memory_reuse=True, top_k=1, slack=SLACK), rank)
                assert ran.restore == STRATEGIES[name]
                taken.append((ran.forward, ran.backward))
    [learned] = search._LEARNED.values()
    search._LEARNED.clear()
    return sorted(learned.tables), taken, sorted(set(pairs_tried))


def no_tokens_job(rank: int, world: int) -> tuple[tuple[int, int], int]:
    """Returns n, and the number of stages, if too few tokens fit for the first stage of trials."""
    stages = []
    real = search.measure_in_stages

    def measure(batch: Any, choices: Any, *limits: Any) -> Any:
        stages.append(choices)
        return real(batch, choices, *limits) if len(stages) > 1 else {}

    search._LEARNED.clear()
    with mock.patch.dict(os.environ, PMOE_CACHE=""), mock.patch.object(search, "measure_in_stages", measure):
        ran = step(build(pipeline=True, memory_reuse="S4", top_k=1, slack=SLACK), rank)
    search._LEARNED.clear()
    return (ran.forward, ran.backward), len(stages)


def test_without_results_of_the_first_trials_the_rule_gives_n_and_no_more_trials_run() -> None:
    """Before, n = 16 was taken, because it was tried next and had nothing to be compared with.

    Later, the rule gave n, but only after the trials of n = 16, whose results nobody used.
    """
    for taken, stages in ranks(2).run(no_tokens_job):
        assert taken == (2, 2)
        assert stages == 1


def test_one_table_holds_for_all_restore_pairs() -> None:
    for tables, (first, second), pairs_tried in ranks(2).run(pairs_job):
        assert tables == ["torch.float64"] and first == second
        assert pairs_tried == [str(STRATEGIES["S1"])]


# ---- memory_reuse=True and a budget: a stated profile


def profile(**lines: LineCost) -> Profile:
    """Returns a profile with these lines, of lanes that do not slow each other."""
    return Profile(
        device="stated",
        device_type="cpu",
        num_ranks=2,
        backend="gloo",
        dtype="float64",
        versions=Versions(torch="none", cuda=None, file=FORMAT),
        **lines,
        interference=Interference(),
        seconds=0.0,
        when="",
    )


def chosen_job(
    rank: int,
    world: int,
    lanes: dict[str, LineCost],
    options: dict[str, Any],
    trials: dict[Any, float] | None = None,
    noise: float = 0.0,
) -> Any:
    """Returns the report of a layer's step, and the layer's sizes.

    trials: the seconds of a pass that trials would measure, by n or by restore pair. Without them no trials
        run.
    noise: relative standard deviation of one of two runs of each trial.
    """

    def tried(_: Any, choices: Any, *limits: Any, **more: Any) -> Any:
        if trials is None:
            return None
        measured = [trials.get(each.restore, trials.get(each.forward, math.inf)) for each in choices]
        return [PassTimes(seconds, 0.0, step=seconds, runs=2, noise=noise) for seconds in measured]

    with (
        mock.patch("pmoe.choose.trials.profile_of", lambda *_: profile(**lanes)),
        mock.patch.object(open_choice, "_tried", tried),
    ):
        layer = build(top_k=1, slack=SLACK, **options)
        ran = step(layer, rank)
    return (
        (ran.forward, ran.backward, ran.restore),
        memory_shape(layer.layer_modules),
        layer.layer_modules.bins_for(layer.options.degrees),
    )


def lanes_of(compute: float, message: float, copy: float, alpha: float = 0.0) -> dict[str, LineCost]:
    """Returns lanes on which a unit of Table II takes these seconds; half of the rows are sent."""
    row_bytes = COUNT * D_MODEL * 8
    copies = LineCost(alpha, copy / row_bytes)
    return {
        "compute": LineCost(alpha, compute / (COUNT * D_MODEL * D_HIDDEN)),
        "message": LineCost(alpha, message / (row_bytes / 2)),
        "copy_out": copies,
        "copy_in": copies,
    }


# Table II gives the units of [compute, message, copy] in backward: S1 [4, 2, 2.67], S2 [4, 3, 1.67],
# S3 [5, 2, 1] and S4 [5, 3, 0], where H / M = 10 / 6. Forward has [2, 2, .] with the same copies.
PAIRS = {
    "S1": ("copies cost nothing, messages nearly as much as computing", lanes_of(1, 1.8, 1e-6)),
    "S2": ("messages cost nothing, copies of T_M just hide", lanes_of(1, 1e-6, 1.2)),
    "S3": ("computing costs nothing, copies of T_DI hide", lanes_of(1e-6, 1, 1)),
    "S4": ("copies are dear", lanes_of(1, 1, 50)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_pair_that_suits_the_machine_is_what_a_layer_runs_with(name: str) -> None:
    _, lanes = PAIRS[name]
    for (_, _, restore), _, _ in ranks(2).run(chosen_job, lanes, {"pipeline": 2, "memory_reuse": True}):
        assert restore == STRATEGIES[name]


def contradicted_job(rank: int, world: int, times: float) -> list[str]:
    """Returns the warnings of three layers whose steps take a multiple of what their profile predicts.

    times: the factor.
    """
    lanes = lanes_of(1, 1, 50)

    def tried(batch: Any, choices: Any, most_rounds: int) -> Any:
        (each,) = choices  # with dear copies S4 alone is worth a trial
        rows = batch.counts.recv.sum() / COUNT  # evenly routed or not
        [most] = largest(batch.modules.ranks, torch.device("cpu"), [float(rows)], stage="a test")
        sizes = memory_shape(batch.modules)
        seconds = step_seconds(sizes, profile(**lanes), COUNT, each)
        step = times * most * seconds
        return {each: PassTimes(forward=0.0, backward=step, step=step, runs=2, noise=0.0)}, []

    open_choice._compared.clear()
    warn.GIVEN.clear()
    rows_of = (Ranks().name, torch.device("cpu"), tokens(COUNT, rank).dtype)
    with (
        mock.patch.dict(open_choice.PROFILES, {rows_of: profile(**lanes)}),
        mock.patch.object(open_choice, "run_trials", tried),
        warnings.catch_warnings(record=True) as given,
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            step(build(top_k=1, slack=SLACK, pipeline=2, memory_reuse=True), rank)
    # Another group that reads the same profile compares it itself: some of its ranks are in no other group.
    assert [name for name, _ in open_choice._compared] == [Ranks().name]
    return [str(each.message) for each in given if "contradicted" in str(each.message)]


@pytest.mark.parametrize("times, is_told", [(1, False), (0.6, False), (1.9, False), (0.4, True), (2.1, True)])
def test_a_profile_that_real_steps_contradict_is_told_once(times: float, is_told: bool) -> None:
    first, other = ranks(2).run(contradicted_job, times)
    assert len(first) == is_told and other == []


@pytest.mark.parametrize("fastest", STRATEGIES)
def test_of_pairs_that_cost_about_the_same_trials_choose(fastest: str) -> None:
    """If computation hides everything, a step takes 6 units with S1 and S2, and 7 with S3 and S4.

    If copies are slow, only S4 is near the fastest, and no trial is needed.
    """
    trials = {pair: 1.0 + (name != fastest) for name, pair in STRATEGIES.items()}
    options = {"pipeline": 2, "memory_reuse": True}
    for lanes, expected in ((lanes_of(1, 1e-6, 1e-6), fastest), (lanes_of(1, 1, 50), "S4")):
        for (_, _, restore), _, _ in ranks(2).run(chosen_job, lanes, options, trials):
            assert restore == STRATEGIES[expected]


@pytest.mark.parametrize("slower, expected", [(1.04, "S1"), (1.2, "S2")])
def test_trials_choose_another_pair_only_if_it_is_clearly_faster(slower: float, expected: str) -> None:
    """Eq. 10 finds S1 0.3 % faster than S2. With 3 % noise, trials overrule it only beyond 7 %."""
    trials = {pair: slower - (slower - 1) * (name == "S2") for name, pair in STRATEGIES.items()}
    lanes = lanes_of(1, 1.34, 1e-6)
    for (_, _, restore), _, _ in ranks(2).run(
        chosen_job, lanes, {"pipeline": 2, "memory_reuse": True}, trials, 0.03
    ):
        assert restore == STRATEGIES[expected]


def test_no_trial_is_made_where_a_host_is_full() -> None:
    """A trial that offloads would fail on that rank only."""
    nothing: Any = None
    with mock.patch.object(TrialBatch, "trials_allowed", True):
        for shortage in (True, False):
            counts: Any = SimpleNamespace(host_shortage=shortage)
            assert TrialBatch(nothing, counts, nothing, nothing).may_try is not shortage
        full: Any = SimpleNamespace(host_shortage=True)
        assert open_choice._tried(TrialBatch(nothing, full, nothing, nothing), []) is None


WIDE = 48
"""Columns of T_M in tests that count bytes, so that the gate needs fewer bytes than the rows."""
OVERLAP_PAYS = lanes_of(D_HIDDEN / WIDE, 1.5, 0.2, alpha=0.02)


def both_passes(n: int, pair: Restore) -> Choice:
    return Choice(forward=n, backward=n, restore=pair)


def candidates(sizes: Any, bins: int, given: dict[str, LineCost]) -> dict[tuple[int, int, Restore], Any]:
    """Returns (seconds, most bytes of any routing) by (n of forward, n of backward, restore pair)."""
    return {
        (n, n, pair): (
            step_seconds(sizes, profile(**given), COUNT, both_passes(n, pair)),
            bound(sizes, sizes.call(COUNT), both_passes(n, pair), SLACK, bins).promised,
        )
        for n in DEGREES
        for pair in ALL_PAIRS
    }


def test_of_what_fits_a_budget_a_layer_runs_with_the_fastest() -> None:
    options = {"pipeline": True, "memory_reuse": True, "d_hidden": WIDE}
    _, sizes, bins = ranks(2).run(chosen_job, OVERLAP_PAYS, {**options, "memory_budget": 1 << 40})[0]
    known = candidates(sizes, bins, OVERLAP_PAYS)
    by_bytes = sorted(size for _, size in known.values())
    found = []
    for budget in (by_bytes[0], by_bytes[len(by_bytes) // 3], by_bytes[-1]):
        got = {
            each[0] for each in ranks(2).run(chosen_job, OVERLAP_PAYS, {**options, "memory_budget": budget})
        }
        assert len(got) == 1
        [choice] = got
        assert known[choice][1] <= budget
        assert known[choice][0] == min(time for time, size in known.values() if size <= budget)
        found.append(choice)
    assert len(set(found)) == 3, "each budget has a best of its own"


@pytest.mark.parametrize("best", [1, 4, 16])
def test_of_what_fits_a_budget_trials_choose_the_number_of_chunks(best: int) -> None:
    """The restore pair is the one that is predicted to be fastest within the budget."""
    options = {"pipeline": True, "memory_reuse": True, "d_hidden": WIDE}
    _, sizes, bins = ranks(2).run(chosen_job, OVERLAP_PAYS, {**options, "memory_budget": 1 << 40})[0]
    known = candidates(sizes, bins, OVERLAP_PAYS)
    budget = sorted(size for _, size in known.values())[len(known) * 2 // 3]
    fitting = {choice: time for choice, (time, size) in known.items() if size <= budget}
    found = ranks(2).run(chosen_job, OVERLAP_PAYS, {**options, "memory_budget": budget}, seconds(best))
    [choice] = {each[0] for each in found}
    tried = {n for n, _, _ in fitting}
    assert choice[0] == min(tried, key=seconds(best).__getitem__)
    assert fitting[choice] == min(time for (n, _, _), time in fitting.items() if n == choice[0])
