"""The experts of a transformers model as one operator of a compiled graph (`pmoe.graph.one_operator`)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.graph.one_operator import KINDS, Kind, run_in_graph
from pmoe.integrations.transformers.layers import run_module

GROUPS: weakref.WeakKeyDictionary[nn.Module, dist.ProcessGroup | None] = weakref.WeakKeyDictionary()
"""The ranks over which the experts of each traced module are spread; None if one rank holds all."""


def run_module_in_graph(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Computes `run_module`, with the same arguments, by operators. torch.compile traces this function."""
    _remember(module, group)
    [y] = run_in_graph("experts", module, [hidden_states, top_k_index, top_k_weights])
    return y


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _remember(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Remembers the ranks of a module for `_run`: a process group cannot be an operator's argument."""
    GROUPS[module] = group


def _run(module: nn.Module, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Runs an experts module. Returns a list with its output."""
    hidden_states, top_k_index, top_k_weights = inputs
    assert hidden_states is not None and top_k_index is not None and top_k_weights is not None
    return [run_module(module, hidden_states, top_k_index, top_k_weights, GROUPS[module])]


def _shapes(module: nn.Module, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns a list with an empty tensor like an experts module's output."""
    assert inputs[0] is not None
    return [torch.empty_like(inputs[0], memory_format=torch.contiguous_format)]


KINDS["experts"] = Kind(_run, _shapes)
