"""Algorithm 1's table of the fastest n: beside the printed one, with noise, with a wrong hypothesis; and its
file.
"""

from __future__ import annotations

import ast
import copy
import json
import math
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pmoe
from bench.searches import PrintedAlgorithm1
from pmoe.choose import search as search_module
from pmoe.choose.search import learned_degrees, load_degrees, save_degrees
from pmoe.measure import store
from pmoe.planner import granularity
from pmoe.planner.degree import DEGREES
from pmoe.planner.granularity import GranularityTable, PassDegrees, rounded
from pmoe.planner.timed_rounds import PassTimes

ROOT = Path(__file__).resolve().parents[2]
KEY = {"device": "cpu", "ranks": 4, "sizes": (1024, 4096)}


def both(n: int) -> PassDegrees:
    return PassDegrees(n, n)


def timed(step: float, noise: float = 0.0, runs: int = 3) -> PassTimes:
    return PassTimes(forward=step / 3, backward=2 * step / 3, step=step, runs=runs, noise=noise)


def recorded(*measurements: tuple[int, dict[int, float]], noise: float = 0.0) -> GranularityTable:
    """Returns a table after some measurements.

    measurements: (B, seconds of a step by n) pairs, B tokens of a rank.
    """
    table = GranularityTable()
    for B, seconds in measurements:
        table.record(B, {both(n): timed(step, noise) for n, step in seconds.items()})
    return table


def only(n: int, *, among: tuple[int, ...] = DEGREES) -> dict[int, float]:
    """Returns the seconds by n of a measurement that says nothing of another B than its own.

    n is the fastest, but by very little.
    """
    return {each: 1.0 if each == n else 1 + 1e-9 for each in among}


def random_monotone(draw: random.Random):
    """Returns a random function from B to the fastest degrees, which never fall as B grows."""
    inner = DEGREES[1:-1]  # the lowest and the highest n would also hold for all B below and above
    forward = sorted(draw.sample(range(1, 2000), len(inner) - 1))
    backward = sorted(draw.sample(range(1, 2000), len(inner) - 1))
    return lambda B: PassDegrees(
        inner[sum(edge <= B for edge in forward)], inner[sum(edge <= B for edge in backward)]
    )


ALL_DEGREES = [PassDegrees(n, m) for n in DEGREES for m in DEGREES]


def exact_times(fastest: PassDegrees) -> dict[PassDegrees, PassTimes]:
    """Returns times without noise, which say nothing of another B than the one they are measured at.

    All other degrees are slower than the fastest ones, but by very little.
    """
    return {degrees: timed(1.0 if degrees == fastest else 1 + 1e-9) for degrees in ALL_DEGREES}


def ranges_of(table: GranularityTable) -> list[tuple[int, int, PassDegrees]]:
    return [(each.lower, each.upper, each.degrees) for each in table.ranges.values()]


def plain(table: GranularityTable) -> list[tuple[int, int, int]]:
    return [(lower, upper, value.forward) for lower, upper, value in ranges_of(table)]


# Entries


def test_a_batch_size_is_rounded_to_a_few_percent() -> None:
    assert [rounded(B) for B in (0, 1, 31, 32, 33, 4000, 4096, 4160, 4225)] == [
        *(0, 1, 31, 32),
        *(34, 3968, 4096, 4096, 4352),
    ]
    for B in range(1, 5000):
        assert abs(rounded(B) - B) <= B / 32
        assert rounded(rounded(B)) == rounded(B) <= rounded(B + 1)


# Where the hypothesis holds and nothing is noisy


@pytest.mark.parametrize("seed", range(40))
def test_every_answer_and_every_trial_is_that_of_the_printed_algorithm(seed: int) -> None:
    draw = random.Random(seed)
    best = random_monotone(draw)
    printed, table, searched, printed_searched = PrintedAlgorithm1(), GranularityTable(), [], []
    for _ in range(300):
        B = rounded(draw.randrange(2000))
        if (found := table.lookup(B)) is None:
            searched.append(B)
            found = table.record(B, exact_times(best(B)))
        if (expected := printed.lookup(B)) is None:
            printed_searched.append(B)
            expected = printed.record(B, best(B))
        assert found == expected == best(B)
    assert searched == printed_searched and len(searched) < 150
    assert {value: (lower, upper) for lower, upper, value in ranges_of(table)} == printed.S


def test_nothing_is_known_before_the_first_measurement_nor_outside_and_between_ranges() -> None:
    assert GranularityTable().lookup(7) is None and ranges_of(GranularityTable()) == []
    table = recorded((96, only(2)), (416, only(2)), (896, only(4)))
    assert ranges_of(table) == [(96, 416, both(2)), (896, 896, both(4))]
    found = {B: table.lookup(B) for B in (92, 96, 100, 400, 416, 432, 864, 896, 928)}
    known = {96: both(2), 100: both(2), 400: both(2), 416: both(2), 896: both(4)}
    assert found == {B: known.get(B) for B in found}


def test_no_tokens_are_a_batch_size() -> None:
    assert recorded((0, only(1))).lookup(0) == both(1)


def test_degrees_are_ordered_forward_first_and_must_be_positive() -> None:
    assert PassDegrees(1, 8) < PassDegrees(2, 1) < PassDegrees(2, 2)
    for forward, backward in ((0, 1), (1, 0), (-2, 4)):
        with pytest.raises(
            ValueError, match=re.escape(f"degrees ({forward}, {backward}) must be at least 1")
        ):
            PassDegrees(forward, backward)


def test_a_known_batch_size_is_not_recorded_again() -> None:
    table = recorded((96, only(2)), (416, only(2)))
    with pytest.raises(ValueError, match=re.escape("B (200) must not be in a range already (96 to 416)")):
        table.record(200, exact_times(both(4)))


def test_an_answer_is_kept_until_the_next_measurement_may_have_changed_it() -> None:
    table = recorded((96, only(2)), (416, only(2)))
    assert table.lookup(200) == table.lookup(203) == table.lookup(210) == both(2)
    assert table.answers == {200: both(2), 208: both(2)}
    table.record(896, exact_times(both(4)))
    assert table.answers == {}


# Margins


def test_a_measurement_holds_as_far_as_no_other_n_can_have_become_faster() -> None:
    """n = 2 is 10 % faster than more chunks, and 20 % faster than fewer."""
    table = recorded((1024, {1: 1.2, 2: 1.0, 4: 1.1, 8: 1.15}))
    assert plain(table) == [(854, 1126, 2)]  # 1024 / 1.2 rounded up, 1024 * 1.1 rounded down


def test_a_margin_shrinks_by_what_the_noise_hides_and_is_never_beyond_a_quarter() -> None:
    noisy = recorded((1024, {1: 9.0, 2: 1.0, 4: 1.1}), noise=0.02)
    error = timed(1.0, noise=0.02).resolution(timed(1.0))
    assert plain(noisy) == [(math.ceil(1024 / 1.25), math.floor(1024 * 1.1 / (1 + error)), 2)]
    assert plain(recorded((1024, {16: 1.0, 8: 1.25}))) == [(820, 1280, 16)]


def test_a_margin_ends_where_another_range_begins() -> None:
    table = recorded((1024, only(4)), (960, {1: 2.0, 2: 1.0, 4: 2.0}), (1088, {4: 2.0, 8: 1.0, 16: 2.0}))
    assert plain(table) == [(768, 1023, 2), (1024, 1024, 4), (1025, 1360, 8)]


# Noise


CLOSE_CALL = {2: 1.0, 4: 1.005, 8: 1.4}
"""Seconds by n. With 2 % of noise, n = 4 is as fast as 2 within half a standard error, and 8 is slower."""


def test_what_is_equally_fast_within_the_noise_joins_its_neighbour() -> None:
    noisy = recorded((512, {2: 1.2, 4: 1.0, 8: 1.4}), (1024, CLOSE_CALL), noise=0.02)
    assert [value for *_, value in plain(noisy)] == [4] and noisy.lookup(1024) == both(4)
    exact = recorded((512, {2: 1.2, 4: 1.0, 8: 1.4}), (1024, CLOSE_CALL), noise=1e-6)
    assert [value for *_, value in plain(exact)] == [4, 2]


def test_a_range_takes_the_n_that_loses_least_in_all_its_measurements() -> None:
    """n = 2 is fastest once by 0.2 %, n = 4 twice by 0.4 %: all of that is within the noise."""
    seconds = ({2: 1.0, 4: 1.002}, {2: 1.004, 4: 1.0}, {2: 1.004, 4: 1.0})
    table = recorded(*zip((512, 1024, 2048), seconds, strict=True), noise=0.02)
    assert [value for *_, value in plain(table)] == [4]
    assert [each.measured for each in table.ranges.values()] == [3]


def test_one_measurement_takes_the_fewest_chunks_within_a_standard_error() -> None:
    """n = 8 was fastest, n = 2 slower by 0.9 and n = 1 by 1.1 standard errors."""
    error = timed(1.0, noise=0.02).standard_error(timed(1.0, noise=0.02))
    seconds = {1: 1 + 1.1 * error, 2: 1 + 0.9 * error, 4: 1.0 + 0.1 * error, 8: 1.0}
    assert recorded((512, seconds), noise=0.02).lookup(512) == both(2)
    assert recorded((512, seconds), noise=0.0).lookup(512) == both(8)


def test_an_n_that_falls_by_less_than_the_contradiction_is_put_right_by_the_hypothesis() -> None:
    """Three measurements say n = 2. The one between them says 4, by three standard errors, so one of them is
    noise.
    """
    error = timed(1.0, noise=0.02).standard_error(timed(1.0, noise=0.02))
    two, four = {2: 1.0, 4: 1 + 6 * error}, {2: 1 + 3 * error, 4: 1.0}
    table = recorded((512, two), (2048, four), noise=0.02)
    assert [value for *_, value in plain(table)] == [2, 4]
    table.record(8192, {both(n): timed(step, 0.02) for n, step in {2: 1.0, 4: 1 + 3.5 * error}.items()})
    assert [value for *_, value in plain(table)] == [2]
    assert table.lookup(2048) == both(2)


def test_measurements_that_contradict_the_hypothesis_beyond_their_spread_overrule_it() -> None:
    error = timed(1.0, noise=0.02).standard_error(timed(1.0, noise=0.02))
    two, four = {2: 1.0, 4: 1 + 9 * error}, {2: 1 + 9 * error, 4: 1.0}
    table = recorded((512, two), (2048, four), (8192, two), noise=0.02)
    assert [value for *_, value in plain(table)] == [2, 4, 2]
    assert [table.lookup(B) for B in (512, 2048, 8192)] == [both(2), both(4), both(2)]


def test_the_hypothesis_holds_for_each_pass_by_itself() -> None:
    """The n of forward falls from 4/2 to 2/4, which contradicts the hypothesis. Degrees near both are
    taken.
    """
    table = GranularityTable()
    first = {PassDegrees(4, 2): 1.0, PassDegrees(2, 2): 1.02, PassDegrees(2, 4): 1.3}
    second = {PassDegrees(2, 4): 1.0, PassDegrees(2, 2): 1.02, PassDegrees(4, 2): 1.3}
    for B, seconds in ((512, first), (1024, second)):
        table.record(B, {degrees: timed(step, 0.02) for degrees, step in seconds.items()})
    assert [each.degrees for each in table.ranges.values()] == [both(2)]


def test_ranges_without_noise_may_fall() -> None:
    table = recorded((512, only(8)), (1024, only(4)), (2048, only(2)))
    assert plain(table) == [(512, 512, 8), (1024, 1024, 4), (2048, 2048, 2)]


@pytest.mark.parametrize("seed", range(40))
def test_any_measurements_leave_disjoint_ranges_in_rising_order(seed: int) -> None:
    draw = random.Random(seed)
    table, measured = GranularityTable(), 0
    for _ in range(200):
        B = draw.randrange(5000)
        if table.lookup(B) is None:
            seconds = {both(n): timed(draw.uniform(1, 1.3), draw.choice((0, 0.03))) for n in (1, 2, 4)}
            assert table.record(B, seconds) == table.lookup(B)
            measured += 1
        found = ranges_of(table)
        assert all(lower <= upper for lower, upper, _ in found)
        for left, right in zip(found, found[1:], strict=False):
            assert left[1] < right[0] and left[2] != right[2]
        assert sum(each.measured for each in table.ranges.values()) == measured
        assert set(table.ranges) == {lower for lower, *_ in found}


def test_batch_sizes_that_change_in_every_step_leave_a_small_table() -> None:
    """2,000 sizes from 1 to 2 million tokens, each with a random n, leave a small table.

    It has at most 16 ranges for each factor of two.
    """
    draw = random.Random(0)
    table = GranularityTable()
    for _ in range(2000):
        B = int(2 ** draw.uniform(0, 21))
        if table.lookup(B) is None:
            table.record(B, exact_times(draw.choice(ALL_DEGREES)))
        table.lookup(B)
    entries = len({rounded(B) for B in range(2**11)}) + 16 * 10 + 1
    assert len(table.ranges) <= entries and len(table.answers) <= entries
    assert len(json.dumps(table.to_fields())) < 200 * entries


# What is recorded


def test_the_fastest_is_recorded_and_of_equal_ones_that_with_fewer_chunks() -> None:
    table = GranularityTable()
    assert table.record(1, {both(8): timed(1.0), both(2): timed(2.0)}) == both(8)
    equal = dict.fromkeys((PassDegrees(4, 1), PassDegrees(1, 2), PassDegrees(2, 1)), timed(1.0))
    assert table.record(64, equal) == PassDegrees(1, 2)


# The file, copies


def learnt() -> GranularityTable:
    """Returns a table with two ranges with noise, and one range in which n falls."""
    table = GranularityTable()
    near = {PassDegrees(1, 2): timed(1.0, 0.01), both(2): timed(1.004, 0.01), both(1): timed(1.1, 0.01)}
    table.record(96, near)
    table.record(384, near)
    for B, n in ((896, 4), (960, 2)):
        table.record(B, exact_times(both(n)))
    return table


def same(one: GranularityTable, other: GranularityTable) -> bool:
    return dict(one.ranges) == dict(other.ranges)


def test_a_saved_table_is_loaded_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_degrees({"torch.float32": learnt(), "torch.bfloat16": GranularityTable()}, path, KEY)
    [loaded] = load_degrees(str(path), KEY).values()
    assert same(loaded, learnt())
    assert [loaded.lookup(B) for B in (86, 250, 900)] == [None, PassDegrees(1, 2), both(4)]
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_the_file_reads_as_what_it_is(tmp_path: Path) -> None:
    table = recorded((96, only(2)), (416, only(2)), (896, {4: 1.0, 2: 1.5}))
    save_degrees({"torch.float32": table}, tmp_path / "table.json", KEY)
    assert json.loads((tmp_path / "table.json").read_text()) == {
        "format": 3,
        "key": {"device": "cpu", "ranks": 4, "sizes": [1024, 4096]},
        "tables": {
            "torch.float32": {
                "ranges": [[96, 416, 2, [[2, 2, 0.0, 0.0]]], [717, 1120, 1, [[4, 4, 0.0, 0.0]]]],
            }
        },
    }


# Files of before


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_file_of_version_2_is_read_and_its_pairs_are_one_table(tmp_path: Path) -> None:
    """The pairs had different n at 400 tokens. Both count as equally fast, and the smaller one is taken."""
    points = {
        "keep/keep, torch.float32": [[100, 1, 2], [400, 2, 2], [900, 4, 4]],
        "communicate/recompute, torch.float32": [[400, 4, 4], [4100, 4, 4]],
        "keep/keep, torch.bfloat16": [[100, 8, 8]],
    }
    tables = {name: {"contradictions": 2, "points": each} for name, each in points.items()}
    loaded = load_degrees(write(tmp_path / "a.json", {"format": 2, "key": KEY, "tables": tables}), KEY)
    assert ranges_of(loaded["torch.float32"]) == [(100, 100, PassDegrees(1, 2)), (400, 4096, both(4))]
    assert ranges_of(loaded["torch.bfloat16"]) == [(100, 100, both(8))]
    with pytest.raises(ValueError, match=r"found n=8/8, expected numbers among \(1, 2, 4\)"):
        load_degrees(tmp_path / "a.json", KEY, (1, 2, 4))


def test_points_of_before_that_contradict_each_other_stay_apart() -> None:
    """The points are those that earlier trials found in 60 random batches (issue 46)."""
    points = {5596: (8, 8), 5796: (2, 4), 5830: (4, 8), 5866: (16, 16), 7248: (4, 4), 9000: (4, 4)}
    table = GranularityTable.from_points({B: {PassDegrees(*degrees)} for B, degrees in points.items()})
    assert ranges_of(table) == [
        (5632, 5632, both(8)),
        (5888, 5888, PassDegrees(2, 4)),  # three points that count as equally fast
        (7168, 9216, both(4)),
    ]


OLD_KEY = {
    "sizes": [16, 32, 8, 2, 1],
    "experts": "FFNExperts",
    "parameters": "torch.float32 on cpu",
    "strategy": "communicate/recompute, rotates=True, bypass_local=True",
}


def version_1(path: Path, **changed: object) -> Path:
    return write(path, {"format": 1, "key": {**OLD_KEY, **changed}, "points": [[100, 2, 2], [400, 2, 4]]})


@pytest.fixture
def nothing_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "_LEARNED", {})


@pytest.mark.usefixtures("nothing_learnt")
def test_a_file_of_version_1_is_read_where_its_key_says_the_same(tmp_path: Path) -> None:
    layer = pmoe.MoELayer(16, 32, 8, top_k=2, pipeline=True, memory_reuse="S4")
    layer.load_degrees(version_1(tmp_path / "a.json"))
    table = learned_degrees(layer.layer_modules).table(torch.float32)
    assert [table.lookup(B) for B in (90, 100, 200, 400)] == [None, both(2), None, PassDegrees(2, 4)]


@pytest.mark.usefixtures("nothing_learnt")
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"sizes": [16, 32, 8, 1, 1]}, r"sizes [16, 32, 8, 1, 1], here [16, 32, 8, 2, 1]"),
        ({"experts": "SwiGLUExperts"}, "experts 'SwiGLUExperts', here 'FFNExperts'"),
        ({"parameters": "torch.float64 on cpu"}, "parameters 'torch.float64 on cpu', here 'torch.float32"),
        ({"strategy": "False, rotates=False, bypass_local=True"}, "strategy 'False, rotates=False"),
        ({"another": 1}, "another 1, here None"),
    ],
)
def test_a_file_of_version_1_of_another_layer_is_refused(
    tmp_path: Path, changed: dict[str, object], told: str
) -> None:
    layer = pmoe.MoELayer(16, 32, 8, top_k=2, pipeline=True, memory_reuse="S4")
    path = version_1(tmp_path / "a.json", **changed)
    with pytest.raises(ValueError, match=re.escape(f"{path}: holds the degrees of another layer")) as refused:
        layer.load_degrees(path)
    assert told in str(refused.value)


def test_a_table_of_another_key_or_format_is_refused_with_both(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_degrees({"torch.float32": learnt()}, path, KEY)
    with pytest.raises(ValueError, match=re.escape(str(path))) as refused:
        load_degrees(path, {**KEY, "ranks": 8})
    assert "another layer, group or machine: ranks 4, here 8; save_degrees" in str(refused.value)
    path.write_text(path.read_text().replace('"format": 3', '"format": 4'))
    with pytest.raises(ValueError, match=re.escape(f"{path}: format (4) must be 1, 2 or 3")):
        load_degrees(path, KEY)


def test_degrees_that_the_layer_cannot_take_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_degrees({"torch.float32": learnt()}, path, KEY)
    assert load_degrees(path, KEY, (1, 2, 4))
    with pytest.raises(ValueError, match=r"found n=4/4, expected numbers among \(1, 2\)"):
        load_degrees(path, KEY, (1, 2))


def broken_files() -> dict[str, tuple[bytes, str]]:
    """Returns (content of the file, pattern of the error) by name of the fault."""
    table = {"ranges": [[1, 2, 1, [[2, 2, 0.0, 0.0]]]]}

    def file(table: object, version: int = 3) -> bytes:
        return json.dumps({"format": version, "key": {}, "tables": {"torch.float32": table}}).encode()

    ranges = {
        "a number": 5,
        "three fields": [[1, 2, [[2, 2, 0.0, 0.0]]]],
        "from behind": [[2, 1, 1, [[2, 2, 0.0, 0.0]]]],
        "negative": [[-1, 2, 1, [[2, 2, 0.0, 0.0]]]],
        "a text": [["1", 2, 1, [[2, 2, 0.0, 0.0]]]],
        "never measured": [[1, 2, 0, [[2, 2, 0.0, 0.0]]]],
        "without n": [[1, 2, 1, []]],
        "n of 0": [[1, 2, 1, [[2, 0, 0.0, 0.0]]]],
        "n of a half": [[1, 2, 1, [[2, 0.5, 0.0, 0.0]]]],
        "n that is true": [[1, 2, 1, [[2, True, 0.0, 0.0]]]],
        "a negative excess": [[1, 2, 1, [[2, 2, -0.1, 0.0]]]],
        "an excess of no number": [[1, 2, 1, [[2, 2, None, 0.0]]]],
        "an excess that is true": [[1, 2, 1, [[2, 2, 0.0, True]]]],
        "overlapping": [[1, 4, 1, [[2, 2, 0.0, 0.0]]], [4, 5, 1, [[2, 2, 0.0, 0.0]]]],
        "falling": [[3, 4, 1, [[2, 2, 0.0, 0.0]]], [1, 2, 1, [[2, 2, 0.0, 0.0]]]],
    }
    points = [5, [[1, 2]], [[1, 2, 0]], [[-1, 2, 2]], [["1", 2, 2]], [[1, 2.5, 2]], [[1, True, 2]]]
    return {
        "empty": (b"", "no JSON"),
        "cut short": (file(table)[:-9], "no JSON"),
        "cut in half": (file(table)[: len(file(table)) // 2], "no JSON"),
        "not text": (b"\xff\xfe\xfd\x00\x01", "no JSON"),
        "nested without end": (b"[" * 100_000, "no JSON"),
        "a list": (b"[]", "must be an object, not list"),
        "no format": (b"{}", r"format \(None\) must be 1, 2 or 3"),
        **{
            f"no key {version}": (
                json.dumps({"format": version}).encode(),
                r"key \(None\) must be an object",
            )
            for version in (1, 2, 3)
        },
        "no tables": (json.dumps({"format": 3, "key": {}}).encode(), r"no granularity table: tables "),
        "no table": (file(5), "no granularity table: "),
        "no ranges": (file({}), "no granularity table: "),
        **{
            f"ranges {name}": (file({"ranges": each}), "no granularity table: ")
            for name, each in ranges.items()
        },
        "no points": (file({}, 2), "no granularity table: "),
        **{f"points {each}": (file({"points": each}, 2), "no granularity table: ") for each in points},
        "points of version 1": (b'{"format": 1, "key": {}, "points": 5}', "no granularity table: "),
    }


@pytest.mark.parametrize(("content", "told"), broken_files().values(), ids=broken_files())
def test_a_corrupt_file_is_refused_by_its_path(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}: ") + told):
        load_degrees(path, {})


def test_saving_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    save_degrees({"torch.float32": learnt()}, path, KEY)
    before = path.read_bytes()
    with pytest.raises(TypeError, match="JSON"):
        save_degrees({}, path, {"device": object()})

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        save_degrees({}, path, KEY)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda search: pickle.loads(pickle.dumps(search))])
def test_a_copy_knows_the_same_and_learns_apart(duplicate) -> None:
    original = learnt()
    twin = duplicate(original)
    assert same(twin, original)
    twin.record(5000, {both(16): timed(1.0)})
    assert original.lookup(5000) is None


# The house


def test_the_table_works_where_there_is_no_torch() -> None:
    program = (
        "import importlib.util, sys\n"
        "sys.modules['torch'] = None\n"
        f"spec = importlib.util.spec_from_file_location('granularity', {granularity.__file__!r})\n"
        "module = sys.modules['granularity'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "table = module.GranularityTable()\n"
        "table.insert(module.BatchRange(64, 96, 1, {module.PassDegrees(16, 16): module.Excess(0.0, 0.0)}))\n"
        "print(table.lookup(80))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "16/16\n"


def test_no_other_module_imports_sortedcontainers() -> None:
    found = set()
    for path in (ROOT / "pmoe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            found |= {path.name for name in names if name.split(".")[0] == "sortedcontainers"}
    assert found == {"granularity.py"}
