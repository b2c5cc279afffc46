"""A name means one thing: no two types of pmoe share one, and functions share one only in the same role."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "pmoe").rglob("*.py"))

SAME_ROLE: dict[str, tuple[set[str], set[str]]] = {
    "a subcommand's part of the command line": (
        {"add_arguments", "run_command"},
        {f"pmoe/cli/{name}.py" for name in ("kernels", "memory", "plan", "profile", "profile_kernels")}
        | {"pmoe/cli/report.py", "pmoe/cli/simulate.py"},
    ),
    "what a command line begins with": (
        {"main"},
        {"pmoe/cli/__init__.py", "pmoe/integrations/fairseq/__main__.py"},
    ),
    "why kernels do not take some rows": (
        {"refusal"},
        {
            f"pmoe/kernels/{name}.py"
            for name in ("counts", "gemm", "permute/launches", "route/launches", "wire")
        }
        | {"pmoe/runners/fused_steps.py"},
    ),
    "grouped products and their plain definition": (
        {"product", "hidden_gradient", "weight_gradient"},
        {"pmoe/kernels/grouped_gemm/products.py", "pmoe/kernels/grouped_gemm/reference.py"},
    ),
    "a permutation and its plain definition": (
        {"permute", "unpermute"},
        {"pmoe/kernels/permute/operators.py", "pmoe/kernels/permute/reference.py"},
    ),
    "what an experiment of `pmoe simulate` prints": (
        {"tables"},
        {f"pmoe/papers/{name}.py" for name in ("comet_figures", "comet_layers", "flashdmoe_figures")}
        | {f"pmoe/papers/{name}.py" for name in ("fsmoe_models", "fsmoe_table5")}
        | {f"pmoe/papers/{name}.py" for name in ("lancet_figures", "mpipemoe_figures")},
    ),
    "a figure of one of several papers": (
        {"figure6", "figure8", "figure12", "speed_ups"},
        {f"pmoe/papers/{name}.py" for name in ("comet_figures", "comet_layers", "flashdmoe_figures")}
        | {f"pmoe/papers/{name}.py" for name in ("fsmoe_models", "fsmoe_table5")}
        | {f"pmoe/papers/{name}.py" for name in ("lancet_figures", "mpipemoe_figures")},
    ),
    "a routing and its plain definition": (
        {"route", "route_backward"},
        {"pmoe/kernels/route/operators.py", "pmoe/kernels/route/reference.py"},
    ),
}
"""Public functions that may share a name, and the files that may have them, by role."""


def types_of(tree: ast.Module) -> Iterator[str]:
    """Yields the names of a file's classes, also nested ones, and of its type aliases."""
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper():
                yield name


def functions_of(tree: ast.Module) -> Iterator[str]:
    """Yields the names of the public functions at the top level of a file."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name


def shared(kind: object) -> dict[str, set[str]]:
    """Returns the names that several files have, each with these files.

    kind: ast.ClassDef for names of types; anything else for names of functions.
    """
    files: defaultdict[str, list[str]] = defaultdict(list)
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name in types_of(tree) if kind is ast.ClassDef else functions_of(tree):
            files[name].append(str(path.relative_to(ROOT)))
    return {name: set(where) for name, where in files.items() if len(where) > 1}


def test_no_two_types_share_a_name() -> None:
    assert len(FILES) > 20
    assert not shared(ast.ClassDef)


def test_functions_share_a_name_only_where_they_have_the_same_role() -> None:
    found = shared(ast.FunctionDef)
    listed = {name: files for names, files in SAME_ROLE.values() for name in names}
    assert not {name: where for name, where in found.items() if not where <= listed.get(name, set())}
    assert set(listed) == set(found), "a name that is no longer shared leaves the list"


# ---- names in docstrings


MENTION = re.compile(r"(?<!`)`(~?[A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`(?!`)")
"""A name in single backticks: `name`, `module.name` or `name()`. Double backticks are for code."""
OTHERS = ("torch", "fairseq", "transformers", "numpy", "scipy", "matplotlib", "logging")
"""Packages of other projects, whose names docstrings may mention."""


def names_of(source: str) -> set[str]:
    """Returns every name in a file's code, without docstrings and comments."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def test_names_that_docstrings_mention_exist() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in FILES}
    known = {"pmoe"}.union(*map(names_of, sources.values()), *(path.parts for path in FILES))
    known |= {path.stem for path in FILES}
    for path in (ROOT / "cuda").rglob("*.h"):
        known |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    missing = [
        f"{path.relative_to(ROOT)}: {mention}"
        for path, source in sources.items()
        for mention in MENTION.findall(source)
        if mention.split(".")[0] not in OTHERS and not {*mention.split(".")} <= known
    ]
    assert not missing, "\n".join(missing)


def test_the_reader_of_names_sees_classes_within_functions_and_names_of_types() -> None:
    tree = ast.parse(
        "Pair = tuple[int, int]\nMOST = 3\nclass A:\n    pass\n"
        "def f():\n    class B:\n        def g(self): ...\ndef _h(): ...\n"
    )
    assert sorted(types_of(tree)) == ["A", "B", "Pair"]
    assert list(functions_of(tree)) == ["f"]
