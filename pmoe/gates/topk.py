"""The top-k softmax gate, which Mixtral and most other models use."""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.gates.base import Routing, TopKRouter, scaled
from pmoe.gates.logits import router_logits, router_loss
from pmoe.kernels.route import top_indices


class TopKGate(TopKRouter):
    """Chooses the top_k largest logits x weight^T. The weights are their softmax over all experts.

    Ties go to the lowest expert index. Experts are chosen by logits and not by probabilities, because
    rounding may make probabilities equal.

    weight: parameter (E, M).

    Args:
        normalize: whether a token's weights are divided by their sum. None means top_k > 1: a single weight
            would be the constant 1, and the gate would not learn from the task.

    The auxiliary loss is `load_balance_loss` + z_loss_weight * `router_z_loss`.
    """

    def forward(self, x_TM: Tensor) -> Routing:
        with torch.autocast(x_TM.device.type, enabled=False):
            logits_TE = router_logits(x_TM, self.weight)
            probability_TE = logits_TE.softmax(-1)
            expert_TK = top_indices(logits_TE, self.top_k)
            weight_TK = scaled(probability_TE.gather(-1, expert_TK), self.normalize)
            l_aux = router_loss(probability_TE, expert_TK, logits_TE, self.z_loss_weight)
        return Routing(expert=expert_TK, weight=weight_TK, l_aux=l_aux, logits=logits_TE)
