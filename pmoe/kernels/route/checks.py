"""What may be asked of the routing. Every check raises ValueError with the argument and its value."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pmoe.kernels.operands import check_tensor
from pmoe.kernels.route.routes import MAX_SLOTS, RouteGradients


def check_route(logits_TE: Tensor, top_k: int, num_chunks: int, z_loss_weight: float) -> None:
    """All but what depends on the number of tokens, which may be unknown while a graph is traced."""
    check_tensor("logits", logits_TE, shape=("T", "E"), dtypes=[torch.float32, torch.float64])
    num_experts = logits_TE.shape[1]
    if num_experts < 1:
        raise ValueError(f"num_experts ({num_experts}), the second size of logits, must be at least 1")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be 1 to num_experts ({num_experts})")
    if num_chunks < 1 or num_chunks * num_experts > MAX_SLOTS:
        raise ValueError(
            f"num_chunks ({num_chunks}) must be at least 1, and times num_experts ({num_experts}) at most "
            f"{MAX_SLOTS}"
        )
    if not 0 <= z_loss_weight < math.inf:
        raise ValueError(f"z_loss_weight ({z_loss_weight}) must be a number of at least 0")


def check_logits_memory(logits_TE: Tensor, top_k: int) -> None:
    check_tensor("logits", logits_TE, contiguous=True)
    if logits_TE.shape[0] * top_k > MAX_SLOTS:
        raise ValueError(
            f"num_tokens ({logits_TE.shape[0]}) * top_k ({top_k}) must be at most {MAX_SLOTS}: places are "
            "int32"
        )


def check_route_backward(
    logits_TE: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    counts_nE: Tensor,
    gradients: RouteGradients,
) -> None:
    check_tensor("expert", expert_TK, shape=("T", "K"))
    check_tensor("counts", counts_nE, shape=("n", "E"))
    top_k, num_chunks = expert_TK.shape[1], counts_nE.shape[0]
    check_route(logits_TE, top_k, num_chunks, 0.0)
    check_logits_memory(logits_TE, top_k)
    (num_tokens, num_experts), dtype = logits_TE.shape, logits_TE.dtype
    grad_weight_TK, grad_l_aux, partial_PN, position_TK = gradients
    if (partial_PN is None) != (position_TK is None) or not (partial_PN is None or grad_weight_TK is None):
        raise ValueError("partial and position must be given together, and without grad_weight")
    slots = (num_tokens, top_k)
    asked: dict[str, tuple[Tensor | None, tuple[int | str, ...], torch.dtype]] = {
        "expert": (expert_TK, slots, torch.int32),
        "weight": (weight_TK, slots, dtype),
        "counts": (counts_nE, (num_chunks, num_experts), torch.int32),
        "grad_weight": (grad_weight_TK, slots, dtype),
        "grad_l_aux": (grad_l_aux, (), dtype),
        "partial": (partial_PN, ("P", num_tokens * top_k), dtype),
        "position": (position_TK, slots, torch.int32),
    }
    for name, (tensor, shape, wanted) in asked.items():
        if tensor is not None:
            check_tensor(name, tensor, shape=shape, dtypes=[wanted], device=logits_TE.device, contiguous=True)
    if partial_PN is not None and not partial_PN.shape[0]:
        raise ValueError(f"partial of shape {tuple(partial_PN.shape)} must have at least one row (P)")
