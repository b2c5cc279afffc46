"""pmoe as an expert-parallel implementation of transformers: experts are spread over ranks by the library
(whole experts, in order), and tokens reach them through pmoe's pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from pmoe.integrations.transformers.layers import run_module
from pmoe.integrations.transformers.layout import check
from pmoe.integrations.transformers.padding import run_tokens


class PipelinedEP(EPImplementation):
    """Dispatch, experts and combine of one experts module, as `configure` says. Built by transformers before
    weights are loaded; ValueError then where pmoe does not know the module's layout."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        check(experts)
        super().__init__(experts, ep_mesh, tp_mesh)
        self.module = experts

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, M) of this rank's tokens (T, M), by their routing (T, K) to experts of the whole group."""
        return run_tokens(self.module, self._run, hidden_states, top_k_index, top_k_weights)

    def _run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        group = self.ep_mesh.get_group()
        if self.tp_mesh.size() == 1:
            return run_module(self.module, hidden_states, top_k_index, top_k_weights, group)
        # Ranks that hold one batch send disjoint parts of it, or its tokens would be computed once for each.
        batch = (hidden_states, top_k_index, top_k_weights)
        rows, index, weights = (_part(each, self.tp_mesh) for each in batch)
        y = run_module(self.module, rows, index, weights, group)
        return _whole(y, self.tp_mesh, hidden_states.shape)


def _part(batch: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of what all ranks of ``mesh`` hold alike; the parts' gradients are gathered again."""
    shared = DTensor.from_local(batch, mesh, [Replicate()], run_check=False)
    part: Tensor = shared.redistribute(placements=[Shard(0)]).to_local()
    return part


def _whole(part: Tensor, mesh: DeviceMesh, shape: torch.Size) -> Tensor:
    """The rows of all ranks of ``mesh``, in order, on each of them."""
    strides: Any = (shape[1], 1)
    rows = DTensor.from_local(
        part.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=strides
    )
    whole: Tensor = rows.full_tensor()
    return whole.clone()  # it is a view, which FSDP2 warns of: an operation in place would drop its hook
