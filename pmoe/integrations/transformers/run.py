"""One call of an experts module through pmoe's pipeline. What a layer must not keep from one call to the next
(the module's parameters, the routing) it holds for that call.

Letters: T tokens of this rank, K choices, M model width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.gates.external import ExternalGate
from pmoe.integrations.transformers.layers import layer_of
from pmoe.integrations.transformers.layout import borrow, check_same_place


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
    with layer_of(module, experts, top_k_index.shape[1], num_experts, group) as layer:
        if layer.training != module.training:
            layer.train(module.training)
        gate = layer.gate
        assert isinstance(gate, ExternalGate)
        layer.experts = experts
        try:
            with gate.routing(expert_TK, top_k_weights, keep_TK):
                y: Tensor = layer(hidden_states)
        finally:
            layer.experts = experts.returned()
    return y.to(hidden_states.dtype)
