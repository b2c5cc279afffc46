"""The runner for a single rank, which computes a forward pass in six or seven kernel launches.

The host waits for none of them.

    gate's product, routing (2 launches), first product, second product, sum of each token's rows

No row is sent, and the batch is not cut into chunks. The first product loads tokens directly, so forward has
no dispatched rows (T_DI). If the product is wide, it is faster to copy the tokens into the order of their
experts first, which is the seventh launch (`gathers_in_load`). These rows are freed before T_DO, the experts'
output, is made. T_DO is as large, so the peak stays the same. Backward gathers the rows when it needs them,
and frees them at once. Between the passes the layer holds its input, the hidden activation T_M, the logits,
and 12 bytes for each choice of a token (expert, weight, position). The activated T_M and T_DO are not saved.
The numbers of rows of the experts stay on the device.

Letters: T tokens, K choices, N = T*K rows, E experts, M = d_model, H = d_hidden, G = H or 2H columns of T_M
(2H for SwiGLU).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from pmoe.comm.ranks import Ranks
from pmoe.engine.autograd import Path, Saved, run_as_one_node
from pmoe.engine.passes.base import Inputs
from pmoe.experts.stacked import StackedExperts, split_parameters
from pmoe.gates import TopKGate
from pmoe.kernels import grouped_gemm, permute, route
from pmoe.kernels.grouped_gemm import RowSlots
from pmoe.kernels.grouped_gemm.launch import gathers_for_weights
from pmoe.kernels.operands import VECTOR_BYTES, strides_fit
from pmoe.kernels.registry import PRODUCTS
from pmoe.kernels.route import Routes
from pmoe.measure.kernel_check import NUM_HIDDEN, NUM_MODEL, KernelCase, first_wrong
from pmoe.measure.products import measure_products, slower_kernels
from pmoe.warn import warn_once

V = TypeVar("V")

DEVICES = ("cuda", "meta")
"""Types of devices of the parameters with which the kernels may run.

Parameters on the meta device have no values until another library loads them to a GPU.
"""

_checked: dict[tuple[KernelCase, int, bool], str | None] = {}
"""Results of `one_rank_mismatch` by its arguments."""


def kernel_refusal(
    gate: TopKGate,
    experts: StackedExperts,
    x_TM: Tensor,
    dtype: torch.dtype,
    *,
    ranks: Ranks,
    needs_grad: bool,
) -> str | None:
    """Returns why the kernels for one rank do not compute a call; None if they do.

    The kernels may not support the call's tensors, may compute wrong results on this device, or may be slower
    than the engine. The speed is measured at the first call with each number of tokens.

    gate: the gate, from which the number of choices of a token is read.
    experts: the experts.
    x_TM: (T, M), T tokens with M = d_model columns.
    dtype: dtype of the rows that reach the experts.
    ranks: the single rank of the layer.
    needs_grad: whether a backward pass may follow.
    """
    device = x_TM.device
    num_rows = x_TM.shape[0] * gate.top_k
    if device.type != "cuda" or not num_rows:
        return f"{x_TM.shape[0]} tokens on {device}"
    num_experts, num_model, width = experts.shapes()["w2"]
    logits = x_TM.new_empty(0, num_experts, dtype=torch.float32)
    reasons = (
        grouped_gemm.refusal(device, dtype, d_model=num_model, d_hidden=width),
        permute.refusal(device, dtype, gate.top_k),
        route.refusal(logits, gate.top_k),
        "float64 tokens" if x_TM.dtype == torch.float64 else None,
    )
    why = next((why for why in reasons if why is not None), None)
    if why is None:
        measure_products(experts, ranks, dtype, device, num_rows, needs_grad=needs_grad)
        why = slower_kernels(experts, dtype, device, num_rows, needs_grad=needs_grad)
    return why or _wrong_kernels(gate, KernelCase.of(experts, device, dtype))


def _wrong_kernels(gate: TopKGate, case: KernelCase) -> str | None:
    """Returns the first error that the kernels make on this device, and warns of it; None if there is none.

    The kernels are checked once for each case. They are not checked if the user forces them by name. While a
    CUDA graph is captured they cannot be checked, so kernels that were not checked before are refused.

    gate: the gate, whose options the check uses.
    case: the device, dtype and kind of experts.
    """
    if PRODUCTS.forced is not None:
        return None
    key = (case, gate.top_k, gate.normalize)
    if key not in _checked:
        if torch.cuda.is_current_stream_capturing():
            return "one rank's kernels were not checked before the capture"
        _checked[key] = why = one_rank_mismatch(*key)
        if why is not None:
            warn_once(f"one rank's kernels are not used: {why}", for_each_reason=True)
    return _checked[key]


def route_tokens(gate: TopKGate, logits_TE: Tensor, by: Callable[..., V]) -> V:
    """Returns the routing that a routing function makes of the gate's logits, with the gate's options.

    gate: the gate.
    logits_TE: (T, E), the gate's logits of T tokens for E experts.
    by: the routing function. It is called as ``by(logits, K, normalize=..., z_loss_weight=...)`` for K
        choices of a token. It may route at once, or return tensors that a persistent kernel fills later.
    """
    return by(logits_TE, gate.top_k, normalize=gate.normalize, z_loss_weight=gate.z_loss_weight)


def aligned_rows(rows_TM: Tensor) -> Tensor:
    """Returns the rows (T, M) with the alignment that the kernels need; a copy if they do not have it.

    rows_TM: (T, M), T tokens with M = d_model columns.
    """
    is_aligned = not rows_TM.numel() or (strides_fit(rows_TM) and rows_TM.data_ptr() % VECTOR_BYTES == 0)
    return rows_TM if is_aligned else rows_TM.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class OneRankRunner:
    """A runner that computes both passes on one rank, after the routing kernel has sorted the rows.

    routes: the experts and weights of each token, and the sorted order of the rows.
    activation: name of the experts' nonlinearity in `pmoe.kernels.grouped_gemm`.
    """

    routes: Routes
    activation: str
    name: ClassVar[Path] = "one rank"

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        x_TM = aligned_rows(inputs.x_TM)
        weight_TK = inputs.weight_TK
        routes = self.routes
        w1, w2, b1, b2 = split_parameters(inputs.parameters)
        ends_E = routes.ends_nE.view(-1)
        position_TK = routes.position_TK
        slots = RowSlots(slot_N=routes.slot_N, top_k=weight_TK.shape[1], position_TK=position_TK)
        hidden_NG, active_NH = grouped_gemm.hidden(
            x_TM, w1, ends_E, activation=self.activation, bias_EG=b1, slots=slots, keep=keep
        )
        scale = weight_TK.view(-1)
        out_NM = grouped_gemm.product(active_NH, w2, ends_E, bias_EO=b2, scale=scale, slots=slots)
        del active_NH
        y_TM = permute.unpermute_directly(out_NM, position_TK)
        if not keep:
            return y_TM, None
        expert_TK = routes.expert_TK if b2 is not None else None
        tensors = [x_TM, weight_TK, w1, w2, b2, hidden_NG, expert_TK, position_TK, ends_E]
        # `_backward` is a function, because a method would keep this runner, and so slot_N, until backward.
        return y_TM, Saved(tensors, functools.partial(_backward, self.activation))


def _backward(
    activation: str, tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor
) -> list[Tensor | None]:
    """Computes the backward pass. Returns the gradient of each tensor of ``Inputs.all``; None if not wanted.

    activation: name of the experts' nonlinearity in `pmoe.kernels.grouped_gemm`.
    tensors: the tensors that forward saved. This function empties the list, to free each tensor early.
    wanted: for each tensor of ``Inputs.all``, whether its gradient is wanted.
    grad_TM: (T, M), the gradient of the layer's output T_O for T tokens; M = d_model.
    """
    x_TM, weight_TK, w1, w2, b2, hidden_NG, expert_TK, position_TK, ends_E = tensors
    tensors.clear()
    needs_x, needs_weight, _, needs_w1, needs_w2, needs_b1, needs_b2 = (*wanted, False, False)[:7]
    num_rows = hidden_NG.shape[0]
    # The rows are gathered before the products. A gather is one launch at the speed of memory, and costs less
    # than products that gather in their loads. The gathered rows do not raise the peak memory of backward,
    # which is reached when of_rows_NM is made, unless there are far more rows than elements of weights.
    grad_NM = permute.permute_directly(aligned_rows(grad_TM), position_TK, num_rows)
    scale_N = weight_TK.new_empty(num_rows).index_copy_(0, position_TK.view(-1).long(), weight_TK.view(-1))
    # Each product for a parameter's gradient runs as early as possible, so that its operands can be freed.
    # There is no communication that it could hide.
    grad_hidden_NG, active_NH, dot_N = grouped_gemm.hidden_gradient(
        grad_NM, w2, hidden_NG, scale_N, ends_E, activation=activation, weighs_active=True
    )
    del hidden_NG
    of_x = of_weight = of_w1 = of_w2 = of_b1 = of_b2 = None
    if needs_w2:
        of_w2 = grouped_gemm.weight_gradient(grad_NM, active_NH, ends_E)
    del active_NH
    if needs_b2:
        of_b2 = grouped_gemm.sum_by_expert(grad_NM, ends_E, scale_N)
    del grad_NM
    if needs_weight:
        of_weight = dot_N.index_select(0, position_TK.view(-1)).view_as(weight_TK)
        if b2 is not None:
            of_bias_TE = grad_TM.to(dot_N.dtype) @ b2.to(dot_N.dtype).t()
            of_weight = of_weight + of_bias_TE.gather(1, expert_TK.long())
        of_weight = of_weight.to(weight_TK.dtype)
    if needs_b1:
        of_b1 = grouped_gemm.sum_by_expert(grad_hidden_NG, ends_E)
    if needs_w1:
        if gathers_for_weights(x_TM.device, x_TM.dtype, grad_hidden_NG.shape[1], position_TK.shape[1]):
            slots = slots_of(position_TK, num_rows)
            of_w1 = grouped_gemm.weight_gradient(grad_hidden_NG, x_TM, ends_E, slots=slots)
        else:
            rows_NM = permute.permute_directly(x_TM, position_TK, num_rows)
            of_w1 = grouped_gemm.weight_gradient(grad_hidden_NG, rows_NM, ends_E)
            del rows_NM
    if needs_x:
        of_rows_NM = grouped_gemm.input_gradient(grad_hidden_NG, w1, ends_E)
        del grad_hidden_NG
        of_x = permute.unpermute_directly(of_rows_NM, position_TK)
    return [of_x, of_weight, None, of_w1, of_w2, of_b1, of_b2][: len(wanted)]


def slots_of(position_TK: Tensor, num_rows: int) -> RowSlots:
    """Returns the slot of each sorted row: the index of its (token, choice) pair, (N,).

    Forward got the slots from the routing, but only the positions are saved for backward. This function
    inverts them.

    position_TK: (T, K) int32, for each of K choices of T tokens the index of its row among the sorted rows.
    num_rows: N = T * K, number of rows.
    """
    slot_N = torch.empty(num_rows, dtype=torch.int32, device=position_TK.device)
    numbers_N = torch.arange(num_rows, dtype=torch.int32, device=position_TK.device)
    slot_N.index_copy_(0, position_TK.view(-1).long(), numbers_N)
    return RowSlots(slot_N=slot_N, top_k=position_TK.shape[1])


# ---- A check of the kernels: a small case is computed by the kernels and by PyTorch on the CPU


NUM_TOKENS, NUM_EXPERTS = 75, 5
"""Numbers of tokens and experts with which the kernels are checked."""
NAMES = ("routing weights", "l_aux", "T_O", "d logits", "dT_I", "d w1", "d w2", "d b1", "d b2")


def one_rank_mismatch(case: KernelCase, top_k: int, normalize: bool) -> str | None:
    """Returns the first result that the kernels compute wrongly, with its error; None if all are right.

    Compares both passes of a small case on the GPU with the same functions on the CPU, in the same dtype and
    in float64.

    case: the device, dtype and kind of experts.
    top_k: number of experts of a token.
    normalize: whether the gate divides a token's weights by their sum.
    """
    generator = torch.Generator().manual_seed(0)
    experts = max(NUM_EXPERTS, top_k)
    width = NUM_HIDDEN * (2 if case.activation == "swiglu" else 1)
    tokens = (NUM_TOKENS, NUM_MODEL)
    weights = ((experts, width, NUM_MODEL), (experts, NUM_MODEL, NUM_HIDDEN))
    biases = ((experts, width), (experts, NUM_MODEL)) if case.bias else ()
    shapes = (tokens, tokens, *weights, *biases)
    operands = [torch.randn(*shape, generator=generator).mul_(0.25).to(case.dtype) for shape in shapes]
    logits_TE = torch.randn(NUM_TOKENS, experts, generator=generator)
    both = functools.partial(_both_passes, top_k, normalize, case.activation)
    with torch.inference_mode(False), torch.autocast(case.device.type, enabled=False):
        plain = both(logits_TE, operands)
        exact = both(logits_TE.double(), [operand.double() for operand in operands])
        try:
            computed = both(logits_TE.to(case.device), [operand.to(case.device) for operand in operands])
            return first_wrong(NAMES[: len(exact)], computed, plain, exact, case.dtype)
        except Exception as error:
            return f"a small case failed: {error}"


def _both_passes(
    top_k: int, normalize: bool, activation: str, logits_TE: Tensor, operands: Sequence[Tensor]
) -> list[Tensor]:
    """Runs both passes of a small case, and returns its results and gradients in the order of `NAMES`.

    top_k, normalize, activation: the settings of the gate and the experts.
    logits_TE: (T, E), the gate's logits for T tokens and E experts.
    operands: x (T, M), the gradient of T_O (T, M), then w1, w2 and the biases, if there are any. M = d_model.
    """
    x_TM, grad_TM, *parameters = operands
    with torch.enable_grad():
        differentiated = [tensor.requires_grad_() for tensor in (logits_TE, x_TM, *parameters)]
        routes = route.route(logits_TE, top_k, normalize=normalize, z_loss_weight=0.1)
        inputs = Inputs(x_TM=x_TM, weight_TK=routes.weight_TK, parameters=parameters)
        y_TM = run_as_one_node(OneRankRunner(routes, activation), inputs, Ranks.single(), needs_grad=True)
        gradients = torch.autograd.grad([routes.l_aux, y_TM], differentiated, [None, grad_TM])
    return [*(tensor.detach() for tensor in (routes.weight_TK, routes.l_aux, y_TM)), *gradients]
