"""docs/architecture.md: its layers of folders are those that imports obey, and its names and tests exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.test_imports import FLOORS
from tests.unit.test_papers_map import NAMED, exists

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    return PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_the_house_has_the_floors_that_imports_are_held_to_in_their_order() -> None:
    rows = [line.split("|")[1] for line in section("The house").splitlines() if line.startswith("| `")]
    paths = {part: ROOT / part.replace(".", "/") for floor in FLOORS[1:] for part in floor}  # below __main__
    built = {part for part, path in paths.items() if path.exists() or path.with_suffix(".py").exists()}
    there = [floor for floor in FLOORS if floor <= built]
    assert [set(re.findall(r"`([\w.]+)`", row)) for row in rows] == there


def test_every_name_on_the_page_exists() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 15
    assert [f"{path}:{name}" for path, name in named if not exists(path, name)] == []


def test_every_contract_is_held_by_tests_that_exist() -> None:
    rows = [line for line in section("Contracts").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 6
    for row in rows:
        files = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert files and all((ROOT / file).is_file() for file in files), row


def test_kernels_include_shared_folders_and_never_each_other() -> None:
    shared = {"common", "counts", "peers", "grouped_gemm", "route"}
    sources = [path for path in (ROOT / "cuda").glob("*/*.*") if path.suffix in (".h", ".cuh", ".cu", ".cpp")]
    assert len(sources) > 60
    for path in sources:
        included = set(re.findall(r'#include "(\w+)/', path.read_text(encoding="utf-8")))
        # A pass program launches kernels of another folder, and the module with NVSHMEM those of FlashDMoE.
        launched = {"program": {"permute"}, "nvshmem": {"flashdmoe"}}.get(path.parent.name, set())
        assert included <= shared | launched | {path.parent.name}, path


def test_nothing_cites_a_page_that_is_not_in_the_repository() -> None:
    cites = "DESIGN" + ".md"
    files = [path for top in ("pmoe", "cuda", "bench", "tests", "docs") for path in (ROOT / top).rglob("*.*")]
    texts = [path for path in files if path.suffix in (".py", ".md", ".h", ".cu", ".cuh", ".cpp", ".sh")]
    assert len(texts) > 300
    assert [path for path in texts if cites in path.read_text(encoding="utf-8")] == []
