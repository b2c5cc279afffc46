"""The specification is written in public names alone, in files short enough to be read at one go."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import pmoe

FOLDER = Path(__file__).parent
REFERENCE = sorted((FOLDER.parents[1] / "docs").glob("reference*.rst"))
FILES = sorted(FOLDER.glob("*.py"))
BESIDE = {"torch", "pytest", "tests"}
"""What a file may import beside Python's own modules and pmoe; of tests the kit alone, which starts ranks."""
MAX_LINES = 250


def public_modules() -> dict[str, set[str] | None]:
    """The names that the reference describes, by module; None stands for all public names of the module."""
    found: dict[str, set[str] | None] = {"pmoe": set(pmoe.__all__)}
    text = "\n".join(each.read_text(encoding="utf-8") for each in REFERENCE)
    for kind, name in re.findall(
        r"^\.\. (public|autoclass|autofunction|docstring):: (\S+)$", text, re.MULTILINE
    ):
        if kind == "public":
            found.setdefault(name, None)
        else:
            module, _, each = name.rpartition(".")
            names = found.setdefault(module, set())
            if names is not None:
                names.add(each)
    return found


def private_names(text: str, public: dict[str, set[str] | None]) -> list[str]:
    """What ``text`` imports or touches that no user should."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.startswith("pmoe.")]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pmoe":
            names = public.get(node.module, set())
            found += [f"{node.module}.{each.name}" for each in node.names if not is_public(each.name, names)]
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            found.append(node.attr)
    return found


def is_public(name: str, names: set[str] | None) -> bool:
    return not name.startswith("_") and (names is None or name in names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_written_in_public_names(path: Path) -> None:
    assert private_names(path.read_text(encoding="utf-8"), public_modules()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_short_and_imports_little(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            assert node.module == "tests.spec.kit" or path.name == "kit.py", node.module


def test_a_private_name_would_be_noticed() -> None:
    public = public_modules()
    assert private_names("from pmoe.engine.buffers.arena import Arena", public) == [
        "pmoe.engine.buffers.arena.Arena"
    ]
    assert private_names("import pmoe.call.options", public) == ["pmoe.call.options"]
    assert private_names("layer._parts", public) == ["_parts"]
    assert private_names("from pmoe.gates import GATES, TopKGate\nimport pmoe", public) == []


def test_the_names_of_the_reference_are_there() -> None:
    for module, names in public_modules().items():
        found = importlib.import_module(module)
        for name in names or ():
            is_module = importlib.util.find_spec(f"{module}.{name}") if hasattr(found, "__path__") else None
            assert is_module or hasattr(found, name), f"{module}.{name}"
