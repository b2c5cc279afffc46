"""What routing gives: where each token goes, with what weight, and where each slot's row stands."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_SLOTS = 2**31 - 1
"""Places are int32."""


class Routes(NamedTuple):
    """Where each token goes and with what weight, and where each slot's row stands.

    A slot is one of the T*K (token, choice) pairs. Rows are the slots sorted by (chunk, expert), in token
    order within; chunk c holds the tokens from floor(c T / n) to floor((c + 1) T / n). None is dropped.

    weight_TK: (T, K) float32 (float64 for float64 logits), carries the gradient of the logits, as l_aux does.
    expert_TK: (T, K) int32, best first.
    position_TK: (T, K) int32, the row of each slot.
    slot_N: (N,) int32, the slot of each row: position's inverse.
    counts_nE: (n, E) int32, rows by chunk and expert.
    ends_nE: (n, E) int32, where they end: the running sum of counts over all chunks and experts. With n = 1
        these are the ends of a grouped product.
    l_aux: scalar, E * sum_e f_e P_e + z_loss_weight * mean_t logsumexp(logits_t)^2, where f_e is the share
        of the slots that fell on e and P_e its mean probability; 0 without tokens.
    """

    weight_TK: Tensor
    expert_TK: Tensor
    position_TK: Tensor
    slot_N: Tensor
    counts_nE: Tensor
    ends_nE: Tensor
    l_aux: Tensor


class RouteGradients(NamedTuple):
    """Gradients of the results of a routing, from which that of the logits is made. None stands for zeros.

    grad_weight_TK: (T, K), of the weights. grad_l_aux: scalar.
    partial_PN, position_TK: in place of grad_weight_TK, the weights' gradient in P parts by row: that of slot
        (t, k) is sum_p partial[p, position[t, k]], added from p = 0 upwards.
    """

    grad_weight_TK: Tensor | None = None
    grad_l_aux: Tensor | None = None
    partial_PN: Tensor | None = None
    position_TK: Tensor | None = None


def empty_routes(logits_TE: Tensor, top_k: int, num_chunks: int = 1) -> Routes:
    """Routes for a launch to write, not initialised."""
    num_tokens, num_experts = logits_TE.shape

    def ints(*shape: int) -> Tensor:
        return logits_TE.new_empty(shape, dtype=torch.int32)

    return Routes(
        weight_TK=logits_TE.new_empty(num_tokens, top_k),
        expert_TK=ints(num_tokens, top_k),
        position_TK=ints(num_tokens, top_k),
        slot_N=ints(num_tokens * top_k),
        counts_nE=ints(num_chunks, num_experts),
        ends_nE=ints(num_chunks, num_experts),
        l_aux=logits_TE.new_empty(()),
    )
