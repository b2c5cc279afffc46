"""`Routes`, the result of routing, and PyTorch expressions that compute it and its gradient.

The expressions are used on the CPU, for float64, and if the CUDA kernels cannot be used.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from pmoe.kernels.counts import FAULT, HEADER, Heading, Messages
from pmoe.kernels.operands import MAX_ROWS, check_tensor


class Routes(NamedTuple):
    """The experts and weights of each token, and the order of their rows by expert.

    There are T tokens with K choices each. A slot is one of the T * K (token, choice) pairs, and no slot is
    dropped. The N = T * K rows are the slots sorted by chunk, then by expert, then by token. Chunk c of n has
    the tokens from floor(c T / n) up to but not including floor((c + 1) T / n).

    weight_TK: (T, K) float32 (float64 for float64 logits), the routing weights, with a gradient.
    expert_TK: (T, K) int32, the experts, best first.
    position_TK: (T, K) int32, the row of each slot.
    slot_N: (N,) int32, the slot of each row: the inverse of position.
    counts_nE: (n, E) int32, number of rows of each chunk for each of E experts.
    ends_nE: (n, E) int32, running sum of the counts over all chunks and experts. With n = 1 it is the
        argument ``ends`` of grouped products.

    The arguments ``sorted_chunks`` and ``last`` of `route` change the order of the rows. They do not change
    counts and ends.

    fault: int64 scalar, the argument ``not_finite`` of `route` if a logit is infinite or NaN, else 0.
    messages: the memory of a `pmoe.kernels.counts.Messages`, in which this rank's messages to other ranks are
        written already; empty unless `route` got a ``heading``.
    l_aux: scalar with a gradient, the auxiliary loss E * sum_e f_e P_e + z_loss_weight * mean_t
        logsumexp(logits_t)^2. f_e is the share of slots that went to expert e, P_e the mean probability of e.
        Without tokens it is 0.
    """

    weight_TK: Tensor
    expert_TK: Tensor
    position_TK: Tensor
    slot_N: Tensor
    counts_nE: Tensor
    ends_nE: Tensor
    fault: Tensor
    messages: Tensor
    l_aux: Tensor


def empty_routes(
    logits_TE: Tensor, top_k: int, num_chunks: int = 1, heading: Heading | None = None
) -> Routes:
    """Returns the tensors of `Routes`, uninitialised, for a kernel to write.

    logits_TE: (T, E), the logits of T tokens for E experts. Only sizes, dtype and device are used.
    top_k: number of experts of a token.
    num_chunks: number of chunks of consecutive tokens.
    heading: the header of messages of row counts; None if no messages are wanted.
    """
    num_tokens, num_experts = logits_TE.shape
    ints = functools.partial(logits_TE.new_empty, dtype=torch.int32)
    counts_nE = ints((num_chunks, num_experts))
    return Routes(
        weight_TK=logits_TE.new_empty(num_tokens, top_k),
        expert_TK=ints((num_tokens, top_k)),
        position_TK=ints((num_tokens, top_k)),
        slot_N=ints((num_tokens * top_k,)),
        counts_nE=counts_nE,
        ends_nE=ints((num_chunks, num_experts)),
        fault=logits_TE.new_empty((), dtype=torch.int64),
        messages=_empty_messages(counts_nE, heading),
        l_aux=logits_TE.new_empty(()),
    )


def _empty_messages(counts_nE: Tensor, heading: Heading | None) -> Tensor:
    """Returns uninitialised memory for messages of row counts; an empty tensor if ``heading`` is None.

    counts_nE: (n, E), the row counts of n chunks for E experts. Only its sizes and device are used.
    heading: the header of messages of row counts; None if no messages are wanted.
    """
    if heading is None:
        return counts_nE.new_empty(0, dtype=torch.int64)
    return Messages.new(counts_nE, heading.num_ranks, heading.num_degrees).memory


# ---- checks of arguments. Each raises ValueError with the argument and its value


def check_route(logits_TE: Tensor, top_k: int, num_chunks: int, z_loss_weight: float) -> None:
    """Raises ValueError for arguments of `route` that are invalid with every number of tokens.

    The number of tokens itself is not checked, because it may be unknown while a graph is traced.

    logits_TE: (T, E), the logits of T tokens for E experts.
    top_k: number of experts of a token.
    num_chunks: number of chunks of consecutive tokens.
    z_loss_weight: factor of the z-loss in the auxiliary loss.
    """
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


def check_order(logits_TE: Tensor, num_chunks: int, sorted_chunks: int, last: range) -> None:
    """Raises ValueError if arguments of `route` ask for an order of rows that `route` cannot produce.

    logits_TE: (T, E), the logits of T tokens for E experts.
    num_chunks: number of chunks of consecutive tokens.
    sorted_chunks: number of neighbouring chunks whose rows are sorted as if they were one chunk. It must
        divide num_chunks.
    last: experts whose rows come last in each chunk, after the rows of all other experts; a range within
        0 .. E - 1.
    """
    if sorted_chunks < 1 or num_chunks % sorted_chunks:
        raise ValueError(f"sorted_chunks ({sorted_chunks}) must divide num_chunks ({num_chunks})")
    if last.start < 0 or last.stop > logits_TE.shape[1]:
        raise ValueError(f"last ({last}) must be a range of the {logits_TE.shape[1]} experts")


def check_logits_memory(logits_TE: Tensor, top_k: int) -> None:
    """Raises ValueError unless logits are contiguous, and T * top_k positions fit into int32.

    logits_TE: (T, E), the logits of T tokens for E experts.
    top_k: number of experts of a token.
    """
    check_tensor("logits", logits_TE, contiguous=True)
    if logits_TE.shape[0] * top_k > MAX_ROWS:
        raise ValueError(
            f"num_tokens ({logits_TE.shape[0]}) * top_k ({top_k}) must be at most {MAX_ROWS}: positions "
            "are int32"
        )


def check_route_backward(
    logits_TE: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    counts_nE: Tensor,
    grad_weight_TK: Tensor | None,
    grad_l_aux: Tensor | None,
) -> None:
    """Raises ValueError unless the arguments of `route_backward` fit each other and are contiguous.

    There are T tokens, E experts, K choices of a token and n chunks. The shapes:

        logits                         (T, E)
        expert, weight, grad_weight    (T, K); grad_weight may be None
        counts                         (n, E)
        grad_l_aux                     a scalar, or None
    """
    check_tensor("expert", expert_TK, shape=("T", "K"))
    check_tensor("counts", counts_nE, shape=("n", "E"))
    top_k = expert_TK.shape[1]
    num_chunks = counts_nE.shape[0]
    check_route(logits_TE, top_k, num_chunks, 0.0)
    check_logits_memory(logits_TE, top_k)
    num_tokens, num_experts = logits_TE.shape
    dtype = logits_TE.dtype
    slots = (num_tokens, top_k)
    expected: dict[str, tuple[Tensor | None, tuple[int, ...], torch.dtype]] = {
        "expert": (expert_TK, slots, torch.int32),
        "weight": (weight_TK, slots, dtype),
        "counts": (counts_nE, (num_chunks, num_experts), torch.int32),
        "grad_weight": (grad_weight_TK, slots, dtype),
        "grad_l_aux": (grad_l_aux, (), dtype),
    }
    for name, (tensor, shape, expected_dtype) in expected.items():
        if tensor is not None:
            check_tensor(
                name, tensor, shape=shape, dtypes=[expected_dtype], device=logits_TE.device, contiguous=True
            )


# ---- the routes


ROUNDS = 16
"""The most choices that `top_indices` finds one at a time. For more choices sorting is faster."""


def top_indices(score_TE: Tensor, top_k: int) -> Tensor:
    """Returns indices of the top_k largest scores of each row, (T, K) int64, best first.

    score_TE: (T, E), scores of T tokens for E experts.

    If scores are equal, the lower index comes first; torch.topk promises no order of equal scores. NaN counts
    as the largest score, and negative infinity as the lowest finite number. The indices of a row are always
    distinct.
    """
    # A copy in which chosen scores become negative infinity. Clamping makes all other scores finite, so that
    # none is chosen twice.
    left_TE = score_TE.detach().clamp(min=torch.finfo(score_TE.dtype).min)
    if top_k > ROUNDS:
        return left_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    chosen: list[Tensor] = []
    for _ in range(top_k):
        if chosen:
            left_TE.scatter_(-1, chosen[-1], -math.inf)
        # max is faster than argmax on a CPU. Both return the first of equal scores.
        chosen.append(left_TE.max(-1, keepdim=True).indices)
    return chosen[0] if top_k == 1 else torch.cat(chosen, -1)


def route(
    logits_TE: Tensor,
    top_k: int,
    *,
    normalize: bool,
    num_chunks: int = 1,
    z_loss_weight: float = 0.0,
    sorted_chunks: int = 1,
    last: range = range(0),
    not_finite: int = 0,
    heading: Heading | None = None,
) -> Routes:
    """Computes `Routes` with PyTorch expressions, which autograd can differentiate.

    logits_TE: (T, E), the gate's logits of T tokens for E experts.
    top_k: number of experts of a token.
    normalize: whether a token's weights are divided by their sum.
    num_chunks: number of chunks of consecutive tokens, by which rows are sorted first.
    z_loss_weight: factor of the z-loss in the auxiliary loss.
    sorted_chunks: number of neighbouring chunks whose rows are sorted as if they were one chunk.
    last: experts whose rows come last in each chunk, after the rows of all other experts.
    not_finite: the fault if a logit is infinite or NaN.
    heading: the header of messages of row counts; None if no messages are wanted.
    """
    num_tokens, num_experts = logits_TE.shape
    probability_TE = logits_TE.softmax(-1)
    expert_TK = top_indices(logits_TE, top_k)
    weight_TK = probability_TE.gather(-1, expert_TK)
    if normalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)

    token_T = torch.arange(num_tokens, device=logits_TE.device)
    # The chunk c of token t, so that floor(c T / n) <= t < floor((c + 1) T / n).
    chunk_T = ((token_T + 1) * num_chunks - 1) // max(num_tokens, 1)
    key_N = (chunk_T.unsqueeze(1) * num_experts + expert_TK).reshape(-1)
    counts = torch.zeros(num_chunks * num_experts, dtype=torch.int64, device=logits_TE.device)
    counts.scatter_add_(0, key_N, torch.ones_like(key_N))
    order_N = key_N
    if sorted_chunks > 1 or last:
        place_TK = expert_TK
        if last:
            place_TK = place_TK + num_experts * ((expert_TK >= last.start) & (expert_TK < last.stop))
        order_N = ((chunk_T // sorted_chunks).unsqueeze(1) * (2 * num_experts) + place_TK).reshape(-1)
    slot_N = order_N.argsort(stable=True)  # stable, so that equal keys stay in token order
    position_N = torch.empty_like(slot_N)
    position_N[slot_N] = torch.arange(slot_N.numel(), device=logits_TE.device)

    counts_nE = counts.view(num_chunks, -1)
    ends_nE = counts.cumsum(0).view(num_chunks, -1)
    share_E = counts_nE.sum(0).to(probability_TE.dtype)
    l_aux = _balance_scale(num_tokens, num_experts, top_k) * (probability_TE.sum(0) * share_E).sum()
    if z_loss_weight:
        l_aux = l_aux + z_loss_weight * (logits_TE.logsumexp(-1).square().sum() / max(num_tokens, 1))
    places = (expert_TK, position_N.view(num_tokens, top_k), slot_N, counts_nE, ends_nE)
    expert, position, slot, counts, ends = (tensor.to(torch.int32) for tensor in places)
    fault = logits_TE.isfinite().all().logical_not().long() * not_finite
    messages = _empty_messages(counts, heading)
    if heading is not None:
        written = Messages.new(counts, heading.num_ranks, heading.num_degrees, messages)
        sent_WL, _ = written.both
        sent_WL[:, :HEADER] = torch.tensor(heading.header)
        sent_WL[:, FAULT] = fault
        written.counts(sent_WL).copy_(counts.unflatten(1, (heading.num_ranks, -1)))
    return Routes(weight_TK, expert, position, slot, counts, ends, fault, messages, l_aux)


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
    """Returns the gradient of the logits, (T, E), with the formulas that the CUDA kernel uses.

    logits_TE: (T, E), the logits of T tokens for E experts that `route` got.
    expert_TK, weight_TK, counts_nE: fields of `Routes`: (T, K) and (T, K) for K choices of each token, and
        (n, E) for n chunks.
    normalize: whether `route` has divided a token's weights by their sum.
    z_loss_weight: factor of the z-loss in the auxiliary loss of `route`.
    grad_weight_TK: (T, K), gradient of the weights; None stands for zeros.
    grad_l_aux: scalar, gradient of the auxiliary loss; None stands for zero.
    """
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
    # d logits = p * (dp - sum_e p dp) through the softmax, plus p times the gradient of logsumexp.
    return p_TE * (grad_p_TE - (p_TE * grad_p_TE).sum(-1, keepdim=True) + log_T1)


def _balance_scale(num_tokens: int, num_experts: int, top_k: int) -> float:
    """Returns the factor s by which a sum over experts is multiplied to give the balance loss.

    The balance loss is E * sum_e (f_e * P_e). f_e is the fraction of the (token, choice) slots that expert e
    has, and P_e is the mean over tokens of p_te, the probability of expert e for token t. The loss is
    computed as s * sum_e (slots_e * sum_t p_te), in which slots_e is the number of slots of expert e.
    """
    return num_experts / (max(num_tokens * top_k, 1) * max(num_tokens, 1))
