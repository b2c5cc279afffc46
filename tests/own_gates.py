"""Gates as users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pmoe import Routing
from tests.kit import NUM_EXPERTS


class ByPosition(nn.Module):
    """Token t goes to experts t, t + 1, ... with weights of its own; no subclass of pmoe.Gate."""

    def __init__(self, top_k: int = 2, num_experts: int = NUM_EXPERTS, **changes: Any) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, top_k, dtype=torch.float64))
        self.num_experts, self.changes = num_experts, changes

    def forward(self, x: Tensor) -> Routing:
        count, top_k = x.shape[0], self.factor.shape[0]
        expert = (torch.arange(count)[:, None] + torch.arange(top_k)) % self.num_experts
        routing = {
            "expert": expert,
            "weight": self.factor.expand(count, top_k),
            "l_aux": self.factor.square().sum(),
        }
        return Routing(**{**routing, **self.changes})
