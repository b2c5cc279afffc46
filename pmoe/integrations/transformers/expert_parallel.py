"""The expert-parallel implementation "pmoe" of transformers.

transformers gives each rank some of the experts: whole experts, in order. pmoe's pipeline sends each token to
the ranks of its experts and back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from pmoe.integrations.transformers.layout import check
from pmoe.integrations.transformers.padding import run_tokens
from pmoe.integrations.transformers.spread_in_graph import MESHES, run_spread_module
from pmoe.warn import warn_once

DIVIDED_TWICE = (torch.float16, torch.float64)
"""Types in which FSDP2 divides gradients before and after the sum over ranks, not by the sum itself."""


class PipelinedEP(EPImplementation):
    """Runs dispatch, experts and combine of one experts module, with the options of `configure`.

    transformers constructs this object before it loads the weights. The constructor raises ValueError if pmoe
    does not know the layout of the module's weights.

    experts: the experts module.
    ep_mesh: the ranks over which its experts are spread.
    tp_mesh: the ranks that hold the same tokens under tensor parallelism. Each sends a part of them.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        check(experts)
        super().__init__(experts, ep_mesh, tp_mesh)
        self.module = experts
        MESHES[experts] = ep_mesh

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns for each token the weighted sum of its experts' outputs, (T, M).

        Letters: T tokens of this rank, K experts of each token, M model width.

        hidden_states: (T, M), the tokens.
        top_k_index: (T, K) integers, the experts of each token, numbered from 0 over all ranks of the group.
        top_k_weights: (T, K), their weights.
        """
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            warn_of_double_division(self.module)
        return run_tokens(self.module, self._run, hidden_states, top_k_index, top_k_weights)

    def _run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the experts' outputs (T, M) for the tokens of a call from which padding was removed.

        Letters: T tokens, K experts of each token, M model width.

        hidden_states: (T, M), the tokens.
        top_k_index, top_k_weights: (T, K), the experts of each token and their weights.
        """
        if self.tp_mesh.size() == 1:
            return run_spread_module(self.module, hidden_states, top_k_index, top_k_weights)
        # Under tensor parallelism several ranks hold the same batch. Each of them sends another part of it,
        # because otherwise experts would compute every token once for each of these ranks.
        batch = (hidden_states, top_k_index, top_k_weights)
        rows, index, weights = (_part(tensor, self.tp_mesh) for tensor in batch)
        y = run_spread_module(self.module, rows, index, weights)
        return _whole(y, self.tp_mesh, hidden_states.shape)


def warn_of_double_division(experts: nn.Module) -> None:
    """Warns once if FSDP2 will divide the gradients of an experts module twice by the same factor.

    transformers lets FSDP2 divide experts' gradients by the number of batches. If no other rank has copies of
    the experts, there is no sum over ranks, and FSDP2 of torch 2.13 divides in place of the sum. In the types
    `DIVIDED_TWICE` it has already divided before. The same happens with transformers' own implementations.

    experts: the experts module.
    """
    if not isinstance(experts, FSDPModule):
        return
    dtypes = {parameter.dtype for parameter in experts.parameters() if parameter.requires_grad}
    if dtypes.isdisjoint(DIVIDED_TWICE):
        return
    groups: Any = experts._get_fsdp_state()._fsdp_param_groups
    for group in groups:
        factor = group.gradient_divide_factor
        if factor is not None and factor > 1 and group.mesh_info.shard_mesh_size == 1:
            warn_once(
                f"FSDP2 divides gradients of experts in {min(map(str, dtypes))} by {factor:g} twice, also "
                "without pmoe: they are too small. Load the model in bfloat16, or in float32 with autocast"
            )


def _part(batch: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns this rank's part of the rows of a tensor that all ranks of ``mesh`` hold as a whole.

    In backward, every rank gets the gradients of all parts.

    batch: the whole tensor, of any shape. It is split along dimension 0.
    mesh: the ranks that hold it.
    """
    shared = DTensor.from_local(batch, mesh, [Replicate()], run_check=False)
    part: Tensor = shared.redistribute(placements=[Shard(0)]).to_local()
    return part


def _whole(part: Tensor, mesh: DeviceMesh, shape: torch.Size) -> Tensor:
    """Concatenates the rows of all ranks of ``mesh``, in order. Every rank gets the whole tensor, (T, M).

    part: this rank's rows.
    mesh: the ranks.
    shape: shape of the result, (T, M): T rows of all ranks, M model width.
    """
    strides: Any = (shape[1], 1)
    rows = DTensor.from_local(
        part.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=strides
    )
    whole: Tensor = rows.full_tensor()
    return whole.clone()  # FSDP2 warns about a view, because a later change in place would drop FSDP2's hook
