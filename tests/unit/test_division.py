"""The division point: which one the table gives, the file it is kept in, and how entries are measured.

All timers are fakes, and all devices.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pmoe import MoELayer
from pmoe.comm.ranks import Ranks
from pmoe.kernels import comet, extension, status
from pmoe.measure import division as among_ranks
from pmoe.measure.division import agreed, agreed_layer, kernel_shapes, time_layers
from pmoe.measure.division_file import as_fields, load_table, read_table, save_table, table_path
from pmoe.measure.stored import stored_profiles
from pmoe.planner.division import (
    Division,
    Entry,
    LayerSeconds,
    LayerTimes,
    Shape,
    Sizes,
    Table,
    all_columns,
    candidates,
    distance,
    fill,
    rule,
    sizes_of,
)
from tests.unit.test_cli import printed, refused, run

CPU = torch.device("cpu")
WHEN = "2026-01-31T12:00:00+00:00"
SIZES = Sizes(
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
SHAPE = Shape(**asdict(SIZES), kernel="combine", direction="forward")
SECONDS = LayerSeconds(fused_forward=1e-3, fused_step=4e-3, chunked_forward=2e-3, chunked_step=3e-3)


def entry(shape: Shape, n_c: int, chunk_columns: int = 512) -> Entry:
    division = Division(n_c, chunk_columns)
    return Entry(shape=shape, division=division, seconds={division: 1e-3, Division(1): 2e-3}, when=WHEN)


def table(*entries: Entry) -> Table:
    return Table({each.shape: each for each in entries})


def alone(values: Sequence[float]) -> list[float]:
    return list(values)


# ---- values


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kernel": "scatter"}, r"kernel \('scatter'\) must be one of dispatch, combine"),
        ({"direction": "up"}, r"direction \('up'\) must be one of forward, backward"),
        ({"num_blocks": 1}, r"num_blocks \(1\) must be at least 2"),
        ({"num_ranks": 0}, r"num_ranks \(0\) must be at least 1"),
        ({"experts": True}, r"experts \(True\) must be of type int"),
        ({"gated": 1}, r"gated \(1\) must be of type bool"),
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
        (0, 512, r"n_c \(0\) must be a whole number of at least 1"),
        (1.0, 512, r"n_c \(1.0\)"),
        (1, 0, r"chunk_columns \(0\) must be a multiple of 256"),
        (1, 300, r"chunk_columns \(300\) must be a multiple of 256"),
    ],
)
def test_divisions_that_no_kernel_takes_are_refused(n_c: Any, columns: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Division(n_c, columns)


def test_an_entry_takes_one_of_the_divisions_that_were_timed() -> None:
    with pytest.raises(ValueError, match="must be among those measured"):
        Entry(shape=SHAPE, division=Division(2), seconds={Division(1): 1.0}, when=WHEN)
    with pytest.raises(ValueError, match=r"seconds of Division.* \(inf\) must be a finite float"):
        Entry(shape=SHAPE, division=Division(1), seconds={Division(1): math.inf}, when=WHEN)


def test_the_kernels_of_a_layer_have_its_sizes() -> None:
    shapes = kernel_shapes(SIZES)
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
        Division(11, 512), "rule: nothing measured of combine forward in bfloat16",
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
    # As near: the same device with other blocks.
    same = entry(replace(SHAPE, num_blocks=66, rows=8192), 20)
    assert table(near, same).find(SHAPE)[0].n_c == 40


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"rows": 2048}, {"rows": 8192}),  # fewer rows
        ({"rows": 2048}, {"d_model": 2048}),
        ({"d_model": 2048}, {"d_model": 8192}),
        ({"d_model": 3072}, {"d_hidden": 768}),  # in steps that are no whole powers
        ({"rows": 8192}, {"gated": False}),  # the same gating
        ({"num_ranks": 4}, {"num_ranks": 16}),
    ],
)
def test_ties_are_settled_by_a_fixed_rule(first: dict[str, Any], second: dict[str, Any]) -> None:
    one, other = entry(replace(SHAPE, **first), 10), entry(replace(SHAPE, **second), 20)
    assert table(one, other).find(SHAPE)[0].n_c == table(other, one).find(SHAPE)[0].n_c == 10


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
    assert Table().find(SHAPE) == (
        Division(11, 512), "rule: nothing measured of combine forward in bfloat16",
    )  # fmt: skip
    assert rule(replace(SHAPE, d_model=256)).chunk_columns == 256


# ---- layers


def layer(rows: int = 4096, **changes: Any) -> LayerTimes:
    return LayerTimes(sizes=replace(SIZES, rows=rows, **changes), seconds=SECONDS, when=WHEN)


def times(*layers: LayerTimes) -> Table:
    return Table(layers={each.sizes: each for each in layers})


def test_layer_times_are_those_of_equal_sizes_and_rows_within_a_power_of_two() -> None:
    exact, half, twice, far = layer(), layer(2048), layer(8192), layer(16384)
    assert times(half, twice, exact, far).find_layer_times(SIZES) == exact
    assert times(half, twice, far).find_layer_times(SIZES) == twice
    assert times(half, far).find_layer_times(SHAPE) == half
    assert times(far, layer(1024)).find_layer_times(SIZES) is None
    assert times(layer(1)).find_layer_times(replace(SIZES, rows=1)) == layer(1)
    others: list[dict[str, Any]] = [
        {"num_ranks": 4}, {"experts": 8}, {"d_model": 8192}, {"gated": False}, {"dtype": "float16"},
        {"num_blocks": 66}, {"device_name": "NVIDIA B200"}, {"virtual": True},
    ]  # fmt: skip
    assert times(*(layer(**each) for each in others)).find_layer_times(SIZES) is None


def test_layer_seconds_say_which_way_is_faster_in_which_pass() -> None:
    assert SECONDS.fused_is_faster(training=False)
    assert not SECONDS.fused_is_faster(training=True)
    with pytest.raises(ValueError, match=r"fused_step \(nan\) must be a finite float"):
        replace(SECONDS, fused_step=math.nan)


def test_time_layers_times_both_passes_of_both_layers() -> None:
    layers = [MoELayer(8, 16, 4, 2, pipeline=n) for n in (1, 2)]
    found = time_layers(*layers, torch.randn(12, 8), Ranks.alone())
    assert min(asdict(found).values()) > 0
    assert all(parameter.grad is None for each in layers for parameter in each.parameters())


# ---- the file


def test_a_table_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    here = entry(SHAPE, 26, 1024)
    other = entry(replace(SHAPE, device_name="NVIDIA B200", virtual=True), 20)
    found = Table({each.shape: each for each in (here, other)}, {SIZES: layer()})
    paths = save_table(found, tmp_path / "new")
    assert [path.name for path in paths] == ["division_nvidia-h200_v1.json", "division_nvidia-b200_v1.json"]
    assert sorted((tmp_path / "new").iterdir()) == sorted(paths)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_table(tmp_path / "new") == found
    assert read_table(paths[0]) == Table({here.shape: here}, {SIZES: layer()})
    assert json.loads(paths[1].read_text()) == {"format": 1, **as_fields(table(other))}
    assert as_fields(table(other))["entries"][0]["seconds"] == [[1, 512, 2e-3], [20, 512, 1e-3]]


def test_it_lies_beside_the_profiles_and_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    (path,) = save_table(table(entry(SHAPE, 26)))
    assert path == table_path("NVIDIA H200") == tmp_path / "division_nvidia-h200_v1.json"
    assert stored_profiles() == {}
    assert load_table().find(SHAPE)[0].n_c == 26


def test_saving_merges_with_what_is_there(tmp_path: Path) -> None:
    old, kept = entry(SHAPE, 26), entry(replace(SHAPE, rows=1), 4)
    save_table(table(old, kept), tmp_path)
    save_table(times(layer()), tmp_path)
    # Names that differ in a hyphen share a file.
    alike = entry(replace(SHAPE, device_name="NVIDIA-H200"), 3)
    save_table(table(entry(SHAPE, 40), alike), tmp_path)
    found = load_table(tmp_path)
    assert {shape: each.division.n_c for shape, each in found.entries.items()} == {
        SHAPE: 40, kept.shape: 4, alike.shape: 3,
    }  # fmt: skip
    assert found.layers == {SIZES: layer()}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_write_that_fails_leaves_the_old_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = save_table(table(entry(SHAPE, 26)), tmp_path)
    before = path.read_bytes()

    def refuse(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("pmoe.measure.product_file.os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        save_table(table(entry(SHAPE, 40)), tmp_path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def changed(**changes: Any) -> Any:
    """The file with fields of its one entry replaced; None takes one away."""

    def change(held: dict[str, Any]) -> dict[str, Any]:
        (made,) = held["entries"]
        made = {name: value for name, value in {**made, **changes}.items() if value is not None}
        return held | {"entries": [made]}

    return change


CORRUPT = {
    "no JSON": ("{", "no JSON"),
    "not UTF-8": (b"\xff\xfe\xff", "no JSON"),
    "no object": ("[]", "must be an object"),
    "an older format": (lambda held: held | {"format": 0}, r"format \(0\) must be 1"),
    "a newer format": (lambda held: held | {"format": 2}, r"format \(2\) must be 1"),
    "no format": (lambda held: {"entries": []}, r"format \(None\) must be 1"),
    "no entries": (lambda held: held | {"entries": {}}, "must have a list of entries"),
    "an entry that is none": (lambda held: held | {"entries": [3]}, r"entries\[0\] \(3\) must be an object"),
    "a layer that is none": (lambda held: held | {"layers": [{}]}, r"layers\[0\] has no device_name"),
    "no n_c": (changed(n_c=None), r"entries\[0\] has no n_c"),
    "rows of no bucket": (changed(rows=7), r"entries\[0\]: rows \(7\) must be a power of two"),
    "an unknown kernel": (changed(kernel=[]), r"entries\[0\]: kernel \(\[\]\) must be one of"),
    "an n_c nobody timed": (changed(n_c=3), r"entries\[0\]: division .* must be among those measured"),
    "times that are none": (changed(seconds=[[26, 512, "1"]]), r"entries\[0\]: seconds of .* \('1'\)"),
    "times without divisions": (changed(seconds=[1.0]), r"entries\[0\]: "),
    "no times": (changed(seconds=7), r"entries\[0\]: "),
    "infinite times": (changed(seconds=[[26, 512, math.inf]]), r"entries\[0\]: seconds of .* \(inf\)"),
}


@pytest.mark.parametrize(("content", "told"), CORRUPT.values(), ids=CORRUPT.keys())
def test_a_file_that_cannot_be_used_is_told_of_and_the_others_are_used(
    tmp_path: Path, content: Any, told: str
) -> None:
    other = entry(replace(SHAPE, device_name="NVIDIA B200"), 20)
    (path,) = save_table(table(entry(SHAPE, 26)), tmp_path)
    save_table(table(other), tmp_path)
    if callable(content):
        content = json.dumps(content(json.loads(path.read_text())))
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match=f"are not used: .*{path.name}: {told}") as caught:
        assert load_table(tmp_path) == table(other)
    assert len(caught) == 1
    assert str(caught[0].message).endswith("; measure again with: pmoe profile --kernels")
    with pytest.warns(UserWarning, match=told):
        save_table(table(entry(SHAPE, 40)), tmp_path)
    assert read_table(path) == table(entry(SHAPE, 40))


def test_the_file_of_an_older_version_is_told_of_and_left_alone(tmp_path: Path) -> None:
    old = tmp_path / "division_nvidia-h200_v0.json"
    old.write_text('{"format": 0}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_table(table(entry(SHAPE, 26)), tmp_path)
    assert old.read_text() == '{"format": 0}'
    with pytest.warns(UserWarning, match=r"_v0.json: format \(0\) must be 1"):
        assert load_table(tmp_path).find(SHAPE)[0].n_c == 26


def test_where_there_is_no_folder_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_table(tmp_path / "none") == Table()
    monkeypatch.delenv("PMOE_CACHE", raising=False)

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(UserWarning, match="not used: no home"):
        assert load_table() == Table()


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
    asked: list[tuple[Shape, Division]] = []

    def time(shape: Shape, division: Division) -> float:
        asked.append((shape, division))
        return 1e-3 * (1 + abs(division.n_c - 26)) + abs(division.chunk_columns - 1024) * 1e-9

    dispatch = replace(SHAPE, kernel="dispatch")
    first, second = fill([dispatch, SHAPE], time, alone)
    assert (first.shape, first.division) == (dispatch, Division(26, 512))
    assert (second.shape, second.division) == (SHAPE, Division(26, 1024))
    assert first.seconds[Division(20)] == pytest.approx(7e-3 + 512e-9)
    # Those of the sweep and of the rule: what is stored tells what measuring gained.
    assert set(first.seconds) == {*candidates(132), rule(dispatch)}
    assert set(second.seconds) == {*candidates(132, 4096), rule(SHAPE)}
    assert len(asked) == len(set(asked)) == 16 + 15 * 4 + 1
    assert table(first, second).find(SHAPE)[0] == Division(26, 1024)


def test_fill_counts_the_slowest_rank_with_one_reduction_a_shape() -> None:
    calls: list[int] = []

    def slower_elsewhere(values: Sequence[float]) -> list[float]:
        """Another rank finds n_c=1 slow."""
        calls.append(len(values))
        return list(values) if len(values) == 2 else [max(values[0], 9.0), *values[1:]]

    shape = replace(SHAPE, kernel="dispatch", num_blocks=10)
    (found,) = fill([shape], lambda shape, division: division.n_c, slower_elsewhere)
    assert found.division == Division(2)
    assert found.seconds == {Division(1): 9.0, Division(2): 2.0, Division(4): 4.0}
    assert calls == [2, 3]  # whether the shapes are alike, and the seconds of the one shape


def test_of_equally_fast_divisions_the_one_with_fewer_blocks_is_taken() -> None:
    (found,) = fill([SHAPE], lambda shape, division: 1.0, alone)
    assert found.division == Division(1, 256)


def test_a_division_that_fails_on_one_rank_counts_on_none_and_is_told_once() -> None:
    def time(shape: Shape, division: Division) -> float:
        if shape.rows == 1 or division.n_c == 26:
            raise RuntimeError("no such launch")
        return math.nan if division.n_c == 20 else abs(division.n_c - 26.0)

    dispatch = replace(SHAPE, kernel="dispatch")
    with pytest.warns(UserWarning) as caught:
        found = fill([dispatch, replace(dispatch, rows=1)], time, alone)
    assert [(each.shape, each.division) for each in found] == [(dispatch, Division(32))]
    assert not {Division(20), Division(26)} & set(found[0].seconds)
    told = [str(each.message) for each in caught]
    assert len(told) == 2
    assert "Division(n_c=20, chunk_columns=512) of dispatch forward" in told[0]
    assert told[1].endswith("could not be measured: no such launch")


def test_fill_refuses_unlike_shapes_before_anything_is_measured() -> None:
    def unlike(values: Sequence[float]) -> list[float]:
        return [value + 1 for value in values]

    with pytest.raises(ValueError, match="shapes to measure must be the same on every rank"):
        fill([SHAPE], lambda shape, division: pytest.fail("measured"), unlike)


# ---- one rank's agreement


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    among_ranks.forget()
    yield
    among_ranks.forget()


def test_what_was_agreed_holds_until_it_is_forgotten(tmp_path: Path) -> None:
    ranks = Ranks.alone()
    assert agreed(ranks, SHAPE, CPU, folder=tmp_path) == Division(11, 512)
    assert agreed_layer(ranks, SHAPE, CPU, folder=tmp_path) is None
    save_table(Table({SHAPE: entry(SHAPE, 26, 1024)}, {SIZES: layer()}), tmp_path)
    assert agreed(ranks, SHAPE, CPU, folder=tmp_path) == Division(11, 512)
    assert agreed_layer(ranks, SIZES, CPU, folder=tmp_path) is None
    among_ranks.forget()
    assert agreed(ranks, SHAPE, CPU, folder=tmp_path) == Division(26, 1024)
    assert agreed_layer(ranks, SIZES, CPU, folder=tmp_path) == SECONDS


# ---- pmoe profile --kernels

KERNELS = ["profile", "--kernels"]
NEEDS = "pmoe profile --kernels needs a CUDA device with the fused kernels: "


def device(reason: str | None = None) -> extension.Device:
    return extension.Device(index=0, name="NVIDIA H200", capability=(9, 0), kernels=(), reason=reason)


@pytest.mark.parametrize(
    ("found", "options", "told"),
    [
        ({"no_devices": "torch sees no CUDA device"}, [], "torch sees no CUDA device"),
        ({"reason": "pmoe._cuda is not built"}, [], "pmoe._cuda is not built"),
        ({"devices": (device("no code for 7.5"),)}, [], "no code for 7.5"),
        ({}, ["--device", "cpu"], "device (cpu) is none"),
        ({}, ["--device", "cuda:3"], "device (cuda:3) is not here, torch sees 1"),
        ({}, [], "no code for this device"),
    ],
)
def test_without_a_device_that_runs_them_one_message_says_why(
    found: dict[str, Any],
    options: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fine: dict[str, Any] = {"no_devices": None, "reason": None, "devices": (device(),)}
    monkeypatch.setattr(among_ranks, "status", lambda: replace(status(), **fine | found))
    monkeypatch.setattr(comet, "path", lambda device: (None, "no code for this device"))
    assert refused(capsys, *KERNELS, *options).endswith(f"{NEEDS}{told}\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_on_a_machine_without_one_the_reason_is_that_of_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{NEEDS}{status().no_devices}" in refused(capsys, *KERNELS)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["profile", "--show"], "--show needs --kernels"),
        (["profile", "--top-k", "2"], "--top-k needs --kernels"),
        (["profile", "--virtual-ranks", "2"], "--virtual-ranks needs --kernels"),
        ([*KERNELS, "--quick"], "--quick must not be given with --kernels"),
        ([*KERNELS, "--out", "x"], "--out must not be given with --kernels"),
        ([*KERNELS, "--tokens", "0"], "argument --tokens: '0' must be a whole number of at least 1"),
        ([*KERNELS, "--device", "abacus"], "--device ('abacus') must be cpu or cuda"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, *argv)


def test_virtual_ranks_are_of_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refused(capsys, *KERNELS, "--virtual-ranks", "4")
    assert "--virtual-ranks (4) must be of one process, and there are 2" in message


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Shape, Division, dict[str, Any]]]:
    """As if there were an H200 whose fused kernels are fastest with 16 communicating blocks."""
    asked: list[tuple[Shape, Division, dict[str, Any]]] = []

    def time_division(shape: Shape, division: Division, **options: Any) -> float:
        asked.append((shape, division, options))
        return 1e-3 + abs(division.n_c - 16) * 1e-5 + division.chunk_columns * 1e-9

    monkeypatch.setattr(among_ranks, "time_division", time_division)
    monkeypatch.setattr(comet, "path", lambda device: ("sm_90a", None))
    monkeypatch.setattr(among_ranks, "status", lambda: replace(
        status(), no_devices=None, reason=None, devices=(device(),)
    ))  # fmt: skip
    monkeypatch.setattr(among_ranks, "device_name", lambda device: "NVIDIA H200")
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return asked


def test_profile_kernels_fills_the_table(
    tmp_path: Path, timed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--folder", str(tmp_path), "--tokens", "1000", "1024", "--virtual-ranks", "8"]
    found = printed(capsys, *KERNELS, *options)
    assert found["path"] == str(table_path("NVIDIA H200", tmp_path))
    sizes = replace(SIZES, experts=1, rows=2048, d_hidden=14336, virtual=True)  # Mixtral 8x7B's, K = 2
    assert list(dict.fromkeys(shape for shape, _, _ in timed)) == kernel_shapes(sizes)
    assert timed[0][2] | {"group": None} == {"top_k": 2, "device": torch.device("cuda:0"), "group": None}
    stored = load_table(tmp_path)
    assert {each.division for each in stored.entries.values()} == {Division(16, 512), Division(16, 256)}
    assert as_fields(stored) == {"entries": found["entries"], "layers": []}
    layer_options = ["--d-model", "64", "--d-hidden", "96", "--num-experts", "2", "--top-k", "1"]
    layer_options += ["--expert", "ffn", "--dtype", "float16", "--tokens", "4", "--folder", str(tmp_path)]
    run(*KERNELS, *layer_options)
    out = capsys.readouterr().out
    assert "float16, 1 rank, 2 experts, 4 rows, 64 x 96, on 132 blocks of NVIDIA H200\n" in out
    assert re.search(r"^dispatch forward +16 +- +1\.000 +1\.050 ", out, re.MULTILINE)
    assert re.search(r"^combine backward +16 +256 +1\.000 +1\.050 ", out, re.MULTILINE)
    assert out.endswith(f"\nwrote {found['path']}\n")
    assert len(load_table(tmp_path).entries) == 8


def test_show_prints_what_is_stored_and_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show = [*KERNELS, "--show", "--folder", str(tmp_path)]
    run(*show)
    assert capsys.readouterr().out == f"nothing measured of the fused kernels in {tmp_path}\n"
    stored = Table({SHAPE: entry(SHAPE, 26, 1024)}, {SIZES: layer()})
    save_table(stored, tmp_path)
    assert printed(capsys, *show) == {"folder": str(tmp_path), **as_fields(stored)}
    run(*show)
    out = capsys.readouterr().out
    assert f"{SIZES}\nkernel " in out
    assert re.search(rf"^combine forward +26 +1024 +1\.000 +- +{re.escape(WHEN)}$", out, re.MULTILINE)
    assert re.search(rf"^{SIZES} +1\.000 +2\.000 +4\.000 +3\.000 +{re.escape(WHEN)}$", out, re.MULTILINE)


def test_bad_sizes_and_kernels_that_cannot_be_timed_end_with_one_message(
    tmp_path: Path, timed: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, *KERNELS, "--virtual-ranks", "3")
    assert "num_experts (8) must be divisible by num_ranks (3)" in message
    assert "top_k (9) must be at most num_experts (8)" in refused(capsys, *KERNELS, "--top-k", "9")
    blocked = tmp_path / "file"
    blocked.touch()
    message = refused(capsys, *KERNELS, "--tokens", "4", "--folder", str(blocked / "in"))
    assert f"--folder ({blocked / 'in'}) must be a folder to write: " in message

    def fail(*args: Any, **options: Any) -> float:
        raise RuntimeError("no memory")

    monkeypatch.setattr(among_ranks, "time_division", fail)
    with pytest.warns(UserWarning, match="could not be measured: no memory"):
        message = refused(capsys, *KERNELS, "--tokens", "4", "--folder", str(tmp_path))
    assert "no fused kernel could be measured" in message
    assert list(tmp_path.iterdir()) == [blocked]
