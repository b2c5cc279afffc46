"""The top-k softmax gate of Mixtral and most others.

Letters: T tokens, K choices, E experts, M = d_model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pmoe.gates.base import Gate, Routing
from pmoe.gates.logits import router_logits
from pmoe.gates.losses import load_balance_loss, router_z_loss


class TopKGate(Gate):
    """Softmax over all experts, the top_k largest probabilities, ties to the lowest expert index.

    weight: parameter (E, M). ``normalize`` scales the k weights to sum 1; None means top_k > 1, because a
    single normalised weight is the constant 1 and the gate would never learn from the task. The auxiliary
    loss is `load_balance_loss` + z_loss_weight * `router_z_loss`. Computed in float32, or in float64 where
    the tokens are.

    Raises ValueError for top_k outside 1..num_experts.
    """

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
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k ({top_k}) must be between 1 and num_experts ({num_experts})")
        self.top_k = top_k
        self.normalize = top_k > 1 if normalize is None else normalize
        self.z_loss_weight = z_loss_weight
        self.weight = nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))
        nn.init.uniform_(self.weight, -1 / math.sqrt(d_model), 1 / math.sqrt(d_model))

    def forward(self, x_TM: Tensor) -> Routing:
        with torch.autocast(x_TM.device.type, enabled=False):
            logits_TE = router_logits(x_TM, self.weight)
            probability_TE = logits_TE.softmax(-1)
            expert_TK = _largest(probability_TE, self.top_k)
            weight_TK = probability_TE.gather(-1, expert_TK)
            if self.normalize:
                weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
            l_aux = load_balance_loss(probability_TE, expert_TK)
            if self.z_loss_weight:
                l_aux = l_aux + self.z_loss_weight * router_z_loss(logits_TE)
        return Routing(expert=expert_TK, weight=weight_TK, l_aux=l_aux, logits=logits_TE)

    def extra_repr(self) -> str:
        return f"num_experts={self.weight.shape[0]}, top_k={self.top_k}, normalize={self.normalize}"


def _largest(score_TE: Tensor, top_k: int) -> Tensor:
    """Indices of the top_k largest scores, (T, K); torch.topk promises nothing on ties, these do."""
    score_TE = score_TE.detach()
    if top_k == 1:
        return score_TE.argmax(-1, keepdim=True)
    return score_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
