"""Routing and its gradient as PyTorch expressions: for the CPU, for float64, and where kernels refuse."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pmoe.kernels.route.routes import Routes

ROUNDS = 16
"""Up to so many choices, as many searches for a maximum are faster than sorting all experts."""


def top_indices(score_TE: Tensor, top_k: int) -> Tensor:
    """Indices (T, K) of the top_k largest scores, best first, ties to the lowest index; NaN is largest.

    torch.topk promises nothing on ties. Distinct whatever the scores are; negative infinity counts as the
    lowest finite number.
    """
    # A copy, in which a score that is taken becomes negative infinity.
    left_TE = score_TE.detach().clamp(min=torch.finfo(score_TE.dtype).min)
    if top_k == 1:
        return left_TE.argmax(-1, keepdim=True)
    if top_k > ROUNDS:
        return left_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    chosen_TK = torch.empty(score_TE.shape[0], top_k, dtype=torch.int64, device=score_TE.device)
    for choice in range(top_k):
        best_T1 = left_TE.argmax(-1, keepdim=True)
        left_TE.scatter_(-1, best_T1, -math.inf)
        chosen_TK[:, choice : choice + 1] = best_T1
    return chosen_TK


def route(
    logits_TE: Tensor, top_k: int, *, normalize: bool, num_chunks: int = 1, z_loss_weight: float = 0.0
) -> Routes:
    """See `Routes`. PyTorch can differentiate it, too."""
    num_tokens, num_experts = logits_TE.shape
    probability_TE = logits_TE.softmax(-1)
    expert_TK = top_indices(logits_TE, top_k)
    weight_TK = probability_TE.gather(-1, expert_TK)
    if normalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)

    token_T = torch.arange(num_tokens, device=logits_TE.device)
    chunk_T = ((token_T + 1) * num_chunks - 1) // max(num_tokens, 1)
    key_N = (chunk_T.unsqueeze(1) * num_experts + expert_TK).reshape(-1)
    counts = torch.zeros(num_chunks * num_experts, dtype=torch.int64, device=logits_TE.device)
    counts.scatter_add_(0, key_N, torch.ones_like(key_N))
    slot_N = key_N.argsort(stable=True)
    position_N = torch.empty_like(slot_N)
    position_N[slot_N] = torch.arange(slot_N.numel(), device=logits_TE.device)

    counts_nE, ends_nE = counts.view(num_chunks, -1), counts.cumsum(0).view(num_chunks, -1)
    share_E = counts_nE.sum(0).to(probability_TE.dtype)
    l_aux = _balance_scale(num_tokens, num_experts, top_k) * (probability_TE.sum(0) * share_E).sum()
    if z_loss_weight:
        l_aux = l_aux + z_loss_weight * (logits_TE.logsumexp(-1).square().sum() / max(num_tokens, 1))
    places = (expert_TK, position_N.view(num_tokens, top_k), slot_N, counts_nE, ends_nE)
    expert, position, slot, counts, ends = (each.to(torch.int32) for each in places)
    return Routes(weight_TK, expert, position, slot, counts, ends, l_aux)


def route_backward(
    logits_TE: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    counts_nE: Tensor,
    normalize: bool,
    z_loss_weight: float = 0.0,
    grad_weight_TK: Tensor | None = None,
    grad_l_aux: Tensor | None = None,
) -> Tensor:
    """The logits' gradient (T, E), by the formulas that the kernel computes."""
    num_tokens, num_experts = logits_TE.shape
    p_TE = logits_TE.softmax(-1)
    grad_p_TE = torch.zeros_like(p_TE)
    if grad_weight_TK is not None:
        chosen_TK = expert_TK.long()
        if normalize:
            inner_T1 = (grad_weight_TK * weight_TK).sum(-1, keepdim=True)
            grad_weight_TK = (grad_weight_TK - inner_T1) / p_TE.gather(-1, chosen_TK).sum(-1, keepdim=True)
        grad_p_TE.scatter_(-1, chosen_TK, grad_weight_TK)
    log_T1: Tensor | float = 0.0
    if grad_l_aux is not None:
        load_E = counts_nE.sum(0).to(p_TE.dtype)
        grad_p_TE += grad_l_aux * _balance_scale(num_tokens, num_experts, weight_TK.shape[1]) * load_E
        if z_loss_weight:
            scale = 2 * z_loss_weight / max(num_tokens, 1)
            log_T1 = grad_l_aux * scale * logits_TE.logsumexp(-1, keepdim=True)
    return p_TE * (grad_p_TE - (p_TE * grad_p_TE).sum(-1, keepdim=True) + log_T1)


def _balance_scale(num_tokens: int, num_experts: int, top_k: int) -> float:
    return num_experts / (max(num_tokens * top_k, 1) * max(num_tokens, 1))
