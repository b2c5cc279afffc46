"""The sigmoid gate of BASE layers (arXiv 2103.16716) and StableMoE (arXiv 2204.08396).

Both papers describe it in section 3.1. The weight of an expert does not depend on the scores of other
experts.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from pmoe.gates.base import Routing, TopKRouter, without_autocast
from pmoe.gates.logits import router_logits, router_loss
from pmoe.kernels.route import top_indices


def sigmoid_shares(logits_TE: Tensor) -> Tensor:
    """Returns the sigmoid of each logit, divided by the sum over experts: (..., E), like the logits.

    The result is correct even if all sigmoids are so small that they would be rounded to 0.

    logits_TE: (..., E), for E experts.
    """
    return F.logsigmoid(logits_TE).softmax(-1)


class SigmoidGate(TopKRouter):
    """Chooses for a token x the top_k experts with the largest x . w_e. The weights are sigmoid(x . w_e).

    w_e is the row of the gate's weight for expert e. This is the gate of BASE layers and StableMoE, in the
    formula of FSMoE (section 2.1). Ties go to the lowest expert index. Experts are compared by x . w_e and
    not by its sigmoid, because the sigmoids of large numbers are all rounded to 1.

    weight: parameter (E, M), the rows w_e of E experts. M = d_model.

    Args:
        normalize: True divides a token's weights by their sum; None means False, as in the papers.

    The auxiliary loss is `load_balance_loss` + z_loss_weight * `router_z_loss`. As probabilities, the balance
    loss gets the sigmoids of each token divided by their sum. Without this division, training could lower the
    loss by making all sigmoids smaller. (The BASE paper has no auxiliary loss, because it assigns the same
    number of tokens to each expert. pmoe does not do this.)
    """

    normalizes = False
    saved_scores = 3

    def forward(self, x_TM: Tensor) -> Routing:
        with without_autocast(x_TM.device.type):
            logits_TE = router_logits(x_TM, self.weight)
            expert_TK = top_indices(logits_TE, self.top_k)
            weight_TK = self._weights(logits_TE, expert_TK)
            l_aux = router_loss(sigmoid_shares(logits_TE), expert_TK, logits_TE, self.z_loss_weight)
        return Routing(expert=expert_TK, weight=weight_TK, l_aux=l_aux, logits=logits_TE)

    def weights_of(self, routing: Routing, expert_TK: Tensor) -> Tensor:
        """Returns the sigmoids of the experts in expert_TK, divided by their sum if ``normalize`` is True.

        routing: the result of the call, with its logits.
        expert_TK: (T, K) int64, K experts for each of T tokens. The result has the same shape.
        """
        assert routing.logits is not None
        return self._weights(routing.logits, expert_TK)

    def balance_terms(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Returns the sigmoids of each token divided by their sum, (T, E), and its choices, (T, K).

        There are T tokens with K choices each, and E experts.

        routing: the result of the call, with its logits.
        """
        assert routing.logits is not None
        return sigmoid_shares(routing.logits), routing.expert

    def _weights(self, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
        """Returns the routing weights of the chosen experts, (T, K), from the gate's logits.

        logits_TE: (T, E), the logits of T tokens for E experts.
        expert_TK: (T, K) int64, the K chosen experts of each token.
        """
        chosen_TK = logits_TE.gather(-1, expert_TK)
        return sigmoid_shares(chosen_TK) if self.normalize else chosen_TK.sigmoid()
