"""Makes docs/reading.md: the code of one call, in the order in which it runs.

    python docs/reading_order.py

A default layer is called once under a tracer. A test holds that the page is what this file makes.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

import pmoe
from pmoe.decide import experts_call

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pmoe"
PAGE = ROOT / "docs" / "reading.md"

HEAD = """\
# The code of one call

For people who read pmoe's code for the first time. This page lists the functions that one call executes,
file by file, in the order in which the call first enters them. It is made by running the call (`python
docs/reading_order.py`), so it is never older than the code.

The layer is `pmoe.MoELayer(16, 32, 4, pipeline=2, memory_reuse="S4")` on one rank: two chunks, and buffers
that rotate. Open the files beside this page and read the functions in this order. Code that only other
layers need (several ranks, callbacks, shared experts, kernels) is not on the way of this call, and not on
this page. The words are those of [How it works](how_it_works.md). [Architecture](architecture.md) describes
the parts of the package.
"""

STAGES = {
    "decide": "## Decide\n\nBefore rows move: checks, the gate, row counts, n and the restore pair.\n",
    "forward": "## Run: the forward pass\n\nRows move and experts multiply. Nothing is decided.\n",
    "backward": "## Run: the backward pass\n\nGradients travel the way back. T_DI and T_M are restored.\n",
}


Function = tuple[str, str]
"""The file and the name of a function."""


@dataclass
class Trace:
    """What a call executed.

    functions   (file, name) of the package; comprehensions and lambdas belong to the function around them
    lines       (file, line) of the package
    calls       the functions in the order of their calls
    num_before  how many of these calls came before `run`
    """

    functions: set[Function] = field(default_factory=set)
    lines: set[tuple[str, int]] = field(default_factory=set)
    calls: list[Function] = field(default_factory=list)
    num_before: int = -1

    @property
    def files_before(self) -> list[str]:
        """The file of each call before `run`."""
        return [file for file, _ in self.calls[: self.num_before]]

    @property
    def changes(self) -> int:
        """How many calls before `run` are in another file than the call before."""
        files = self.files_before
        return sum(one != other for one, other in zip(files, files[1:], strict=False))


def traced(package: Path, call: Callable[[], object], run: Callable[..., object]) -> Trace:
    """Executes ``call()`` and records the functions and lines of ``package`` that it executes."""
    trace = Trace()
    inside = f"{package}/"

    def on_event(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        code = frame.f_code
        if not code.co_filename.startswith(inside):
            return None
        if event == "call":
            if code is run.__code__ and trace.num_before < 0:
                trace.num_before = len(trace.calls)
            if not code.co_name.startswith("<"):
                function = (code.co_filename, code.co_qualname.replace(".<locals>", ""))
                trace.functions.add(function)
                trace.calls.append(function)
        elif event == "line":
            trace.lines.add((code.co_filename, frame.f_lineno))
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        call()
    finally:
        sys.settrace(before)
    return trace


def default_call() -> tuple[Trace, Trace]:
    """Returns the traces of a default layer's forward pass and of its backward pass."""
    torch.manual_seed(0)
    layer = pmoe.MoELayer(16, 32, 4, pipeline=2, memory_reuse="S4")
    x = torch.randn(64, 16, requires_grad=True)
    layer(x).sum().backward()  # the first call compares and imports what later ones do not
    outputs: list[torch.Tensor] = []
    forward = traced(PACKAGE, lambda: outputs.append(layer(x)), experts_call.run)
    backward = traced(PACKAGE, outputs[0].sum().backward, experts_call.run)
    return forward, backward


def page() -> str:
    """Returns the text of docs/reading.md."""
    forward, backward = default_call()
    calls = {
        "decide": forward.calls[: forward.num_before],
        "forward": forward.calls[forward.num_before :],
        "backward": backward.calls,
    }
    shown: set[Function] = set()
    parts = [HEAD]
    for stage, text in STAGES.items():
        functions_by_file: dict[str, list[str]] = {}
        for function in calls[stage]:
            if function not in shown:
                shown.add(function)
                file, name = function
                functions_by_file.setdefault(file, []).append(name)
        rows = [row(Path(file), names) for file, names in functions_by_file.items()]
        table = ["| file | what it is | functions, in order |", "|---|---|---|", *rows, ""]
        parts.append("\n".join([text, *table]))
    return "\n".join(parts)


def row(file: Path, names: list[str]) -> str:
    """One file in a table: its path, the first sentence of its docstring, and its functions."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = docstring.partition("\n\n")[0].replace("\n", " ")
    sentence = re.split(r"(?<!Fig)\.(?=\s|$)", paragraph)[0].rstrip(":")
    functions = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
    return f"| `{file.relative_to(ROOT)}` | {sentence.replace('|', '/')} | {functions} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
