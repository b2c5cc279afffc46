"""Batch Prioritised Routing of V-MoE (arXiv 2106.05974, section 4, Algorithm 2).

If more tokens choose an expert than its capacity allows, the expert keeps the tokens with the highest
priority, not the first tokens of the batch. The priority of a token is its largest probability.
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

    The priority of a token is its largest probability before normalisation. With T tokens, K choices of a
    token and E experts, each expert keeps at most C = ceil(capacity_factor * T * K / E) of the choices that
    fell on it. They are the first C in this order:

    1. first choices of all tokens, then second choices of all tokens, and so on;
    2. among these, tokens with a higher priority first;
    3. among tokens with equal priority, the order of the batch.

    Lancet (section 2.3) describes another priority, the sum of a token's top_k probabilities. For top_k = 1
    both priorities are equal. For a larger top_k other tokens may be dropped.

    Args:
        capacity_factor: determines C; None keeps all choices.
        normalize: as in `TopKGate`; False is usual with this gate.

    The routing's ``keep``, (T, K) bool, is True for kept choices. It is None if capacity_factor is None. Kept
    choices have the same weights as without dropping, and l_aux counts dropped choices, too. The layer itself
    drops no further choices.

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
