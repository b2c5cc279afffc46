"""CONTRIBUTING.md: the names in its recipes exist, and its kernel is right in the emulator.

`tests/unit/test_docs.py` and `tests/gloo/test_docs.py` run its blocks of Python.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.cuda.compiled import compile_and_run
from tests.snippets import ROOT, blocks
from tests.unit.test_papers_map import NAMED, exists

PAGE = ROOT / "CONTRIBUTING.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_every_name_on_the_page_exists() -> None:
    named = NAMED.findall(TEXT)
    assert len(named) > 30
    assert [f"{path}:{name}" for path, name in named if not exists(path, name)] == []


def test_lines_that_the_recipes_change_are_in_their_files() -> None:
    """Lines that a recipe's diff keeps or removes are in the file that it changes."""
    for block in blocks(PAGE):
        if block.language != "diff":
            continue
        for part in re.split(r"^ (?=pmoe/)", block.text, flags=re.MULTILINE)[1:]:
            heading, *lines = part.splitlines()
            file = ROOT / heading.partition(",")[0]
            kept = [line[1:].strip() for line in lines if line[:1] in (" ", "-") and line.strip()]
            source = file.read_text(encoding="utf-8") if kept else ""
            assert [line for line in kept if line not in source] == [], heading


def test_the_kernel_of_the_recipe_is_right_in_the_emulator(tmp_path: Path) -> None:
    kernel, test = (block.text for block in blocks(PAGE) if block.language == "cpp")
    (tmp_path / "scale").mkdir()
    (tmp_path / "scale" / "kernel.cuh").write_text(kernel, encoding="utf-8")
    (tmp_path / "scale_test.cpp").write_text(test, encoding="utf-8")
    compile_and_run(str(tmp_path / "scale_test.cpp"))
