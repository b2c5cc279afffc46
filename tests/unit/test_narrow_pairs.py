"""Pairs that keep T_DI in messages or T_M in e4m3: who chooses them, their schedules, bytes and costs.

tests/gloo/test_narrow_pairs.py has the layers on several ranks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import pmoe
from pmoe import Restore, cli
from pmoe.planner.cost_model import workload
from pmoe.planner.degree import Choice
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.planner.priced_choices import PricedChoice, advise, bound, within_budget
from pmoe.schedule.restore import (
    ALL_PAIRS,
    KEEP,
    NARROW_PAIRS,
    STRATEGIES,
    pairs_to_choose,
    without_messages,
)
from pmoe.schedule.ring_buffers import rotating_backward, rotating_forward
from pmoe.schedule.tasks import Kind, Stages
from tests.spread import named, spread
from tests.unit.test_footprint import TOKENS, build, measured
from tests.unit.test_wire import LAYER, PROFILE, SHARE

BOTH = Restore("message", "e4m3")
STAGES = Stages(local=True, remote=True)


def test_there_are_seven_such_pairs_and_none_has_a_name_of_the_paper() -> None:
    assert [str(pair) for pair in NARROW_PAIRS] == [
        "keep/e4m3",
        "offload/e4m3",
        "communicate/e4m3",
        "message/keep",
        "message/offload",
        "message/recompute",
        "message/e4m3",
    ]
    assert not {*NARROW_PAIRS} & {*ALL_PAIRS} and all(pair.strategy is None for pair in NARROW_PAIRS)


# ---- who chooses them


def test_only_allow_lets_pmoe_choose_them() -> None:
    for has_budget in (False, True):
        exact = ALL_PAIRS if has_budget else tuple(STRATEGIES.values())
        assert pairs_to_choose(None, has_budget=has_budget, has_messages=True) == exact
        allowed = pairs_to_choose("e4m3", has_budget=has_budget, has_messages=True)
        assert allowed[: len(exact)] == exact and len(allowed) == len(exact) + (7 if has_budget else 5)
        without = pairs_to_choose("e4m3", has_budget=has_budget, has_messages=False)
        assert {*without} == {pair for pair in allowed if pair.dispatched != "message"}


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_a_layer_chooses_among_them_only_if_it_allows_them(budget: Any) -> None:
    layer = build(memory_reuse=True, memory_budget=budget)
    assert not any(pair.is_narrow for pair in layer.layer_modules.pairs)
    layer.allow = "e4m3"
    pairs = layer.layer_modules.pairs
    assert Restore("communicate", "e4m3") in pairs and not any(pair.dispatched == "message" for pair in pairs)
    wide = pmoe.MoELayer(8, 8, 4, memory_reuse=True, allow="e4m3", memory_budget=budget, dtype=torch.float64)
    assert not any(pair.is_narrow for pair in wide.layer_modules.pairs)


def priced(pair: Restore, seconds: float, promised: int) -> PricedChoice:
    sizes = sizes_from_options(**LAYER, wire="e4m3")
    choice = Choice(forward=2, backward=2, restore=pair)
    memory = replace(bound(sizes, sizes.call(64), choice, 1.25), promised=promised)
    return PricedChoice(**vars(choice), seconds=seconds, memory=memory)


def test_of_equally_fast_pairs_within_a_budget_one_that_rounds_nothing_is_taken() -> None:
    rounding, exact = priced(Restore("keep", "e4m3"), 1.0, 50), priced(KEEP, 1.0, 90)
    message = priced(Restore("message", "keep"), 1.0, 80)
    assert within_budget([rounding, exact], 100) is exact
    assert within_budget([rounding, exact, message], 100) is message
    assert within_budget([rounding, exact], 60) is rounding
    assert within_budget([priced(Restore("keep", "e4m3"), 0.9, 50), exact], 100).restore.rounds


def test_a_choice_whose_time_was_not_predicted_is_told_without_a_time() -> None:
    """A layer with a budget and one possible choice logged "n=2 keep/keep: 0 ms"."""
    assert str(priced(KEEP, 0.0, 3 << 20)) == "n=2 keep/keep: 3.0 MiB at most"
    assert str(priced(KEEP, 0.5, 3 << 20)) == "n=2 keep/keep: 500 ms, 3.0 MiB at most"


def test_advice_names_such_a_pair_only_if_it_is_allowed() -> None:
    sizes = sizes_from_options(**LAYER, wire="e4m3")
    plain = advise(sizes, PROFILE, 4096)
    assert plain.decision.restore.strategy and not any(each.restore.is_narrow for each in plain.candidates)
    allowed = advise(sizes, PROFILE, 4096, allow="e4m3")
    assert {each.restore for each in allowed.candidates} == {*ALL_PAIRS, *NARROW_PAIRS}
    assert allowed.decision.restore == BOTH and "message/e4m3 is the cheapest of S1, S2" in allowed.why
    smallest = min(each.memory.promised for each in allowed.candidates if each.restore == BOTH)
    assert advise(sizes, PROFILE, 4096, allow="e4m3", budget=1 << 40).decision.restore == Restore(
        "message", "keep"
    )
    assert advise(sizes, PROFILE, 4096, allow="e4m3", budget=smallest).decision.memory.promised <= smallest
    unwired = advise(sizes_from_options(**LAYER), PROFILE, 4096, allow="e4m3")
    assert not any(each.restore.dispatched == "message" for each in unwired.candidates)
    wide = advise(sizes_from_options(**{**LAYER, "dtype": torch.float64}), PROFILE, 4096, allow="e4m3")
    assert not any(each.restore.rounds for each in wide.candidates)


# ---- schedules and costs


def test_backward_neither_sends_again_nor_recomputes() -> None:
    schedule = rotating_backward(3, STAGES, restore=BOTH)
    assert not schedule.kinds & {Kind.GATHER_AGAIN, Kind.DISPATCH_AGAIN, Kind.RECOMPUTE, Kind.LOCAL_RECOMPUTE}
    (task,) = (task for task in schedule.tasks if task.name == "C1")
    assert {"dT_DO.1", "T_DI.1"} <= {*task.reads} and not {"T_DI_sorted.1", "T_M.1"} & {*task.reads}
    assert {"T_DI_sorted.1", "T_M.1"} <= {*task.writes} and len({*task.writes}) == len(task.writes)
    assert not any(slot.startswith("T_DI[") for slot in schedule.slots.values())
    forward = rotating_forward(3, STAGES, restore=BOTH)
    assert not any(slot.startswith("T_DI[") for slot in forward.slots.values())
    assert {slot for slot in forward.slots.values() if slot.startswith("T_M")} == {"T_M[0]"}


def test_forward_dispatches_into_memory_that_no_chunk_waits_for() -> None:
    """With messages that stay, S2 need not wait for the experts of chunk 0, whose slot it would take."""
    waits = {
        pair: {task.name: task.waits for task in rotating_forward(4, STAGES, restore=pair).tasks}["S2"]
        for pair in (STRATEGIES["S4"], Restore("message", "recompute"))
    }
    assert "C0" in waits[STRATEGIES["S4"]] and waits[Restore("message", "recompute")] == ("G2",)


def test_they_add_no_units_of_work_to_table_2() -> None:
    for direction in ("forward", "backward"):
        assert workload(BOTH, direction) == workload(KEEP, direction)
    assert workload(Restore("message", "recompute"), "backward") == (5, 2, 0)
    assert workload(Restore("offload", "e4m3"), "backward") == (4, 2, 1)


# ---- bytes


def test_predicted_bytes_between_the_passes_are_those_of_messages() -> None:
    sizes = sizes_from_options(**LAYER, wire="e4m3")

    def tensors(pair: Restore) -> dict[str, int]:
        choice = Choice(forward=4, backward=4, restore=pair)
        return bound(sizes, sizes.call(4096), choice, 1.25).tensors

    kept, narrow = tensors(KEEP), tensors(BOTH)
    received = kept["T_DI"] - 4096 * 2 * 2048  # without the rows that stay, which take no bytes now
    assert narrow["T_DI"] / received == pytest.approx(SHARE)
    assert narrow["T_M"] / kept["T_M"] == pytest.approx((2048 + 4 * 16) / 4096)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "pair, n, width",
    spread([pair for pair in NARROW_PAIRS if pair.dispatched != "message"], [1, 2, 4], [512, 520], every=4),
    ids=named,
)
def test_the_peak_of_a_step_is_within_two_percent_of_the_prediction(
    pair: Restore, n: int, width: int
) -> None:
    layer = build(pipeline=n, memory_reuse=pair, d_hidden=width)
    found = measured(layer)
    predicted = layer.predict_memory(TOKENS, layer.row_counts)
    assert predicted.peak == pytest.approx(found.peak, rel=0.02)
    assert predicted.saved == pytest.approx(found.held, rel=0.02)
    assert layer.predict_memory(TOKENS).peak >= found.peak


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_peak_in_narrow_types_is_at_most_the_prediction(dtype: torch.dtype) -> None:
    layer = build(pipeline=2, memory_reuse=Restore("communicate", "e4m3"), dtype=dtype)
    found = measured(layer)
    assert layer.predict_memory(TOKENS, layer.row_counts).peak >= found.peak


# ---- one rank, and the command


def test_on_one_rank_messages_are_copies_of_tokens() -> None:
    assert without_messages(BOTH) == Restore("communicate", "e4m3")
    layer = build(memory_reuse=Restore("message", "recompute"), wire="e4m3")
    layer(torch.randn(9, layer.d_model)).sum().backward()
    assert layer.ran is not None and layer.ran.restore == STRATEGIES["S4"]
    assert layer.memory_reuse == Restore("message", "recompute")


def test_predict_memory_takes_a_pair_and_refuses_what_the_layer_cannot() -> None:
    layer = build(memory_reuse="S4")
    assert layer.predict_memory(64, memory_reuse=Restore("keep", "e4m3")).tensors["T_M"] > 0
    with pytest.raises(
        ValueError, match=r"memory_reuse \(message/keep\) must not keep T_DI in messages with wire"
    ):
        layer.predict_memory(64, memory_reuse=Restore("message", "keep"))


SIZES = ["--d-model=256", "--d-hidden=512", "--num-experts=8", "--tokens=512", "--ranks=4", "--n=2"]


def test_the_command_lists_them_where_they_are_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    def pairs(*options: str) -> list[str]:
        assert cli.main(["memory", *SIZES, *options, "--json"]) in (0, None)
        return [row["restore"] for row in json.loads(capsys.readouterr().out)["pairs"]]

    assert pairs("--wire=e4m3") == [str(pair) for pair in ALL_PAIRS]
    assert pairs("--wire=e4m3", "--allow=e4m3") == [str(pair) for pair in (*ALL_PAIRS, *NARROW_PAIRS)]
    assert "message/keep" not in pairs("--allow=e4m3")
    assert pairs("--wire=e4m3", "--memory-reuse=message/recompute") == ["message/recompute"]
    for options, message in (
        (["--memory-reuse=message/recompute"], "--memory-reuse (message/recompute) needs --wire"),
        (["--memory-reuse=keep/e4m3", "--dtype=float64"], "must not keep T_M in e4m3 with --dtype float64"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["memory", *SIZES, *options])
        assert message in capsys.readouterr().err
