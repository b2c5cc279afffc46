"""Random routing: the baseline that any learned gate should beat."""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.gates.base import Gate, Routing, at_least_float32, check_sizes
from pmoe.gates.draws import distinct

BOUND = 1 << 62
"""Draws are below it, so large that their remainders are uniform."""


class RandomGate(Gate):
    """K distinct experts a token, every set of K equally likely, each with weight 1 / K; drawn anew at every
    call, in training and in eval mode alike. No parameters.

    The draws are of torch's default generator of the tokens' device: `torch.manual_seed` repeats them, and so
    does activation checkpointing, which keeps that generator's state. Ranks draw what their own generators
    give; nothing needs them to agree. Weights are float32, or float64 where the tokens are, and need no
    gradient. l_aux is the constant 0: nothing here could learn from it.

    partition "none": a part of the batch has other draws than it has within the whole. Capacity is the
    layer's. ``device`` and ``dtype`` are taken as of any gate; there is nothing to place.

    Raises ValueError for top_k outside 1..num_experts or sizes below 1.
    """

    partition = "none"
    saved_scores = 0

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(d_model, num_experts, top_k)
        self.num_experts, self.top_k = num_experts, top_k

    def forward(self, x_TM: Tensor) -> Routing:
        weight_TK = at_least_float32(x_TM.new_full((x_TM.shape[0], self.top_k), 1.0)) / self.top_k
        draw_TK = torch.randint(BOUND, weight_TK.shape, device=x_TM.device)
        return Routing(
            expert=distinct(draw_TK, self.num_experts), weight=weight_TK, l_aux=weight_TK.new_zeros(())
        )

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}"
