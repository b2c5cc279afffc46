"""How pmoe runs the experts of transformers' models: options of MoELayer, for all of them.

They are checked when they are given, not at the first batch, by building a small layer with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pmoe.comm.ranks import Ranks
from pmoe.experts.base import Experts
from pmoe.gates.given import GivenGate
from pmoe.integrations.transformers.borrowed import BorrowedSwiGLU, Stacks
from pmoe.layer import MoELayer

OPTIONS = (
    "pipeline",
    "pipeline_backward",
    "memory_reuse",
    "memory_budget",
    "slack",
    "order",
    "dispatch",
    "combine",
    "nodes",
    "send_once",
)
"""Arguments of `MoELayer` that say how experts are run. What they compute is the model's to say."""

MODULES = ("order", "dispatch", "combine")
"""Of these MoELayer takes modules too; each belongs to one layer."""

_options: Mapping[str, Any] = {}


def configure(**options: Any) -> None:
    """Sets how the experts of all models are run from their next call on: any of `OPTIONS`, as
    `pmoe.MoELayer` takes them. What is left out is MoELayer's default; configure() sets everything back.

    Every rank must set the same, and not between a forward pass under gradient checkpointing and its backward
    pass, which runs it again. A ``memory_budget`` is of each layer. Raises ValueError or TypeError, naming
    option, value and rule, and changes nothing then.

    Example: configure(pipeline=4, memory_reuse="S4", memory_budget="2GiB")
    """
    global _options
    for name, value in options.items():
        if name not in OPTIONS:
            raise ValueError(f"{name} ({value!r}) must be left out: the options are {', '.join(OPTIONS)}")
        if name in MODULES and not (isinstance(value, str) or (value is None and name == "combine")):
            raise TypeError(f"{name} ({value!r}) must be a name: a module belongs to one layer")
    experts = BorrowedSwiGLU(Stacks(w1=torch.empty(2, 16, 8), w2=torch.empty(2, 8, 8)))
    sizes = {"d_model": 8, "d_hidden": 8, "num_experts": 2, "top_k": 2}
    make_layer(experts, Ranks.alone(), sizes, options)
    _options = options


def are_same(options: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether a layer is the same with either. True is no 1: pipeline=True lets the planner choose."""
    return options == others and all(type(value) is type(others[name]) for name, value in options.items())


def options() -> Mapping[str, Any]:
    """Those that `configure` was last given."""
    return _options


def make_layer(
    experts: Experts,
    group: dist.ProcessGroup | Ranks,
    sizes: Mapping[str, Any],
    options: Mapping[str, Any],
) -> MoELayer:
    """A layer around this rank's experts that is routed from outside. sizes: MoELayer's first arguments."""
    return MoELayer(**sizes, gate=GivenGate(), expert=experts, group=group, **options)
