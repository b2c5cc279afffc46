"""The experts of a transformers model, which torch.compile keeps in its graph as one operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pmoe.call.module_calls import traced_as
from pmoe.call.operator_kinds import KINDS, OperatorKind
from pmoe.integrations.transformers import layers


def _traced(*args: Any, **kwargs: Any) -> Tensor:
    """The function that torch.compile traces in place of `run_experts_module`, to get one operator."""
    return _run_in_graph(*args, **kwargs)


@traced_as(_traced)
def run_experts_module(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs an experts module on one rank, as `pmoe.integrations.transformers.layers.run_module` does.

    transformers calls this function for experts_implementation="pmoe". Arguments, result and errors are those
    of that function.
    """
    return layers.run_module(module, hidden_states, top_k_index, top_k_weights)


def _run_in_graph(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs an experts module by an operator, which torch.compile keeps as a whole in its graph.

    Arguments and result are those of `run_experts_module`.

    If weights are DTensors, transformers spreads the experts by an implementation of its own. transformers
    then replaces the parameters of the experts, but only while it calls them. A compiled graph would run the
    operator later, when the module has its own parameters again. So the graph breaks here.
    """
    from pmoe.graph.one_operator import run_in_graph

    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return layers.run_module(module, hidden_states, top_k_index, top_k_weights)
    batch = [hidden_states, top_k_index, top_k_weights]
    [y] = run_in_graph("experts", module, batch, communicates=False)
    return y


def _run(module: nn.Module, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Runs an experts module. Returns a list with its output."""
    hidden_states, top_k_index, top_k_weights = inputs
    assert hidden_states is not None and top_k_index is not None and top_k_weights is not None
    return [layers.run_module(module, hidden_states, top_k_index, top_k_weights)]


def shapes_of_experts(module: nn.Module, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns a list with an empty tensor like an experts module's output."""
    assert inputs[0] is not None
    return [torch.empty_like(inputs[0], memory_format=torch.contiguous_format)]


KINDS["experts"] = OperatorKind(_run, shapes_of_experts)
