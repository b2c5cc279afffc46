"""Releases of torch and transformers: a newer one than was tested is warned of once, and all files name the
same tested ones.
"""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch

from pmoe import warn

ROOT = Path(__file__).resolve().parents[2]


def told(*versions: str) -> list[str]:
    """Returns the warnings about these versions of torch, in one process that has not warned yet."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as found:
        patch.setattr(warn, "GIVEN", set())
        patch.setattr(warn, "TESTED", {"torch": ((2, 13), (2, 14))})
        warnings.simplefilter("always")
        for version in versions:
            warn.warn_of_untested_release("torch", version)
    return [str(each.message) for each in found]


@pytest.mark.parametrize("version", ["2.15.0", "2.15.0+cpu", "2.15.0a0+git12", "2.16.0.dev20261120", "3.0.0"])
def test_a_newer_release_is_warned_of_once(version: str) -> None:
    assert told(version, version) == [
        f"pmoe: torch {version} is newer than 2.14, the newest release with which pmoe was tested: if "
        'something fails, pip install "torch==2.14.*"'
    ]


def test_tested_and_older_releases_pass_without_a_warning() -> None:
    assert told("2.14.9+cu130", "2.13.0", "2.9.1", "1.13.1", "unknown") == []


def test_import_looks_at_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "GIVEN", set())
    monkeypatch.setattr(torch, "__version__", "9.1.0")
    with pytest.warns(UserWarning, match=r"torch 9\.1\.0 is newer than"):
        runpy.run_path(str(ROOT / "pmoe" / "__init__.py"))


def test_make_test_versions_holds_the_oldest_and_the_newest_tested_releases() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = re.search(r"^VERSIONS \?= (.*)$", makefile, re.MULTILINE)
    assert listed is not None
    _, *columns = zip(*(each.split(",") for each in listed[1].split()), strict=True)
    for package, versions in zip(("torch", "transformers"), columns, strict=True):
        releases = {tuple(map(int, version.split(".")[:2])) for version in versions}
        assert (min(releases), max(releases)) == warn.TESTED[package]


def test_no_variable_of_the_makefile_has_two_definitions() -> None:
    """A `define` replaced the list of versions, and `make test-versions` ran none of them."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    defined = re.findall(r"^define (\w+)$", makefile, re.MULTILINE)
    assigned = re.findall(r"^(\w+) [?:]?=", makefile, re.MULTILINE)
    assert len(defined) == len(set(defined)) and not set(defined) & set(assigned)


def test_pip_allows_all_releases_from_the_oldest_tested_one_on() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for package, ((major, minor), _) in warn.TESTED.items():
        assert re.findall(rf'"{package}([<>=][^"]*)"', setup) == [f">={major}.{minor}"]


def test_the_guide_names_the_tested_releases() -> None:
    guide = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| 3\.\d+ \| (\d\.\d+)[^|]* \| (\d\.\d+)?[^|]* \|", guide, re.MULTILINE)
    for column, (package, ends) in enumerate(warn.TESTED.items()):
        assert {".".join(map(str, end)) for end in ends} <= {row[column] for row in rows}, package
