"""The layer of pmoe behind an experts module, and the options of MoELayer that all such layers have.

A layer is found by the module and is no part of it: state_dict, copies and pickles of a model know nothing of
it, and two models share nothing. Options are checked when they are given, not at the first batch, by building
a small layer with them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pmoe.comm.ranks import Ranks
from pmoe.experts.base import Experts
from pmoe.gates.external import ExternalGate
from pmoe.integrations.statistics import finders
from pmoe.integrations.transformers.borrowed import BorrowedExperts, BorrowedSwiGLU, NormedExperts, Stacks
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
    make_layer(experts, Ranks.single(), sizes, options)
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
    return MoELayer(**sizes, gate=ExternalGate(), expert=experts, group=group, **options)


# ---- layers by their modules


@dataclass(frozen=True)
class _Built:
    """A layer and what it was built for. turn: of threads that share a model (a server's), for a layer holds
    the routing and the parameters of one call."""

    sizes: Mapping[str, Any]
    group: dist.ProcessGroup | None
    options: Mapping[str, Any]
    layer: MoELayer
    turn: threading.Lock = field(default_factory=threading.Lock)


_layers: weakref.WeakKeyDictionary[nn.Module, _Built] = weakref.WeakKeyDictionary()


def layers(model: nn.Module) -> dict[str, MoELayer]:
    """The layers that run a model's experts, by the names of their modules; those that have been called.

    To look at: ``row_counts``, ``tokens_per_expert``, ``predict_memory``, ``traffic`` of the last forward.
    """
    return {name: _layers[each].layer for name, each in model.named_modules() if each in _layers}


if layers not in finders:
    finders.append(layers)  # `pmoe.stats` names them as well


@contextmanager
def layer_of(
    module: nn.Module, experts: Experts, top_k: int, num_experts: int, group: dist.ProcessGroup | None
) -> Iterator[MoELayer]:
    """Built at the first call, and again where sizes, ranks or `configure`'s options are others since. One
    thread has it at a time."""
    inner = experts.inner if isinstance(experts, NormedExperts) else experts
    assert isinstance(inner, BorrowedExperts)
    sizes = {
        "d_model": inner.w2.shape[1],
        "d_hidden": inner.num_hidden,
        "num_experts": num_experts,
        "top_k": top_k,
    }
    built, chosen = _layers.get(module), options()
    is_same = built is not None and (built.sizes, built.group) == (sizes, group)
    if built is None or not is_same or not are_same(built.options, chosen):
        layer = make_layer(experts, Ranks.single() if group is None else group, sizes, chosen)
        built = _layers[module] = _Built(sizes, group, chosen, layer)
    with built.turn:
        yield built.layer
