"""What routing gives: where each token goes, with what weight, and where each slot's row stands."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pmoe.kernels.operands import MAX_ROWS, check_tensor


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


# ---- what may be asked of the routing. Every check raises ValueError with the argument and its value


def check_route(logits_TE: Tensor, top_k: int, num_chunks: int, z_loss_weight: float) -> None:
    """All but what depends on the number of tokens, which may be unknown while a graph is traced."""
    check_tensor("logits", logits_TE, shape=("T", "E"), dtypes=[torch.float32, torch.float64])
    num_experts = logits_TE.shape[1]
    if num_experts < 1:
        raise ValueError(f"num_experts ({num_experts}), the second size of logits, must be at least 1")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be 1 to num_experts ({num_experts})")
    if num_chunks < 1 or num_chunks * num_experts > MAX_ROWS:
        raise ValueError(
            f"num_chunks ({num_chunks}) must be at least 1, and times num_experts ({num_experts}) at most "
            f"{MAX_ROWS}"
        )
    if not 0 <= z_loss_weight < math.inf:
        raise ValueError(f"z_loss_weight ({z_loss_weight}) must be a number of at least 0")


def check_logits_memory(logits_TE: Tensor, top_k: int) -> None:
    check_tensor("logits", logits_TE, contiguous=True)
    if logits_TE.shape[0] * top_k > MAX_ROWS:
        raise ValueError(
            f"num_tokens ({logits_TE.shape[0]}) * top_k ({top_k}) must be at most {MAX_ROWS}: places are "
            "int32"
        )


def check_route_backward(
    logits_TE: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    counts_nE: Tensor,
    grad_weight_TK: Tensor | None,
    grad_l_aux: Tensor | None,
) -> None:
    check_tensor("expert", expert_TK, shape=("T", "K"))
    check_tensor("counts", counts_nE, shape=("n", "E"))
    top_k, num_chunks = expert_TK.shape[1], counts_nE.shape[0]
    check_route(logits_TE, top_k, num_chunks, 0.0)
    check_logits_memory(logits_TE, top_k)
    (num_tokens, num_experts), dtype = logits_TE.shape, logits_TE.dtype
    slots = (num_tokens, top_k)
    asked: dict[str, tuple[Tensor | None, tuple[int, ...], torch.dtype]] = {
        "expert": (expert_TK, slots, torch.int32),
        "weight": (weight_TK, slots, dtype),
        "counts": (counts_nE, (num_chunks, num_experts), torch.int32),
        "grad_weight": (grad_weight_TK, slots, dtype),
        "grad_l_aux": (grad_l_aux, (), dtype),
    }
    for name, (tensor, shape, wanted) in asked.items():
        if tensor is not None:
            check_tensor(name, tensor, shape=shape, dtypes=[wanted], device=logits_TE.device, contiguous=True)
