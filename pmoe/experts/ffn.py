"""Feed-forward experts: act(x w1^T + b1) w2^T + b2."""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.experts.activations import find_activation
from pmoe.experts.base import WHOLE, Shard
from pmoe.experts.stacked import StackedExperts


class FFNExperts(StackedExperts):
    """E_local feed-forward experts with relu, gelu (exact) or silu. T_M is (N, H)."""

    hidden_factor = 1

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_local_experts: int,
        *,
        activation: str = "gelu",
        bias: bool = True,
        shard: Shard = WHOLE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.activation = activation
        find_activation(activation)
        super().__init__(
            d_model, d_hidden, num_local_experts, bias=bias, shard=shard, device=device, dtype=dtype
        )

    @property
    def fused_activation(self) -> str | None:
        """None where a subclass has a nonlinearity of its own."""
        kind, own = type(self), FFNExperts
        changed = (kind.activate, kind.activation_gradient) != (own.activate, own.activation_gradient)
        return None if changed else self.activation

    def activate(self, hidden_NG: Tensor, active_NH: Tensor) -> None:
        find_activation(self.activation).value(hidden_NG, active_NH)

    def activation_gradient(self, grad_NG: Tensor, hidden_NG: Tensor) -> None:
        find_activation(self.activation).gradient_(grad_NG, hidden_NG)
