"""Expert choice (arXiv 2202.09368, section 3.2): each expert takes the tokens with its highest scores.

Letters: T tokens of a rank, E experts, K = top_k, C tokens that each expert takes, S = E * C rows.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from pmoe.arguments import check_one_of, check_place, check_positive
from pmoe.gates.base import Gate, PartitionName, Routing, check_sizes, draw_router_weight, without_autocast
from pmoe.gates.capacity import expert_capacity
from pmoe.gates.logits import router_logits

NormalizedOver = Literal["experts", "tokens"]
"""Values of `ExpertChoiceGate`'s argument normalize_over."""


class ExpertChoiceGate(Gate):
    """A gate in which each of E experts takes its C best tokens of this rank. Ties go to the lowest index.

    C = min(T, ceil(capacity_factor * T * top_k / E)) for T tokens. A token may get any number of experts, or
    none. Because all experts get the same number of tokens, l_aux is 0 and the layer drops nothing.

    weight: parameter (E, M). M = d_model.

    Args:
        top_k: the mean number of experts of a token if capacity_factor is 1 (c in the paper).
        capacity_factor: determines C; None means 1.
        normalize_over: "experts": scores are a softmax over the experts, for each token. Each expert takes
            the tokens with its largest scores, and these scores are the weights (2202.09368, Eq. 2-3).
            "tokens": Softmax(KeepTopK((x Wg)^T, C)) as in FSMoE (section 2.1). Each expert takes the tokens
            with its largest logits. The weights are a softmax over these tokens; with C = 1 that is the
            constant 1.

    The routing has S = E * C rows, one for each pair of an expert and a token that it took, in the order of
    tokens, then of experts: ``token`` (S,), ``expert`` (S, 1), ``weight`` (S, 1). Shapes depend on T only.

    partition is "none" (the gate needs the whole batch), because the tokens of a batch compete for each
    expert. A token also competes with later tokens of its own sequence.

    Raises ValueError for a capacity_factor that is not positive, and for an unknown normalize_over.
    """

    top_k: int
    capacity_factor: float | None
    weight: nn.Parameter

    partition: PartitionName = "none"
    picks_tokens = True
    decides_capacity = True

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 1,
        *,
        capacity_factor: float | None = None,
        normalize_over: NormalizedOver = "experts",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(d_model, num_experts, top_k)
        check_place(device, dtype)
        check_positive(capacity_factor=capacity_factor)
        check_one_of("normalize_over", normalize_over, get_args(NormalizedOver))
        self.top_k = int(top_k)
        self.capacity_factor = capacity_factor
        self.normalize_over = normalize_over
        self.weight = nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw_router_weight(self.weight)

    def num_rows(self, num_tokens: int) -> int:
        return self.weight.shape[0] * self.rows_an_expert(num_tokens)

    def rows_an_expert(self, num_tokens: int) -> int:
        """Returns C, the number of tokens that each expert takes from a batch of num_tokens."""
        factor = 1.0 if self.capacity_factor is None else self.capacity_factor
        capacity = expert_capacity(factor, num_tokens, self.top_k, self.weight.shape[0])
        return min(num_tokens, capacity)

    def forward(self, x_TM: Tensor) -> Routing:
        num_experts = self.weight.shape[0]
        rows = self.rows_an_expert(x_TM.shape[0])
        with without_autocast(x_TM.device.type):
            logits_TE = router_logits(x_TM, self.weight)
            if self.normalize_over == "experts":
                score_TE = logits_TE.softmax(-1)
                chosen_TE = best_tokens(score_TE, rows)
            else:
                chosen_TE = best_tokens(logits_TE, rows)
                score_TE = logits_TE.masked_fill(~chosen_TE, -math.inf).softmax(0)
            # The chosen pairs as indices t * E + e, ascending. Their number is known, so nonzero_static can
            # be used. nonzero would make the host wait until the GPU has counted them.
            place_S = torch.nonzero_static(chosen_TE.reshape(-1), size=rows * num_experts).squeeze(1)
            weight_S1 = score_TE.reshape(-1).index_select(0, place_S).unsqueeze(1)
        return Routing(
            expert=(place_S % num_experts).unsqueeze(1),
            weight=weight_S1,
            l_aux=logits_TE[:0].sum(),  # 0 with a gradient of zeros, even if logits are not finite
            logits=logits_TE,
            token=place_S // num_experts,
        )


def best_tokens(score_TE: Tensor, rows: int) -> Tensor:
    """Returns which tokens each expert takes, (T, E) bool: those with its ``rows`` largest scores.

    score_TE: (T, E), scores of T tokens for E experts. Ties go to the lowest token index. NaN counts as
        infinity.
    rows: number of tokens that each expert takes.

    Let s be an expert's rows-th largest score. The expert takes all tokens with scores above s, then the
    first tokens with the score s. So the result does not depend on torch.topk, whose choice among equal
    scores is not defined.
    """
    if rows == 0:
        return torch.zeros_like(score_TE, dtype=torch.bool)
    score_ET = score_TE.detach().t().contiguous()
    score_ET = score_ET.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    last_E1 = score_ET.topk(rows, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_ET = score_ET > last_E1
    tied_ET = score_ET == last_E1
    room_E1 = rows - above_ET.sum(-1, keepdim=True)
    return (above_ET | (tied_ET & (tied_ET.cumsum(-1) <= room_E1))).t()
