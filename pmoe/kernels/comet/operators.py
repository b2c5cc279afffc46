"""The four fused steps and the plain dispatch, each one launch for all ranks of this process.

    forward    dispatch_hidden            dispatch + first product + nonlinearity
               product_combine            second product + sum over choices + combine
    backward   dispatch_hidden_gradient   dispatch of dT_O + gradient of the hidden
               gradient_combine           gradient of the rows + sum over choices + combine
               dispatch                   rows alone, if T_DI is sent again

Arguments that belong to a rank are lists, one entry a rank. Tensors by token hold the tokens of all these
ranks.

The functions ``..._fields`` return the fields of a launch: addresses, strides and sizes. They raise
ValueError, naming the tensor, for operands that the kernels would read wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.comet.launcher import Launcher
from pmoe.kernels.gemm import ACTIVATIONS, HIDDEN, HIDDEN_GRADIENT
from pmoe.kernels.heap import Heap
from pmoe.kernels.operands import address, at, check_memory, check_tensor


@dataclass(frozen=True, kw_only=True)
class FusedRouting:
    """The destinations of the rows of one rank's tokens, and the rows that come to it, all in int32.

    rank: this rank.
    expert_TK: (T, K), numbers among the experts of all ranks.
    position_TK: (T, K), the place of each slot's row among the rows that this rank sends, which are sorted by
        expert, then by token; -1 if the slot is dropped.
    slot_S: (S,), the slot of each row that this rank sends.
    send_WE: (W, E), this rank's rows for each rank's experts, on the device.
    recv_WE: (W, E), rows from each rank for this rank's experts, on the device.
    num_received: N, or an upper bound of it.
    first_token, num_tokens: this rank's tokens, if the tensors by token hold those of several ranks.
    first_row: the first position of this rank's rows then, as `pmoe.kernels.route` numbers them with one
        chunk for each rank.
    """

    rank: int
    expert_TK: Tensor
    position_TK: Tensor
    slot_S: Tensor
    send_WE: Tensor
    recv_WE: Tensor
    num_received: int
    first_token: int = 0
    num_tokens: int | None = None
    first_row: int = 0

    @property
    def top_k(self) -> int:
        """K, choices of a token."""
        return self.expert_TK.shape[1]

    @property
    def ends_E(self) -> Tensor:
        """(E,) int32, the running sum of the rows that arrive for each expert."""
        return self.recv_WE.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def routing_fields(heap: Heap, fused_routing: FusedRouting) -> dict[str, int]:
    """Returns the fields that say where rows go. Raises ValueError if the heap has too few rows."""
    shape = heap.shape
    if fused_routing.num_received > shape.rows:
        raise ValueError(
            f"num_received ({fused_routing.num_received}) must be at most the heap's {shape.rows} rows"
        )
    sent = fused_routing.slot_S.shape[0]
    if fused_routing.num_tokens is not None:
        sent = min(sent, fused_routing.num_tokens * fused_routing.top_k)
    if sent > shape.home_rows:
        raise ValueError(
            f"rows that may be sent ({sent}) must be at most the heap's home_rows ({shape.home_rows})"
        )
    check_tensor("send_WE", fused_routing.send_WE, shape=(shape.num_ranks, shape.experts))
    for name in ("expert_TK", "position_TK", "slot_S", "send_WE"):
        check_tensor(
            name, getattr(fused_routing, name), dtypes=[torch.int32], device=heap.device, contiguous=True
        )
    recv_WE = fused_routing.recv_WE
    check_tensor("recv_WE", recv_WE, dtypes=[torch.int32], device=heap.device)
    if recv_WE.stride(1) != 1:
        raise ValueError(f"recv_WE of strides {recv_WE.stride()} must have a column stride of 1")
    return {
        "send_counts": fused_routing.send_WE.data_ptr(),
        "recv_counts": recv_WE.data_ptr(),
        "recv_stride": recv_WE.stride(0),
        "expert": fused_routing.expert_TK.data_ptr(),
        "position": fused_routing.position_TK.data_ptr(),
        "slot": fused_routing.slot_S.data_ptr(),
        "first_row": fused_routing.first_row,
        "top_k": fused_routing.top_k,
        "computes": 1,
    }


def check_tokens(heap: Heap, expert_TK: Tensor, source_TM: Tensor, weight_TK: Tensor) -> None:
    """Raises ValueError unless kernels can read rows by token, (T, M), and routing weights, (T, K)."""
    shape = heap.shape
    device = heap.device
    rows_shape = (expert_TK.shape[0], shape.d_model)
    slots_shape = expert_TK.shape
    check_tensor("rows", source_TM, shape=rows_shape, dtypes=[shape.dtype], device=device)
    check_memory(dense={"rows": source_TM})
    check_tensor(
        "weight", weight_TK, shape=slots_shape, dtypes=[torch.float32], device=device, contiguous=True
    )


def dispatch_fields(
    heap: Heap, fused_routing: FusedRouting, source_TM: Tensor, weight_TK: Tensor
) -> dict[str, int]:
    """Returns the fields of a launch that dispatches: rows of tokens leave, and arrive as the product's A."""
    check_tokens(heap, fused_routing.expert_TK, source_TM, weight_TK)
    shape = heap.shape
    places = shape.places
    return {
        **routing_fields(heap, fused_routing),
        "source": source_TM.data_ptr(),
        "source_stride": shape.row_bytes,
        "weight": weight_TK.data_ptr(),
        "a": heap.base + places["inbox"],
        "a_rows": max(shape.rows, 1),  # not 0: "a" is an address, also in a heap without rows
        "a_stride": shape.d_model,
        "row_weight": heap.base + places["weights"],
        "k": shape.d_model,
    }


def combine_fields(heap: Heap, fused_routing: FusedRouting, a: Tensor, result_TM: Tensor) -> dict[str, int]:
    """Returns the fields of a launch that combines.

    a: (rows, columns), the first operand of the product, whose result is written where dispatched rows lay.
    result_TM: (T, M), receives the sum of each token's rows.
    """
    shape = heap.shape
    check_tensor("rows", a, dtypes=[shape.dtype], device=heap.device)
    check_memory(dense={"rows": a, "result": result_TM})
    return {
        **routing_fields(heap, fused_routing),
        **at(a=a),
        "a_rows": a.shape[0],
        "rows": a.shape[0],
        "d": heap.base + shape.places["inbox"],
        "d_stride": shape.d_model,
        "n": shape.d_model,
        "k": a.shape[1],
        "columns": shape.d_model,
        "result": result_TM.data_ptr(),
        "result_stride": shape.row_bytes,
        "first_token": fused_routing.first_token,
        "tokens": fused_routing.expert_TK.shape[0]
        if fused_routing.num_tokens is None
        else fused_routing.num_tokens,
    }


def check_expert_weight(
    name: str, weight: Tensor, bias: Tensor | None, heap: Heap, *, columns: int
) -> tuple[int, int, int]:
    """Raises ValueError unless a weight fits the heap's experts. Returns its three sizes.

    columns: which of its dimensions is d_model.
    """
    check_memory(dense={name: weight, "bias": bias})
    shape = heap.shape
    expected: list[int | str] = [shape.experts, "columns", "columns"]
    expected[columns] = shape.d_model
    check_tensor(name, weight, shape=expected, dtypes=[shape.dtype], device=heap.device)
    if bias is not None:
        check_tensor("bias", bias, shape=weight.shape[:2], dtypes=[shape.dtype], device=heap.device)
    first, second, third = weight.shape
    return first, second, third


# ---- launches


def dispatch(
    launcher: Launcher, fused_routings: Sequence[FusedRouting], x_TM: Tensor, weight_TK: Tensor
) -> None:
    """Sends rows, (T, M), and their routing weights, (T, K), to the ranks that compute them."""
    fields = [
        {**dispatch_fields(heap, fused_routing, x_TM, weight_TK), "computes": 0}
        for heap, fused_routing in zip(launcher.heaps, fused_routings, strict=True)
    ]
    launcher.launch("dispatch", "forward", fields, epilogue=HIDDEN, activation=ACTIVATIONS["relu"])


def dispatch_hidden(
    launcher: Launcher,
    fused_routings: Sequence[FusedRouting],
    x_TM: Tensor,
    weight_TK: Tensor,
    w1: Sequence[Tensor],
    b1: Sequence[Tensor | None],
    *,
    activation: str,
    keep: bool,
) -> tuple[list[Tensor] | None, list[Tensor]]:
    """Dispatches rows and computes T_M = rows w1[e]^T + b1[e] and the activated hidden on each rank.

    x_TM: (T, M). weight_TK: (T, K).
    w1, b1: of each rank, (E, G, M) and (E, G).

    Returns lists with an entry for each rank: T_M (N, G), or None unless ``keep``, and the activated hidden
    (N, H).
    """
    fields = []
    hidden = []
    active = []
    for heap, fused_routing, weight_EGM, bias in zip(launcher.heaps, fused_routings, w1, b1, strict=True):
        _, num_hidden, _ = check_expert_weight("w1", weight_EGM, bias, heap, columns=2)
        width = num_hidden // 2 if activation == "swiglu" else num_hidden
        active.append(x_TM.new_empty(fused_routing.num_received, width))
        if keep:
            hidden.append(x_TM.new_empty(fused_routing.num_received, num_hidden))
        fields.append(
            {
                **dispatch_fields(heap, fused_routing, x_TM, weight_TK),
                "b": weight_EGM.data_ptr(),
                "n": num_hidden,
                "rows": fused_routing.num_received,
                "bias": address(bias),
                **at(d=hidden[-1] if keep else None, active=active[-1]),
            }
        )
    launcher.launch("dispatch", "forward", fields, epilogue=HIDDEN, activation=ACTIVATIONS[activation])
    return (hidden if keep else None), active


def product_combine(
    launcher: Launcher,
    fused_routings: Sequence[FusedRouting],
    active: Sequence[Tensor],
    w2: Sequence[Tensor],
    b2: Sequence[Tensor | None],
) -> Tensor:
    """Returns T_O (T, M): the sum over each token's rows of (active w2[e]^T + b2[e]) * weight.

    active: of each rank, the activated hidden (N, H).
    w2, b2: of each rank, (E, M, H) and (E, M).

    The weights are those that the dispatch before it sent. Each rank sums its own rows of a token before they
    travel. The token's owner adds these sums in the order of the token's choices, so results repeat to the
    bit.
    """
    fields = []
    result_TM = active[0].new_empty(fused_routings[0].expert_TK.shape[0], launcher.heaps[0].shape.d_model)
    by_rank = zip(launcher.heaps, fused_routings, active, w2, b2, strict=True)
    for heap, fused_routing, active_NH, weight_EMH, bias in by_rank:
        _, _, width = check_expert_weight("w2", weight_EMH, bias, heap, columns=1)
        check_tensor("active", active_NH, shape=("rows", width))
        fields.append(
            {
                **combine_fields(heap, fused_routing, active_NH, result_TM),
                "b": weight_EMH.data_ptr(),
                "bias": address(bias),
                "row_weight": heap.base + heap.shape.places["weights"],
            }
        )
    launcher.launch("combine", "forward", fields)
    return result_TM


def dispatch_hidden_gradient(
    launcher: Launcher,
    fused_routings: Sequence[FusedRouting],
    grad_TM: Tensor,
    weight_TK: Tensor,
    w2: Sequence[Tensor],
    b2: Sequence[Tensor | None],
    hidden: Sequence[Tensor],
    *,
    activation: str,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Dispatches dT_O, (T, M), and computes three tensors from it on each rank:

        dT_M times the rows' weights              (N, G)
        the activated hidden times the weights    (N, H)
        parts of the weights' gradients           (P, N), to be summed over P in this order

    The weights' gradient is <activated hidden, grad w2[e]> + <grad, b2[e]>. Each of the first P - 1 parts is
    the inner product over some columns, the last part is the bias's; without a bias all P are parts of the
    inner product.

    weight_TK: (T, K).
    w2, b2, hidden: of each rank, (E, M, H), (E, M) and T_M (N, G).
    """
    fields = []
    grad_hidden = []
    active = []
    dots = []
    by_rank = zip(launcher.heaps, fused_routings, w2, hidden, b2, strict=True)
    for heap, fused_routing, weight_EMH, hidden_NG, bias in by_rank:
        _, _, width = check_expert_weight("w2", weight_EMH, None, heap, columns=1)
        check_memory(dense={"hidden": hidden_NG})
        num_rows = hidden_NG.shape[0]
        parts = extension.module().row_dot_parts(launcher.hopper, width)
        grad_hidden.append(torch.empty_like(hidden_NG))
        active.append(hidden_NG.new_empty(num_rows, width))
        dots.append(hidden_NG.new_empty(parts + (bias is not None), num_rows, dtype=torch.float32))
        fields.append(
            {
                **dispatch_fields(heap, fused_routing, grad_TM, weight_TK),
                "b": weight_EMH.data_ptr(),
                "n": width,
                "rows": num_rows,
                **at(d=grad_hidden[-1], hidden=hidden_NG, active=active[-1]),
                "made_dots": dots[-1].data_ptr(),
                "weighs_active": 1,
            }
        )
    kind = ACTIVATIONS[activation]
    launcher.launch("dispatch", "backward", fields, epilogue=HIDDEN_GRADIENT, activation=kind)
    for heap, fused_routing, bias, dots_PN in zip(launcher.heaps, fused_routings, b2, dots, strict=True):
        if bias is not None:
            dots_PN[-1] = _dots_with_bias(heap.rows(dots_PN.shape[1]), bias, fused_routing.ends_E)
    return grad_hidden, active, dots


def _dots_with_bias(rows_NM: Tensor, bias_EM: Tensor, ends_E: Tensor) -> Tensor:
    """Returns the inner product of each row with the bias of its expert: (N,) float32.

    ends_E: (E,), the running sum of rows by expert. Rows beyond the last expert's use its bias.
    """
    by_expert_NE = rows_NM.float() @ bias_EM.float().t()
    row_N = torch.arange(rows_NM.shape[0], dtype=torch.int32, device=rows_NM.device)
    expert_N = torch.searchsorted(ends_E, row_N, right=True).clamp_(max=bias_EM.shape[0] - 1)
    return by_expert_NE.gather(1, expert_N.unsqueeze(1)).squeeze(1)


def gradient_combine(
    launcher: Launcher,
    fused_routings: Sequence[FusedRouting],
    of_hidden: Sequence[Tensor],
    w1: Sequence[Tensor],
    dots: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Returns dT_I (T, M) and the gradients of the routing weights (T, K), 0 for dropped slots.

    dT_I of a token is the sum of dT_M w1[e] over its rows, added in the order of `product_combine`.

    of_hidden: dT_M of each rank, (N, G).
    w1: of each rank, (E, G, M).
    dots: parts of the weights' gradients of each rank, (P, N).
    """
    fields = []
    num_tokens, top_k = fused_routings[0].expert_TK.shape
    result_TM = of_hidden[0].new_empty(num_tokens, launcher.heaps[0].shape.d_model)
    grad_weight_TK = of_hidden[0].new_empty(num_tokens, top_k, dtype=torch.float32)
    by_rank = zip(launcher.heaps, fused_routings, of_hidden, w1, dots, strict=True)
    for heap, fused_routing, grad_NG, weight_EGM, dots_PN in by_rank:
        _, width, _ = check_expert_weight("w1", weight_EGM, None, heap, columns=2)
        check_tensor("gradient of the hidden", grad_NG, shape=("rows", width))
        fields.append(
            {
                **combine_fields(heap, fused_routing, grad_NG, result_TM),
                "b": weight_EGM.data_ptr(),
                "row_dots": dots_PN.data_ptr(),
                "dot_parts": dots_PN.shape[0],
                "dot_rows": dots_PN.shape[1],
                "weight_gradient": grad_weight_TK.data_ptr(),
            }
        )
    launcher.launch("combine", "backward", fields)
    return result_TM, grad_weight_TK
