"""The MoE layers that run the experts modules of transformers, and the options of all these layers.

- Each experts module has a `MoELayer`, stored in a table outside of the module. So a model's state_dict,
  copies and pickles do not contain the layer.
- `configure` checks options at once, by building a small layer with them.
- A layer refers to the module's parameters and to the routing only during a call.

Letters: T tokens of this rank, K experts of each token, M model width.
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
    "wire",
    "wire_backward",
)
"""Arguments of `MoELayer` that `configure` takes: those that decide how experts are run.

The arguments that decide what is computed, such as the activation, come from the model.
"""

_options: Mapping[str, Any] = {}
"""The options that the last call of `configure` set."""


def configure(**options: Any) -> None:
    """Sets how pmoe runs the experts of all transformers models, from their next call on.

    options: arguments of `pmoe.MoELayer`, any of `OPTIONS`. Those that are left out are set back to
        MoELayer's defaults. A ``memory_budget`` limits each layer by itself.

    Every rank must set the same options. Do not call this function between a forward pass under gradient
    checkpointing and its backward pass, because the recomputation must use the same options.

    Raises ValueError or TypeError if an option is unknown or has a wrong value. Nothing is changed then.

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
    """The MoE layer that runs one experts module.

    made_for: the sizes, group and options with which the layer was built. A new layer is built if a call has
        other sizes, another group or other options.
    layer: the layer.
    turn: a lock that lets only one thread at a time use the layer. Threads of a server may share a model, but
        a layer can hold the routing and parameters of only one call.
    """

    made_for: tuple[Any, ...]
    layer: MoELayer
    turn: threading.Lock = field(default_factory=threading.Lock)


_layers: weakref.WeakKeyDictionary[nn.Module, _Built] = weakref.WeakKeyDictionary()
"""The layer of each experts module that has been called.

The keys are weak references, so the table does not keep a module alive.
"""


def layers(model: nn.Module) -> dict[str, MoELayer]:
    """Returns the MoE layers that run a model's experts, by the names of the experts modules.

    Experts modules that were never called have no layer yet. Each layer gives numbers about its last forward
    pass (``row_counts``, ``tokens_per_expert``, ``traffic``) and can predict memory (``predict_memory``).

    model: a model of transformers, or any module that contains one.
    """
    check_module(model=model)
    return {name: _layers[module].layer for name, module in model.named_modules() if module in _layers}


finders.append(
    layers
)  # `pmoe.stats` would not find these layers, because they are no submodules of the model


@contextmanager
def _layer_of(
    module: nn.Module,
    experts: BorrowedExperts | NormedExperts,
    top_k: int,
    num_experts: int,
    group: dist.ProcessGroup | None,
) -> Iterator[MoELayer]:
    """Yields the MoE layer for a call of an experts module, to one thread at a time.

    The layer is built at the module's first call, and built again if sizes, group or options have changed.

    module: the experts module.
    experts: its parameters, as experts that a MoELayer can run.
    top_k: number of experts of each token.
    num_experts: number of experts of all ranks.
    group: the ranks over which the experts are spread; None if this rank holds all experts.
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
    """Runs an experts module by pmoe. Returns each token's weighted sum of expert outputs, (T, M).

    Letters: T tokens of this rank, K experts of each token, M model width.

    module: an experts module of transformers.
    hidden_states: (T, M), the tokens.
    top_k_index: (T, K) integers, the experts of each token. E, the number of experts of all ranks, means no
        expert.
    top_k_weights: (T, K), their weights.
    group: the ranks over which the experts are spread, evenly and in order. None if this rank holds all
        experts, as when transformers calls this function for experts_implementation="pmoe".

    Raises ValueError if pmoe does not know the layout of the module's weights, or for a wrong routing. A
    routing with wrong values raises on every rank of the group.
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
    """Runs an experts module by pmoe, without looking for padding. Returns (T, M).

    module, group: as in `run_module`: the experts module, and the ranks over which its experts are spread.
    hidden_states: (T, M), T tokens of width M.
    top_k_index, top_k_weights: (T, K), the K experts of each token and their weights.

    Raises ValueError as `run_module` does.
    """
    experts = borrow(module)
    num_experts = experts.num_local_experts * (1 if group is None else dist.get_world_size(group))
    if top_k_index.dim() != 2 or top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"top_k_weights (shape {tuple(top_k_weights.shape)}) must be of the shape of top_k_index "
            f"({tuple(top_k_index.shape)}), one row a token"
        )
    # With several ranks the layer itself checks its input, because it raises the error on all ranks.
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
        finally:  # between calls the layer knows the sizes, but does not hold the module's parameters
            layer.experts = type(experts)(experts.stacks.stand_ins())
    return y.to(hidden_states.dtype)
