"""Base class of gates that draw experts at random or by a hash, and compute no scores."""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.gates.base import Gate, Routing, at_least_float32, check_sizes


class DrawnGate(Gate):
    """Base class of gates that give each token K = top_k distinct experts with the weight 1 / K each.

    It has no parameters. The arguments ``device`` and ``dtype`` have no effect; they exist because all gates
    accept them.

    The weights (T, K) of T tokens are float32, or float64 if the tokens are float64, without a gradient.
    l_aux is the constant 0, because there are no parameters to train.
    """

    num_experts: int
    top_k: int

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
        self.num_experts = int(num_experts)
        self.top_k = int(top_k)

    def routed(self, x_TM: Tensor, draw_TK: Tensor) -> Routing:
        """Returns a routing in which random numbers choose the experts of each token.

        `distinct` turns the K random numbers of a token into K distinct experts. All weights are 1 / K.

        x_TM: (T, M), the T tokens with M = d_model columns. Only their dtype and device are read.
        draw_TK: (T, K) int64, K independent random numbers for each token.
        """
        weight_TK = at_least_float32(x_TM.new_full(draw_TK.shape, 1.0)) / self.top_k
        expert_TK = distinct(draw_TK, self.num_experts)
        return Routing(expert=expert_TK, weight=weight_TK, l_aux=weight_TK.new_zeros(()))

    def weights_of(self, routing: Routing, expert_TK: Tensor) -> Tensor:
        """Returns the weights of the experts in expert_TK, (T, K) for T tokens: 1 / K for each expert.

        routing: the result of the call; not used.
        expert_TK: (T, K) int64, K experts of each token.
        """
        return routing.weight


def distinct(draw_TK: Tensor, num_experts: int) -> Tensor:
    """Returns K distinct experts for each token, (T, K) int64, from K independent random numbers.

    draw_TK: (T, K) int64 for T tokens, uniformly distributed, not negative and much larger than num_experts.
    num_experts: E, the number of experts.

    Choice k of a token, counted from 0, is draw k modulo E - K + k + 1. If an earlier choice of the token is
    the same expert, choice k is expert E - K + k instead (Floyd's sampling). So all sets of K experts are
    equally likely. The order of a token's experts is not uniformly distributed, and has no meaning.

    Example: 3 experts, K = 2, draws 7 and 8 -> experts 7 mod 2 = 1 and 8 mod 3 = 2.
    """
    top_k = draw_TK.shape[1]
    chosen_TK = torch.empty_like(draw_TK)
    for choice in range(top_k):
        last = num_experts - top_k + choice
        pick_T = draw_TK[:, choice] % (last + 1)
        taken_T = (chosen_TK[:, :choice] == pick_T.unsqueeze(1)).any(1)
        chosen_TK[:, choice] = pick_T.masked_fill(taken_T, last)
    return chosen_TK
