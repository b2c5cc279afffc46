"""Files that are kept between runs: written completely, found by their key, and read from earlier versions.

tests/stored/ has files that commit 447fbb3 wrote, with the values that the tests of each kind make.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pmoe.choose.search import load_degrees
from pmoe.measure.block_split import load_divisions
from pmoe.measure.profile import find_profile, load_profile, profile_path
from pmoe.measure.store import CorruptFileError, cache_folder, cache_path, load_json, save_json
from pmoe.planner.block_split import DivisionTable
from pmoe.planner.granularity import PassDegrees
from tests.unit.test_division import SECONDS, SHAPE, SIZES, entry
from tests.unit.test_granularity import KEY
from tests.unit.test_profile import MADE

STORED = Path(__file__).resolve().parents[1] / "stored"


# ---- files written by 447fbb3


def test_a_profile_of_before_is_refused_for_it_did_not_say_on_how_many_nodes() -> None:
    versions = replace(MADE.versions, file=2)
    path = profile_path(replace(MADE, versions=versions), STORED)
    told = r"v2.json: format version \(2\) must be 3; `pmoe profile` writes it"
    with pytest.raises(ValueError, match=told):
        load_profile(path)
    with pytest.raises(ValueError, match=told):
        find_profile(STORED, num_ranks=4, dtype="float32")


def test_divisions_of_before_are_found_and_read() -> None:
    assert load_divisions(STORED) == DivisionTable({SHAPE: entry(SHAPE, 26, 1024)}, {SIZES: SECONDS})


def test_degrees_of_before_are_read() -> None:
    [table] = load_degrees(STORED / "degrees.json", KEY).values()
    known = {90: None, 100: (1, 2), 250: (1, 2), 400: (1, 2), 500: None, 900: (4, 4), 960: (2, 2)}
    for B, degrees in known.items():
        assert table.lookup(B) == (degrees and PassDegrees(*degrees))
    with pytest.raises(
        ValueError, match=r"degrees.json: holds the degrees of another layer, .*ranks 4, here 8"
    ):
        load_degrees(STORED / "degrees.json", {**KEY, "ranks": 8})


# ---- one store


def test_what_is_saved_is_loaded_through_the_reader_of_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "a.json"
    save_json(path, {"b": [1, 2.5, None], "c": "d"})
    assert load_json(path, lambda fields: fields["b"]) == [1, 2.5, None]
    assert list(path.parent.iterdir()) == [path]


def test_a_name_is_made_of_the_letters_and_digits_of_its_key(tmp_path: Path) -> None:
    key = ("division", "NVIDIA H200 (SXM)", "v1")
    assert cache_path(key, tmp_path) == tmp_path / "division_nvidia-h200-sxm_v1.json"


def test_the_folder_is_that_of_the_argument_the_environment_or_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path / "cache"))
    assert cache_folder(tmp_path) == tmp_path
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("PMOE_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "pmoe"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[1]", "must be an object, not list"),
    ],
)
def test_what_is_no_json_object_is_called_corrupt_by_its_path(
    tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=f"^{path}: {told}"):
        load_json(path, lambda fields: fields)


def test_an_error_of_the_reader_keeps_its_type_and_gets_the_path(tmp_path: Path) -> None:
    class WrongNumberError(ValueError):
        pass

    def refuse(fields: object) -> None:
        raise WrongNumberError("b (1) must be 2")

    save_json(tmp_path / "a.json", {"b": 1})
    with pytest.raises(WrongNumberError, match=r"a.json: b \(1\) must be 2"):
        load_json(tmp_path / "a.json", refuse)


def test_values_that_json_cannot_hold_leave_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    save_json(path, {"b": 1})
    for value in (float("nan"), object()):
        with pytest.raises((TypeError, ValueError)):
            save_json(path, {"b": value})
    assert load_json(path, lambda fields: fields) == {"b": 1}
    assert os.listdir(tmp_path) == ["a.json"]
