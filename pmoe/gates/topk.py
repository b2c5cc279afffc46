"""The top-k softmax gate, which Mixtral and most other models use."""

from __future__ import annotations

from torch import Tensor

from pmoe.gates.base import Routing, TopKRouter, scaled, without_autocast
from pmoe.gates.logits import router_logits, router_loss
from pmoe.kernels.route import top_indices


class TopKGate(TopKRouter):
    """Chooses the top_k experts with the largest logits x weight^T, with softmax probabilities as weights.

    x is a token. The softmax is over all experts. Ties go to the lowest expert index. Experts are compared by
    logits and not by probabilities, because different logits may have the same probability after rounding.

    weight: parameter (E, M), for E experts. M = d_model.

    Args:
        normalize: whether a token's weights are divided by their sum. None means True if top_k is above 1.
            With top_k = 1 the weight would be the constant 1, and the gate would get no gradient from the
            task.

    The auxiliary loss is `load_balance_loss` + z_loss_weight * `router_z_loss`.
    """

    def forward(self, x_TM: Tensor) -> Routing:
        with without_autocast(x_TM.device.type):
            logits_TE = router_logits(x_TM, self.weight)
            probability_TE = logits_TE.softmax(-1)
            expert_TK = top_indices(logits_TE, self.top_k)
            weight_TK = probability_TE.gather(-1, expert_TK)
            if self.normalize:
                weight_TK = scaled(weight_TK)
            l_aux = router_loss(probability_TE, expert_TK, logits_TE, self.z_loss_weight)
        return Routing(expert=expert_TK, weight=weight_TK, l_aux=l_aux, logits=logits_TE)

    def weights_of(self, routing: Routing, expert_TK: Tensor) -> Tensor:
        """Returns the probabilities of the experts in expert_TK, divided by their sum if `normalize`.

        routing: the result of the call, with its logits.
        expert_TK: (T, K) int64, K experts for each of T tokens. The result has the same shape.
        """
        assert routing.logits is not None
        weight_TK = routing.logits.softmax(-1).gather(-1, expert_TK)
        return scaled(weight_TK) if self.normalize else weight_TK

    def balance_terms(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Returns the experts' probabilities for each token, (T, E), and the choices of each token, (T, K).

        There are T tokens with K choices each, and E experts.

        routing: the result of the call, with its logits.
        """
        assert routing.logits is not None
        return routing.logits.softmax(-1), routing.expert
