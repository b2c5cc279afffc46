"""The grouped products as PyTorch expressions, for any dtype and device.

These expressions define what the kernels compute. N rows are sorted by expert; ``ends_E`` (E,) has the index
behind the last row of each of E experts. The functions copy ``ends_E`` to the host, so on a GPU the host
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.kernels.grouped_gemm.checks import RowSlots


def gather(rows: Tensor, slots: RowSlots | None, gathered: bool) -> Tensor:
    """Returns the N rows of a product, (N, I), copied from T tokens if ``gathered``.

    rows: (N, I), the rows, which are returned unchanged; or (T, I), the tokens, if ``gathered``.
    slots: for each row r its slot, the index of its (token, choice) pair. The row is a copy of token slot[r]
        // top_k. None if not gathered.
    gathered: whether ``rows`` are tokens.
    """
    if not gathered or slots is None:
        return rows
    return rows.index_select(0, slots.slot_N.long() // slots.top_k)


def by_row(scale: Tensor, slots: RowSlots | None) -> Tensor:
    """Returns the factor of each of N rows, (N,).

    scale: (N,), factors by row, which are returned unchanged. If there are slots: (T * K,), factors by slot,
        for K choices of T tokens.
    slots: for each row its slot, the index of its (token, choice) pair; or None.
    """
    return scale if slots is None else scale.index_select(0, slots.slot_N.long())


def product(
    rows: Tensor, weight_EOI: Tensor, ends_E: Tensor, bias: Tensor | None, scale_N: Tensor | None, out: Tensor
) -> Tensor:
    """Fills out (N, O) with (rows weight[e]^T + bias[e]) * scale for the rows of each expert e.

    Sums are computed in float32 or wider, so each number of the result is rounded once. Returns ``out``.

    rows: (N, I), N rows sorted by expert.
    weight_EOI: (E, O, I), for E experts.
    ends_E: (E,), the index behind each expert's last row.
    bias: (E, O), or None.
    scale_N: (N,), factor of each row; or None.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    scale_N = None if scale_N is None else scale_N.to(wide)
    for expert, at in _groups(ends_E):
        result = rows[at].to(wide) @ weight_EOI[expert].t().to(wide)
        if bias is not None:
            result = result + bias[expert].to(wide)
        out[at] = (result if scale_N is None else result * scale_N[at].unsqueeze(1)).to(out.dtype)
    return out


def hidden_gradient(
    grad: Tensor,
    weight_EMH: Tensor,
    hidden_NG: Tensor,
    scale_N: Tensor,
    ends_E: Tensor,
    *,
    activation: str,
    weighs_active: bool,
    out: Tensor,
    active: Tensor,
) -> Tensor:
    """Computes the gradient of an expert's hidden activation from the gradient of the layer's output.

    grad: (N, M), gradient of the output for each of N rows, not multiplied by the routing weight. M =
        d_model.
    weight_EMH: (E, M, H), second weight of E experts. H = d_hidden.
    hidden_NG: (N, G), hidden activation before the nonlinearity. G is H, or 2H for "swiglu".
    scale_N: (N,), routing weight of each row.
    ends_E: (E,), the index behind each expert's last row.
    activation: name of the nonlinearity.
    weighs_active: whether ``active`` is multiplied by the routing weights.
    out: (N, G), is filled with the gradient of hidden_NG.
    active: (N, H), is filled with the activation after the nonlinearity.

    Returns (N,): for each row of expert e the inner product of two vectors, its activation after the
    nonlinearity and the product grad @ weight[e]. Without a bias this is the gradient of the row's routing
    weight.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    grad_active = active.new_empty(active.shape, dtype=wide)
    transposed = weight_EMH.transpose(1, 2).to(wide)
    product(grad.to(wide), transposed, ends_E, None, None, grad_active)
    row_scale = scale_N.to(wide).unsqueeze(1)
    value = activate(activation, hidden_NG.to(wide))
    gradient = slope(activation, hidden_NG.to(wide), grad_active * row_scale)
    dot_N = (value * grad_active).sum(1)
    active.copy_(value * row_scale if weighs_active else value)
    out.copy_(gradient)
    return dot_N


def weight_gradient(grad: Tensor, rows: Tensor, ends_E: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    """Computes the gradient of each expert's weight into ``out``, and returns ``out``.

        out[e] = grad[rows of e]^T rows[rows of e]      for each of E experts e

    grad: (N, O), gradient of the product, N rows sorted by expert.
    rows: (N, I), the product's rows.
    ends_E: (E,), the index behind each expert's last row.
    out: (E, O, I), memory for the result.
    accumulate: True adds the gradient to ``out``, False overwrites ``out``.
    """
    if not accumulate:
        out.zero_()
    for expert, at in _groups(ends_E):
        out[expert] += grad[at].to(out.dtype).t() @ rows[at].to(out.dtype)
    return out


def activate(activation: str, hidden_NG: Tensor) -> Tensor:
    """Returns the activation after the nonlinearity, (N, H), from the activation before the nonlinearity.

    activation: name of the nonlinearity.
    hidden_NG: (N, G), N rows. G is H = d_hidden, or 2H for "swiglu". The result has the same dtype.
    """
    wide = hidden_NG.to(torch.promote_types(hidden_NG.dtype, torch.float32))
    if activation == "swiglu":
        gate, up = wide.chunk(2, dim=1)
        return (F.silu(gate) * up).to(hidden_NG.dtype)
    functions: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
    return functions[activation](wide).to(hidden_NG.dtype)


def slope(activation: str, hidden_NG: Tensor, grad_NH: Tensor) -> Tensor:
    """Returns the gradient of a nonlinearity's input, (N, G), from the gradient of its output, (N, H).

    The function uses plain operations, because torch.autograd.grad cannot be traced.

    activation: name of the nonlinearity.
    hidden_NG: (N, G), the hidden activation before the nonlinearity, N rows. G is H = d_hidden, or 2H for
        "swiglu".
    grad_NH: (N, H), gradient of the activation after the nonlinearity.
    """
    if activation == "swiglu":
        gate, up = hidden_NG.chunk(2, dim=1)
        grad_gate = torch.ops.aten.silu_backward(grad_NH * up, gate)
        return torch.cat([grad_gate, grad_NH * F.silu(gate)], dim=1)
    if activation == "relu":
        return grad_NH * (hidden_NG > 0)
    backward = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}[activation]
    grad_NG: Tensor = backward(grad_NH, hidden_NG)
    return grad_NG


def _groups(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields (expert, slice of its rows) for each expert that has rows.

    ends_E: (E,), the index behind the last row of each of E experts.

    Raises ValueError if ``ends_E`` decreases.
    """
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end < start:
            raise ValueError(f"ends ({ends_E.tolist()}) must not decrease: they are a running sum")
        if end > start:
            yield expert, slice(start, end)
        start = end
