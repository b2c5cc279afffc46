"""The grouped products as PyTorch expressions, for any dtype and device.

They define what the kernels compute. They copy ``ends`` to the host, so on a GPU the host waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.kernels.grouped_gemm.checks import RowSlots


def gather(rows: Tensor, slots: RowSlots | None, gathered: bool) -> Tensor:
    """Returns the N rows of a product.

    rows: the N rows, which are returned as they are; or tokens, if ``gathered``.
    slots: slot of each row, its index among all (token, choice) pairs. Row r is read from token slot[r] //
        top_k.
    """
    if not gathered or slots is None:
        return rows
    return rows.index_select(0, slots.slot_N.long() // slots.top_k)


def by_row(scale: Tensor, slots: RowSlots | None) -> Tensor:
    """Returns the scale of each of N rows, (N,).

    scale: (N,); or by slot if there are slots, that is by index among all (token, choice) pairs.
    """
    return scale if slots is None else scale.index_select(0, slots.slot_N.long())


def product(
    rows: Tensor, weight_EOI: Tensor, ends_E: Tensor, bias: Tensor | None, scale_N: Tensor | None, out: Tensor
) -> Tensor:
    """Fills out (N, O) with (rows weight[e]^T + bias[e]) * scale for the rows of each expert e.

    Every number is rounded once.

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
    """Computes the gradient of the hidden activation from that of the expert's output.

    The arguments are those of `pmoe.kernels.grouped_gemm.hidden_gradient`. There are N rows of H = d_hidden
    columns, and G is H, or 2H for "swiglu". It fills out (N, G) with the gradient of the hidden activation
    before the nonlinearity, and active (N, H) with the activation after it. It returns the inner products of
    that activation with its gradient, (N,), which are the gradient of the routing weights.
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
    """Fills out (E, O, I) with grad[rows of e]^T rows[rows of e] for each expert e, or adds that to out.

    grad: (N, O), gradient of the product, N rows sorted by expert.
    rows: (N, I), the product's rows.
    ends_E: (E,), for each of E experts the index behind its last row.
    accumulate: whether to add.
    """
    if not accumulate:
        out.zero_()
    for expert, at in _groups(ends_E):
        out[expert] += grad[at].to(out.dtype).t() @ rows[at].to(out.dtype)
    return out


def activate(activation: str, hidden_NG: Tensor) -> Tensor:
    """Returns the activation after the nonlinearity, (N, H), from the activation before it, (N, G).

    It has the same dtype. G is H = d_hidden, or 2H for "swiglu"; there are N rows.
    """
    wide = hidden_NG.to(torch.promote_types(hidden_NG.dtype, torch.float32))
    if activation == "swiglu":
        gate, up = wide.chunk(2, dim=1)
        return (F.silu(gate) * up).to(hidden_NG.dtype)
    functions: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
    return functions[activation](wide).to(hidden_NG.dtype)


def slope(activation: str, hidden_NG: Tensor, grad_NH: Tensor) -> Tensor:
    """Returns the gradient before a nonlinearity, (N, G), from the gradient after it, (N, H).

    It consists of plain operations: unlike torch.autograd.grad, these can be traced.

    hidden_NG: (N, G), the hidden activation before the nonlinearity. G is H, or 2H for "swiglu".
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

    ends_E: (E,), the index behind each expert's last row. Raises ValueError if they decrease.
    """
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end < start:
            raise ValueError(f"ends ({ends_E.tolist()}) must not decrease: they are a running sum")
        if end > start:
            yield expert, slice(start, end)
        start = end
