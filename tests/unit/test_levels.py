"""The levels of the tests: what the Makefile runs at each level, and which tests need a compiler."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.levels import MARKERS

MAKEFILE = (Path(__file__).resolve().parents[2] / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("level", MARKERS)
def test_the_makefile_runs_a_level_by_its_markers(level: str) -> None:
    target = level.removeprefix("make ")
    (recipe,) = re.findall(rf"^{target}: \$\(STAMP\).*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert f'-m pytest tests -m "{MARKERS[level]}" ' in recipe


def test_kernels_are_compiled_for_the_quick_level_only_when_asked() -> None:
    needed = dict(re.findall(r"^(test[\w-]*): \$\(STAMP\) (\S+) ", MAKEFILE, re.MULTILINE))
    assert needed == {"test": "$(WANTED_EXTENSION)", "test-all": "extension", "test-nightly": "extension"}
