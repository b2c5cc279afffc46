"""The projections before and after experts that are narrower or wider than the layer (``d_latent``)."""

from __future__ import annotations

import torch
from torch import nn


class LatentProjections(nn.Module):
    """The two projections of a layer with ``d_latent``: linear maps without bias, equal on every rank.

    down: (T, d_model) -> (T, d_latent) for T tokens, with a weight (d_latent, d_model).
    up: (T, d_latent) -> (T, d_model), with a weight (d_model, d_latent).

    Both are dense parameters, like those of the gate: data parallelism averages their gradients.
    """

    down: nn.Linear
    up: nn.Linear

    def __init__(
        self,
        d_model: int,
        d_latent: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.down = nn.Linear(d_model, d_latent, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(d_latent, d_model, bias=False, device=device, dtype=dtype)
