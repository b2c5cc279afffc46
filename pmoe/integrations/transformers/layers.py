"""The MoELayer that runs an experts module of transformers, and the options of all these layers.

- Each experts module has a layer of its own, in a table outside of the module. So a model's state_dict,
  copies and pickles do not contain it.
- Options are checked when `configure` is called, by building a small layer with them.
- A layer holds the module's parameters and the routing only during a call.

Letters: T tokens of this rank, K choices, M model width.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.arguments import check_module
from pmoe.comm.ranks import Ranks
from pmoe.gates.external import ExternalGate
from pmoe.integrations.statistics import finders
from pmoe.integrations.transformers.layout import borrow, check_same_place
from pmoe.integrations.transformers.padding import run_tokens
from pmoe.integrations.transformers.shared_tensors import (
    BorrowedExperts,
    BorrowedSwiGLU,
    NormedExperts,
    Stacks,
)
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
"""Arguments of `MoELayer` that decide how experts are run. What is computed is up to the model."""

_options: Mapping[str, Any] = {}
"""The options of the last `configure`."""


def configure(**options: Any) -> None:
    """Sets how the experts of all models are run, from their next call on.

    options: any of `OPTIONS`, as `pmoe.MoELayer` takes them. Options that are left out get MoELayer's
        defaults, so configure() sets everything back. A ``memory_budget`` is for each layer.

    Every rank must set the same options. Do not call it between a forward pass under gradient checkpointing
    and its backward pass, which runs the forward pass again.

    Raises ValueError or TypeError, naming option, value and rule, and changes nothing then.

    Example: configure(pipeline=4, memory_reuse="S4", memory_budget="2GiB")
    """
    global _options
    for name, value in options.items():
        if name not in OPTIONS:
            raise ValueError(f"{name} ({value!r}) must be left out: the options are {', '.join(OPTIONS)}")
        takes_modules = name in ("order", "dispatch", "combine")
        if takes_modules and not (isinstance(value, str) or (value is None and name == "combine")):
            raise TypeError(f"{name} ({value!r}) must be a name: a module could serve only one of the layers")
    experts = BorrowedSwiGLU(Stacks(w1=torch.empty(2, 16, 8), w2=torch.empty(2, 8, 8)))
    MoELayer(8, 8, 2, 2, gate=ExternalGate(), expert=experts, group=Ranks.single(), **options)
    _options = options


# ---- layers by their modules


@dataclass(frozen=True)
class _Built:
    """A layer, with the sizes and options that it was built for.

    made_for: sizes, group and options. If they change, another layer is built.
    layer: the layer.
    turn: a lock, because a layer holds the routing and the parameters of one call, and threads of a server
        may share a model.
    """

    made_for: tuple[Any, ...]
    layer: MoELayer
    turn: threading.Lock = field(default_factory=threading.Lock)


_layers: weakref.WeakKeyDictionary[nn.Module, _Built] = weakref.WeakKeyDictionary()
"""The layer of each experts module that has been called. It does not keep the module alive."""


def layers(model: nn.Module) -> dict[str, MoELayer]:
    """Returns the layers that run a model's experts, by the names of the experts modules.

    Only modules that have been called have a layer. Ask a layer for ``row_counts``, ``tokens_per_expert`` and
    ``traffic`` of its last forward pass, and for ``predict_memory``.
    """
    check_module(model=model)
    return {name: _layers[each].layer for name, each in model.named_modules() if each in _layers}


finders.append(layers)  # so that `pmoe.stats` finds these layers, which are no submodules of the model


@contextmanager
def _layer_of(
    module: nn.Module,
    experts: BorrowedExperts | NormedExperts,
    top_k: int,
    num_experts: int,
    group: dist.ProcessGroup | None,
) -> Iterator[MoELayer]:
    """Yields the layer of an experts module, to one thread at a time.

    experts: the module's experts in this call. top_k, num_experts, group: of the call.

    The layer is built at the first call, and again if sizes, group or options have changed.
    """
    _, d_hidden, d_model = experts.stacks.w2.shape
    if not experts.stacks.transposed:
        d_hidden, d_model = d_model, d_hidden
    sizes = (d_model, d_hidden, num_experts, top_k)
    options = _options
    typed = {name: (type(value), value) for name, value in options.items()}  # because True == 1
    entry = _layers.get(module)
    made_for = (sizes, group, typed)
    if entry is None or entry.made_for != made_for:
        ranks = Ranks.single() if group is None else group
        layer = MoELayer(*sizes, gate=ExternalGate(), expert=experts, group=ranks, **options)
        entry = _layers[module] = _Built(made_for, layer)
    with entry.turn:
        yield entry.layer


# ---- a call


@torch._disable_dynamo  # type: ignore[attr-defined]
def run_module(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Runs an experts module by pmoe; returns (T, M), each token's sum of weighted outputs.

    module: an experts module of transformers.
    hidden_states: (T, M), tokens.
    top_k_index: (T, K) integers, the experts of each token. The index behind the last expert means no expert.
    top_k_weights: (T, K), their weights.
    group: the ranks over which the experts are spread, evenly and in order. None if this rank holds all, as
        in transformers' registry of experts implementations.

    Raises ValueError if pmoe does not know the module's layout, or for a bad routing. Bad values of the
    routing raise on every rank of the group.
    """
    if group is not None or getattr(module, "_is_expert_parallel", False):
        return _run(module, group, hidden_states, top_k_index, top_k_weights)
    return run_tokens(module, partial(_run, module, None), hidden_states, top_k_index, top_k_weights)


def _run(
    module: nn.Module,
    group: dist.ProcessGroup | None,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Runs all rows that are given; arguments and result are those of `run_module`."""
    experts = borrow(module)
    num_experts = experts.num_local_experts * (1 if group is None else dist.get_world_size(group))
    if top_k_index.dim() != 2 or top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"top_k_weights (shape {tuple(top_k_weights.shape)}) must be of the shape of top_k_index "
            f"({tuple(top_k_index.shape)}), one row a token"
        )
    # Among several ranks the layer checks its input itself, so that the error is raised on all of them.
    if group is None:
        check_same_place(module, hidden_states=hidden_states)
    keep_TK = top_k_index != num_experts
    expert_TK = top_k_index.to(torch.int64).where(keep_TK, 0)
    with _layer_of(module, experts, top_k_index.shape[1], num_experts, group) as layer:
        if layer.training != module.training:
            layer.train(module.training)
        gate = layer.gate
        assert isinstance(gate, ExternalGate)
        layer.experts = experts
        try:
            with gate.routing(expert_TK, top_k_weights, keep_TK):
                y: Tensor = layer(hidden_states)
        finally:  # the layer keeps the sizes, but not the module's parameters
            layer.experts = type(experts)(experts.stacks.stand_ins())
    return y.to(hidden_states.dtype)
