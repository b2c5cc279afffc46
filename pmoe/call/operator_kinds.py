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

    run: function (module, inputs) that runs the module. Returns its results.
    shapes: function (module, inputs) that returns empty tensors like these results, also in dtype. The inputs
        have shapes and no values. Autocast is on if it is on in `run`.
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
