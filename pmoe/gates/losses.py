"""The auxiliary losses of routers: load balance and router z-loss."""

from __future__ import annotations

import torch
from torch import Tensor


def load_balance_loss(probability_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """E * sum_e f_e * P_e (Switch Transformer, Eq. 4): 1 for an even load, up to E for the worst.

    probability_TE: (T, E). expert_TK: (T, K). Returns a scalar; without tokens 0, attached to the graph.

    f_e is the share of the T*K choices that fell on expert e, counted before any capacity drops, and P_e
    the mean probability of e. Only P carries a gradient.
    """
    num_tokens, num_experts = probability_TE.shape
    chosen = expert_TK.reshape(-1)
    share_E = torch.zeros(num_experts, dtype=probability_TE.dtype, device=probability_TE.device)
    share_E.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=share_E.dtype))
    scale = num_experts / (max(chosen.numel(), 1) * max(num_tokens, 1))
    return scale * (probability_TE.sum(0) * share_E).sum()


def router_loss(probability_TE: Tensor, expert_TK: Tensor, logits_TE: Tensor, z_loss_weight: float) -> Tensor:
    """`load_balance_loss` + z_loss_weight * `router_z_loss`."""
    balance = load_balance_loss(probability_TE, expert_TK)
    return balance + z_loss_weight * router_z_loss(logits_TE) if z_loss_weight else balance


def router_z_loss(logits_TE: Tensor) -> Tensor:
    """mean_t logsumexp(logits_t)^2 (ST-MoE, Eq. 5), a scalar: keeps the logits small. No tokens give 0."""
    return logits_TE.logsumexp(-1).square().sum() / max(logits_TE.shape[0], 1)
