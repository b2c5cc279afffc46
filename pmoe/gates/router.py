"""What gates have in common that choose a token's top_k experts by logits of one parameter.

Letters: E experts, M = d_model.
"""

from __future__ import annotations

import torch

from pmoe.arguments import check_not_negative
from pmoe.gates.arguments import check_normalize, check_sizes, draw_router_weight, router_weight
from pmoe.gates.base import Gate


class TopKRouter(Gate):
    """weight: parameter (E, M). normalize: None means what the gate's papers do, see `normalizes`."""

    normalizes = True
    """Whether several weights of a token are scaled to sum 1 where nothing is said. A single one never is: it
    would be the constant 1, and the gate would never learn from the task."""

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 1,
        *,
        normalize: bool | None = None,
        z_loss_weight: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(d_model, num_experts, top_k)
        check_normalize(normalize)
        check_not_negative(z_loss_weight=z_loss_weight)
        self.top_k, self.z_loss_weight = top_k, z_loss_weight
        self.normalize = self.normalizes and top_k > 1 if normalize is None else normalize
        self.weight = router_weight(num_experts, d_model, device, dtype)

    def reset_parameters(self) -> None:
        draw_router_weight(self.weight)

    def extra_repr(self) -> str:
        return f"num_experts={self.weight.shape[0]}, top_k={self.top_k}, normalize={self.normalize}"
