"""The experts of a transformers model on several ranks, as one operator in graphs of torch.compile.

During a call, transformers replaces the parameters of an experts module by this rank's parts. In a compiled
model, it does so only while torch.compile traces the call. Later, when the operator runs, the module has its
own parameters again. So the operator replaces them itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

from pmoe.call.module_calls import traced_as
from pmoe.call.operator_kinds import KINDS, OperatorKind
from pmoe.integrations.transformers import layers
from pmoe.integrations.transformers.in_graph import shapes_of_experts

MESHES: weakref.WeakKeyDictionary[nn.Module, DeviceMesh] = weakref.WeakKeyDictionary()
"""For each experts module with ep_implementation="pmoe", the ranks over which its experts are spread."""


def _traced(*args: Any, **kwargs: Any) -> Tensor:
    """The function that torch.compile traces in place of `run_spread_module`, to get one operator."""
    return _run_in_graph(*args, **kwargs)


@traced_as(_traced)
def run_spread_module(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs an experts module whose experts are spread over the ranks of its mesh in `MESHES`. Collective.

    Arguments, result and errors are those of `pmoe.integrations.transformers.layers.run_module`.
    """
    group: dist.ProcessGroup = MESHES[module].get_group()
    return layers.run_module(module, hidden_states, top_k_index, top_k_weights, group)


def _run_in_graph(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Does the same as `run_spread_module`, by one operator. torch.compile traces this function."""
    from pmoe.graph.one_operator import run_in_graph

    [y] = run_in_graph("spread experts", module, [hidden_states, top_k_index, top_k_weights])
    return y


def _run(module: nn.Module, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Replaces a module's parameters by this rank's parts, and runs it. Returns a list with its output."""
    hidden_states, top_k_index, top_k_weights = inputs
    assert hidden_states is not None and top_k_index is not None and top_k_weights is not None
    style: Any = EpDispatchExpertsParallel()  # whose methods have no types
    with style.context_around_forward(module, MESHES[module]):
        return [run_spread_module(module, hidden_states, top_k_index, top_k_weights)]


KINDS["spread experts"] = OperatorKind(_run, shapes_of_experts)
