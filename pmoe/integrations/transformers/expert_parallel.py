"""pmoe as an expert-parallel implementation of transformers.

transformers spreads the experts over the ranks: whole experts, in order. pmoe's pipeline sends tokens to
them.
"""

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
    """Dispatch, experts and combine of one experts module, with the options of `configure`.

    transformers builds it before it loads weights. Raises ValueError then if pmoe does not know the layout
    of the module's weights.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        check(experts)
        super().__init__(experts, ep_mesh, tp_mesh)
        self.module = experts

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the experts' outputs (T, M), summed with their weights for each token.

        hidden_states: (T, M), this rank's tokens.
        top_k_index, top_k_weights: (T, K), the routing; experts are numbered over the whole group.
        """
        return run_tokens(self.module, self._run, hidden_states, top_k_index, top_k_weights)

    def _run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes tokens that `__call__` was given, without padding."""
        group = self.ep_mesh.get_group()
        if self.tp_mesh.size() == 1:
            return run_module(self.module, hidden_states, top_k_index, top_k_weights, group)
        # Under tensor parallelism several ranks hold the same batch. Each sends a part of it of its own;
        # otherwise experts would compute every token once for each of these ranks.
        batch = (hidden_states, top_k_index, top_k_weights)
        rows, index, weights = (_part(each, self.tp_mesh) for each in batch)
        y = run_module(self.module, rows, index, weights, group)
        return _whole(y, self.tp_mesh, hidden_states.shape)


def _part(batch: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns this rank's rows of a tensor that all ranks of ``mesh`` hold.

    In backward, the gradients of all parts are gathered on every rank.
    """
    shared = DTensor.from_local(batch, mesh, [Replicate()], run_check=False)
    part: Tensor = shared.redistribute(placements=[Shard(0)]).to_local()
    return part


def _whole(part: Tensor, mesh: DeviceMesh, shape: torch.Size) -> Tensor:
    """Returns the rows of all ranks of ``mesh``, in order, on each of them. shape: of the result, (T, M)."""
    strides: Any = (shape[1], 1)
    rows = DTensor.from_local(
        part.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=strides
    )
    whole: Tensor = rows.full_tensor()
    return whole.clone()  # FSDP2 warns of a view: an operation in place on it would drop FSDP2's hook
