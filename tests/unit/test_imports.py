"""Imports between folders of pmoe/ go in one direction only, as docs/architecture.md draws it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fresh, source_imports

ROOT = Path(__file__).resolve().parents[2]

# From the top of the house to its ground. A module may import its own part and those further down.
FLOORS: list[set[str]] = [
    {"pmoe.__main__"},
    {"pmoe.cli"},
    {"pmoe.integrations"},
    {"pmoe.papers"},
    {"pmoe"},  # __init__.py, which names what users import
    {"pmoe.graph"},
    {"pmoe.training"},
    {"pmoe.convert"},
    {"pmoe.layer"},
    {"pmoe.decide"},
    {"pmoe.choose"},
    {"pmoe.call"},
    {"pmoe.runners"},
    {"pmoe.checkpointing"},
    {"pmoe.program"},
    {"pmoe.engine"},
    {"pmoe.measure"},
    {"pmoe.planner"},
    {"pmoe.gates", "pmoe.ordering", "pmoe.experts", "pmoe.comm"},
    {"pmoe.kernels"},
    {"pmoe.schedule"},
    {"pmoe.arguments", "pmoe.settings", "pmoe.text", "pmoe.warn"},
]
# Imports that do not point downwards. The stages of one floor know nothing of each other. pmoe/__init__.py
# imports `stats` at its first use; what stands in the file is for type checkers alone. A layer
# imports the file in which it is one operator of a graph only where torch.compile traces it.
NEIGHBOURS: set[tuple[str, str]] = {("pmoe", "pmoe.integrations"), ("pmoe.layer", "pmoe.graph")}

FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}


def part_of(module: str) -> str:
    """Returns the folder of a module. Example: pmoe.experts.ffn -> pmoe.experts."""
    return ".".join(module.split(".")[:2])


def module_of(path: Path) -> str:
    return source_imports.module_name(path, ROOT)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, module) for each import statement of a file, also inside functions."""
    for one in source_imports.imports_of(path, ROOT):
        yield one.line, one.module


FILES = sorted((ROOT / "pmoe").rglob("*.py"))


def test_every_file_of_pmoe_belongs_to_a_part_of_the_house() -> None:
    assert len(FILES) > 20
    unknown = {part_of(module_of(path)) for path in FILES} - set(FLOOR_OF)
    assert not unknown, f"{sorted(unknown)}: give it a place in FLOORS, as in docs/architecture.md"


def test_imports_point_downwards() -> None:
    wrong = []
    for path in FILES:
        here = part_of(module_of(path))
        for line, module in imports_of(path):
            there = part_of(module)
            if there.split(".")[0] != "pmoe" or there == here or (here, there) in NEIGHBOURS:
                continue
            if FLOOR_OF[here] >= FLOOR_OF[there]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {here} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_nothing_of_pmoe_imports_tests_examples_or_benchmarks() -> None:
    for path in FILES:
        for line, module in imports_of(path):
            assert module.split(".")[0] not in ("tests", "bench", "examples"), (path, line)


def test_the_reader_of_imports_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pmoe" / "comm").mkdir(parents=True)
    (tmp_path / "pmoe" / "layer.py").touch()
    file = tmp_path / "pmoe" / "comm" / "flat.py"
    file.write_text(
        "import os, pmoe.layer\nfrom pmoe import layer\nfrom pmoe.layer import MoELayer\n"
        "def f():\n    from .. import layer\n    from . import counts\n    from .ranks import Ranks\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert list(imports_of(file)) == [
        (1, "os"),
        (1, "pmoe.layer"),
        (2, "pmoe.layer"),
        (3, "pmoe.layer"),
        (5, "pmoe.layer"),
        (6, "pmoe.comm"),
        (7, "pmoe.comm.ranks"),
    ]


def newly_imported(statement: str) -> set[str]:
    """Returns the modules that ``statement`` loads in a new Python, besides those of torch.distributed."""
    program = (
        "import sys, torch, torch.distributed\n"
        f"before = set(sys.modules)\n{statement}\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    return set(fresh.run(program).split())


def test_importing_pmoe_loads_no_optional_dependency_and_no_compiler() -> None:
    found = newly_imported("import pmoe")
    assert "pmoe.layer" in found
    roots = {name.split(".")[0] for name in found}
    assert not roots & {"matplotlib", "tqdm", "numpy", "transformers", "fairseq", "triton"}, sorted(found)
    compiler = [name for name in found if name.startswith(("torch._dynamo", "torch._inductor"))]
    assert not compiler, compiler


def test_importing_pmoe_starts_no_process_group_and_no_cuda() -> None:
    program = (
        "import torch, torch.distributed as dist, pmoe\n"
        "assert not dist.is_initialized() and not torch.cuda.is_initialized()"
    )
    fresh.run(program)
