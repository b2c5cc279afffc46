"""The gate of SoftMoE (arXiv 2308.00951, sections 2.1 and 2.3): experts get mixtures of all tokens.

Letters: P slots of an expert, S = E * P rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pmoe.arguments import check_count, check_place
from pmoe.gates.base import Gate, Mix, PartitionName, Routing, check_sizes
from pmoe.gates.logits import router_logits

SHORTEST = 1e-6
"""The length below which a vector counts as zero."""


class SoftGate(Gate):
    """Gives each slot of an expert a mixture of all tokens, and each token a mixture of all results.

    logits (T, S) = scale * unit(x) unit(phi)^T, where unit divides each row by its length. dispatch is their
    softmax over tokens, and combine their softmax over slots (Eq. 1-3 and section 2.3).

    weight: parameter (E, P, M), the paper's phi, with out-features before in-features.
    scale: scalar parameter, which starts at 1.

    Args:
        top_k: is checked and has no other effect, because every token goes to all experts.
        slots_per_expert: P; None means 1. T / E is usual: then there are equally many slots and tokens.

    The routing has S rows. Row s goes to expert s // P, has weight 1, and is mixed by ``mix``. Nothing is
    dropped, capacity has no effect, and l_aux is 0 because the load is always even. A token that is zero has
    equal weights for all slots.

    partition is "none", because a slot mixes all tokens of the rank's batch: of all sequences, also later
    tokens. So causal language models cannot use this gate. The paper's models mix within one image. To do the
    same, call the layer with one image at a time.

    Raises ValueError for slots_per_expert below 1.
    """

    weight: nn.Parameter
    scale: nn.Parameter

    partition: PartitionName = "none"
    picks_tokens = True
    mixes_tokens = True

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 1,
        *,
        slots_per_expert: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(d_model, num_experts, top_k)
        check_place(device, dtype)
        slots = 1 if slots_per_expert is None else slots_per_expert
        check_count(slots_per_expert=slots)
        self.weight = nn.Parameter(torch.empty(num_experts, slots, d_model, device=device, dtype=dtype))
        self.scale = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight.shape[2]))
        nn.init.ones_(self.scale)

    def forward(self, x_TM: Tensor) -> Routing:
        num_slots = self.weight.shape[0] * self.weight.shape[1]
        with torch.autocast(x_TM.device.type, enabled=False):
            logits_TS = self._logits(x_TM)
            mix = Mix(dispatch=logits_TS.softmax(0), combine=logits_TS.softmax(-1))
        slot_S1 = torch.arange(num_slots, device=x_TM.device).unsqueeze(1)
        return Routing(
            expert=slot_S1 // self.weight.shape[1],
            weight=logits_TS.new_ones(num_slots, 1),
            l_aux=logits_TS[:0].sum(),  # 0 that carries a gradient, also if logits are not finite
            logits=logits_TS,
            mix=mix,
        )

    @property
    def saved_scores(self) -> int:  # type: ignore[override]
        return 4 * self.weight.shape[1]

    def num_rows(self, num_tokens: int) -> int:
        return self.weight.shape[0] * self.weight.shape[1]

    def _logits(self, x_TM: Tensor) -> Tensor:
        """Returns the logits (T, S).

        It divides the products (T, S) by the lengths, because they are smaller than the tokens (T, M).
        """
        phi_SM = self.weight.flatten(0, 1)
        product_TS = router_logits(x_TM, phi_SM)
        over_phi_S = (inverse_length(phi_SM).squeeze(1) * self.scale).to(product_TS.dtype)
        return product_TS * inverse_length(x_TM) * over_phi_S


def inverse_length(vectors: Tensor) -> Tensor:
    """Returns 1 / length of each row of vectors (..., M), as (..., 1), in float32 or wider.

    It is 0, without a gradient, for rows shorter than `SHORTEST`. Dividing by a length of 0 would make the
    row NaN, and a small constant added to the length would make gradients huge.
    """
    wide = torch.promote_types(vectors.dtype, torch.float32)
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=wide)
    inverse: Tensor = length.clamp(min=SHORTEST).reciprocal() * (length >= SHORTEST)
    return inverse
