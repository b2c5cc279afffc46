"""Restore pairs: what becomes of T_DI and T_M, the pairs' names, and what memory_reuse accepts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES, Restore, parse_restore


def test_the_four_strategies_are_those_of_table_2() -> None:
    assert {name: str(pair) for name, pair in STRATEGIES.items()} == {
        "S1": "offload/offload",
        "S2": "communicate/offload",
        "S3": "offload/recompute",
        "S4": "communicate/recompute",
    }


def test_there_are_nine_pairs_and_the_order_is_fixed() -> None:
    assert [str(pair) for pair in ALL_PAIRS] == [
        "keep/keep",
        "keep/offload",
        "keep/recompute",
        "offload/keep",
        "offload/offload",
        "offload/recompute",
        "communicate/keep",
        "communicate/offload",
        "communicate/recompute",
    ]
    assert ALL_PAIRS[0] == KEEP


def test_a_pair_knows_the_papers_name_where_it_has_one() -> None:
    assert {str(pair): pair.strategy for pair in ALL_PAIRS if pair.strategy is not None} == {
        "offload/offload": "S1",
        "communicate/offload": "S2",
        "offload/recompute": "S3",
        "communicate/recompute": "S4",
    }
    assert KEEP.strategy is None


def test_a_pair_offloads_where_either_tensor_is_offloaded() -> None:
    assert [str(pair) for pair in ALL_PAIRS if not pair.offloads] == [
        "keep/keep",
        "keep/recompute",
        "communicate/keep",
        "communicate/recompute",
    ]


def test_equal_pairs_are_one_key_and_a_pair_cannot_change() -> None:
    assert {Restore("communicate", "recompute"): 1}[STRATEGIES["S4"]] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        KEEP.hidden = "offload"  # type: ignore[misc]


@pytest.mark.parametrize(
    "fates, match",
    [
        (
            ("recompute", "keep"),
            r"^dispatched \('recompute'\) must be one of keep, offload, communicate, message$",
        ),
        (
            ("keep", "communicate"),
            r"^hidden \('communicate'\) must be one of keep, offload, recompute, e4m3$",
        ),
        (("Offload", "offload"), r"^dispatched \('Offload'\) must be one of"),
        (("keep", None), r"^hidden \(None\) must be one of"),
        (([], "keep"), r"^dispatched \(\[\]\) must be one of"),
    ],
)
def test_a_fate_that_the_tensor_does_not_have_is_refused(fates: tuple[Any, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Restore(*fates)


def test_memory_reuse_may_be_a_bool_a_strategy_or_a_pair() -> None:
    assert parse_restore(False) is False
    assert parse_restore(True) is True
    assert parse_restore("S1") == Restore("offload", "offload")
    assert parse_restore("S2") == Restore("communicate", "offload")
    assert parse_restore("S3") == Restore("offload", "recompute")
    assert parse_restore("S4") == Restore("communicate", "recompute")
    pair = Restore("keep", "recompute")
    assert parse_restore(pair) is pair


@pytest.mark.parametrize(
    "memory_reuse, error",
    [
        ("S5", ValueError),
        ("s1", ValueError),
        ("", ValueError),
        ("offload/offload", ValueError),
        (1, TypeError),
        (0, TypeError),
        (None, TypeError),
        (("offload", "offload"), TypeError),
    ],
)
def test_any_other_memory_reuse_is_refused_by_name_value_and_rule(
    memory_reuse: Any, error: type[Exception]
) -> None:
    with pytest.raises(error) as refused:
        parse_restore(memory_reuse)
    assert str(refused.value) == (
        f"memory_reuse ({memory_reuse!r}) must be False, True, a Restore or one of S1, S2, S3, S4"
    )
