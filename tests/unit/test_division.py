"""The division point of a fused kernel: which one the table gives, and how the table is measured.

It says how many blocks of the kernel communicate. All timers and devices are fakes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pmoe import MoELayer
from pmoe.comm.ranks import Ranks
from pmoe.measure import block_split
from pmoe.measure.block_split import agreed, agreed_layer, save_divisions
from pmoe.measure.fused_kernels import sweep, time_layers
from pmoe.planner.block_split import (
    Division,
    DivisionTable,
    Entry,
    FusedKernelSizes,
    FusedLayerSizes,
    LayerSeconds,
    all_columns,
    all_kernel_sizes,
    candidates,
    distance,
    rule,
    sizes_of,
)

CPU = torch.device("cpu")
WHEN = "2026-01-31T12:00:00+00:00"
SIZES = FusedLayerSizes(
    device_name="NVIDIA H200",
    num_blocks=132,
    num_ranks=8,
    experts=4,
    rows=4096,
    d_model=4096,
    d_hidden=1024,
    gated=True,
    dtype="bfloat16",
)
SHAPE = FusedKernelSizes(**asdict(SIZES), kernel="combine", direction="forward")
SECONDS = LayerSeconds(
    fused_forward=1e-3, fused_step=4e-3, chunked_forward=2e-3, chunked_step=3e-3, when=WHEN
)


def entry(shape: FusedKernelSizes, n_c: int, chunk_columns: int = 512) -> Entry:
    division = Division(n_c, chunk_columns)
    return Entry(sizes=shape, division=division, seconds={division: 1e-3, Division(1): 2e-3}, when=WHEN)


def table(*entries: Entry) -> DivisionTable:
    return DivisionTable({each.sizes: each for each in entries})


def alone(values: Sequence[float]) -> list[float]:
    return list(values)


# ---- values


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_blocks": 1}, r"num_blocks \(1\) must be at least 2"),
        ({"num_ranks": 0}, r"num_ranks \(0\) must be at least 1"),
        ({"rows": 1000}, r"rows \(1000\) must be a power of two: 1024"),
        ({"dtype": "int8"}, r"dtype \('int8'\) must name a floating-point type"),
        ({"dtype": "nn"}, r"dtype \('nn'\) must name a floating-point type"),
    ],
)
def test_shapes_that_no_kernel_has_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(SHAPE, **changes)


@pytest.mark.parametrize(
    ("n_c", "columns", "told"),
    [
        (0, 512, r"n_c \(0\) must be at least 1"),
        (1, 0, r"chunk_columns \(0\) must be at least 1"),
        (1, 300, r"chunk_columns \(300\) must be a multiple of 256"),
    ],
)
def test_divisions_that_no_kernel_takes_are_refused(n_c: Any, columns: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Division(n_c, columns)


def test_the_kernels_of_a_layer_have_its_sizes() -> None:
    shapes = all_kernel_sizes(SIZES)
    assert [(each.kernel, each.direction) for each in shapes] == [
        ("dispatch", "forward"), ("dispatch", "backward"), ("combine", "forward"), ("combine", "backward"),
    ]  # fmt: skip
    assert {sizes_of(each) for each in shapes} == {SIZES}
    assert str(SHAPE) == (
        "combine forward bfloat16, 8 ranks, 4 experts, 4096 rows, 4096 x 1024 gated, "
        "on 132 blocks of NVIDIA H200"
    )


# ---- finding


def test_the_very_shape_is_what_was_measured_fastest() -> None:
    near = replace(SHAPE, rows=8192)
    found, why = table(entry(near, 40), entry(SHAPE, 26, 1024)).find(SHAPE)
    assert (found, why) == (Division(26, 1024), f"measured {WHEN}")


@pytest.mark.parametrize(
    ("changes", "powers"),
    [
        ({}, 0),
        ({"rows": 8192}, 1),
        ({"rows": 1024}, 2),
        ({"rows": 8192, "experts": 1}, 3),
        ({"num_ranks": 4, "d_model": 2048, "d_hidden": 2048}, 3),
        ({"d_hidden": 1536}, math.log2(1.5)),
        ({"gated": False, "num_ranks": 16}, 2),
        ({"device_name": "Abacus 4000", "num_blocks": 9}, 0),  # counted before any distance
    ],
)
def test_a_distance_is_the_sum_of_powers_of_two(changes: dict[str, Any], powers: float) -> None:
    other = replace(SIZES, **changes)
    assert distance(SIZES, other) == distance(other, SIZES) == pytest.approx(powers, abs=1e-8)


def test_the_nearest_entry_is_taken_and_told() -> None:
    two = entry(replace(SHAPE, rows=1024), 8)  # 2
    one_and_a_half = entry(replace(SHAPE, d_hidden=1536, d_model=2048), 18)  # 0.58 + 1
    three = entry(replace(SHAPE, rows=8192, num_ranks=2), 30)  # 1 + 2
    found, why = table(three, two, one_and_a_half).find(SHAPE)
    assert found == Division(18, 512)
    assert why == (f"nearest: bfloat16, 8 ranks, 4 experts, 4096 rows, 2048 x 1536 gated, measured {WHEN}")


@pytest.mark.parametrize("changes", [{"kernel": "dispatch"}, {"direction": "backward"}, {"dtype": "float16"}])
def test_entries_of_another_kernel_direction_or_dtype_do_not_compete(changes: dict[str, Any]) -> None:
    far = entry(replace(SHAPE, rows=1), 30)
    assert table(entry(replace(SHAPE, **changes), 40), far).find(SHAPE)[0] == far.division
    assert table(entry(replace(SHAPE, **changes), 40)).find(SHAPE) == (
        Division(11, 512), "rule: no measurement of combine forward in bfloat16",
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"device_name": "NVIDIA B200", "num_blocks": 148}, {"device_name": "NVIDIA H800"}, {"num_blocks": 66},
     {"virtual": True}],
)  # fmt: skip
def test_what_was_measured_elsewhere_is_further_away_than_anything_here(changes: dict[str, Any]) -> None:
    far = entry(replace(SHAPE, rows=1, d_model=64, experts=64), 30, 256)
    elsewhere = entry(replace(SHAPE, **changes), 20)
    assert table(far, elsewhere).find(SHAPE)[0] == far.division


@pytest.mark.parametrize(
    ("there", "n_c", "here", "scaled"),
    [
        (148, 20, 132, 18),  # 17.84
        (66, 13, 132, 26),
        (132, 26, 66, 13),
        (132, 1, 66, 1),  # 0.5, up
        (132, 3, 44, 1),
        (132, 1, 16, 1),  # 0.12: at least one
        (4, 3, 132, 99),
    ],
)
def test_n_c_of_another_device_is_scaled_by_the_ratio_of_the_blocks(
    there: int, n_c: int, here: int, scaled: int
) -> None:
    other = replace(SHAPE, device_name="NVIDIA B200", num_blocks=there)
    found, why = table(entry(other, n_c)).find(replace(SHAPE, num_blocks=here))
    assert found == Division(scaled, 512)
    assert f"measured {WHEN} on {there} blocks of NVIDIA B200, n_c {n_c} scaled to {scaled}" in why


def test_of_two_other_devices_the_nearer_shape_counts() -> None:
    near = entry(replace(SHAPE, device_name="NVIDIA B200", rows=8192), 20)
    further = entry(replace(SHAPE, device_name="NVIDIA H800", rows=1024), 30)
    assert table(further, near).find(SHAPE)[0].n_c == 20


def test_of_equally_near_entries_one_is_taken_whatever_their_order() -> None:
    one, other = entry(replace(SHAPE, rows=2048), 10), entry(replace(SHAPE, rows=8192), 20)
    assert table(one, other).find(SHAPE) == table(other, one).find(SHAPE)


def test_what_is_found_is_clamped_to_what_the_kernel_takes() -> None:
    assert table(entry(replace(SHAPE, rows=8192), 131)).find(SHAPE)[0].n_c == 131
    assert table(entry(SHAPE, 200)).find(SHAPE)[0].n_c == 131
    small = replace(SHAPE, d_model=300)
    assert table(entry(SHAPE, 8, 4096)).find(small)[0] == Division(8, 512)
    few = replace(SHAPE, num_blocks=2)
    assert table(entry(SHAPE, 131)).find(few)[0].n_c == 1


def test_where_nothing_is_measured_a_twelfth_of_the_blocks_communicates() -> None:
    for blocks, n_c in ((132, 11), (148, 12), (24, 2), (11, 1), (2, 1)):
        assert rule(replace(SHAPE, num_blocks=blocks)) == Division(n_c, 512)
    assert DivisionTable().find(SHAPE) == (
        Division(11, 512), "rule: no measurement of combine forward in bfloat16",
    )  # fmt: skip
    assert rule(replace(SHAPE, d_model=256)).chunk_columns == 256


# ---- layers


def times(*rows: int, **changes: Any) -> DivisionTable:
    """Returns a table for layers with these numbers of rows, which take as many seconds."""
    seconds = {each: replace(SECONDS, fused_step=each) for each in rows}
    return DivisionTable(layers={replace(SIZES, rows=each, **changes): seconds[each] for each in rows})


def test_layer_times_are_those_of_equal_sizes_and_rows_within_a_power_of_two() -> None:
    for measured, rows in (
        ((2048, 8192, 4096, 16384), 4096),
        ((2048, 8192, 16384), 8192),
        ((2048, 16384), 2048),
    ):
        found = times(*measured).find_layer_times(SIZES)
        assert found is not None and found.fused_step == rows
    assert times(16384, 1024).find_layer_times(SIZES) is None
    assert times(1).find_layer_times(replace(SIZES, rows=1)) is not None
    others: list[dict[str, Any]] = [
        {"num_ranks": 4}, {"experts": 8}, {"d_model": 8192}, {"gated": False}, {"dtype": "float16"},
        {"num_blocks": 66}, {"device_name": "NVIDIA B200"}, {"virtual": True},
    ]  # fmt: skip
    assert not any(times(4096, **each).find_layer_times(SIZES) for each in others)


def test_layer_seconds_say_which_way_is_faster_in_which_pass() -> None:
    assert SECONDS.fused_is_faster(training=False)
    assert not SECONDS.fused_is_faster(training=True)


def test_time_layers_times_both_passes_of_both_layers() -> None:
    layers = [MoELayer(8, 16, 4, 2, pipeline=n) for n in (1, 2)]
    found = time_layers(*layers, torch.randn(12, 8), Ranks.single())
    assert min(value for value in asdict(found).values() if value is not found.when) > 0
    assert all(parameter.grad is None for each in layers for parameter in each.parameters())


# ---- measuring


def test_a_sweep_tries_ever_fewer_of_more_blocks() -> None:
    dispatch = [each.n_c for each in candidates(132)]
    assert dispatch == [1, 2, 4, 6, 8, 12, 16, 20, 26, 32, 40, 46, 52, 58, 64]
    assert {each.chunk_columns for each in candidates(132)} == {512}
    assert [each.n_c for each in candidates(92)][-1] == 40  # below half: 46 is half
    assert candidates(2) == candidates(3) == [Division(1)]
    assert candidates(8, 1024) == [Division(n, columns) for n in (1, 2) for columns in (256, 512, 1024)]
    assert [each.chunk_columns for each in candidates(4, 4096)] == [256, 512, 1024, 4096]
    assert [each.chunk_columns for each in candidates(4, 300)] == [256, 512]
    assert [all_columns(d_model) for d_model in (1, 256, 257, 1000)] == [256, 256, 512, 1024]


def test_fill_takes_the_fastest_division_of_each_shape() -> None:
    asked: list[tuple[FusedKernelSizes, Division]] = []

    def time(shape: FusedKernelSizes, division: Division) -> float:
        asked.append((shape, division))
        return 1e-3 * (1 + abs(division.n_c - 26)) + abs(division.chunk_columns - 1024) * 1e-9

    dispatch = replace(SHAPE, kernel="dispatch")
    first, second = sweep([dispatch, SHAPE], time, alone)
    assert (first.sizes, first.division) == (dispatch, Division(26, 512))
    assert (second.sizes, second.division) == (SHAPE, Division(26, 1024))
    assert first.seconds[Division(20)] == pytest.approx(7e-3 + 512e-9)
    # Those of the sweep and of the rule: what is stored tells what measuring gained.
    assert set(first.seconds) == {*candidates(132), rule(dispatch)}
    assert set(second.seconds) == {*candidates(132, 4096), rule(SHAPE)}
    assert len(asked) == len(set(asked)) == 16 + 15 * 4 + 1
    assert table(first, second).find(SHAPE)[0] == Division(26, 1024)


def test_fill_counts_the_slowest_rank_with_one_reduction_a_shape() -> None:
    calls: list[int] = []

    def slower_elsewhere(values: Sequence[float]) -> list[float]:
        """Reduces times as if another rank found n_c=1 slow."""
        calls.append(len(values))
        return list(values) if len(values) == 2 else [max(values[0], 9.0), *values[1:]]

    shape = replace(SHAPE, kernel="dispatch", num_blocks=10)
    (found,) = sweep([shape], lambda shape, division: division.n_c, slower_elsewhere)
    assert found.division == Division(2)
    assert found.seconds == {Division(1): 9.0, Division(2): 2.0, Division(4): 4.0}
    assert calls == [2, 3]  # whether the shapes are alike, and the seconds of the one shape


def test_of_equally_fast_divisions_the_one_with_fewer_blocks_is_taken() -> None:
    (found,) = sweep([SHAPE], lambda shape, division: 1.0, alone)
    assert found.division == Division(1, 256)


def test_a_division_that_fails_on_one_rank_counts_on_none_and_is_told_once() -> None:
    def time(shape: FusedKernelSizes, division: Division) -> float:
        if shape.rows == 1 or division.n_c == 26:
            raise RuntimeError("no such launch")
        return math.nan if division.n_c == 20 else abs(division.n_c - 26.0)

    dispatch = replace(SHAPE, kernel="dispatch")
    with pytest.warns(UserWarning) as caught:
        found = sweep([dispatch, replace(dispatch, rows=1)], time, alone)
    assert [(each.sizes, each.division) for each in found] == [(dispatch, Division(32))]
    assert not {Division(20), Division(26)} & set(found[0].seconds)
    told = [str(each.message) for each in caught]
    assert len(told) == 2
    assert "Division(n_c=20, chunk_columns=512) of dispatch forward" in told[0]
    assert told[1].endswith("could not be measured: no such launch")


def test_fill_refuses_unlike_shapes_before_anything_is_measured() -> None:
    def unlike(values: Sequence[float]) -> list[float]:
        return [value + 1 for value in values]

    with pytest.raises(ValueError, match="kernels to measure must be the same on every rank"):
        sweep([SHAPE], lambda shape, division: pytest.fail("measured"), unlike)


# ---- one rank's agreement


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    block_split.forget()
    yield
    block_split.forget()


def test_what_was_agreed_holds_until_it_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    ranks = Ranks.single()
    assert agreed(ranks, SHAPE, CPU) == Division(11, 512)
    assert agreed_layer(ranks, SHAPE, CPU) is None
    save_divisions(DivisionTable({SHAPE: entry(SHAPE, 26, 1024)}, {SIZES: SECONDS}))
    assert agreed(ranks, SHAPE, CPU) == Division(11, 512)
    assert agreed_layer(ranks, SIZES, CPU) is None
    block_split.forget()
    assert agreed(ranks, SHAPE, CPU) == Division(26, 1024)
    assert agreed_layer(ranks, SIZES, CPU) == SECONDS
