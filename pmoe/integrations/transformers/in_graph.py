"""The experts of a transformers model as one operator of a compiled graph (`pmoe.graph.one_operator`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pmoe.graph.one_operator import KINDS, Kind, run_in_graph
from pmoe.integrations.transformers.layers import run_module

outside: Callable[..., Tensor] = torch._dynamo.disable(
    run_module.__wrapped__,  # type: ignore[attr-defined]
    reason="experts that are spread over ranks cannot be in a graph yet: leave fullgraph=True out",
)
"""`run_module`, at which torch.compile breaks its graph."""


def run_module_in_graph(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Computes `run_module`, with the same arguments, by an operator. torch.compile traces this function.

    The graph breaks at experts that are spread over ranks: transformers replaces their parameters for the
    time of a call, and when the operator runs, this time is over.
    """
    if group is not None or any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return outside(module, hidden_states, top_k_index, top_k_weights, group)
    [y] = run_in_graph("experts", module, [hidden_states, top_k_index, top_k_weights])
    return y


def _run(module: nn.Module, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Runs an experts module. Returns a list with its output."""
    hidden_states, top_k_index, top_k_weights = inputs
    assert hidden_states is not None and top_k_index is not None and top_k_weights is not None
    return [run_module(module, hidden_states, top_k_index, top_k_weights)]


def _shapes(module: nn.Module, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns a list with an empty tensor like an experts module's output."""
    assert inputs[0] is not None
    return [torch.empty_like(inputs[0], memory_format=torch.contiguous_format)]


KINDS["experts"] = Kind(_run, _shapes)
