"""Batch Prioritised Routing of V-MoE (arXiv 2106.05974, section 4, Algorithm 2).

If more tokens choose an expert than its capacity allows, it keeps the tokens with the largest routing
weights, and not the first tokens of the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pmoe.arguments import check_positive
from pmoe.gates.base import PartitionName, Routing
from pmoe.gates.capacity import expert_capacity, within_capacity
from pmoe.gates.topk import TopKGate


class BatchPrioritisedGate(TopKGate):
    """Routes as `TopKGate` does, and drops the choices of tokens with low priority.

    The priority of a token is the largest of its probabilities before they are normalised. Each expert keeps
    the first C = ceil(capacity_factor * T * K / E) choices that fell on it, for T tokens with K choices of E
    experts. All first choices of tokens come before all second choices, and so on. Among first choices (and
    among second choices, ...), tokens with a higher priority come first, and tokens with equal priority in
    the order of the batch.

    Lancet (section 2.3) describes another priority, the sum of a token's top_k probabilities. For top_k = 1
    the two are the same. For a larger top_k they may drop different tokens.

    Args:
        capacity_factor: determines C; None keeps all choices.
        normalize: as in `TopKGate`; False is usual with this gate.

    In the routing, ``keep`` (T, K) is True for choices that are kept; it is None if capacity_factor is None.
    Dropping does not change the weights of kept choices, and l_aux also counts dropped choices. The layer
    drops nothing else.

    partition is "none" (the gate needs the whole batch), because the tokens of a batch compete for capacity.

    Raises ValueError for a capacity_factor that is not positive.
    """

    partition: PartitionName = "none"
    decides_capacity = True

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 1,
        *,
        capacity_factor: float | None = None,
        normalize: bool | None = None,
        z_loss_weight: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(capacity_factor=capacity_factor)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            d_model, num_experts, top_k, normalize=normalize, z_loss_weight=z_loss_weight, **options
        )
        self.capacity_factor = capacity_factor

    def forward(self, x_TM: Tensor) -> Routing:
        routing = super().forward(x_TM)
        if self.capacity_factor is None:
            return routing
        assert routing.logits is not None
        num_experts = self.weight.shape[0]
        capacity = expert_capacity(self.capacity_factor, x_TM.shape[0], self.top_k, num_experts)
        priority_T = routing.logits.detach().softmax(-1).amax(-1)
        return replace(routing, keep=keep_by_priority(routing.expert, priority_T, capacity, num_experts))


def keep_by_priority(expert_TK: Tensor, priority_T: Tensor, capacity: int, num_experts: int) -> Tensor:
    """Returns which choices are kept, (T, K) bool: the first ``capacity`` choices of each expert.

    It is the paper's Algorithm 2. Choices are ordered by k (first choices before second ones), then by
    priority from the highest, then by token.

    expert_TK: (T, K) int64, the K choices of T tokens.
    priority_T: (T,), each token's priority.
    capacity: the most choices that an expert keeps.
    num_experts: the number of experts.
    """
    order_T = priority_T.argsort(descending=True, stable=True)
    queue = expert_TK[order_T].t().reshape(-1)  # (K * T): all first choices come before the second ones
    keep, _ = within_capacity(queue, capacity, queue.new_zeros(num_experts))
    keep_TK = torch.empty_like(expert_TK, dtype=torch.bool)
    keep_TK[order_T] = keep.view(expert_TK.shape[1], -1).t()
    return keep_TK
