"""A router's logits, and the auxiliary losses that are computed from a router's scores.

Logits are computed in float32 even if the tokens are bfloat16 or float16, and in float64 for float64 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pmoe.arguments import check_tensors
from pmoe.kernels.route.launches import gate_operands

BLOCK_ROWS = 4096
"""Number of tokens that are cast to float32 at a time, to save memory."""


def router_logits(x_TM: Tensor, weight_EM: Tensor) -> Tensor:
    """Returns x weight^T, (T, E), computed in float32, or in float64 if the tokens are float64.

    x_TM: (T, M), T tokens of M = d_model columns.
    weight_EM: (E, M), the router's weight for E experts.

    Tokens of a narrower dtype are saved for backward in their own dtype (`Logits`). Autograd would save a
    float32 copy, which is twice as large as everything else that the layer saves of the tokens.
    """
    if x_TM.dtype in (torch.float32, torch.float64):
        return F.linear(x_TM, weight_EM.to(x_TM.dtype))
    if torch.compiler.is_compiling():
        return F.linear(x_TM.float(), weight_EM.float())
    logits_TE: Tensor = Logits.apply(x_TM, weight_EM)  # type: ignore[no-untyped-call]
    return logits_TE


class Logits(torch.autograd.Function):
    """The autograd function x weight^T, which computes in float32 for tokens x of a narrower dtype.

    Only the tokens in their own dtype are saved for backward, not a float32 copy.
    """

    @staticmethod
    def forward(ctx: Any, x_TM: Tensor, weight_EM: Tensor) -> Tensor:
        ctx.save_for_backward(x_TM, weight_EM)
        return _narrow_logits(x_TM, weight_EM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor]:
        x_TM, weight_EM = ctx.saved_tensors
        if x_TM.is_cuda and x_TM.dtype == weight_EM.dtype == torch.bfloat16:
            halves, twice_EM, grad_weight = _gate_products(grad_TE, x_TM, weight_EM)
            return halves @ twice_EM if ctx.needs_input_grad[0] else None, grad_weight
        wide_EM = weight_EM.float()
        grad_x = torch.empty_like(x_TM)
        grad_weight = torch.zeros_like(wide_EM)
        blocks = (tensor.split(BLOCK_ROWS) for tensor in (grad_TE, x_TM, grad_x))
        for grad, rows, grad_rows in zip(*blocks, strict=True):
            grad_rows.copy_(grad @ wide_EM)
            grad_weight.addmm_(grad.t(), rows.float())
        return grad_x, grad_weight.to(weight_EM.dtype)


def _narrow_logits(x_TM: Tensor, weight_EM: Tensor) -> Tensor:
    """Returns x weight^T, (T, E) float32, for tokens of a narrower dtype.

    x_TM: (T, M), T tokens of M = d_model columns.
    weight_EM: (E, M), the router's weight for E experts.
    """
    if x_TM.is_cuda and x_TM.dtype == weight_EM.dtype:
        # float32 holds products of narrow numbers exactly, and sums are float32 too. So a single launch
        # computes what a product of float32 copies would.
        return torch.mm(x_TM, weight_EM.t(), out_dtype=torch.float32)
    wide_EM = weight_EM.float()
    logits_TE = x_TM.new_empty(x_TM.shape[0], weight_EM.shape[0], dtype=torch.float32)
    for rows, out in zip(x_TM.split(BLOCK_ROWS), logits_TE.split(BLOCK_ROWS), strict=True):
        torch.mm(rows.float(), wide_EM.t(), out=out)
    return logits_TE


def _gate_products(grad_TE: Tensor, x_TM: Tensor, weight_EM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns two factors whose product is the tokens' gradient, and the gradient of the gate's weight.

    Tokens and weight are bfloat16. The gradient of the logits is float32, and is split into the sum of two
    bfloat16 tensors. So the products take bfloat16 operands, but are as precise as with the float32 gradient.

    Returns (T, 2E), (2E, M) and (E, M). The product of the first two is the gradient of the tokens.

    grad_TE: (T, E) float32, the gradient of the logits of T tokens for E experts.
    x_TM, weight_EM: (T, M) and (E, M), the tokens and the gate's weight.
    """
    halves, twice_EM = gate_operands(grad_TE, weight_EM)
    upper_EM, lower_EM = torch.mm(halves.t(), x_TM, out_dtype=torch.float32).chunk(2)
    return halves, twice_EM, torch.add(upper_EM, lower_EM, out=torch.empty_like(weight_EM))


class LogitsAndRows(torch.autograd.Function):
    """The autograd function x -> (x weight^T, x), in which backward sums both gradients of the tokens x.

    The layer's experts read the second result. Backward adds the gate's gradient of x to theirs by the matrix
    product itself. If the experts read x, autograd would add the two gradients by an operator of its own, and
    the gate's gradient would be rounded once more.

    The sum is written into the memory of the experts' gradient. So only the experts' autograd node may read
    the second result: it returns memory that nothing else reads.

    Tokens and weight have the same dtype: float32, float64, or bfloat16 on a GPU. The attribute
    ``passes_rows`` of the autograd node tells `pmoe.engine.halves` that this node only passes the tokens on,
    so that it looks for the node that has made them.
    """

    @staticmethod
    def takes(x_TM: Tensor, weight_EM: Tensor) -> bool:
        """Returns whether this function can be used: the dtypes fit, and the tokens need a gradient.

        x_TM: (T, M), T tokens of M = d_model columns.
        weight_EM: (E, M), the router's weight for E experts.
        """
        wide = (torch.float32, torch.float64)
        has_dtype = x_TM.dtype in wide or (x_TM.dtype == torch.bfloat16 and x_TM.is_cuda)
        return has_dtype and x_TM.dtype == weight_EM.dtype and x_TM.requires_grad and torch.is_grad_enabled()

    @staticmethod
    def forward(ctx: Any, x_TM: Tensor, weight_EM: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_TM, weight_EM)
        ctx.set_materialize_grads(False)
        ctx.passes_rows = True
        if x_TM.dtype == torch.bfloat16:
            return _narrow_logits(x_TM, weight_EM), x_TM.detach()
        return F.linear(x_TM, weight_EM), x_TM.detach()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_TE: Tensor | None, grad_TM: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        if grad_TE is None:
            return grad_TM, None
        x_TM, weight_EM = ctx.saved_tensors
        grad_weight: Tensor | None
        if x_TM.dtype == torch.bfloat16:
            first, second, grad_weight = _gate_products(grad_TE, x_TM, weight_EM)
        else:
            first = grad_TE
            second = weight_EM
            grad_weight = grad_TE.t() @ x_TM if ctx.needs_input_grad[1] else None
        return first @ second if grad_TM is None else grad_TM.addmm_(first, second), grad_weight


def logits_and_rows(x_TM: Tensor, weight_EM: Tensor, *, adds: bool) -> tuple[Tensor, Tensor | None]:
    """Returns a router's logits, (T, E), and the rows (T, M) for the experts' autograd node, or None.

    x_TM: (T, M), T tokens of M = d_model columns.
    weight_EM: (E, M), the router's weight for E experts.
    adds: whether backward may add the experts' gradient of the tokens to the router's (`LogitsAndRows`). If
        it may not, or cannot, the rows are None. The experts then read x, and autograd adds the gradients.
    """
    if adds and LogitsAndRows.takes(x_TM, weight_EM):
        logits_TE, rows_TM = LogitsAndRows.apply(x_TM, weight_EM)  # type: ignore[no-untyped-call]
        return logits_TE, rows_TM
    return router_logits(x_TM, weight_EM), None


def load_balance_loss(probability_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """Returns the load-balance loss E * sum_e f_e * P_e, a scalar (Switch Transformer, Eq. 4).

    For E experts, f_e is the share of the T * K choices that fell on expert e, before any drops. P_e is the
    mean probability of e. Only P_e has a gradient. The loss is 1 if all experts are chosen equally often, and
    E if all choices fall on one expert. Without tokens it is 0, and still has a gradient (of zeros).

    Args:
        probability_TE: (T, E), for each of T tokens the probabilities of the experts.
        expert_TK: (T, K) int64, the K choices of each token.

    Raises ValueError or TypeError for tensors of another shape or dtype.
    """
    check_tensors(2, probability_TE=probability_TE, expert_TK=expert_TK)
    if expert_TK.dtype != torch.int64:
        raise TypeError(f"expert_TK of dtype {expert_TK.dtype} must have dtype torch.int64")
    return _load_balance_loss(probability_TE, expert_TK)


def _load_balance_loss(probability_TE: Tensor, expert_TK: Tensor) -> Tensor:
    num_tokens, num_experts = probability_TE.shape
    chosen = expert_TK.reshape(-1)
    share_E = torch.zeros(num_experts, dtype=probability_TE.dtype, device=probability_TE.device)
    share_E.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=share_E.dtype))
    scale = num_experts / (max(chosen.numel(), 1) * max(num_tokens, 1))
    return scale * (probability_TE.sum(0) * share_E).sum()


def router_loss(probability_TE: Tensor, expert_TK: Tensor, logits_TE: Tensor, z_loss_weight: float) -> Tensor:
    """Returns a gate's auxiliary loss, a scalar: `load_balance_loss` + z_loss_weight * `router_z_loss`.

    probability_TE, logits_TE: (T, E), the probabilities and the logits of T tokens for E experts.
    expert_TK: (T, K) int64, the K choices of each token.
    z_loss_weight: the factor of the second loss.
    """
    balance = _load_balance_loss(probability_TE, expert_TK)
    return balance + z_loss_weight * router_z_loss(logits_TE) if z_loss_weight else balance


def router_z_loss(logits_TE: Tensor) -> Tensor:
    """Returns the z-loss mean_t logsumexp(logits_t)^2, a scalar (ST-MoE, Eq. 5), which keeps logits small.

    logits_TE: (T, E), for T tokens and E experts. Without tokens the loss is 0.

    Raises ValueError or TypeError for tensors of another shape.
    """
    check_tensors(2, logits_TE=logits_TE)
    return logits_TE.logsumexp(-1).square().sum() / max(logits_TE.shape[0], 1)
