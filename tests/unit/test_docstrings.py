"""Docstrings of what users import and subclass: purpose, shapes of tensors, and errors."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

import pmoe
from pmoe import comm, experts, gates, kernels, ordering
from pmoe.experts.modules import ModuleExperts
from pmoe.experts.swiglu import SwiGLUExperts
from pmoe.gates import GATES
from pmoe.ordering.einsum import EinsumOrder
from pmoe.training import parallel

BASES: list[type] = [
    *(pmoe.Gate, pmoe.Routing, *GATES.values()),
    *(pmoe.Order, pmoe.Callback, pmoe.Dispatch, pmoe.Combine, comm.base.Exchange),
    *(pmoe.Experts, experts.StackedExperts, experts.FFNExperts, SwiGLUExperts, ModuleExperts, EinsumOrder),
]
"""Classes that users subclass, and classes that show how to."""

SHAPE = re.compile(r"\((\.\.\.|[\w*/+ ]+)(,\s*[\w*/+ ]+)*,?\s*(,\s*\.\.\.)?\)")
"""A shape in a docstring, such as (T, M), (E,), (..., d_model) or (2 * H, M)."""


def has_shape(text: str) -> bool:
    """Returns whether a docstring gives a shape, or says that a tensor is a scalar or of any shape."""
    shapes = (found.group() for found in SHAPE.finditer(text))
    words = re.search(r"\b(scalar|(any|whatever|same) shape)\b", text, re.IGNORECASE)
    return words is not None or any("," in each for each in shapes)


def takes_tensors(function: Callable[..., Any]) -> bool:
    """Returns whether an argument or the result is a tensor or contains tensors. Annotations are texts."""
    of = getattr(function, "__annotations__", {}).values()
    return any(re.search(r"\bTensor\b", str(each)) for each in of)


def raises(function: Callable[..., Any]) -> bool:
    """Returns whether the function's own body raises an error."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    nodes: list[ast.AST] = [*tree.body[0].body]  # type: ignore[attr-defined]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func)
            if name not in ("AssertionError", "AttributeError"):
                return True
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            nodes += ast.iter_child_nodes(node)
    return False


def functions_of(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the public methods and properties of a class that pmoe defines, and its constructor."""
    for name in dir(kind):
        owner = next(each for each in kind.__mro__ if name in vars(each))
        if not owner.__module__.startswith("pmoe."):
            continue
        found = vars(owner)[name]
        found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
        found = inspect.unwrap(found) if callable(found) else found
        is_written = inspect.isfunction(found) and not found.__code__.co_filename.startswith("<")
        if is_written and (not name.startswith("_") or name in BUILDS):
            yield name, found


BUILDS = ("__init__", "__post_init__")
"""Methods that the docstring of their class describes."""


def defined_in(module: ModuleType) -> list[str]:
    """Returns the public names of a module without ``__all__``."""
    own = (name for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__)
    return [name for name in own if not name.startswith("_")]


def missing_of_class(kind: type) -> Iterator[str]:
    about = inspect.getdoc(kind) if kind.__doc__ else None
    if about is None:
        yield f"{kind.__name__}: a docstring"
        return
    if any(re.search(r"\bTensor\b", str(each)) for each in vars(kind).get("__annotations__", {}).values()):
        yield from [] if has_shape(about) else [f"{kind.__name__}: a shape"]
    for name, function in functions_of(kind):
        text = about if name in BUILDS else inspect.getdoc(getattr(kind, name)) or ""
        yield from missing_of_function(f"{kind.__name__}.{name}", function, text)


def missing_of_function(name: str, function: Callable[..., Any], text: str | None = None) -> Iterator[str]:
    text = inspect.getdoc(function) or "" if text is None else text
    if not text:
        yield f"{name}: a docstring"
        return
    if takes_tensors(function) and not has_shape(text):
        yield f"{name}: a shape"
    if raises(function) and not re.search(r"\bRaises\b", text):
        yield f"{name}: what it raises"


DOCUMENTED = (pmoe, comm, experts, gates, kernels, ordering, parallel)
"""Modules whose public names are in the reference of the documentation."""
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in DOCUMENTED
    for name in getattr(module, "__all__", None) or defined_in(module)
    if callable(getattr(module, name))
} | {f"{each.__module__}.{each.__name__}": each for each in (SwiGLUExperts, ModuleExperts, EinsumOrder)}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_says_what_it_does_its_shapes_and_errors(name: str) -> None:
    value = PUBLIC[name]
    if inspect.isclass(value):
        assert not list(missing_of_class(value))
    elif inspect.isfunction(inspect.unwrap(value)):
        assert not list(missing_of_function(name, inspect.unwrap(value)))
    else:
        assert inspect.getdoc(value)  # an operator of torch


@pytest.mark.parametrize("kind", dict.fromkeys(BASES), ids=lambda kind: kind.__name__)
def test_what_users_subclass_says_what_it_does_its_shapes_and_errors(kind: type) -> None:
    assert not list(missing_of_class(kind))


def test_the_layers_docstring_is_read_at_one_go() -> None:
    assert len((pmoe.MoELayer.__doc__ or "").splitlines()) <= 60


def test_what_is_missing_is_found() -> None:
    class Bad:
        """Says nothing of shapes."""

        def silent(self) -> None: ...

        def shapeless(self, x: Tensor) -> None:
            """Takes x."""

        def raising(self, n: int) -> Tensor:
            """Returns (N, M)."""
            if n < 0:
                raise ValueError(n)
            raise AssertionError

        def good(self, x: Tensor) -> None:
            """x: (T, M). Calls raises in its own time."""

    Bad.__module__ = "pmoe.bad"
    assert list(missing_of_class(Bad)) == [
        "Bad.raising: what it raises",
        "Bad.shapeless: a shape",
        "Bad.silent: a docstring",
    ]
