"""The layer of pmoe behind an experts module, and the options of MoELayer that all such layers have.

A layer is found by the module and is no part of it: state_dict, copies and pickles of a model know nothing of
it, and two models share nothing. Options are checked when they are given, not at the first batch, by building
a small layer with them. What a layer must not keep from one call to the next (the module's parameters, the
routing) it holds for that call.

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
from pmoe.integrations.transformers.borrowed import BorrowedExperts, BorrowedSwiGLU, NormedExperts, Stacks
from pmoe.integrations.transformers.layout import borrow, check_same_place
from pmoe.integrations.transformers.padding import run_tokens
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
        takes_modules = name in ("order", "dispatch", "combine")
        if takes_modules and not (isinstance(value, str) or (value is None and name == "combine")):
            raise TypeError(f"{name} ({value!r}) must be a name: a module belongs to one layer")
    experts = BorrowedSwiGLU(Stacks(w1=torch.empty(2, 16, 8), w2=torch.empty(2, 8, 8)))
    MoELayer(8, 8, 2, 2, gate=ExternalGate(), expert=experts, group=Ranks.single(), **options)
    _options = options


# ---- layers by their modules


@dataclass(frozen=True)
class _Built:
    """A layer and what it was built for. turn: of threads that share a model (a server's), for a layer holds
    the routing and the parameters of one call."""

    made_for: tuple[Any, ...]
    layer: MoELayer
    turn: threading.Lock = field(default_factory=threading.Lock)


_layers: weakref.WeakKeyDictionary[nn.Module, _Built] = weakref.WeakKeyDictionary()


def layers(model: nn.Module) -> dict[str, MoELayer]:
    """The layers that run a model's experts, by the names of their modules; those that have been called.

    To look at: ``row_counts``, ``tokens_per_expert``, ``predict_memory``, ``traffic`` of the last forward.
    """
    check_module(model=model)
    return {name: _layers[each].layer for name, each in model.named_modules() if each in _layers}


finders.append(layers)  # `pmoe.stats` names them as well


@contextmanager
def _layer_of(
    module: nn.Module,
    experts: BorrowedExperts | NormedExperts,
    top_k: int,
    num_experts: int,
    group: dist.ProcessGroup | None,
) -> Iterator[MoELayer]:
    """Built at the first call, and again where sizes, ranks or `configure`'s options are others since. One
    thread has it at a time."""
    _, d_hidden, d_model = experts.stacks.w2.shape
    if not experts.stacks.transposed:
        d_hidden, d_model = d_model, d_hidden
    sizes, options = (d_model, d_hidden, num_experts, top_k), _options
    typed = {name: (type(value), value) for name, value in options.items()}  # pipeline=True is no 1
    built, made_for = _layers.get(module), (sizes, group, typed)
    if built is None or built.made_for != made_for:
        ranks = Ranks.single() if group is None else group
        layer = MoELayer(*sizes, gate=ExternalGate(), expert=experts, group=ranks, **options)
        built = _layers[module] = _Built(made_for, layer)
    with built.turn:
        yield built.layer


# ---- a call


@torch._disable_dynamo  # type: ignore[attr-defined]
def run_module(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """(T, M): each token's experts' outputs, times their weights, summed. group: the ranks that the experts
    are spread over, evenly and in order; None where this rank's are all, as in the registry of experts
    implementations.

    top_k_index, top_k_weights: (T, K); the index behind the last expert means no expert. Raises ValueError
    where the layout or the routing is not as it must be; of the routing's values on every rank of the group.
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
    experts = borrow(module)
    num_experts = experts.num_local_experts * (1 if group is None else dist.get_world_size(group))
    if top_k_index.dim() != 2 or top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"top_k_weights (shape {tuple(top_k_weights.shape)}) must be of the shape of top_k_index "
            f"({tuple(top_k_index.shape)}), one row a token"
        )
    if group is None:  # among several ranks the layer checks, which tells all of them
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
        finally:  # the sizes stay, without anybody's parameters
            layer.experts = type(experts)(experts.stacks.stand_ins())
    return y.to(hidden_states.dtype)
