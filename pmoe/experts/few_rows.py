"""Computes the experts of a call with few rows, without gradients, on one rank.

An example is a decoding step of inference. In a call of few rows, the host's work takes longer than the
matrix products. So the functions here call a few PyTorch operators directly, without a plan, chunks or a
schedule. They compute the rows of each expert that has rows, and sum the results of each token.

Letters: T tokens, K experts of a token, N rows, E experts, M = d_model, H = d_hidden, G columns of T_M, the
hidden activation before the nonlinearity (G = H, or 2H for gated experts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.experts.base import FEW_ROWS
from pmoe.experts.borrowed import Stacks


def _swiglu(hidden_NG: Tensor) -> Tensor:
    """Returns the SwiGLU activation, (N, H), for N rows: silu(first half of a row) * second half.

    hidden_NG: (N, 2H), the hidden activation before the nonlinearity, for H hidden columns.
    """
    gate_NH, up_NH = hidden_NG.chunk(2, dim=1)
    return F.silu(gate_NH).mul_(up_NH)  # the result of silu is contiguous, as matrix products need it


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": _swiglu,
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
}
"""The functions of the activations that pmoe knows by name."""


def has_few_rows(x: Tensor, index: Tensor, weights: Tensor, stacks: Stacks) -> bool:
    """Returns whether `few_rows_output` may compute a call on one rank: few rows, no gradients, on the CPU.

    The result is also False if the shapes or dtypes do not fit together. The layer, which then runs the call,
    raises the error that names the mistake.

    x: (T, M), the T tokens with M = d_model columns.
    index, weights: (T, K), the K experts of each token and their routing weights.
    stacks: the experts' weights.
    """
    w1 = stacks.w1
    return (
        0 < index.numel() <= FEW_ROWS
        and not torch.is_grad_enabled()
        and x.dtype == w1.dtype
        and x.device.type == w1.device.type == index.device.type == weights.device.type == "cpu"
        and x.dim() == index.dim() == 2
        and index.shape == weights.shape
        and weights.is_floating_point()
        and x.shape == (index.shape[0], w1.shape[1 if stacks.transposed else 2])
        and not torch.is_autocast_enabled("cpu")
        # The layer refuses to be traced, and computes only shapes for tensors without values.
        and type(x) is Tensor
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )


def few_rows_output(x_TM: Tensor, index_TK: Tensor, weight_TK: Tensor, stacks: Stacks) -> Tensor | None:
    """Returns each token's weighted sum of its experts' outputs, (T, M).

    Returns None if an expert's number is not in 0 ... E - 1, for E experts. The caller then runs the call in
    another way, which allows the number E for "no expert", and raises an error for other numbers.

    x_TM: (T, M), the T tokens with M = d_model columns.
    index_TK, weight_TK: (T, K), the K experts of each token and their routing weights.
    stacks: the weights of the experts.
    """
    num_experts = stacks.w1.shape[0]
    top_k = index_TK.shape[1]
    if index_TK.shape[0] == 1:  # one token: each row has an expert of its own, so nothing is sorted
        experts = index_TK[0].tolist()
        if min(experts) < 0 or max(experts) >= num_experts:
            return None
        out_NM = _outputs([x_TM] * top_k, x_TM, experts, [1] * top_k, stacks)
        return weight_TK.to(out_NM.dtype) @ out_NM
    expert_N, slot_N = index_TK.reshape(-1).sort(stable=True)
    unique, counted = torch.unique_consecutive(expert_N, return_counts=True)
    experts = unique.tolist()
    counts = counted.tolist()
    if experts[0] < 0 or experts[-1] >= num_experts:
        return None
    rows_NM = x_TM.index_select(0, slot_N if top_k == 1 else slot_N // top_k)
    if _are_grouped(rows_NM, len(experts), stacks):
        out_NM = _outputs_of_many(rows_NM, experts, counts, stacks)
    else:
        out_NM = _outputs(rows_NM.split(counts), x_TM, experts, counts, stacks)
    position_N = torch.empty_like(slot_N)
    position_N[slot_N] = torch.arange(slot_N.numel())
    weight_TK = weight_TK.to(out_NM.dtype)
    if out_NM.element_size() < 4:
        rows_TKM = out_NM.index_select(0, position_N).view(*index_TK.shape, -1)
        return (rows_TKM.float() * weight_TK.float().unsqueeze(2)).sum(1).to(x_TM.dtype)
    position_TK = position_N.view_as(index_TK)
    return F.embedding_bag(position_TK, out_NM, mode="sum", per_sample_weights=weight_TK)


def _outputs(
    rows: Sequence[Tensor], x_TM: Tensor, experts: list[int], counts: list[int], stacks: Stacks
) -> Tensor:
    """Returns the experts' outputs, (N, M), computed by a loop over the experts that have rows.

    There are N rows with M = d_model columns.

    rows: for each of ``experts`` its rows, (count, M).
    x_TM: a tensor with the dtype and device of the rows.
    experts, counts: the experts that have rows, and how many rows each of them has.
    stacks: the weights of all experts.
    """
    w1 = stacks.out_features_first(stacks.w1)
    w2 = stacks.out_features_first(stacks.w2)
    hidden_NG = x_TM.new_empty(sum(counts), w1.shape[1])
    _products(rows, w1, stacks.b1, experts, hidden_NG.split(counts))
    active_NH = _activated(hidden_NG, stacks)
    out_NM = x_TM.new_empty(hidden_NG.shape[0], w2.shape[1])
    _products(active_NH.split(counts), w2, stacks.b2, experts, out_NM.split(counts))
    return out_NM if stacks.norm is None else stacks.norm(out_NM)


def _outputs_of_many(rows_NM: Tensor, experts: list[int], counts: list[int], stacks: Stacks) -> Tensor:
    """Returns the experts' outputs, (N, M), computed by ``torch.nn.functional.grouped_mm``.

    The caller uses this function if `_are_grouped` returns True: if many experts have rows, grouped_mm is
    faster than a loop.

    rows_NM: (N, M), the N rows with M = d_model columns, sorted by expert.
    experts, counts: the experts that have rows, and how many rows each of them has.
    stacks: the weights of all experts.
    """
    ends = [0] * stacks.w1.shape[0]
    for expert, count in zip(experts, counts, strict=True):
        ends[expert] = count
    ends_E = torch.tensor(ends, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    w1, w2 = (weight if stacks.transposed else weight.transpose(1, 2) for weight in (stacks.w1, stacks.w2))
    active_NH = _activated(F.grouped_mm(rows_NM, w1, offs=ends_E), stacks)
    out_NM = F.grouped_mm(active_NH.contiguous(), w2, offs=ends_E)
    return out_NM if stacks.norm is None else stacks.norm(out_NM)


def _are_grouped(rows_NM: Tensor, num_with_rows: int, stacks: Stacks) -> bool:
    """Returns whether torch's ``grouped_mm`` can compute the experts, and is faster than a loop in Python.

    ``grouped_mm`` is faster if more than a third of the experts have rows, because it loops in C++ over all
    experts. It can compute experts without biases in dtypes of 4 and 2 bytes, if the bytes of each row of a
    matrix are a multiple of 16.

    rows_NM: (N, M), the N rows with M = d_model columns, sorted by expert.
    num_with_rows: the number of experts that have rows.
    stacks: the weights of all experts.
    """
    size = rows_NM.element_size()
    if 3 * num_with_rows <= stacks.w1.shape[0] or stacks.b1 is not None or size > 4:
        return False
    widths = (*stacks.w1.shape[1:], *stacks.w2.shape[1:])
    aligned = all(width * size % 16 == 0 for width in widths)
    return aligned and all(
        each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (stacks.w1, stacks.w2)
    )


def _activated(hidden_NG: Tensor, stacks: Stacks) -> Tensor:
    """Returns the activation of N rows, (N, H) for H hidden columns. May overwrite ``hidden_NG``.

    hidden_NG: (N, G), the hidden activation before the nonlinearity; G is H, or 2H for gated experts.
    stacks: the experts' weights and their activation function.
    """
    activation = stacks.activation
    active_NH: Tensor = (ACTIVATIONS[activation] if isinstance(activation, str) else activation)(hidden_NG)
    return active_NH


def _products(
    rows: Sequence[Tensor],
    weight_EOI: Tensor,
    bias_EO: Tensor | None,
    experts: list[int],
    out: Sequence[Tensor],
) -> None:
    """Computes rows @ weight[e]^T + bias[e] for each expert e that has rows, and writes it to ``out``.

    rows: for each of ``experts`` its rows, (count, I), I input features.
    weight_EOI: (E, O, I), the weights of all experts, O output features.
    bias_EO: (E, O), the biases; None without biases.
    experts: the experts that have rows.
    out: for each of ``experts`` the memory for its results, (count, O).
    """
    for expert, rows_nI, out_nO in zip(experts, rows, out, strict=True):
        weight_IO = weight_EOI[expert].t()
        if bias_EO is None:
            torch.mm(rows_nI, weight_IO, out=out_nO)
        else:
            torch.addmm(bias_EO[expert], rows_nI, weight_IO, out=out_nO)
