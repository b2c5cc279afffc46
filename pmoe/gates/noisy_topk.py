"""The noisy top-k gate of Shazeer et al. (arXiv 1701.06538, Eq. 3-5).

FSMoE (section 2.1) calls it GShard's gate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pmoe.gates.base import Routing, TopKRouter, without_autocast
from pmoe.gates.logits import router_logits, router_loss
from pmoe.kernels.route import top_indices


class NoisyTopKGate(TopKRouter):
    """Chooses the top_k experts with the largest noisy logits H. Ties go to the lowest expert index.

    For a token x, H = x weight^T + N(0, 1) * softplus(x noise_weight^T). N(0, 1) is drawn for each token and
    expert, in training mode only. The weights are Softmax(KeepTopK(H, top_k)): a softmax over the top_k
    largest logits of the token.

    weight: parameter (E, M), for E experts. M = d_model.
    noise_weight: parameter (E, M). It starts at 0, as is usual. The standard deviation of the noise is then
        softplus(0) = 0.69 for each token and expert.

    Args:
        normalize: True gives the weights above, as in the papers. False takes the weights of the chosen
            experts from a softmax of H over all experts. None means True if top_k is above 1, as in
            `TopKGate`.

    The auxiliary loss is the sum of two losses of the noisy logits H: `load_balance_loss` of their softmax,
    and z_loss_weight * `router_z_loss`. H has the noise in it, so the balance loss also trains noise_weight,
    as the importance loss of 1701.06538 does.

    The noise comes from torch's default generator of the tokens' device. So a seed makes it repeatable, and
    activation checkpointing repeats it.
    """

    noise_weight: nn.Parameter

    @property
    def saved_scores(self) -> int:  # type: ignore[override]
        return 4 + self.normalize

    def make_parameters(self, weight: nn.Parameter) -> None:
        super().make_parameters(weight)
        self.noise_weight = nn.Parameter(torch.zeros_like(weight))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.noise_weight)

    def forward(self, x_TM: Tensor) -> Routing:
        with without_autocast(x_TM.device.type):
            logits_TE = self._logits(x_TM)
            probability_TE = logits_TE.softmax(-1)
            expert_TK = top_indices(logits_TE, self.top_k)
            if self.normalize:
                weight_TK = logits_TE.gather(-1, expert_TK).softmax(-1)
            else:
                weight_TK = probability_TE.gather(-1, expert_TK)
            l_aux = router_loss(probability_TE, expert_TK, logits_TE, self.z_loss_weight)
        return Routing(expert=expert_TK, weight=weight_TK, l_aux=l_aux, logits=logits_TE)

    def weights_of(self, routing: Routing, expert_TK: Tensor) -> Tensor:
        """Returns the weights of the experts in expert_TK, from the noisy logits of the call.

        routing: the result of the call, with its logits.
        expert_TK: (T, K) int64, K experts for each of T tokens. The result has the same shape.
        """
        assert routing.logits is not None
        if self.normalize:
            return routing.logits.gather(-1, expert_TK).softmax(-1)
        return routing.logits.softmax(-1).gather(-1, expert_TK)

    def balance_terms(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Returns the experts' probabilities, (T, E), with the noise of the call, and the choices, (T, K).

        There are T tokens with K choices each, and E experts.

        routing: the result of the call, with its logits.
        """
        assert routing.logits is not None
        return routing.logits.softmax(-1), routing.expert

    def _logits(self, x_TM: Tensor) -> Tensor:
        """Returns the logits H (T, E) of T tokens for E experts, with noise in training mode.

        x_TM: (T, M), the tokens with M = d_model columns.
        """
        if not self.training:
            return router_logits(x_TM, self.weight)
        both_XM = torch.cat([self.weight, self.noise_weight])  # one product reads the tokens once
        clean_TE, deviation_TE = router_logits(x_TM, both_XM).chunk(2, dim=-1)
        return clean_TE + torch.randn_like(clean_TE) * F.softplus(deviation_TE)
