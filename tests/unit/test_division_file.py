"""The file in which tables of division points are stored. They say how many blocks of a kernel
communicate.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pmoe.measure.block_split import (
    as_fields,
    division_path,
    load_divisions,
    read_divisions,
    save_divisions,
)
from pmoe.measure.profile import stored_profiles
from pmoe.planner.block_split import DivisionTable
from tests.unit.test_division import SECONDS, SHAPE, SIZES, entry, table


def test_a_table_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    here = entry(SHAPE, 26, 1024)
    other = entry(replace(SHAPE, device_name="NVIDIA B200", virtual=True), 20)
    first = DivisionTable({here.sizes: here}, {SIZES: SECONDS})
    paths = [save_divisions(each, tmp_path / "new") for each in (first, table(other))]
    assert [path.name for path in paths] == ["division_nvidia-h200_v1.json", "division_nvidia-b200_v1.json"]
    assert sorted((tmp_path / "new").iterdir()) == sorted(paths)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = DivisionTable({each.sizes: each for each in (here, other)}, first.layers)
        assert load_divisions(tmp_path / "new") == both
    assert read_divisions(paths[0]) == first
    assert json.loads(paths[1].read_text()) == {"format": 1, **as_fields(table(other))}
    assert as_fields(table(other))["entries"][0]["seconds"] == [[1, 512, 2e-3], [20, 512, 1e-3]]


def test_it_lies_beside_the_profiles_and_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    path = save_divisions(table(entry(SHAPE, 26)))
    assert path == division_path("NVIDIA H200") == tmp_path / "division_nvidia-h200_v1.json"
    assert stored_profiles() == {}
    assert load_divisions().find(SHAPE)[0].n_c == 26


def test_saving_merges_with_what_is_there(tmp_path: Path) -> None:
    old, kept = entry(SHAPE, 26), entry(replace(SHAPE, rows=1), 4)
    save_divisions(table(old, kept), tmp_path)
    save_divisions(DivisionTable(layers={SIZES: SECONDS}), tmp_path)
    # Names that differ in a hyphen share a file.
    alike = entry(replace(SHAPE, device_name="NVIDIA-H200"), 3)
    save_divisions(table(entry(SHAPE, 40), alike), tmp_path)
    found = load_divisions(tmp_path)
    assert {shape: each.division.n_c for shape, each in found.entries.items()} == {
        SHAPE: 40, kept.sizes: 4, alike.sizes: 3,
    }  # fmt: skip
    assert found.layers == {SIZES: SECONDS}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_write_that_fails_leaves_the_old_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_divisions(table(entry(SHAPE, 26)), tmp_path)
    before = path.read_bytes()

    def refuse(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("pmoe.measure.store.os.fsync", refuse)
    with pytest.raises(OSError, match="disk full"):
        save_divisions(table(entry(SHAPE, 40)), tmp_path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def changed(**changes: Any) -> Any:
    """Returns the file's content with other fields in its only entry; None removes a field."""

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
    "an unknown kernel": (
        changed(kernel=[]),
        r"entries\[0\].kernel \(\[\]\) must be one of dispatch, combine",
    ),
    "an unknown direction": (changed(direction="up"), r"entries\[0\].direction \('up'\) must be one of"),
    "a count that is none": (changed(experts=True), r"entries\[0\].experts \(True\) is of the wrong type"),
    "a flag that is none": (changed(gated=1), r"entries\[0\].gated \(1\) is of the wrong type"),
    "no date": (changed(when=None), r"entries\[0\].when \(None\) is of the wrong type"),
    "an n_c nobody timed": (changed(n_c=3), r"entries\[0\]: division .* must be among those measured"),
    "times that are none": (changed(seconds=[[26, 512, "1"]]), r"entries\[0\]: .*seconds\[0\] \('1'\)"),
    "times without divisions": (changed(seconds=[1.0]), r"entries\[0\]: "),
    "no times": (changed(seconds=7), r"entries\[0\]: "),
    "infinite times": (changed(seconds=[[26, 512, math.inf]]), r"entries\[0\]: .*seconds\[0\] \(inf\)"),
}


@pytest.mark.parametrize(("content", "told"), CORRUPT.values(), ids=CORRUPT.keys())
def test_a_file_that_cannot_be_used_is_told_of_and_the_others_are_used(
    tmp_path: Path, content: Any, told: str
) -> None:
    other = entry(replace(SHAPE, device_name="NVIDIA B200"), 20)
    path = save_divisions(table(entry(SHAPE, 26)), tmp_path)
    save_divisions(table(other), tmp_path)
    if callable(content):
        content = json.dumps(content(json.loads(path.read_text())))
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match=f"are not used: .*{path.name}: {told}") as caught:
        assert load_divisions(tmp_path) == table(other)
        assert load_divisions(tmp_path) == table(other)  # told once
    assert len(caught) == 1
    assert str(caught[0].message).endswith("; measure again with: pmoe profile --kernels")
    save_divisions(table(entry(SHAPE, 40)), tmp_path)
    assert read_divisions(path) == table(entry(SHAPE, 40))


def test_the_file_of_an_older_version_is_told_of_and_left_alone(tmp_path: Path) -> None:
    old = tmp_path / "division_nvidia-h200_v0.json"
    old.write_text('{"format": 0}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_divisions(table(entry(SHAPE, 26)), tmp_path)
    assert old.read_text() == '{"format": 0}'
    with pytest.warns(UserWarning, match=r"_v0.json: format \(0\) must be 1"):
        assert load_divisions(tmp_path).find(SHAPE)[0].n_c == 26


def test_where_there_is_no_folder_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_divisions(tmp_path / "none") == DivisionTable()
    monkeypatch.delenv("PMOE_CACHE", raising=False)

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(UserWarning, match="not used: no home"):
        assert load_divisions() == DivisionTable()
