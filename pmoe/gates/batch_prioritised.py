"""Batch Prioritised Routing of V-MoE (arXiv 2106.05974, section 4, Algorithm 2).

Capacity goes to the tokens with the largest routing weights, not to the first tokens of the batch.
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
    """Routes as `TopKGate`, and drops the choices of tokens with low priority.

    Each expert keeps C = ceil(capacity_factor * T * K / E) choices, in this order: first choices before
    second ones; among those, by the token's priority, from the highest; among equals, from the lowest token.
    A token's priority is its largest probability before normalisation.

    Args:
        capacity_factor: scales C; None keeps all choices.
        normalize: as in `TopKGate`; False is usual with this gate.

    In the routing, ``keep`` (T, K) marks the kept choices; it is None if all are kept. The weights of kept
    choices do not change, and l_aux counts choices before drops. The layer drops nothing more.

    partition is "none", because tokens compete for capacity within the batch.

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
    """Returns which choices are kept, (T, K) bool: the first ``capacity`` of each expert (Algorithm 2).

    They are ordered by choice (the k of (T, K)), then by priority from the highest, then by token.
    """
    order_T = priority_T.argsort(descending=True, stable=True)
    queue = expert_TK[order_T].t().reshape(-1)  # (K * T): all first choices come before the second ones
    keep, _ = within_capacity(queue, capacity, queue.new_zeros(num_experts))
    keep_TK = torch.empty_like(expert_TK, dtype=torch.bool)
    keep_TK[order_T] = keep.view(expert_TK.shape[1], -1).t()
    return keep_TK
