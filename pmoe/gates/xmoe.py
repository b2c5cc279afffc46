"""The gate of X-MoE (arXiv 2204.09179, section 3): scores are cosines in a space of few dimensions.

With cosines, training does not pull tokens towards the embeddings of their experts.

Letters: P = d_proj, the number of these dimensions.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from pmoe.arguments import (
    check_count,
    check_flag,
    check_not_negative,
    check_one_of,
    check_place,
    check_positive,
)
from pmoe.gates.base import Gate, Routing, check_sizes, draw_router_weight, scaled, without_autocast
from pmoe.gates.logits import router_logits, router_loss
from pmoe.gates.soft import inverse_length
from pmoe.kernels.route import top_indices

ScoreName = Literal["softmax", "sigmoid"]
"""Functions by which `XMoEGate` computes weights from cosines."""

TEMPERATURES: dict[ScoreName, float] = {"softmax": 0.3, "sigmoid": 0.07}
"""Initial temperature for each score. These are usual values; they were not checked against the paper."""


class XMoEGate(Gate):
    """Chooses the top_k experts with the largest cosines s_e = cos(projection x, w_e).

    Ties go to the lowest expert index. The weights are softmax(s / temperature) or sigmoid(s / temperature).
    There are E experts, tokens x have M = d_model columns, and their projections have P = d_proj.

    projection: parameter (P, M).
    weight: parameter (E, P), the experts' embeddings w_e.
    log_temperature: scalar parameter. The temperature is exp(log_temperature), so training cannot make the
        temperature 0 or negative.

    Args:
        d_proj: P. None means num_experts // 2, which is usual, but at least 2: in one dimension every cosine
            is 1 or -1, and nothing gets a gradient.
        score: "softmax" or "sigmoid".
        temperature: the initial temperature. None means the usual 0.3 for softmax, and 0.07 for sigmoid.
        normalize: whether a token's weights are divided by their sum. None means True for softmax if top_k is
            above 1, as in `TopKGate`, and False for sigmoid, as in `SigmoidGate`.

    The auxiliary loss is `load_balance_loss` on softmax(s / initial temperature) + z_loss_weight *
    `router_z_loss` of s / temperature. The balance loss takes the initial temperature, a constant, because
    otherwise training could lower the loss by raising the temperature.

    A token whose projection is zero has cosine 0 with every expert, and no gradient.

    Raises ValueError for an unknown score, a d_proj below 1, or a temperature that is not positive.
    """

    top_k: int
    z_loss_weight: float
    normalize: bool
    first_temperature: float
    projection: nn.Parameter
    weight: nn.Parameter
    log_temperature: nn.Parameter

    saved_scores = 4

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 1,
        *,
        d_proj: int | None = None,
        score: ScoreName = "softmax",
        temperature: float | None = None,
        normalize: bool | None = None,
        z_loss_weight: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(d_model, num_experts, top_k)
        check_place(device, dtype)
        check_one_of("score", score, tuple(TEMPERATURES))
        check_positive(temperature=temperature)
        check_flag("normalize", normalize, or_none=True)
        check_not_negative(z_loss_weight=z_loss_weight)
        if d_proj is None:
            d_proj = max(num_experts // 2, 2)
        check_count(d_proj=d_proj)
        self.top_k = int(top_k)
        self.score = score
        self.z_loss_weight = z_loss_weight
        self.normalize = (top_k > 1 and score == "softmax") if normalize is None else normalize
        self.first_temperature = TEMPERATURES[score] if temperature is None else temperature
        self.projection = nn.Parameter(torch.empty(d_proj, d_model, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(num_experts, d_proj, device=device, dtype=dtype))
        self.log_temperature = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw_router_weight(self.projection)
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight.shape[1]))
        nn.init.constant_(self.log_temperature, math.log(self.first_temperature))

    def forward(self, x_TM: Tensor) -> Routing:
        with without_autocast(x_TM.device.type):
            cosine_TE = self._cosine(x_TM)
            logits_TE = cosine_TE / self.log_temperature.to(cosine_TE.dtype).exp()
            expert_TK = top_indices(cosine_TE, self.top_k)
            weight_TK = self._weights(logits_TE, expert_TK)
            probability_TE = (cosine_TE / self.first_temperature).softmax(-1)
            l_aux = router_loss(probability_TE, expert_TK, logits_TE, self.z_loss_weight)
        return Routing(expert=expert_TK, weight=weight_TK, l_aux=l_aux, logits=logits_TE)

    def weights_of(self, routing: Routing, expert_TK: Tensor) -> Tensor:
        """Returns the weights of the experts in expert_TK, divided by their sum if ``normalize`` is True.

        routing: the result of the call, with its logits.
        expert_TK: (T, K) int64, K experts for each of T tokens. The result has the same shape.
        """
        assert routing.logits is not None
        return self._weights(routing.logits, expert_TK)

    def balance_terms(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Returns softmax(cosines / initial temperature), (T, E), and the choices of each token, (T, K).

        There are T tokens with K choices each, and E experts.

        routing: the result of the call, with its logits.
        """
        assert routing.logits is not None
        cosine_TE = routing.logits * self.log_temperature.to(routing.logits.dtype).exp()
        return (cosine_TE / self.first_temperature).softmax(-1), routing.expert

    def _weights(self, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
        """Returns the routing weights of the experts in expert_TK, (T, K).

        logits_TE: (T, E), cosine / temperature of T tokens and E experts.
        expert_TK: (T, K) int64, K experts of each token.
        """
        if self.score == "softmax":
            weight_TK = logits_TE.softmax(-1).gather(-1, expert_TK)
        else:
            weight_TK = logits_TE.gather(-1, expert_TK).sigmoid()
        return scaled(weight_TK) if self.normalize else weight_TK

    def _cosine(self, x_TM: Tensor) -> Tensor:
        """Returns the cosines of T tokens with E experts, (T, E).

        Rounding may put them slightly outside -1..1.

        x_TM: (T, M), the tokens with M = d_model columns.
        """
        projected_TP = router_logits(x_TM, self.projection)
        embedding_EP = self.weight.to(projected_TP.dtype)
        unit_EP = embedding_EP * inverse_length(embedding_EP)
        return (projected_TP * inverse_length(projected_TP)) @ unit_EP.t()
