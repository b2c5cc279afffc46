"""The plain definition of every grouped product, for any dtype and device. It reads `ends_E` on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.kernels.grouped_gemm.checks import RowSlots


def gather(rows: Tensor, slots: RowSlots | None, gathered: bool) -> Tensor:
    """Returns the N rows: gathered from tokens by slots, or the rows themselves."""
    if not gathered or slots is None:
        return rows
    return rows.index_select(0, slots.slot_N.long() // slots.top_k)


def by_row(scale: Tensor, slots: RowSlots | None) -> Tensor:
    """Returns the scale of each row, (N,), from a scale that is by slot if there are slots."""
    return scale if slots is None else scale.index_select(0, slots.slot_N.long())


def product(
    rows: Tensor, weight_EOI: Tensor, ends_E: Tensor, bias: Tensor | None, scale_N: Tensor | None, out: Tensor
) -> Tensor:
    """Fills out (N, O) with (rows weight[e]^T + bias[e]) * scale, rounded once."""
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
    """Fills out (N, G) and active (N, H), and returns the inner products (N,); see `products`."""
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
    """Fills out (E, O, I) with grad[rows of e]^T rows[rows of e], or adds it."""
    if not accumulate:
        out.zero_()
    for expert, at in _groups(ends_E):
        out[expert] += grad[at].to(out.dtype).t() @ rows[at].to(out.dtype)
    return out


def activate(activation: str, hidden_NG: Tensor) -> Tensor:
    """Returns the activated hidden (N, H) in the dtype of hidden (N, G)."""
    wide = hidden_NG.to(torch.promote_types(hidden_NG.dtype, torch.float32))
    if activation == "swiglu":
        gate, up = wide.chunk(2, dim=1)
        return (F.silu(gate) * up).to(hidden_NG.dtype)
    functions: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
    return functions[activation](wide).to(hidden_NG.dtype)


def slope(activation: str, hidden_NG: Tensor, grad_NH: Tensor) -> Tensor:
    """Returns the gradient of hidden (N, G) from that of the activated hidden (N, H).

    It consists of plain operations, so unlike autograd.grad it can be traced.
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
    """Yields (expert, slice of its rows) for each expert that has rows."""
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end < start:
            raise ValueError(f"ends ({ends_E.tolist()}) must not decrease: they are a running sum")
        if end > start:
            yield expert, slice(start, end)
        start = end
