"""The gate of the Switch Transformer (arXiv 2101.03961, section 2.1): one expert a token."""

from __future__ import annotations

import torch

from pmoe.gates.topk import TopKGate


class SwitchGate(TopKGate):
    """Top-1 with the softmax probability itself as weight. Raises ValueError unless top_k is 1."""

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
        if top_k != 1:
            raise ValueError(f"top_k ({top_k}) must be 1 with gate='switch'")
        if normalize:
            raise ValueError("normalize_gate (True) must be False or None with gate='switch'")
        super().__init__(
            d_model, num_experts, 1, normalize=False, z_loss_weight=z_loss_weight, device=device, dtype=dtype
        )
