"""Runs the experts modules of transformers by pmoe, and holds the options of all of them.

`pmoe.layer.run_experts` keeps a layer for each experts module. `configure` checks options at once, by
building a small layer with them.

Letters: T tokens of this rank, K experts of each token, M model width.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.comm.ranks import Ranks
from pmoe.experts.borrowed import BorrowedSwiGLU, Stacks
from pmoe.experts.few_rows import has_few_rows
from pmoe.gates.external import ExternalGate
from pmoe.integrations.transformers.layout import borrow, check_same_place
from pmoe.integrations.transformers.padding import run_tokens
from pmoe.layer import MoELayer
from pmoe.layer.run_experts import (
    OPTIONS,
    check_option_names,
    check_routing_shapes,
    layers,
    run_borrowed,
    run_few_rows,
)

__all__ = ["OPTIONS", "configure", "layers", "run_module"]

_options: Mapping[str, Any] = {}
"""The options that the last call of `configure` set."""


def configure(**options: Any) -> None:
    """Sets how pmoe runs the experts of all transformers models, from their next call on.

    options: arguments of `pmoe.MoELayer`, any of `OPTIONS`. Options that are left out are set back to
        MoELayer's defaults. A ``memory_budget`` limits each layer by itself.

    Every rank must set the same options. Do not call this function between a forward pass under gradient
    checkpointing and its backward pass, because the recomputation must use the same options.

    Raises ValueError or TypeError if an option is unknown or has a wrong value. Nothing is changed then.

    Example: configure(pipeline=4, memory_reuse="S4", memory_budget="2GiB")
    """
    global _options
    check_option_names(options)
    for name, value in options.items():
        takes_modules = name in ("order", "dispatch", "combine")
        if takes_modules and not (isinstance(value, str) or (value is None and name == "combine")):
            raise TypeError(f"{name} ({value!r}) must be a name: a module could serve only one of the layers")
    experts = BorrowedSwiGLU(Stacks(w1=torch.empty(2, 16, 8), w2=torch.empty(2, 8, 8)))
    MoELayer(8, 8, 2, 2, gate=ExternalGate(), expert=experts, group=Ranks.single(), **options)
    _options = options


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
    """Runs an experts module by pmoe for all T rows, even if some are padding. Returns (T, M).

    module: the experts module.
    group: the ranks over which the module's experts are spread; None if this rank holds all experts.
    hidden_states: (T, M), the rows, of width M.
    top_k_index, top_k_weights: (T, K), the K experts of each row and their weights.

    Raises ValueError if pmoe does not know the layout of the module's weights, or if the routing is wrong.
    """
    if group is None:
        y = _run_few(module, hidden_states, top_k_index, top_k_weights)
        if y is not None:
            return y
    experts = borrow(module)
    check_routing_shapes(top_k_index, top_k_weights, "top_k_index", "top_k_weights")
    # With several ranks the layer itself checks its input, because it raises the error on all ranks.
    if group is None:
        check_same_place(module, hidden_states=hidden_states)
        _known[module] = _Known.of(module, experts.stacks)
    return run_borrowed(module, experts, hidden_states, top_k_index, top_k_weights, group, _options)


# ---- few rows


@dataclass(frozen=True)
class _Known:
    """The checked layout of an experts module, by which later calls read the tensors without a new check.

    tensors: for each of the names w1, w2, b1 and b2 that the module has: (the tensor's name in the module,
        weak reference to the tensor).
    transposed: whether a weight has the dimensions (experts, in, out), not (experts, out, in).
    activation: the name of an activation of pmoe; None if the module's own function is called.
    function: a weak reference to the module's function of that name; None if ``activation`` is None.
    """

    tensors: dict[str, tuple[str, weakref.ref[Tensor]]]
    transposed: bool
    activation: str | None
    function: weakref.ref[Any] | None

    @staticmethod
    def of(module: Any, stacks: Stacks) -> _Known:
        """Returns the layout of a module that was checked. It refers to the module's tensors only weakly.

        module: the experts module.
        stacks: the module's tensors.
        """
        names = {id(tensor): name for name, tensor in module._parameters.items() if tensor is not None}
        own = {key: (names.get(id(tensor), ""), weakref.ref(tensor)) for key, tensor in stacks.named.items()}
        name = stacks.activation if isinstance(stacks.activation, str) else None
        function = None if name is None else weakref.ref(module.act_fn)
        return _Known(own, stacks.transposed, name, function)

    def stacks(self, module: Any) -> Stacks | None:
        """Returns the module's present tensors; None if a tensor or its activation was replaced since."""
        parameters = module._parameters
        found = {key: parameters.get(name) for key, (name, _) in self.tensors.items()}
        if any(tensor is None or tensor is not self.tensors[key][1]() for key, tensor in found.items()):
            return None
        activation: Any = self.activation
        if self.function is not None and module.act_fn is not self.function():
            return None
        if activation is None:
            activation = module._apply_gate if getattr(module, "has_gate", True) else module.act_fn
        norm = module._modules.get("post_expert_norm")
        return Stacks(**found, transposed=self.transposed, activation=activation, norm=norm)


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
"""The checked layout of each experts module that was called on one rank."""


def _run_few(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor | None:
    """Runs an experts module for a few rows without gradients, such as a step of decoding. Returns (T, M).

    T is the number of tokens, M their width. Returns None if the call has many rows or needs gradients, if
    the module's layout was not checked yet, or if tensors do not fit. The caller then runs the call in the
    usual way, which also raises the errors.

    module: the experts module.
    hidden_states: (T, M), the tokens.
    top_k_index, top_k_weights: (T, K), the K experts of each token and their weights.
    """
    known = None if torch.is_grad_enabled() else _known.get(module)
    stacks = None if known is None else known.stacks(module)
    if _options.get("products") is not None:  # the short way rounds nothing
        return None
    if stacks is None or not has_few_rows(hidden_states, top_k_index, top_k_weights, stacks):
        return None
    return run_few_rows(module, hidden_states, top_k_index, top_k_weights, stacks)
