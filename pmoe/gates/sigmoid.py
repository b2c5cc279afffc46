"""The sigmoid gate of BASE layers (arXiv 2103.16716) and StableMoE (arXiv 2204.08396), sections 3.1.

The weight of an expert does not depend on the scores of the other experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.gates.base import Routing, TopKRouter
from pmoe.gates.logits import router_logits, router_loss
from pmoe.kernels.route import top_indices


def sigmoid_shares(logits_TE: Tensor) -> Tensor:
    """Returns sigmoid(l_e) / sum_j sigmoid(l_j) (..., E), also if all sigmoids underflow in the dtype."""
    return F.logsigmoid(logits_TE).softmax(-1)


class SigmoidGate(TopKRouter):
    """Chooses the top_k largest x . w_e, with the weights sigmoid(x . w_e) (FSMoE, section 2.1).

    Ties go to the lowest expert index. Experts are chosen by the product and not by its sigmoid, because
    sigmoids of large products are equal after rounding.

    weight: parameter (E, M), the rows w_e.

    Args:
        normalize: True divides a token's weights by their sum; None means False, as in the papers.

    The auxiliary loss is `load_balance_loss` + z_loss_weight * `router_z_loss`. Its probabilities are a
    token's sigmoids divided by their sum; with the sigmoids themselves, the loss would fall if all of them
    shrink. BASE balances by assigning the whole batch instead, which pmoe does not do.
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
