"""Reads the imports of source files, without importing anything."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """An import of a module.

    file: path from the root of the tree.
    is_local: whether it stands inside a function.
    is_for_types: whether only type checkers see it (``if TYPE_CHECKING``).
    """

    file: str
    line: int
    module: str
    is_local: bool
    is_for_types: bool


def module_name(path: Path, root: Path) -> str:
    """Example: pmoe/experts/__init__.py -> "pmoe.experts"."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache  # several tests ask for the imports of all files
def imports_of(path: Path, root: Path) -> tuple[Import, ...]:
    """Returns all imports of a file. ``from a import b`` is one of a.b if that is a module, and else of a."""
    file = str(path.relative_to(root))
    package = module_name(path.parent / "__init__.py", root)

    def modules_of(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
            return
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *([base] if base else [])])
        for name in node.names:
            inner = root.joinpath(*base.split("."), name.name)
            is_module = inner.is_dir() or inner.with_suffix(".py").exists()
            yield f"{base}.{name.name}" if is_module else base

    def visit(node: ast.AST, is_local: bool, is_for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in modules_of(node):
                yield Import(file, node.lineno, module, is_local, is_for_types)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            is_negated = isinstance(node.test, ast.UnaryOp)  # if not TYPE_CHECKING
            for child in node.body:
                yield from visit(child, is_local, is_for_types or not is_negated)
            for child in node.orelse:
                yield from visit(child, is_local, is_for_types or is_negated)
            return
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_local or is_function, is_for_types)

    return tuple(visit(ast.parse(path.read_text(encoding="utf-8")), False, False))
