"""The plain definition of every grouped product, for any type and device. `ends_E` is read on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.kernels.grouped_gemm.checks import RowSlots


def product(
    rows: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    bias_EO: Tensor | None,
    scale: Tensor | None,
    slots: RowSlots | None,
    gathered: bool,
    out: Tensor,
) -> Tensor:
    """out (N, O) = (rows weight[e]^T + bias[e]) * scale, rounded once."""
    rows_N = _gather(rows, slots, gathered)
    wide = torch.promote_types(rows.dtype, torch.float32)
    scale_N = None if scale is None else _by_row(scale, slots).to(wide)
    for expert, at in _groups(ends_E):
        found = rows_N[at].to(wide) @ weight_EOI[expert].t().to(wide)
        if bias_EO is not None:
            found = found + bias_EO[expert].to(wide)
        out[at] = (found if scale_N is None else found * scale_N[at].unsqueeze(1)).to(out.dtype)
    return out


def hidden_gradient(
    grad: Tensor,
    weight_EMH: Tensor,
    hidden_NG: Tensor,
    scale: Tensor,
    ends_E: Tensor,
    *,
    activation: str,
    slots: RowSlots | None,
    gathered: bool,
    weighs_active: bool,
    out: Tensor,
    active: Tensor,
) -> Tensor:
    """The inner products (N,); fills out (N, G) and active (N, H)."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    of_active = active.new_empty(active.shape, dtype=wide)
    transposed = weight_EMH.transpose(1, 2).to(wide)
    product(grad.to(wide), transposed, ends_E, None, None, slots, gathered, of_active)
    row_scale = _by_row(scale, slots).to(wide).unsqueeze(1)
    value = activate(activation, hidden_NG.to(wide))
    gradient = slope(activation, hidden_NG.to(wide), of_active * row_scale)
    dot_N = (value * of_active).sum(1)
    active.copy_(value * row_scale if weighs_active else value)
    out.copy_(gradient)
    return dot_N


def weight_gradient(
    grad: Tensor,
    rows: Tensor,
    ends_E: Tensor,
    *,
    slots: RowSlots | None,
    gathers_grad: bool,
    gathers_rows: bool,
    out: Tensor,
    accumulate: bool,
) -> Tensor:
    """out (E, O, I) = grad[rows of e]^T rows[rows of e], or added to it."""
    grad_N, rows_N = _gather(grad, slots, gathers_grad), _gather(rows, slots, gathers_rows)
    if not accumulate:
        out.zero_()
    for expert, at in _groups(ends_E):
        out[expert] += grad_N[at].to(out.dtype).t() @ rows_N[at].to(out.dtype)
    return out


def activate(activation: str, hidden_NG: Tensor) -> Tensor:
    """The activated hidden (N, H), of the hidden's type."""
    wide = hidden_NG.to(torch.promote_types(hidden_NG.dtype, torch.float32))
    if activation == "swiglu":
        gate, up = wide.chunk(2, dim=1)
        return (F.silu(gate) * up).to(hidden_NG.dtype)
    functions: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
    return functions[activation](wide).to(hidden_NG.dtype)


def slope(activation: str, hidden_NG: Tensor, grad_NH: Tensor) -> Tensor:
    """The gradient of hidden (N, G) for that of the activated one; traceable, unlike autograd.grad."""
    if activation == "swiglu":
        gate, up = hidden_NG.chunk(2, dim=1)
        of_gate = torch.ops.aten.silu_backward(grad_NH * up, gate)
        return torch.cat([of_gate, grad_NH * F.silu(gate)], dim=1)
    if activation == "relu":
        return grad_NH * (hidden_NG > 0)
    backward = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}[activation]
    found: Tensor = backward(grad_NH, hidden_NG)
    return found


def _groups(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end < start:
            raise ValueError(f"ends ({ends_E.tolist()}) must not decrease: they are a running sum")
        if end > start:
            yield expert, slice(start, end)
        start = end


def _gather(rows: Tensor, slots: RowSlots | None, gathered: bool) -> Tensor:
    if not gathered or slots is None:
        return rows
    return rows.index_select(0, slots.slot_N.long() // slots.top_k)


def _by_row(scale: Tensor, slots: RowSlots | None) -> Tensor:
    return scale if slots is None else scale.index_select(0, slots.slot_N.long())
