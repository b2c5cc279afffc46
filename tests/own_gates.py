"""Gates as users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pmoe import Routing
from tests.kit import D_MODEL, NUM_EXPERTS


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


class OwnGate(nn.Module):
    """Hidden columns, dropout, noise, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D_MODEL, 7), nn.GELU(), nn.Dropout(0.4), nn.Linear(7, NUM_EXPERTS))
        self.net.double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x_TM: Tensor) -> Routing:
        self.calls += 1
        logits = self.net(x_TM[:, : D_MODEL - 1].repeat(1, 2)[:, :D_MODEL] + x_TM)
        logits = logits + 0.3 * torch.randn_like(logits)
        weight, expert = logits.softmax(-1).topk(2)
        return Routing(expert=expert, weight=weight, l_aux=logits.square().mean(), logits=logits)
