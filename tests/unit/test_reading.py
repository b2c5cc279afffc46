"""Measures of how much a maintainer must read to follow a call, and rules for pmoe's sentences.

The number of lines of code is no such measure. These are:

- the functions and lines that a traced default call executes, and how often it changes the file before `run`;
- circles of imports, those inside functions counted;
- imports of pmoe inside functions, each with its reason;
- statements that bind unlike values;
- first sentences and phrases that STYLE forbids: a docstring says what the thing is or does.

A number in this file may only fall. Each check fails on a planted example.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from docs import reading_order
from docs.reading_order import traced
from tests import fresh, source_imports
from tests.source_imports import Import, module_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pmoe"
FILES = sorted(PACKAGE.rglob("*.py"))

MOST_FUNCTIONS = 186
"""Functions of pmoe that a forward and a backward pass of the traced layer execute."""

MOST_LINES = 1124
"""Lines of pmoe that they execute."""

MOST_CHANGES = 40
"""Calls before `run`, in their order, that are in another file than the call before."""

MOST_PARALLEL = 0.01
"""Share of assignments that bind several values which are written side by side: ``a, b = x, y``."""

LOCAL_IMPORTS: dict[str, str] = {
    "pmoe.checkpointing.routing_check": (
        "Only a layer under activation checkpointing compares the routing of two forward passes."
    ),
    "pmoe.choose.dispatch": 'Only dispatch="auto" needs it, and it loads measure/ and planner/.',
    "pmoe.choose.open_choice": (
        "It loads planner/ and measure/, which a layer with a fixed n and restore pair does not need."
    ),
    "pmoe.choose.search": "Only pipeline=True learns by trials, and it loads planner/ and measure/.",
    "pmoe.choose.trials": "It loads measure/, which a layer with a fixed n and restore pair does not need.",
    "pmoe.comm.hierarchical_1d": "Only layers with this exchange need it.",
    "pmoe.comm.hierarchical_2d": "Only layers with this exchange need it.",
    "pmoe.comm.topology": "Only layers on a device mesh or with hierarchical exchanges need it.",
    "pmoe.comm.wire": "Only layers that may keep T_M in e4m3 need it.",
    "pmoe.decide.balanced_counts": "Only a layer with balance on several ranks needs it.",
    "pmoe.decide.bounded_counts": "It loads the fused kernels, and only pmoe.BoundedSteps needs it.",
    "pmoe.decide.cuda_graph": (
        "Only a call that a CUDA graph captures is checked, and the checks load the kernels."
    ),
    "pmoe.decide.custom_gate": "Only a gate that is a user's own module is checked.",
    "pmoe.decide.exact_counts": "It loads the engine, which the first call needs and `import pmoe` does not.",
    "pmoe.decide.fused_choice": "It loads the fused kernels, which few layers ask for.",
    "pmoe.decide.fused_counts": "It loads the fused kernels, which few layers ask for.",
    "pmoe.decide.one_rank_counts": "It loads the kernels of one rank, which only layers on one GPU use.",
    "pmoe.decide.padded_counts": "Only pad_to_capacity=True needs it.",
    "pmoe.decide.program_choice": "It loads pass programs, which few layers ask for.",
    "pmoe.decide.program_counts": "It loads pass programs, which few layers ask for.",
    "pmoe.decide.solver_counts": "Only pipeline='solve' needs it.",
    "pmoe.decide.rank_consistency": "A layer of one rank has no options to compare with other ranks.",
    "pmoe.engine.buffers.host_pool": "Only offloading needs memory on the host.",
    "pmoe.engine.lanes.cuda": "Only calls on a GPU have CUDA streams.",
    "pmoe.engine.lanes.recorder": "It loads the timeline, which only a recorded or profiled pass needs.",
    "pmoe.engine.lanes.threads": (
        "Only CPU lanes that offload, or communicate in several steps, need threads."
    ),
    "pmoe.engine.plan.callbacks": "Only layers with callbacks need it.",
    "pmoe.engine.variants.copies": "Only a call with copies of busy experts needs it.",
    "pmoe.engine.variants.module_copies": "Only a call with copies of experts that are modules needs it.",
    "pmoe.experts.architecture": "Only experts that are modules beside balance need it.",
    "pmoe.engine.variants.callbacks": "Only layers with callbacks need it.",
    "pmoe.engine.variants.cuda_kernels": "Only calls on a GPU launch kernels.",
    "pmoe.engine.variants.cuda_hidden_e4m3": "Only passes on a GPU that keep T_M in e4m3 need it.",
    "pmoe.engine.variants.cuda_wire": "Only wire and wire_backward on a GPU need it.",
    "pmoe.engine.variants.frozen": "Only a backward pass of frozen experts needs it.",
    "pmoe.engine.variants.offload": "Only restore pairs that offload need it.",
    "pmoe.engine.variants.padding": "Only pad_to_capacity=True needs it.",
    "pmoe.engine.variants.send_once": "Only send_once=True needs it.",
    "pmoe.engine.variants.wire": "Only wire and wire_backward need it.",
    "pmoe.engine.variants.hidden_e4m3": "Only restore pairs that keep T_M in e4m3 need it.",
    "pmoe.engine.variants.rounded_products": "Only layers that round operands of products need it.",
    "pmoe.call.sizes": "It loads planner/, which only calls on a GPU that choose n or the pair need.",
    "pmoe.call.rounded_products": "Only layers that round operands of products need it.",
    "pmoe.engine.variants.sharded_experts": "Only experts that are sharded over the ranks of a node need it.",
    "pmoe.engine.variants.shared_expert": "Only layers with a shared expert need it.",
    "pmoe.engine.halves": (
        "Only a backward pass whose graph is kept may have two halves, as zero-bubble schedules ask for."
    ),
    "pmoe.graph.one_operator": "It loads the compiler, which only models under torch.compile need.",
    "pmoe.runners.few_rows": "Only calls of few rows without gradients need it.",
    "pmoe.experts.dtensor_layout": (
        "Only experts that `pmoe.parallelize` or `MoELayer.spread` lays out need it."
    ),
    "pmoe.experts.modules": "Only experts that are a user's own modules, and shared experts, need it.",
    "pmoe.experts.swiglu": "Only layers with SwiGLU experts need it.",
    "pmoe.experts.wrapper_checks": (
        "A layer of one rank has no wrappers to check, unless its experts were parallelized."
    ),
    "pmoe.integrations.fairseq.options": (
        "It loads all of pmoe, which the other commands load only behind fairseq."
    ),
    "pmoe.integrations.report.history": "It loads numpy, which `pmoe report` alone needs.",
    "pmoe.integrations.report.page": "It loads numpy, which `pmoe report` alone needs.",
    "pmoe.integrations.run_folder": "It loads the statistics, which `pmoe report` alone needs.",
    "pmoe.integrations.transformers.expert_parallel": (
        "It imports transformers, of which the caller first checks the release."
    ),
    "pmoe.integrations.transformers.in_graph": (
        "An installed transformers of a new enough release is checked first."
    ),
    "pmoe.kernels.route.operators": "It registers torch operators, which only calls on a GPU need.",
    "pmoe.layer.calls_with_any": "Only inputs that are not plain tensors with values need it.",
    "pmoe.call.latent": "Only layers with d_latent need it.",
    "pmoe.decide.latent_call": "Only layers with d_latent need it.",
    "pmoe.layer.batch_invariant": "Only layers that `pmoe.make_batch_invariant` has changed need it.",
    "pmoe.layer.predict_memory": "Only a memory budget or a prediction needs it, and it loads planner/.",
    "pmoe.layer.reshard": "Only a layer that is spread over a mesh, or drawn again, needs it.",
    "pmoe.ordering.einsum": "Only layers with this ordering, a slow reference, need it.",
    "pmoe.training.fsdp1": "Only models in FullyShardedDataParallel (FSDP1) need it.",
    "pmoe.schedule.ring_buffers": (
        "A layer uses this schedule or the one with separate buffers, and `import pmoe` neither."
    ),
    "pmoe.schedule.separate_buffers": (
        "A layer uses this schedule or the one with ring buffers, and `import pmoe` neither."
    ),
    "pmoe.integrations.fairseq.plugin": "It needs fairseq, which may be missing: a message then says so.",
}
"""Modules of pmoe that are imported inside functions, and why."""


# ---- a traced call


@dataclass
class Measured:
    """The measures of a traced call, from a process that did nothing else."""

    functions: int
    lines: int
    changes: int
    files: list[str]
    page: str


PROGRAM = """
import json
from docs import reading_order
forward, backward = reading_order.default_call()
print(json.dumps([
    len(forward.functions | backward.functions), len(forward.lines | backward.lines), forward.changes,
    forward.files_before, reading_order.page(),
]))
"""


@pytest.fixture(scope="module")
def default_call() -> Measured:
    return Measured(*json.loads(fresh.run(PROGRAM).splitlines()[-1]))


def test_a_call_executes_few_functions(default_call: Measured) -> None:
    assert default_call.functions <= MOST_FUNCTIONS


def test_a_call_executes_few_lines(default_call: Measured) -> None:
    assert default_call.lines <= MOST_LINES


def test_a_call_is_decided_in_few_files_one_after_the_other(default_call: Measured) -> None:
    assert len(default_call.files) > 50
    assert default_call.changes <= MOST_CHANGES, shown(default_call.files)


def test_the_page_that_lists_the_code_of_a_call_is_made_of_this_code(default_call: Measured) -> None:
    assert reading_order.PAGE.read_text(encoding="utf-8") == default_call.page, "python docs/reading_order.py"


def shown(files: list[str]) -> str:
    """Returns a text of the files in order, each with the number of calls in a row."""
    lines: list[str] = []
    last, count = "", 0
    for file in [*files, ""]:
        if file == last:
            count += 1
            continue
        if last:
            lines.append(f"{Path(last).relative_to(ROOT)} x {count}")
        last, count = file, 1
    return "\n".join(lines)


def test_the_tracer_counts_a_planted_call(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def f(g):\n    g()\n    return [x for x in range(3)]\n")
    (tmp_path / "two.py").write_text("def g():\n    pass\n\ndef run():\n    g()\n")
    names: dict[str, dict[str, Callable[..., object]]] = {"one": {}, "two": {}}
    for name, space in names.items():
        path = tmp_path / f"{name}.py"
        exec(compile(path.read_text(), str(path), "exec"), space)
    one, two = names["one"], names["two"]

    def call() -> None:
        one["f"](two["g"])
        two["run"]()

    trace = traced(tmp_path, call, two["run"])
    assert {name for _, name in trace.functions} == {"f", "g", "run"}
    assert len(trace.lines) == 4
    assert [Path(file).stem for file in trace.files_before] == ["one", "two"]
    assert trace.changes == 1


# ---- imports


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Yields the imports of pmoe in a file, without those that only type checkers need."""
    for one in source_imports.imports_of(path, root):
        if one.module.split(".")[0] == "pmoe" and not one.is_for_types:
            yield one


def circles(files: list[Path], root: Path) -> list[list[str]]:
    """Returns groups of modules that import one another, directly or through others (Tarjan's components)."""
    graph = {module_name(path, root): {one.module for one in imports_of(path, root)} for path in files}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def connect(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module] & graph.keys():
            if other not in index:
                connect(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1 or module in graph[module]:
                groups.append(sorted(group))

    for module in graph:
        if module not in index:
            connect(module)
    return groups


def test_no_modules_import_one_another() -> None:
    assert circles(FILES, ROOT) == []


def test_an_import_inside_a_function_has_a_reason() -> None:
    unexplained = [
        f"{one.file}:{one.line}: {one.module}"
        for path in FILES
        for one in imports_of(path, ROOT)
        if one.is_local and one.module not in LOCAL_IMPORTS
    ]
    assert unexplained == []


def test_a_reason_that_nothing_needs_leaves_the_list() -> None:
    used = {one.module for path in FILES for one in imports_of(path, ROOT) if one.is_local}
    assert sorted(LOCAL_IMPORTS.keys() - used) == []


def test_planted_imports_are_seen(tmp_path: Path) -> None:
    (tmp_path / "pmoe").mkdir()
    one = tmp_path / "pmoe" / "one.py"
    two = tmp_path / "pmoe" / "two.py"
    one.write_text("def f():\n    from pmoe import two\n")
    two.write_text("import pmoe.one\n")
    assert circles([one, two], tmp_path) == [["pmoe.one", "pmoe.two"]]
    assert [(found.module, found.is_local) for found in imports_of(one, tmp_path)] == [("pmoe.two", True)]
    for_types = tmp_path / "pmoe" / "three.py"
    for_types.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pmoe import four\n")
    four = tmp_path / "pmoe" / "four.py"
    four.write_text("import pmoe.three\n")
    assert circles([for_types, four], tmp_path) == []


# ---- statements


def parallel_assignments(tree: ast.AST) -> Iterator[ast.Assign]:
    """Yields the assignments of several values that are written side by side, except swaps: those need both
    values.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Tuple):
            continue
        bound = {ast.unparse(name) for name in target.elts}
        if all(name.isupper() for name in bound):
            continue  # constants of one kind, such as the codes of an operator
        read = {
            ast.unparse(name) for name in ast.walk(node.value) if isinstance(name, ast.Name | ast.Attribute)
        }
        if not bound & read:
            yield node


def tuple_statements(tree: ast.AST) -> Iterator[ast.Expr]:
    """Yields statements that are tuples, such as several calls in one line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Tuple):
            yield node


@functools.cache  # several tests read all files
def trees() -> tuple[ast.Module, ...]:
    """The syntax trees of `FILES`."""
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in FILES)


def test_a_statement_binds_one_value() -> None:
    count = sum(isinstance(node, ast.Assign | ast.AnnAssign) for tree in trees() for node in ast.walk(tree))
    parallel = [node for tree in trees() for node in parallel_assignments(tree)]
    assert len(parallel) <= MOST_PARALLEL * count, [ast.unparse(node) for node in parallel]


def test_no_statement_is_a_tuple() -> None:
    assert [ast.unparse(node) for tree in trees() for node in tuple_statements(tree)] == []


def test_planted_statements_are_seen() -> None:
    tree = ast.parse("a, b = 1, f()\na, b = b, a\na, b = x.shape\nf(), g()\n")
    assert [ast.unparse(node) for node in parallel_assignments(tree)] == ["a, b = (1, f())"]
    assert len(list(tuple_statements(tree))) == 1


HIDDEN_USES: dict[str, str] = {
    "pmoe/__init__.py": "names that load late stand in its imports for type checkers too",
    "pmoe/gates/__init__.py": "names that load late stand in its imports for type checkers too",
    "pmoe/kernels/__init__.py": "its packages import the names that load late for type checkers too",
    "pmoe/kernels/extension.py": "the compiled extension has no source that a type checker could read",
    "pmoe/integrations/transformers/registry.py": "transformers has other modules in each release",
    "pmoe/integrations/fairseq/__main__.py": "fairseq is not installed where pmoe is checked",
}
"""Files that may import modules by a string, and why."""


@pytest.mark.parametrize("call", ["type", "importlib.import_module", "locals"])
def test_no_class_or_module_is_made_from_a_string(call: str) -> None:
    """``type(name, bases, fields)``, ``importlib.import_module`` and ``locals()`` hide uses from a search."""
    uses = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, tree in zip(FILES, trees(), strict=True)
        if call != "importlib.import_module" or str(path.relative_to(ROOT)) not in HIDDEN_USES
        for line in hidden_uses(tree, call)
    ]
    assert uses == []


def hidden_uses(tree: ast.AST, call: str) -> Iterator[int]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == call
            and (call != "type" or len(node.args) == 3)
        ):
            yield node.lineno


def test_planted_hidden_uses_are_seen() -> None:
    tree = ast.parse("A = type('A', (B,), {})\nm = importlib.import_module('x')\nn = locals()\nk = type(n)\n")
    assert [list(hidden_uses(tree, call)) for call in ("type", "importlib.import_module", "locals")] == [
        [1],
        [2],
        [3],
    ]


# ---- sentences

OPENING = re.compile(
    r"(Of|As|By|In|For|With|Where|From|To|On|At|Who|Whoever|Whatever|What|How|Which|Why|When|So|Such|Among|Beside)\b"
)
"""A docstring that begins with one of these does not say what the thing is or does."""

PHRASE = re.compile(r"\b(whoever|whatever|likewise|anew|alike|told of|what .{1,40} is what)\b", re.IGNORECASE)
"""Phrases without a noun for the thing, from STYLE's section on English."""

LONGEST = 100
"""Characters of a first sentence."""


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                yield docstring


def faults_of(docstring: str) -> list[str]:
    """Returns what STYLE forbids in a docstring: an opening without a noun or verb, a phrase, a long first
    sentence.
    """
    faults = []
    if OPENING.match(docstring):
        faults.append("opening")
    if PHRASE.search(docstring):
        faults.append("phrase")
    first = re.split(r"[.:](?=\s|$)", docstring.partition("\n\n")[0].replace("\n", " "))[0]
    if len(first) > LONGEST:
        faults.append("long first sentence")
    return faults


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    faulty = [
        f"{path.relative_to(ROOT)}: {', '.join(faults)}: {docstring.splitlines()[0]}"
        for path, tree in zip(FILES, trees(), strict=True)
        for docstring in docstrings(tree)
        if (faults := faults_of(docstring))
    ]
    assert faulty == [], "\n".join(faulty)


def test_planted_docstrings_are_seen() -> None:
    text = textwrap.dedent('''
        """Counts of rows."""
        def f():
            """Of the rows as the experts get them."""
        def g():
            """Does it anew."""
        def h():
            """Returns %s."""
        class A:
            """As `B`."""
    ''') % ("very " * 30)
    assert [faults_of(docstring) for docstring in docstrings(ast.parse(text))] == [
        [], ["opening"], ["phrase"], ["long first sentence"], ["opening"],
    ]  # fmt: skip
