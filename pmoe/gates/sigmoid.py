"""The sigmoid gate of BASE layers (arXiv 2103.16716, section 3.1) and StableMoE (arXiv 2204.08396, section
3.1): how much of an expert's output a token takes does not depend on the other experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.gates.base import Routing, TopKRouter
from pmoe.gates.logits import router_logits, router_loss
from pmoe.kernels.route import top_indices


def sigmoid_shares(logits_TE: Tensor) -> Tensor:
    """sigmoid(l_e) / sum_j sigmoid(l_j), also where every sigmoid is too small for the number's type."""
    return F.logsigmoid(logits_TE).softmax(-1)


class SigmoidGate(TopKRouter):
    """The top_k largest x . w_e, ties to the lowest expert index, with sigmoid(x . w_e) as the weight (FSMoE,
    section 2.1).

    weight: parameter (E, M). Experts are chosen by the product itself, for sigmoids of large ones are equal.
    ``normalize`` True divides a token's weights by their sum; None means False, as in the papers.
    The auxiliary loss is `load_balance_loss` + z_loss_weight * `router_z_loss`, where a token's probabilities
    are its sigmoids over their sum: sigmoids alone would have the loss fall as all of them shrink. (BASE
    balances by an assignment of the whole batch instead; that is not done here.)
    """

    normalizes = False
    saved_scores = 3

    def forward(self, x_TM: Tensor) -> Routing:
        with torch.autocast(x_TM.device.type, enabled=False):
            logits_TE = router_logits(x_TM, self.weight)
            expert_TK = top_indices(logits_TE, self.top_k)
            chosen_TK = logits_TE.gather(-1, expert_TK)
            weight_TK = sigmoid_shares(chosen_TK) if self.normalize else chosen_TK.sigmoid()
            l_aux = router_loss(sigmoid_shares(logits_TE), expert_TK, logits_TE, self.z_loss_weight)
        return Routing(expert=expert_TK, weight=weight_TK, l_aux=l_aux, logits=logits_TE)
