"""pmoe for type checkers: mypy --strict and pyright accept what users write, and find what is wrong.

pyright is basedpyright's, whose wheel brings all that it needs; in the mode "standard" it is pyright.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import pytest

import pmoe
from pmoe import comm, convert, experts, gates, ordering
from pmoe.call import options as options_module
from pmoe.experts import ffn
from pmoe.gates import base, expert_choice, xmoe
from pmoe.planner import degree
from pmoe.schedule import restore
from tests.snippets import GUIDES, ROOT, blocks

UNSEEN = tuple(
    f"pmoe.integrations.{stack}."
    for stack in ("deepspeed", "fairseq", "lightning", "lightning_deepspeed", "megatron", "torchtitan")
)
"""Modules with subclasses of what is not installed where types are checked."""
SCRIPT = ROOT / "tests" / "typed" / "script.py"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LARGE = [path for path in EXAMPLES if "transformers" in path.read_text(encoding="utf-8")]
"""Examples that a checker takes long to read, because they import transformers."""
FIRST = [page for page in GUIDES if page.name in ("README.md", "start.md")]

Errors = dict[tuple[str, int], str]
"""A checker's messages by (file name, line)."""


def environment() -> dict[str, str]:
    """Returns an environment in which checkers find this Python's packages and this tree's pmoe.

    `pip install -e` makes pmoe known by code, which checkers do not run.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    packages = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PATH": path, "PYTHONPATH": packages, "MYPYPATH": ""}


def output_of(words: list[str], folder: Path) -> str:
    """Returns what a checker prints. Its exit code is 1 if it has found errors."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def by_mypy(paths: Iterable[Path], folder: Path) -> Errors:
    settings = folder / "mypy.ini"
    settings.write_text(
        "[mypy]\nstrict = true\n"
        "untyped_calls_exclude = torch\n"  # Tensor.backward, say, has no annotations
        "[mypy-tqdm.*]\nignore_missing_imports = true\n"  # its types are a package of their own
    )
    # Kept between runs: to read torch takes 10 seconds.
    cache = ROOT / ".mypy_cache" / "users"
    options = ["--config-file", str(settings), "--cache-dir", str(cache), "--no-error-summary"]
    text = output_of(["mypy", *options, "--hide-error-context", *map(str, paths)], folder)
    found = re.findall(r"^(\S+?):(\d+): error: (.*)$", text, re.MULTILINE)
    assert found or not text.strip(), text
    return {(Path(path).name, int(line)): message for path, line, message in found}


def by_pyright(paths: Iterable[Path], folder: Path) -> Errors:
    settings = folder / "pyrightconfig.json"
    named = [str(path) for path in paths]
    places = sorted({str(Path(path).parent) for path in named})  # examples import their neighbours
    options = {"typeCheckingMode": "standard", "include": named, "extraPaths": places}
    settings.write_text(json.dumps(options))
    words = ["basedpyright", "-p", str(settings), "--pythonpath", sys.executable, "--outputjson"]
    told = json.loads(output_of(words, folder))
    assert told["summary"]["filesAnalyzed"] == len(named)
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"]
        for each in told["generalDiagnostics"]
        if each["severity"] == "error"
    }


CHECKERS: dict[str, Callable[[Iterable[Path], Path], Errors]] = {"mypy": by_mypy, "pyright": by_pyright}


def snippets(pages: Iterable[Path], folder: Path) -> list[Path]:
    """Writes each block of Python of these pages to a file of its own. Returns the files."""
    made = []
    for page in pages:
        for block in blocks(page):
            if block.language == "python":
                made.append(folder / f"{page.stem}_{block.line}.py")
                made[-1].write_text(block.text, encoding="utf-8")
    return made


# ---- what users write


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_what_is_right_is_accepted_and_what_is_wrong_is_found(checker: str, tmp_path: Path) -> None:
    """Checks a script, the first pages' snippets and the examples."""
    shown = snippets(FIRST, tmp_path)
    assert len(shown) > 3
    examples = [path for path in EXAMPLES if path not in LARGE]
    found = CHECKERS[checker]([SCRIPT, *shown, *examples], tmp_path)
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    wrong = {(SCRIPT.name, at) for at, line in enumerate(lines, 1) if line.endswith("# found")}
    assert len(wrong) > 20
    assert not {place: message for place, message in found.items() if place not in wrong}
    assert not wrong - found.keys()


@pytest.mark.nightly
@pytest.mark.parametrize("checker", CHECKERS)
def test_examples_with_transformers_are_accepted(checker: str, tmp_path: Path) -> None:
    assert LARGE and not CHECKERS[checker](LARGE, tmp_path)


# ---- what pmoe tells checkers


@pytest.mark.slow
def test_every_public_name_has_a_known_type(tmp_path: Path) -> None:
    """Subclasses of classes of fairseq and Megatron are left out: neither is installed here."""
    words = ["basedpyright", "--verifytypes", "pmoe", "--ignoreexternal", "--outputjson"]
    told = json.loads(output_of(words, tmp_path))["typeCompleteness"]
    assert Path(told["packageRootDirectory"]) == ROOT / "pmoe"
    assert told["pyTypedPath"]
    unknown = {
        each["name"]: [one["message"] for one in each["diagnostics"]]
        for each in told["symbols"]
        if each["isExported"]
        and (each["isTypeAmbiguous"] or not each["isTypeKnown"])
        and not each["name"].startswith(UNSEEN)
    }
    assert len(told["symbols"]) > 4000
    assert not unknown


def parameters_of(function: ast.FunctionDef) -> str:
    returned = "None" if function.returns is None else ast.unparse(function.returns)
    return f"{ast.unparse(function.args)} -> {returned}"


@pytest.mark.parametrize("kind", [pmoe.MoELayer, pmoe.Gate])
def test_a_call_has_the_types_of_forward(kind: type) -> None:
    """Type checkers read a ``__call__`` beside forward; at run time there is only torch's."""
    tree = ast.parse(Path(inspect.getfile(kind)).read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    functions = {node.name: node for node in ast.walk(found) if isinstance(node, ast.FunctionDef)}
    assert "__call__" not in vars(kind)
    assert parameters_of(functions["__call__"]) == parameters_of(functions["forward"])


@pytest.mark.parametrize("package", [pmoe, gates])
def test_names_that_load_later_are_named_to_checkers(package: Any) -> None:
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    named = {
        each.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module != package.__name__
        for each in node.names
    }
    later = pmoe._LATER if package is pmoe else {k: f"pmoe.gates.{v}" for k, v in gates._FILES.items()}
    assert named == later
    assert later.keys() <= set(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None


@pytest.mark.parametrize(
    ("words", "table"),
    [
        (gates.GateName, gates.GATES),
        (base.PartitionName, {kind.partition for kind in gates.GATES.values()}),
        (expert_choice.NormalizedOver, ("experts", "tokens")),
        (xmoe.ScoreName, xmoe.TEMPERATURES),
        (experts.ExpertName, experts.STACKED),
        (ffn.ActivationName, ffn.ACTIVATIONS),
        (restore.StrategyName, restore.STRATEGIES),
        (degree.SolveName, (degree.SOLVE,)),
        (comm.ExchangeName, comm.NAMES),
        (convert.LayoutName, convert.LAYOUTS),
    ],
)
def test_words_of_types_are_those_of_run_time(words: object, table: Iterable[str]) -> None:
    assert sorted(get_args(words)) == sorted(table)


@pytest.mark.parametrize(
    ("option", "words", "others"),
    [
        ("gate", gates.GateName, ()),
        ("expert", experts.ExpertName, ()),
        ("activation", ffn.ActivationName, ()),
        ("pipeline", degree.SolveName, ()),
        ("memory_reuse", restore.StrategyName, ()),
        ("fused", options_module.FusedName, ()),
        ("order", ordering.OrderName, ()),
        ("dispatch", comm.ExchangeName, ("auto",)),
        ("combine", comm.ExchangeName, ()),
    ],
)
def test_a_layer_takes_every_word_of_the_type_and_no_other(
    option: str, words: object, others: tuple[str, ...]
) -> None:
    for word in (*get_args(words), *others):
        options: dict[str, Any] = {"capacity_factor": 1.0} if word == "batch_prioritised" else {}
        assert pmoe.MoELayer(8, 8, 4, device="meta", **options, **{option: word})
    with pytest.raises((ValueError, TypeError), match=rf"{option} \('.*'\) must be"):
        pmoe.MoELayer(8, 8, 4, **{option: f"{get_args(words)[0]}x"})


def test_names_of_modules_that_the_docs_list_are_there() -> None:
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    listed = re.findall(r"`from (pmoe[\w.]*) import (\w+)`", text)
    assert len(listed) >= 7
    for module, name in listed:
        assert get_args(getattr(importlib.import_module(module), name)), name
