"""The kinds of modules that torch.compile puts into its graph as a single operator.

Modules register their kinds in this file. The operator itself is in `pmoe.graph.one_operator`, a file that is
slow to import, because it imports the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class OperatorKind:
    """The two functions of an operator that runs modules of one kind.

    run: a function (module, inputs) that runs the module and returns its results.
    shapes: a function (module, inputs) that returns tensors with the shapes and dtypes of these results, but
        without values. The inputs have no values either. torch.compile calls it while it traces, under the
        same autocast setting as `run`.
    """

    run: Callable[[Any, Sequence[Tensor | None]], list[Tensor]]
    shapes: Callable[[Any, Sequence[Tensor | None]], list[Tensor]]


KINDS: dict[str, OperatorKind] = {}
"""The kinds by name.

"layer"            a MoELayer
"experts"          an experts module of transformers on one rank
"spread experts"   an experts module of transformers, with the experts spread over ranks
"torchtitan"       the routed experts of torchtitan
"""
