"""The fused forward and backward steps, each one launch for all ranks of this process.

    forward    dispatch_hidden            dispatch + w1's product + nonlinearity
               product_combine            w2's product + sum over each token's choices + combine
    backward   dispatch_hidden_gradient   dispatch of the output's gradient + gradient of the hidden
                                          activation
               gradient_combine           gradient of the rows + sum over each token's choices + combine
               dispatch                   dispatch alone, if the layer's input is sent a second time

An argument that differs between ranks is a list with an entry for each rank. Tensors that are indexed by
token hold the tokens of all these ranks.

The functions ``..._fields`` return a rank's arguments of a launch by name: addresses, strides and sizes.
These functions raise ValueError, naming the tensor, if the kernels could not read an operand correctly.

Letters: T tokens, K choices of a token, S rows that a rank sends, N rows that it receives, W ranks, E experts
of one rank, M = d_model, H = d_hidden, G = columns of the hidden activation before the nonlinearity: H, or 2H
for SwiGLU. The gradient of a routing weight is a sum over columns. Different thread blocks compute P partial
sums, each over a group of columns.
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
    """Destinations of the rows of one rank's tokens, and counts of the rows that arrive at the rank.

    All tensors are int32. A slot is one of the T * K (token, choice) pairs. Each slot that is not dropped has
    a row. The row is sent to the rank of the slot's expert, even if that rank is this rank itself.

    rank: this rank.
    expert_TK: (T, K), global expert index of each slot.
    position_TK: (T, K), index of each slot's row among the rows that this rank sends; -1 if the slot is
        dropped. These rows are sorted by expert, then by token.
    slot_S: (S,), slot of each of the S rows that this rank sends.
    send_WE: (W, E), number of rows that this rank sends to each of the E experts of each of the W ranks, on
        the device.
    recv_WE: (W, E), number of rows that each rank sends to each of this rank's experts, on the device.
    num_received: N, the number of rows that arrive, or an upper bound.

    Several ranks of this process may share the tensors that are indexed by token. The tokens of these ranks
    then follow each other, in order of rank. Three more fields say which tokens and rows are this rank's:

    first_token, num_tokens: this rank has the tokens from first_token up to, but not including, first_token +
        num_tokens. num_tokens is None if tensors are not shared.
    first_row: number of rows that the lower ranks of this process send. position_TK counts the rows of all
        these ranks, so a position minus first_row is an index among this rank's rows. 0 if not shared.
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
        """K, the number of choices of a token."""
        return self.expert_TK.shape[1]

    @property
    def ends_E(self) -> Tensor:
        """The index behind the last arriving row of each expert of this rank, (E,) int32."""
        return self.recv_WE.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def routing_fields(heap: Heap, fused_routing: FusedRouting) -> dict[str, int]:
    """Returns the arguments of a launch that say where rows go, by their names in cuda/comet/read.h.

    heap: this rank's symmetric heap.
    fused_routing: where the rows of this rank's tokens go, and which rows arrive.

    Raises ValueError if the heap has too little room for the rows of ``fused_routing``. Also raises it if the
    kernels cannot read a tensor (wrong shape, dtype, device or strides).
    """
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
    """Raises ValueError unless kernels can read the rows and routing weights that are to be dispatched.

    heap: this rank's symmetric heap, whose dtype and d_model the rows must have.
    expert_TK: (T, K), the experts of T tokens, K choices of each.
    source_TM: (T, M), a row of M = d_model columns for each token.
    weight_TK: (T, K), the routing weights.
    """
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
    """Returns the arguments of a launch that sends tokens as rows, and multiplies the rows that arrive.

    heap: this rank's symmetric heap. Rows that arrive in it are the first operand of the product.
    fused_routing: where the rows of this rank's tokens go, and which rows arrive.
    source_TM: (T, M), a row of M = d_model columns for each of T tokens.
    weight_TK: (T, K), the routing weights of the K choices of each token, which are sent with the rows.
    """
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
    """Returns the arguments of a launch that multiplies rows, and sends the results back to their tokens.

    heap: this rank's symmetric heap. The results overwrite the rows that were dispatched into it.
    fused_routing: the `FusedRouting` by which the rows were dispatched.
    a: (N, columns), the first operand of the product, for the N rows that arrived.
    result_TM: (T, M), memory for the sum of each token's results.
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
    """Raises ValueError unless kernels can read an expert weight and its bias. Returns the weight's shape.

    name: the weight's name, for the error.
    weight: (E, rows, columns), a matrix for each of this rank's E experts.
    bias: (E, rows), or None.
    heap: this rank's symmetric heap, whose dtype, d_model and number of experts the weight must have.
    columns: which dimension of ``weight`` must have size d_model: 1 (the rows) or 2 (the columns).
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
    """Sends tokens as rows, with their routing weights, to the ranks of their experts, without a product.

    launcher: has the heap of each rank of this process.
    fused_routings: for each of these ranks, where the rows of its tokens go.
    x_TM: (T, M), the T tokens of these ranks, M = d_model columns each.
    weight_TK: (T, K), the routing weights of the K choices of each token.
    """
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
    """Sends tokens to the ranks of their experts, which compute w1's product and the nonlinearity.

    The product is T_M = rows w1[e]^T + b1[e] for the rows of each expert e.

    launcher: has the heap of each rank of this process.
    fused_routings: for each of these ranks, where the rows of its tokens go, and which N rows arrive.
    x_TM: (T, M), the T tokens of these ranks, M = d_model columns each.
    weight_TK: (T, K), the routing weights of the K choices of each token.
    w1, b1: for each rank, weight (E, G, M) and bias (E, G) of its E experts. G is H = d_hidden, or 2H for
        SwiGLU.
    activation: name of the nonlinearity.
    keep: whether to store and return T_M.

    Returns two lists with an entry for each rank: T_M, (N, G); and the activation after the nonlinearity, (N,
    H). If ``keep`` is False, the first result is None.
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
    """Multiplies rows by w2, sends the results to their tokens' ranks, and sums each token's results.

    A token's output is the sum over its rows of (active w2[e]^T + b2[e]) * routing weight, where e is the
    row's expert. The last dispatch has sent the routing weights.

    launcher: has the heap of each rank of this process.
    fused_routings: for each of these ranks, the `FusedRouting` with which the rows were dispatched.
    active: for each rank, the activation after the nonlinearity, (N, H), of the N rows that arrived. H =
        d_hidden.
    w2, b2: for each rank, weight (E, M, H) and bias (E, M) of its E experts. M = d_model.

    Returns the layer's output (T_O) for all T tokens of these ranks, (T, M).

    A rank that holds several of a token's experts sends only the sum of their results. The token's rank adds
    the sums that arrive in the order of the token's choices, so the output has the same bits in each run.
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
    """Dispatches the output's gradient, and computes the hidden activation's gradient on each expert rank.

    launcher: has the heap of each rank of this process.
    fused_routings: for each of these ranks, where the rows of its tokens go, and which N rows arrive.
    grad_TM: (T, M), gradient of the layer's output for the tokens of these ranks.
    weight_TK: (T, K), the routing weights of the K choices of each token.
    w2, b2: for each rank, weight (E, M, H) and bias (E, M) of its E experts. H = d_hidden.
    hidden: for each rank, the hidden activation before the nonlinearity (T_M), (N, G), of the N rows that
        arrive. G is H, or 2H for SwiGLU.
    activation: name of the nonlinearity.

    Returns three lists with an entry for each rank. For a row of expert e, let g (M columns) be the gradient
    of the token's output, s the routing weight, h the row's T_M, and a the activation of h (H columns):

        gradient of h: s * (g w2[e]) through the nonlinearity's derivative   (N, G)
        s * a, which the gradient of w2 needs                                (N, H)
        P numbers for each row, which add up to the gradient of s            (P, N)

    The gradient of s is <a, g w2[e]> + <b2[e], g>. Each of the P numbers is the sum of <a, g w2[e]> over a
    group of the H columns; with a bias, the last of the P numbers is <b2[e], g>. The caller must add the P
    numbers in order.
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
    """Returns the inner product of each row with the bias of its expert, (N,) float32.

    rows_NM: (N, M), N rows of M columns, sorted by expert. N may be larger than the number of rows that
        arrived. The results of the unused rows at the end have no meaning.
    bias_EM: (E, M), the bias of each of E experts.
    ends_E: (E,), for each expert the index after its last row.
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
    """Computes the rows' gradients, sends them to their tokens' ranks, and sums each token's gradients.

    The gradient of a row of expert e is its hidden gradient times w1[e]. A token's gradient is the sum over
    its rows, added in the order of the token's choices, so it has the same bits in each run.

    launcher: has the heap of each rank of this process.
    fused_routings: for each of these ranks, the `FusedRouting` with which the rows were dispatched.
    of_hidden: for each rank, the gradient of the hidden activation before the nonlinearity, (N, G), of the N
        rows that arrived. G is H = d_hidden, or 2H for SwiGLU.
    w1: for each rank, the weight (E, G, M) of its E experts. M = d_model.
    dots: for each rank, the third result of `dispatch_hidden_gradient`: P partial sums for each row, (P, N),
        which add up to the gradient of the row's routing weight.

    Returns the gradient of the layer's input for all T tokens of these ranks, (T, M), and the gradient of the
    routing weights, (T, K) for K choices of each token, which is 0 for dropped choices.
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
