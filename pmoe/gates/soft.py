"""The gate of SoftMoE (arXiv 2308.00951, sections 2.1 and 2.3): experts get mixtures of all tokens.

Letters: E experts, P slots of an expert, S = E * P slots in all. A slot is a mixture of tokens, which its
expert gets as a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pmoe.arguments import check_count, check_place
from pmoe.gates.base import Gate, Mix, PartitionName, Routing, check_sizes, without_autocast
from pmoe.gates.logits import router_logits

SHORTEST = 1e-6
"""The length below which a vector counts as zero."""


class SoftGate(Gate):
    """Gives each expert mixtures of all tokens, and each token a mixture of all experts' results.

    There are T tokens, and S slots: P for each of E experts. A slot is a row that its expert computes: a
    mixture of all tokens. x are the tokens, (T, M). phi is the parameter ``weight`` as S rows of M columns.
    Tokens are mixed twice (Eq. 1-3 and section 2.3):

        logits (T, S)           scale * unit(x) unit(phi)^T, where unit divides a row by its Euclidean norm
        input of slot s         sum_t dispatch[t, s] x_t     with dispatch = softmax of the logits over tokens
        result of token t       sum_s combine[t, s] y_s      with combine = softmax of the logits over slots

    y_s is the result that the expert of slot s computes.

    weight: parameter (E, P, M), with M = d_model as last dimension.
    scale: scalar parameter, which starts at 1.

    Args:
        top_k: is checked and has no other effect, because every token goes to all experts.
        slots_per_expert: P; None means 1. Usually P = T / E, so that S = T.

    The `Routing` lists slots, not tokens: slot s goes to expert s // P, with routing weight 1. The weights
    dispatch and combine are in `Routing.mix`. Nothing is dropped, and capacity has no effect. l_aux is 0,
    because all experts always get P rows. A token of zeros has equal weights for all slots.

    partition is "none" (the gate needs the whole batch), because each slot mixes all tokens of the rank's
    batch: tokens of all sequences, and later tokens with earlier ones. So causal language models cannot use
    this gate. The paper's models mix the tokens of one image; to do the same, call the layer with one image
    at a time.

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
        with without_autocast(x_TM.device.type):
            logits_TS = self._logits(x_TM)
            mix = Mix(dispatch=logits_TS.softmax(0), combine=logits_TS.softmax(-1))
        slot_S1 = torch.arange(num_slots, device=x_TM.device).unsqueeze(1)
        return Routing(
            expert=slot_S1 // self.weight.shape[1],
            weight=logits_TS.new_ones(num_slots, 1),
            l_aux=logits_TS[:0].sum(),  # 0 with a gradient of zeros, even if logits are not finite
            logits=logits_TS,
            mix=mix,
        )

    @property
    def saved_scores(self) -> int:  # type: ignore[override]
        return 4 * self.weight.shape[1]

    def num_rows(self, num_tokens: int) -> int:
        return self.weight.shape[0] * self.weight.shape[1]

    def _logits(self, x_TM: Tensor) -> Tensor:
        """Returns the logits of T tokens for S slots (mixtures of tokens), (T, S).

        First the product x phi^T, (T, S), is computed from the tokens x and the parameter ``weight``, phi.
        Then the product is divided by the Euclidean norms of the tokens and of phi's rows. To divide the
        tokens before the product would read more memory if M = d_model is above S.

        x_TM: (T, M), the tokens.
        """
        phi_SM = self.weight.flatten(0, 1)
        product_TS = router_logits(x_TM, phi_SM)
        over_phi_S = (inverse_length(phi_SM).squeeze(1) * self.scale).to(product_TS.dtype)
        return product_TS * inverse_length(x_TM) * over_phi_S


def inverse_length(vectors: Tensor) -> Tensor:
    """Returns 1 / Euclidean norm of each row of vectors (..., M), as (..., 1), at least in float32.

    For rows shorter than `SHORTEST` it is 0, without a gradient. Dividing by a length of 0 would give NaN,
    and adding a small constant to the length would make gradients huge.

    vectors: (..., M), with any number M of columns.
    """
    wide = torch.promote_types(vectors.dtype, torch.float32)
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=wide)
    inverse: Tensor = length.clamp(min=SHORTEST).reciprocal() * (length >= SHORTEST)
    return inverse
