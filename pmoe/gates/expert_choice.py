"""Expert choice (arXiv 2202.09368, section 3.2): each expert takes the tokens that score highest with it.

Letters: K = top_k, the mean number of experts a token, C tokens an expert takes, S = E * C rows.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from pmoe.arguments import check_one_of, check_place, check_positive
from pmoe.gates.base import Gate, PartitionName, Routing, check_sizes, draw_router_weight
from pmoe.gates.capacity import expert_capacity
from pmoe.gates.logits import router_logits

NormalizedOver = Literal["experts", "tokens"]
"""What the scores of `ExpertChoiceGate` sum to 1 over."""


class ExpertChoiceGate(Gate):
    """Each expert takes its C = min(T, ceil(capacity_factor * T * top_k / E)) best tokens of this rank, ties
    to the lowest token; a token may get any number of experts, none included. The load is even by
    construction, so l_aux is 0.

    weight: parameter (E, M).

    Args:
        top_k: c, the mean number of experts a token gets.
        capacity_factor: scales C; None means 1.
        normalize_over: "experts": scores S = softmax over a token's experts, of which each expert takes the
            largest, and the weights are S (2202.09368, Eq. 2-3). "tokens": Softmax(KeepTopK((x Wg)^T, C))
            as FSMoE writes it (section 2.1): each expert takes the largest products, and the weights are a
            softmax over the tokens that it took, which is the constant 1 where C is 1.

    The routing has a row for each pair of token and expert: ``token`` (S,) ascending, within a token by
    expert; ``expert`` (S, 1), ``weight`` (S, 1). Its shapes depend on T only.

    partition "none": tokens compete within the batch, later tokens of the same sequence included. The layer
    drops nothing more.

    Raises ValueError for a capacity_factor that is not positive, an unknown normalize_over.
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
        self.top_k, self.capacity_factor, self.normalize_over = int(top_k), capacity_factor, normalize_over
        self.weight = nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw_router_weight(self.weight)

    def num_rows(self, num_tokens: int) -> int:
        return self.weight.shape[0] * self.rows_an_expert(num_tokens)

    def rows_an_expert(self, num_tokens: int) -> int:
        """C."""
        factor = 1.0 if self.capacity_factor is None else self.capacity_factor
        capacity = expert_capacity(factor, num_tokens, self.top_k, self.weight.shape[0])
        return min(num_tokens, capacity)

    def forward(self, x_TM: Tensor) -> Routing:
        num_experts = self.weight.shape[0]
        rows = self.rows_an_expert(x_TM.shape[0])
        with torch.autocast(x_TM.device.type, enabled=False):
            logits_TE = router_logits(x_TM, self.weight)
            if self.normalize_over == "experts":
                score_TE = logits_TE.softmax(-1)
                chosen_TE = best_tokens(score_TE, rows)
            else:
                chosen_TE = best_tokens(logits_TE, rows)
                score_TE = logits_TE.masked_fill(~chosen_TE, -math.inf).softmax(0)
            # As t * E + e, ascending. Their number is known: nonzero would wait for the GPU to count them.
            place_S = torch.nonzero_static(chosen_TE.reshape(-1), size=rows * num_experts).squeeze(1)
            weight_S1 = score_TE.reshape(-1).index_select(0, place_S).unsqueeze(1)
        return Routing(
            expert=(place_S % num_experts).unsqueeze(1),
            weight=weight_S1,
            l_aux=logits_TE[:0].sum(),  # 0 on the graph, also where they are not finite
            logits=logits_TE,
            token=place_S // num_experts,
        )


def best_tokens(score_TE: Tensor, rows: int) -> Tensor:
    """(T, E) bool: the ``rows`` largest scores of each expert, exactly, ties to the lowest token.

    By the value of the last one that is taken, which ties do not change, instead of by sorting. NaN counts as
    infinity.
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
