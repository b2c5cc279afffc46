"""Algorithm 1 beside the plainest program of it, what happens where its hypothesis is wrong, and its file."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import random
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from pmoe.choose.search import load_degrees, save_degrees
from pmoe.measure import store
from pmoe.planner import granularity
from pmoe.planner.degree import DEGREES
from pmoe.planner.granularity import GranularityTable, PassDegrees

ROOT = Path(__file__).resolve().parents[2]
KEY = {"device": "cpu", "ranks": 4, "sizes": (1024, 4096)}


def both(n: int) -> PassDegrees:
    return PassDegrees(n, n)


class LiteralAlgorithm1:
    """The paper's lines in their order, with its two misprints put right; every find looks at every range."""

    def __init__(self) -> None:
        self.S: dict[PassDegrees, list[int]] = {}  # n -> [lower, upper]
        self.cache_table: dict[int, PassDegrees] = {}
        self.searched: list[int] = []

    def degrees_for(self, B, best) -> PassDegrees:
        if B in self.cache_table:
            return self.cache_table[B]
        n = next((n for n, (lower, upper) in self.S.items() if lower <= B <= upper), None)
        if n is None:
            n = best(B)
            self.searched.append(B)
            if n not in self.S:
                self.S[n] = [B, B]
            else:
                lower, upper = self.S[n]
                self.S[n] = [min(B, lower), max(B, upper)]
        self.cache_table[B] = n
        return n


def random_monotone(draw: random.Random):
    """B -> degrees that never fall, neither forward nor backward."""
    forward = sorted(draw.sample(range(1, 400), len(DEGREES) - 1))
    backward = sorted(draw.sample(range(1, 400), len(DEGREES) - 1))
    return lambda B: PassDegrees(
        DEGREES[sum(edge <= B for edge in forward)], DEGREES[sum(edge <= B for edge in backward)]
    )


def measured(*points: tuple[int, int]) -> GranularityTable:
    ranges = GranularityTable()
    for B, n in points:
        ranges.points[B] = both(n)
    return ranges


def ranges_of(found: GranularityTable) -> list[tuple[int, int, PassDegrees]]:
    """(lower, upper, value) of each of Algorithm 1's ranges, by rising B: runs of equal neighbours."""
    runs = [list(run) for _, run in groupby(found.points.items(), key=lambda point: point[1])]
    return [(run[0][0], run[-1][0], run[0][1]) for run in runs]


def plain(ranges: GranularityTable) -> list[tuple[int, int, int]]:
    return [(lower, upper, value.forward) for lower, upper, value in ranges_of(ranges)]


# Where the hypothesis holds


@pytest.mark.parametrize("seed", range(40))
def test_every_answer_and_every_trial_is_that_of_the_literal_algorithm(seed: int) -> None:
    draw = random.Random(seed)
    best = random_monotone(draw)
    literal, search, searched = LiteralAlgorithm1(), GranularityTable(), []
    for _ in range(300):
        B = draw.randrange(400)
        found = search.lookup(B)
        if found is None:
            searched.append(B)
            found = search.record(B, {best(B): 0.0, PassDegrees(3, 3): 1.0})
        assert found == literal.degrees_for(B, best) == best(B)
    assert searched == literal.searched and len(searched) < 300
    assert {value: [lower, upper] for lower, upper, value in ranges_of(search)} == literal.S
    for B in range(400):
        inside = [n for n, (lower, upper) in literal.S.items() if lower <= B <= upper]
        assert search.lookup(B) == (inside[0] if inside else None)


@pytest.mark.parametrize("seed", range(20))
def test_ranges_do_not_depend_on_the_order_of_measurements_even_of_those_inside_a_range(seed: int) -> None:
    draw = random.Random(seed)
    best = random_monotone(draw)
    points = [draw.randrange(400) for _ in range(60)]
    there, back = GranularityTable(), GranularityTable()
    hull: dict[PassDegrees, list[int]] = {}
    for B in points:
        there.points[B] = best(B)
        lower, upper = hull.get(best(B), [B, B])
        hull[best(B)] = [min(B, lower), max(B, upper)]
    for B in reversed(points):
        back.points[B] = best(B)
    assert ranges_of(there) == ranges_of(back)
    assert {value: [lower, upper] for lower, upper, value in ranges_of(there)} == hull


def test_nothing_is_known_before_the_first_measurement_nor_outside_and_between_ranges() -> None:
    assert GranularityTable().lookup(7) is None and ranges_of(GranularityTable()) == []
    ranges = measured((100, 2), (400, 2), (900, 4))
    assert ranges_of(ranges) == [(100, 400, both(2)), (900, 900, both(4))]
    found = {B: ranges.lookup(B) for B in (99, 100, 101, 399, 400, 401, 899, 900, 901)}
    known = {100: both(2), 101: both(2), 399: both(2), 400: both(2), 900: both(4)}
    assert found == {B: known.get(B) for B in found}


def test_no_tokens_are_a_batch_size() -> None:
    assert measured((0, 1)).lookup(0) == both(1)


def test_degrees_are_ordered_forward_first_and_must_be_positive() -> None:
    assert PassDegrees(1, 8) < PassDegrees(2, 1) < PassDegrees(2, 2)
    for forward, backward in ((0, 1), (1, 0), (-2, 4)):
        with pytest.raises(
            ValueError, match=re.escape(f"degrees ({forward}, {backward}) must be at least 1")
        ):
            PassDegrees(forward, backward)


# Where it does not


def test_a_point_inside_a_range_with_another_value_cuts_it_in_two() -> None:
    ranges = measured((100, 2), (400, 2), (900, 4), (200, 4))
    assert plain(ranges) == [(100, 100, 2), (200, 200, 4), (400, 400, 2), (900, 900, 4)]
    assert [ranges.lookup(B) for B in (150, 200, 300)] == [None, both(4), None]


def test_a_range_that_would_reach_over_another_one_does_not() -> None:
    ranges = measured((10, 2), (20, 4), (30, 4), (40, 2))
    assert plain(ranges) == [(10, 10, 2), (20, 30, 4), (40, 40, 2)]
    assert ranges.lookup(25) == both(4)


def test_falling_degrees_leave_each_point_a_range_of_its_own() -> None:
    ranges = measured((10, 4), (20, 2), (30, 1))
    assert plain(ranges) == [(10, 10, 4), (20, 20, 2), (30, 30, 1)]


def test_measuring_the_same_batch_size_again_replaces_its_value() -> None:
    ranges = measured((10, 2), (20, 2), (30, 4), (20, 4))
    assert plain(ranges) == [(10, 10, 2), (20, 30, 4)]


def test_later_measurements_can_mend_what_an_outlier_broke() -> None:
    ranges = measured((100, 2), (400, 2), (200, 8), (200, 2))
    assert plain(ranges) == [(100, 400, 2)]


@pytest.mark.parametrize("seed", range(40))
def test_any_measurements_leave_disjoint_ranges_in_which_the_last_ones_stand(seed: int) -> None:
    draw = random.Random(seed)
    ranges, last = GranularityTable(), {}
    for _ in range(80):
        B = draw.randrange(100)
        last[B] = PassDegrees(draw.choice((1, 2, 4)), draw.choice((1, 2)))
        ranges.points[B] = last[B]
        found = ranges_of(ranges)
        assert all(lower <= upper for lower, upper, _ in found)
        for left, right in zip(found, found[1:], strict=False):
            assert left[1] < right[0] and left[2] != right[2]
    for B in range(100):
        inside = [value for lower, upper, value in ranges_of(ranges) if lower <= B <= upper]
        assert inside == ([] if ranges.lookup(B) is None else [ranges.lookup(B)])
        assert B not in last or inside == [last[B]]


# What is recorded


def test_the_fastest_is_recorded_and_of_equal_ones_that_with_fewer_chunks() -> None:
    search = GranularityTable()
    assert search.record(1, {both(8): 1.0, both(2): 2.0}) == both(8)
    assert search.record(
        2, {PassDegrees(4, 1): 1.0, PassDegrees(1, 2): 1.0, PassDegrees(2, 1): 1.0}
    ) == PassDegrees(1, 2)


# The file, copies


def learnt() -> GranularityTable:
    """900 was measured again, and what fell at 950 stands."""
    search = GranularityTable()
    points = (
        (100, PassDegrees(1, 2)),
        (400, PassDegrees(1, 2)),
        (900, both(8)),
        (900, both(4)),
        (950, both(2)),
    )
    for B, degrees in points:
        search.record(B, {degrees: 1.0})
    return search


def same(one: GranularityTable, other: GranularityTable) -> bool:
    return one.points == other.points


def test_a_saved_table_is_loaded_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_degrees({"S4": learnt(), "S1": GranularityTable()}, path, KEY)
    [loaded] = load_degrees(str(path), KEY).values()
    assert same(loaded, learnt())
    assert [loaded.lookup(B) for B in (99, 250, 900)] == [None, PassDegrees(1, 2), both(4)]
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_the_file_reads_as_what_it_is(tmp_path: Path) -> None:
    save_degrees({"S4": learnt()}, tmp_path / "table.json", KEY)
    assert json.loads((tmp_path / "table.json").read_text()) == {
        "format": 2,
        "key": {"device": "cpu", "ranks": 4, "sizes": [1024, 4096]},
        "tables": {
            "S4": {
                "points": [[100, 1, 2], [400, 1, 2], [900, 4, 4], [950, 2, 2]],
            }
        },
    }


def test_a_file_of_an_older_pmoe_which_counted_contradictions_is_read(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_degrees({"S4": learnt()}, path, KEY)
    path.write_text(path.read_text().replace('"points"', '"contradictions": 2, "points"'))
    assert same(load_degrees(path, KEY)["S4"], learnt())


def test_a_table_of_another_key_or_format_is_refused_with_both(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_degrees({"S4": learnt()}, path, KEY)
    with pytest.raises(ValueError, match=re.escape(str(path))) as refused:
        load_degrees(path, {**KEY, "ranks": 8})
    assert "another layer, group or machine: ranks 4, here 8; save_degrees" in str(refused.value)
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(ValueError, match=re.escape(f"{path}: format (1) must be 2")):
        load_degrees(path, KEY)


def test_degrees_that_the_layer_cannot_take_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_degrees({"S4": learnt()}, path, KEY)
    assert load_degrees(path, KEY, (1, 2, 4))
    with pytest.raises(ValueError, match=r"found PassDegrees\(forward=4, backward=4\), expected .* \(1, 2\)"):
        load_degrees(path, KEY, (1, 2))


def broken_files() -> dict[str, tuple[bytes, str]]:
    """Content, and what is said of it."""
    table = {"points": [[1, 2, 2]]}

    def file(table: object) -> bytes:
        return json.dumps({"format": 2, "key": {}, "tables": {"S4": table}}).encode()

    return {
        "empty": (b"", "no JSON"),
        "cut short": (file(table)[:-9], "no JSON"),
        "not text": (b"\xff\xfe\xfd\x00\x01", "no JSON"),
        "nested without end": (b"[" * 100_000, "no JSON"),
        "a list": (b"[]", "must be an object, not list"),
        "no key": (json.dumps({"format": 2}).encode(), r"key \(None\) must be an object"),
        "no tables": (json.dumps({"format": 2, "key": {}}).encode(), r"no granularity table: tables "),
        "no table": (file(5), "no granularity table: "),
        "no points": (file({}), "no granularity table: "),
    } | {
        f"{name} {value}": (file({**table, name: value}), "no granularity table: ")
        for name, value in [
            ("points", 5),
            ("points", [[1, 2]]),
            ("points", [[1, 2, 0]]),
            ("points", [[-1, 2, 2]]),
            ("points", [["1", 2, 2]]),
            ("points", [[1, 2.5, 2]]),
            ("points", [[1, True, 2]]),
            ("points", [[1, None, 2]]),
        ]
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
    save_degrees({"S4": learnt()}, path, KEY)
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
    twin.record(5000, {both(16): 1.0})
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
        "print(table.record(64, {module.PassDegrees(n, n): 1 / n for n in (1, 16)}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "PassDegrees(forward=16, backward=16)\n"


def test_no_other_module_imports_sortedcontainers() -> None:
    found = set()
    for path in (ROOT / "pmoe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            found |= {path.name for name in names if name.split(".")[0] == "sortedcontainers"}
    assert found == {"granularity.py"}
