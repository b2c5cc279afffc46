"""Grouped products with what follows them fused: rows sorted by expert times that expert's matrix.

Expert e owns rows ends[e - 1] to ends[e], and ends[E - 1] is N: group sizes are on the device, and nothing
here waits for them. Rows may be gathered: row r of the N is then row slot[r] // K of what is given, as the
tokens of T*K slots are, so that the dispatched rows (T_DI) need not exist. The kernels are in
cuda/grouped_gemm; without them, or on the CPU, the plain definition below is computed.

Letters: N rows, E experts, K choices, S slots, I in-features, O out-features, M = d_model, H = d_hidden,
G = H or 2H rows of w1.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.kernels import extension
from pmoe.kernels.permute import unpermute

MOST_ROWS = 2**31 - 1

ACTIVATIONS = {"relu": 1, "gelu": 2, "silu": 3, "swiglu": 4}
"""As in cuda/common/activation.h. "swiglu" has hidden columns in two halves: silu(first) * second."""
_ELEMENTS = {torch.bfloat16: 0, torch.float16: 1}
_FORWARD, _INPUT, _WEIGHT = 0, 1, 2
_PLAIN, _HIDDEN, _HIDDEN_GRADIENT = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Which slot each of the N rows is. slot_N: int32, below T*K; slot s is of token s // top_k. Weights
    of rows are then by slot, (T*K,)."""

    slot_N: Tensor
    top_k: int


CLUSTER = 0
"""How many blocks share an operand on Hopper: 1, 2, or 0 for whichever is better by rule. For benchmarks."""


# ---- what a device can run


def path(device: torch.device) -> tuple[str | None, str | None]:
    """("sm_90a" or "sm_80", None): whose kernels a CUDA device runs; or (None, why there are none). Read from
    the kernels as the driver loaded them."""
    if device.type != "cuda":
        return None, f"device {device.type}: the kernels are CUDA's"
    return _path(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _path(index: int) -> tuple[str | None, str | None]:
    module = extension.load()
    if module is None:
        return None, extension.status().reason
    return path_of(extension.on_device(index))


def path_of(device: extension.Device) -> tuple[str | None, str | None]:
    """As `path`, of a device whose kernels are loaded."""
    for name in ("sm_90a", "sm_80"):
        found = [each for each in device.kernels if each.name.startswith(f"grouped_gemm.{name}.")]
        if found and all(each.refusal is None for each in found):
            return name, None
    reason = device.reason or "; ".join(sorted({each.refusal for each in device.kernels if each.refusal}))
    return None, f"device {device.index}: {reason or 'there are no grouped products in the extension'}"


def misfit(dtype: torch.dtype, **columns: int) -> str | None:
    """Why operands of this type and these numbers of columns do not fit the kernels, or None."""
    if dtype not in _ELEMENTS:
        return f"dtype {dtype}: the kernels take bfloat16 and float16"
    for name, count in columns.items():
        if count % 8 or not count:
            return f"{name} ({count}) must be a multiple of 8 and at least 8: 16 bytes a load"
    return None


def refusal(device: torch.device, dtype: torch.dtype, **columns: int) -> str | None:
    """Why the kernels would not compute a product of such operands on this device, or None."""
    return path(device)[1] or misfit(dtype, **columns)


# ---- checks


def _check_rows(name: str, rows: Tensor, like: Tensor) -> None:
    if rows.dim() != 2:
        raise ValueError(f"{name} of shape {tuple(rows.shape)} must have two dimensions")
    if rows.shape[0] > MOST_ROWS:
        raise ValueError(f"{name} of {rows.shape[0]} rows must have at most {MOST_ROWS}: places are int32")
    _check_like(name, rows, like)


def _check_like(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name} on {tensor.device} must be where the weights are ({like.device})")
    if tensor.dtype != like.dtype:
        raise ValueError(f"{name} of dtype {tensor.dtype} must be of the weights' dtype ({like.dtype})")


def _check_weight(name: str, weight: Tensor) -> None:
    if weight.dim() != 3:
        raise ValueError(f"{name} of shape {tuple(weight.shape)} must have three dimensions, experts first")
    if not weight.is_floating_point():
        raise ValueError(f"{name} of dtype {weight.dtype} must be of a floating-point type")


def _check_bias(bias: Tensor | None, weight: Tensor) -> None:
    if bias is None:
        return
    if tuple(bias.shape) != tuple(weight.shape[:2]):
        raise ValueError(f"bias of shape {tuple(bias.shape)} must be {tuple(weight.shape[:2])}")
    _check_like("bias", bias, weight)


def _check_memory(**tensors: Tensor | None) -> None:
    """As the kernels read it: rows wherever they lie, weights without gaps."""
    for name, tensor in tensors.items():
        if tensor is None or not tensor.numel():
            continue
        if tensor.dim() == 2 and name != "bias":
            _check_rows_apart(name, tensor)
        elif not tensor.is_contiguous():
            raise ValueError(f"{name} of strides {tensor.stride()} must be contiguous")
        if name == "scale":
            if tensor.dtype != torch.float32:
                raise ValueError(f"scale of dtype {tensor.dtype} must be torch.float32")
        elif tensor.data_ptr() % 16:
            raise ValueError(f"{name} at address {tensor.data_ptr():#x} must be aligned to 16 bytes")


def _check_rows_apart(name: str, rows: Tensor) -> None:
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        raise ValueError(f"{name} of strides {rows.stride()} must have neighbouring columns")
    if rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
        raise ValueError(
            f"{name} of shape {tuple(rows.shape)} and strides {rows.stride()}: rows must not overlap"
        )
    row_bytes = rows.stride(0) * rows.element_size()
    if rows.shape[0] > 1 and row_bytes % 16:
        raise ValueError(f"{name}: rows {row_bytes} bytes apart must be a multiple of 16 bytes apart")


def _check_index(name: str, index: Tensor, count: int | None, device: torch.device) -> None:
    if index.dtype != torch.int32 or index.dim() != 1 or not index.is_contiguous():
        raise ValueError(
            f"{name} of dtype {index.dtype} and shape {tuple(index.shape)} must be contiguous int32 of one "
            "dimension"
        )
    if count is not None and index.numel() != count:
        raise ValueError(f"{name} of {index.numel()} numbers must have {count}")
    if index.device != device:
        raise ValueError(f"{name} on {index.device} must be where the rows are ({device})")


def _check_scale(
    scale: Tensor | None, rows: Tensor, num_rows: int, slots: Slots | None, gathered: bool
) -> None:
    """By slot there is one for every slot of the tokens that are given, or for N at least."""
    if scale is None:
        return
    count = rows.shape[0] * slots.top_k if slots is not None and gathered else num_rows
    fits = scale.numel() >= count if slots is not None and not gathered else scale.numel() == count
    if scale.dim() != 1 or not scale.is_floating_point() or not fits:
        raise ValueError(
            f"scale of dtype {scale.dtype} and shape {tuple(scale.shape)} must be ({count},) and floating"
        )
    if scale.device != rows.device:
        raise ValueError(f"scale on {scale.device} must be where the rows are ({rows.device})")


def _check_slots(slots: Slots | None, num_rows: int, device: torch.device) -> None:
    if slots is None:
        return
    _check_index("slot", slots.slot_N, num_rows, device)
    if slots.top_k < 1:
        raise ValueError(f"top_k ({slots.top_k}) must be at least 1")


def _check_out(name: str, out: Tensor, shape: tuple[int, int], like: Tensor) -> None:
    if tuple(out.shape) != shape:
        raise ValueError(f"{name} of shape {tuple(out.shape)} must be {shape}")
    _check_rows(name, out, like)


def _activation(activation: str) -> int:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation ({activation!r}) must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


# ---- launches


@functools.cache
def _tell(reason: str) -> None:
    warnings.warn(f"pmoe: grouped products are computed without pmoe's kernels: {reason}", stacklevel=2)


def _kernels(device: torch.device, dtype: torch.dtype, **columns: int) -> str | None:
    """The path that computes these operands; None on the CPU, and where there are no kernels, which is told
    once. Raises ValueError for operands that do not fit the kernels that there are."""
    if device.type != "cuda":
        return None
    found, why = path(device)
    if found is None:
        _tell(str(why))
        return None
    why = misfit(dtype, **columns)
    if why is not None:
        raise ValueError(f"grouped product: {why}")
    return found


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _stride(rows: Tensor) -> int:
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


def _launch(
    kernels: str,
    form: int,
    like: Tensor,
    ends: Tensor,
    slots: Slots | None,
    epilogue: int = _PLAIN,
    **fields: Any,
) -> None:
    module = extension.load()
    assert module is not None
    module.grouped_gemm(
        device=like.device.index,
        stream=torch.cuda.current_stream(like.device).cuda_stream,
        hopper=kernels == "sm_90a",
        element=_ELEMENTS[like.dtype],
        form=form,
        epilogue=epilogue,
        ends=ends.data_ptr(),
        experts=ends.numel(),
        slot=0 if slots is None else slots.slot_N.data_ptr(),
        top_k=1 if slots is None else slots.top_k,
        cluster=CLUSTER if kernels == "sm_90a" else 1,
        **fields,
    )


def _num_rows(rows: Tensor, slots: Slots | None, gathered: bool) -> int:
    if rows.dim() != 2:
        raise ValueError(f"rows of shape {tuple(rows.shape)} must have two dimensions")
    if gathered and slots is None:
        raise ValueError("gathered (True) must be False without slots: they say which rows to gather")
    return slots.slot_N.numel() if gathered and slots is not None else rows.shape[0]


def _checked(
    rows: Tensor, weight: Tensor, ends: Tensor, slots: Slots | None, gathered: bool, columns: int
) -> int:
    """N. columns: which of the weight's dimensions the rows have as columns."""
    _check_weight("weight", weight)
    num_rows = _num_rows(rows, slots, gathered)
    _check_rows("rows", rows, weight)
    if rows.shape[1] != weight.shape[columns]:
        raise ValueError(f"rows of {rows.shape[1]} columns must have {weight.shape[columns]}, as weight has")
    _check_index("ends", ends, weight.shape[0], rows.device)
    _check_slots(slots, num_rows, rows.device)
    return num_rows


def _hidden_width(num_hidden: int, activation: str) -> int:
    if activation != "swiglu":
        return num_hidden
    if num_hidden % 2:
        raise ValueError(f"weight of {num_hidden} rows an expert must have an even number for swiglu")
    return num_hidden // 2


def product(
    rows: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    *,
    bias_EO: Tensor | None = None,
    scale: Tensor | None = None,
    slots: Slots | None = None,
    gathered: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """(rows weight[e]^T + bias[e]) * scale for the rows of each expert e, (N, O), rounded once.

    rows: (N, I), or whatever the slots gather from. ends_E: int32, the running sum of rows by expert. scale:
    float32, (N,), by slot where slots are given. out: rows as far apart as they like. Rows behind ends[E - 1]
    are left alone. No gradient; `grouped_product` has one. Raises ValueError for operands that do not fit.
    """
    num_rows = _checked(rows, weight_EOI, ends_E, slots, gathered, 2)
    _check_bias(bias_EO, weight_EOI)
    _check_scale(scale, rows, num_rows, slots, gathered)
    _, num_out, num_in = weight_EOI.shape
    out = rows.new_empty(num_rows, num_out) if out is None else out
    _check_out("out", out, (num_rows, num_out), weight_EOI)
    kernels = _kernels(rows.device, rows.dtype, in_features=num_in, out_features=num_out)
    if kernels is None:
        return _reference_product(rows, weight_EOI, ends_E, bias_EO, scale, slots, gathered, out)
    _check_memory(rows=rows, weight=weight_EOI, bias=bias_EO, scale=scale, out=out)
    if num_rows:
        _launch(
            kernels, _FORWARD, rows, ends_E, slots,
            a=rows.data_ptr(), a_rows=rows.shape[0], a_stride=_stride(rows), a_gathered=gathered,
            b=weight_EOI.data_ptr(), d=out.data_ptr(), d_stride=_stride(out), rows=num_rows,
            n=num_out, k=num_in,
            bias=_address(bias_EO), weight=_address(scale),
        )  # fmt: skip
    return out


def hidden(
    rows: Tensor,
    weight_EGI: Tensor,
    ends_E: Tensor,
    *,
    activation: str,
    bias_EG: Tensor | None = None,
    slots: Slots | None = None,
    gathered: bool = False,
    out: Tensor | None = None,
    active: Tensor | None = None,
    keep: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """T_M = rows weight[e]^T + bias[e], (N, G), and the activated hidden, (N, H), of the rounded T_M.

    keep: False computes T_M without storing it, and returns None for it. The rest is as in `product`.
    """
    kind = _activation(activation)
    num_rows = _checked(rows, weight_EGI, ends_E, slots, gathered, 2)
    _check_bias(bias_EG, weight_EGI)
    _, num_hidden, num_in = weight_EGI.shape
    width = _hidden_width(num_hidden, activation)
    active = rows.new_empty(num_rows, width) if active is None else active
    _check_out("active", active, (num_rows, width), weight_EGI)
    if keep and out is None:
        out = rows.new_empty(num_rows, num_hidden)
    if out is not None:
        _check_out("out", out, (num_rows, num_hidden), weight_EGI)
    kernels = _kernels(rows.device, rows.dtype, in_features=num_in, hidden=width)
    if kernels is None:
        found = rows.new_empty(num_rows, num_hidden) if out is None else out
        _reference_product(rows, weight_EGI, ends_E, bias_EG, None, slots, gathered, found)
        active.copy_(_activate(activation, found))
        return (found if keep else None), active
    _check_memory(rows=rows, weight=weight_EGI, bias=bias_EG, out=out, active=active)
    if num_rows:
        _launch(
            kernels, _FORWARD, rows, ends_E, slots, _HIDDEN, activation=kind,
            a=rows.data_ptr(), a_rows=rows.shape[0], a_stride=_stride(rows), a_gathered=gathered,
            b=weight_EGI.data_ptr(), d=_address(out) if keep else 0,
            d_stride=_stride(out) if out is not None else 0, rows=num_rows, n=num_hidden, k=num_in,
            bias=_address(bias_EG), active=active.data_ptr(), active_stride=_stride(active),
        )  # fmt: skip
    return (out if keep else None), active


def input_gradient(
    grad: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    *,
    slots: Slots | None = None,
    gathered: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """grad weight[e] for the rows of each expert e, (N, I); grad: (N, O), or gathered."""
    num_rows = _checked(grad, weight_EOI, ends_E, slots, gathered, 1)
    _, num_out, num_in = weight_EOI.shape
    out = grad.new_empty(num_rows, num_in) if out is None else out
    _check_out("out", out, (num_rows, num_in), weight_EOI)
    kernels = _kernels(grad.device, grad.dtype, in_features=num_in, out_features=num_out)
    if kernels is None:
        weight_EIO = weight_EOI.transpose(1, 2)
        return _reference_product(grad, weight_EIO, ends_E, None, None, slots, gathered, out)
    _check_memory(grad=grad, weight=weight_EOI, out=out)
    if num_rows:
        _launch(
            kernels, _INPUT, grad, ends_E, slots,
            a=grad.data_ptr(), a_rows=grad.shape[0], a_stride=_stride(grad), a_gathered=gathered,
            b=weight_EOI.data_ptr(), d=out.data_ptr(), d_stride=_stride(out), rows=num_rows,
            n=num_in, k=num_out,
        )  # fmt: skip
    return out


def hidden_gradient(
    grad: Tensor,
    weight_EMH: Tensor,
    hidden_NG: Tensor,
    scale: Tensor,
    ends_E: Tensor,
    *,
    activation: str,
    slots: Slots | None = None,
    gathered: bool = False,
    weighs_active: bool = False,
    out: Tensor | None = None,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The way back through an expert's second product and its nonlinearity.

    grad: dT_O's rows (N, M), or gathered, before the routing weight is multiplied in; weight: w2 (E, M, H);
    hidden: T_M (N, G); scale: the routing weights, float32, (N,) or by slot. Returns dT_M (N, G), times
    scale; the activated hidden (N, H), times scale where ``weighs_active``; and the inner products <activated
    hidden, grad w2[e]>, (N,) float32, the gradient of the routing weights but for <grad, b2>. out may
    be hidden itself, and active the first columns of hidden.
    """
    kind = _activation(activation)
    num_rows = _checked(grad, weight_EMH, ends_E, slots, gathered, 1)
    _, num_model, width = weight_EMH.shape
    columns = 2 * width if activation == "swiglu" else width
    _check_out("hidden", hidden_NG, (num_rows, columns), weight_EMH)
    _check_scale(scale, grad, num_rows, slots, gathered)
    out = grad.new_empty(num_rows, columns) if out is None else out
    active = grad.new_empty(num_rows, width) if active is None else active
    _check_out("out", out, (num_rows, columns), weight_EMH)
    _check_out("active", active, (num_rows, width), weight_EMH)
    if num_rows and out.data_ptr() == hidden_NG.data_ptr() == active.data_ptr():
        raise ValueError("out and active must not both lie in hidden: one would overwrite the other")
    kernels = _kernels(grad.device, grad.dtype, d_model=num_model, hidden=width)
    if kernels is None:
        wide = torch.promote_types(grad.dtype, torch.float32)
        of_active = grad.new_empty(num_rows, width, dtype=wide)
        transposed = weight_EMH.transpose(1, 2).to(wide)
        _reference_product(grad.to(wide), transposed, ends_E, None, None, slots, gathered, of_active)
        row_scale = _by_row(scale, slots).to(wide).unsqueeze(1)
        value = _activate(activation, hidden_NG.to(wide))
        slope = _slope(activation, hidden_NG.to(wide), of_active * row_scale)
        dot_N = (value * of_active).sum(1)
        active.copy_(value * row_scale if weighs_active else value)
        out.copy_(slope)
        return out, active, dot_N
    _check_memory(grad=grad, weight=weight_EMH, hidden=hidden_NG, scale=scale, out=out, active=active)
    module = extension.load()
    assert module is not None
    parts = module.row_dot_parts(kernels == "sm_90a", width)
    dots = torch.empty(parts, num_rows, dtype=torch.float32, device=grad.device)
    if num_rows:
        _launch(
            kernels, _INPUT, grad, ends_E, slots, _HIDDEN_GRADIENT, activation=kind,
            a=grad.data_ptr(), a_rows=grad.shape[0], a_stride=_stride(grad), a_gathered=gathered,
            b=weight_EMH.data_ptr(), d=out.data_ptr(), d_stride=_stride(out), rows=num_rows,
            n=width, k=num_model,
            weight=scale.data_ptr(), active=active.data_ptr(), active_stride=_stride(active),
            hidden=hidden_NG.data_ptr(), hidden_stride=_stride(hidden_NG), row_dots=dots.data_ptr(),
            weighs_active=weighs_active,
        )  # fmt: skip
    return out, active, dots[0] if parts == 1 else dots.sum(0)


def weight_gradient(
    grad: Tensor,
    rows: Tensor,
    ends_E: Tensor,
    *,
    slots: Slots | None = None,
    gathers_grad: bool = False,
    gathers_rows: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """grad[rows of e]^T rows[rows of e] for each expert e, (E, O, I); zero for an expert without rows.

    grad: (N, O), rows: (N, I), either gathered. out: contiguous, of the rows' type or float32; with
    ``accumulate`` float32, and the products are added to it.
    """
    shape = _weight_gradient_shape(grad, rows, ends_E, slots, gathers_grad, gathers_rows)
    num_rows = _num_rows(grad, slots, gathers_grad)
    if out is None:
        if accumulate:
            raise ValueError("accumulate (True) must be False without out: there is nothing to add to")
        out = rows.new_empty(shape)
    if tuple(out.shape) != shape:
        raise ValueError(f"out of shape {tuple(out.shape)} must be {shape}")
    if out.device != rows.device:
        raise ValueError(f"out on {out.device} must be where the rows are ({rows.device})")
    if out.dtype not in (rows.dtype, torch.float32):
        raise ValueError(f"out of dtype {out.dtype} must be of the rows' dtype ({rows.dtype}) or float32")
    wide = out.dtype == torch.float32
    if accumulate and out.element_size() < 4:
        raise ValueError(f"out of dtype {out.dtype} must be float32 to accumulate")
    kernels = _kernels(rows.device, rows.dtype, out_features=shape[1], in_features=shape[2])
    if kernels is None:
        grad_N, rows_N = _gather(grad, slots, gathers_grad), _gather(rows, slots, gathers_rows)
        if not accumulate:
            out.zero_()
        for expert, at in _groups(ends_E):
            out[expert] += grad_N[at].to(out.dtype).t() @ rows_N[at].to(out.dtype)
        return out
    _check_memory(grad=grad, rows=rows, out=out)
    _launch(
        kernels, _WEIGHT, rows, ends_E, slots,
        a=grad.data_ptr(), a_rows=grad.shape[0], a_stride=_stride(grad), a_gathered=gathers_grad,
        b=rows.data_ptr(), b_rows=rows.shape[0], b_stride=_stride(rows), b_gathered=gathers_rows,
        d=out.data_ptr(), d_stride=shape[2], rows=num_rows, m=shape[1], n=shape[2], wide=wide,
        accumulates=accumulate,
    )  # fmt: skip
    return out


def _weight_gradient_shape(
    grad: Tensor,
    rows: Tensor,
    ends_E: Tensor,
    slots: Slots | None,
    gathers_grad: bool,
    gathers_rows: bool,
) -> tuple[int, int, int]:
    num_rows = _num_rows(grad, slots, gathers_grad)
    if num_rows != _num_rows(rows, slots, gathers_rows):
        raise ValueError(f"grad of {num_rows} rows must have as many as rows ({rows.shape[0]})")
    _check_rows("grad", grad, rows)
    _check_rows("rows", rows, grad)
    _check_index("ends", ends_E, None, rows.device)
    _check_slots(slots, num_rows, rows.device)
    return ends_E.numel(), grad.shape[1], rows.shape[1]


# ---- the plain definition


def _groups(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end < start:
            raise ValueError(f"ends ({ends_E.tolist()}) must not decrease: they are a running sum")
        if end > start:
            yield expert, slice(start, end)
        start = end


def _gather(rows: Tensor, slots: Slots | None, gathered: bool) -> Tensor:
    if not gathered or slots is None:
        return rows
    return rows.index_select(0, slots.slot_N.long() // slots.top_k)


def _by_row(scale: Tensor, slots: Slots | None) -> Tensor:
    return scale if slots is None else scale.index_select(0, slots.slot_N.long())


def _reference_product(
    rows: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    bias_EO: Tensor | None,
    scale: Tensor | None,
    slots: Slots | None,
    gathered: bool,
    out: Tensor,
) -> Tensor:
    rows_N = _gather(rows, slots, gathered)
    wide = torch.promote_types(rows.dtype, torch.float32)
    scale_N = None if scale is None else _by_row(scale, slots).to(wide)
    for expert, at in _groups(ends_E):
        found = rows_N[at].to(wide) @ weight_EOI[expert].t().to(wide)
        if bias_EO is not None:
            found = found + bias_EO[expert].to(wide)
        out[at] = (found if scale_N is None else found * scale_N[at].unsqueeze(1)).to(out.dtype)
    return out


def _activate(activation: str, hidden_NG: Tensor) -> Tensor:
    wide = hidden_NG.to(torch.promote_types(hidden_NG.dtype, torch.float32))
    if activation == "swiglu":
        gate, up = wide.chunk(2, dim=1)
        return (F.silu(gate) * up).to(hidden_NG.dtype)
    functions: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
    value = functions[activation](wide)
    return value.to(hidden_NG.dtype)


def _slope(activation: str, hidden_NG: Tensor, grad_NH: Tensor) -> Tensor:
    """The gradient of hidden for that of the activated one; traceable, unlike autograd.grad."""
    if activation == "swiglu":
        gate, up = hidden_NG.chunk(2, dim=1)
        of_gate = torch.ops.aten.silu_backward(grad_NH * up, gate)
        return torch.cat([of_gate, grad_NH * F.silu(gate)], dim=1)
    if activation == "relu":
        return grad_NH * (hidden_NG > 0)
    backward = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}[activation]
    slope: Tensor = backward(grad_NH, hidden_NG)
    return slope


# ---- operators with gradients


def _slots(slot_N: Tensor | None, top_k: int) -> Slots | None:
    return None if slot_N is None else Slots(slot_N=slot_N, top_k=top_k)


@torch.library.custom_op("pmoe::grouped_product", mutates_args=())
def _product_op(
    rows: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    bias_EO: Tensor | None,
    scale: Tensor | None,
    slot_N: Tensor | None,
    top_k: int,
    gathered: bool,
) -> Tensor:
    slots = _slots(slot_N, top_k)
    return product(rows, weight_EOI, ends_E, bias_EO=bias_EO, scale=scale, slots=slots, gathered=gathered)


@_product_op.register_fake
def _(
    rows: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    bias_EO: Tensor | None,
    scale: Tensor | None,
    slot_N: Tensor | None,
    top_k: int,
    gathered: bool,
) -> Tensor:
    slots = _slots(slot_N, top_k)
    num_rows = _checked(rows, weight_EOI, ends_E, slots, gathered, 2)
    _check_bias(bias_EO, weight_EOI)
    _check_scale(scale, rows, num_rows, slots, gathered)
    return rows.new_empty(num_rows, weight_EOI.shape[1])


@torch.library.custom_op("pmoe::grouped_hidden", mutates_args=())
def _hidden_op(
    rows: Tensor,
    weight_EGI: Tensor,
    ends_E: Tensor,
    bias_EG: Tensor | None,
    slot_N: Tensor | None,
    top_k: int,
    activation: str,
) -> tuple[Tensor, Tensor]:
    slots = _slots(slot_N, top_k)
    found, active = hidden(
        rows,
        weight_EGI,
        ends_E,
        activation=activation,
        bias_EG=bias_EG,
        slots=slots,
        gathered=slots is not None,
    )
    assert found is not None
    return found, active


@_hidden_op.register_fake
def _(
    rows: Tensor,
    weight_EGI: Tensor,
    ends_E: Tensor,
    bias_EG: Tensor | None,
    slot_N: Tensor | None,
    top_k: int,
    activation: str,
) -> tuple[Tensor, Tensor]:
    _activation(activation)
    slots = _slots(slot_N, top_k)
    num_rows = _checked(rows, weight_EGI, ends_E, slots, slots is not None, 2)
    _check_bias(bias_EG, weight_EGI)
    columns = weight_EGI.shape[1]
    width = _hidden_width(columns, activation)
    return rows.new_empty(num_rows, columns), rows.new_empty(num_rows, width)


@torch.library.custom_op("pmoe::grouped_input_gradient", mutates_args=())
def _input_gradient_op(grad_NO: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return input_gradient(grad_NO, weight_EOI, ends_E)


@_input_gradient_op.register_fake
def _(grad_NO: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    num_rows = _checked(grad_NO, weight_EOI, ends_E, None, False, 1)
    return grad_NO.new_empty(num_rows, weight_EOI.shape[2])


@torch.library.custom_op("pmoe::grouped_weight_gradient", mutates_args=())
def _weight_gradient_op(
    grad_NO: Tensor, rows: Tensor, ends_E: Tensor, slot_N: Tensor | None, top_k: int
) -> Tensor:
    """rows are gathered where slot_N is given."""
    slots = _slots(slot_N, top_k)
    return weight_gradient(grad_NO, rows, ends_E, slots=slots, gathers_rows=slots is not None)


@_weight_gradient_op.register_fake
def _(grad_NO: Tensor, rows: Tensor, ends_E: Tensor, slot_N: Tensor | None, top_k: int) -> Tensor:
    slots = _slots(slot_N, top_k)
    return rows.new_empty(_weight_gradient_shape(grad_NO, rows, ends_E, slots, False, slots is not None))


@torch.library.custom_op("pmoe::grouped_hidden_gradient", mutates_args=())
def _hidden_gradient_op(
    grad: Tensor,
    weight_EMH: Tensor,
    hidden_NG: Tensor,
    scale: Tensor,
    ends_E: Tensor,
    slot_N: Tensor | None,
    top_k: int,
    activation: str,
    weighs_active: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    slots = _slots(slot_N, top_k)
    return hidden_gradient(
        grad, weight_EMH, hidden_NG, scale, ends_E, activation=activation, slots=slots,
        gathered=slots is not None, weighs_active=weighs_active,
    )  # fmt: skip


@_hidden_gradient_op.register_fake
def _(
    grad: Tensor,
    weight_EMH: Tensor,
    hidden_NG: Tensor,
    scale: Tensor,
    ends_E: Tensor,
    slot_N: Tensor | None,
    top_k: int,
    activation: str,
    weighs_active: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _activation(activation)
    slots = _slots(slot_N, top_k)
    rows = _checked(grad, weight_EMH, ends_E, slots, slots is not None, 1)
    width = weight_EMH.shape[2]
    _check_out("hidden", hidden_NG, (rows, 2 * width if activation == "swiglu" else width), weight_EMH)
    _check_scale(scale, grad, rows, slots, slots is not None)
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (
        torch.empty_like(hidden_NG, memory_format=torch.contiguous_format),
        grad.new_empty(rows, weight_EMH.shape[2]),
        grad.new_empty(rows, dtype=wide),
    )


def sum_by_expert(rows_NO: Tensor, ends_E: Tensor) -> Tensor:
    """(E, O), in a fixed order where atomic adds would have none: a product with a column of ones."""
    ones = rows_NO.new_zeros(rows_NO.shape[0], 8)
    ones[:, 0] = 1
    summed: Tensor = _weight_gradient_op(rows_NO, ones, ends_E, None, 1)
    return summed[:, :, 0]


def _to_tokens(grad_NI: Tensor, slot_N: Tensor | None, top_k: int, num_tokens: int) -> Tensor:
    """Gradients of gathered rows, summed by token in the order of its choices."""
    if slot_N is None:
        return grad_NI
    position = torch.full((num_tokens * top_k,), grad_NI.shape[0], dtype=torch.int32, device=slot_N.device)
    order = torch.arange(slot_N.shape[0], dtype=torch.int32, device=slot_N.device)
    position = position.scatter(0, slot_N.long(), order)
    return unpermute(grad_NI, position.view(num_tokens, top_k))


def _save_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, ends, bias, scale, slot, top_k, gathered = inputs
    ctx.save_for_backward(rows, weight, ends, bias, scale, slot)
    ctx.top_k, ctx.gathered = top_k, gathered


def _product_backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, ends, bias, scale, slot = ctx.saved_tensors
    grad_NO, needs = grad_NO.contiguous(), ctx.needs_input_grad
    gather_slot = slot if ctx.gathered else None
    grad_rows = grad_scale = grad_weight = grad_bias = None
    scale_N1 = None
    if scale is not None:
        scale_N1 = (scale if slot is None else scale.index_select(0, slot.long())).unsqueeze(1)
    if needs[0] or needs[4]:
        plain_NI = _input_gradient_op(grad_NO, weight, ends)
        if needs[4]:
            rows_N = rows if gather_slot is None else rows.index_select(0, slot.long() // ctx.top_k)
            dot_N = (plain_NI.to(scale.dtype) * rows_N.to(scale.dtype)).sum(1)
            if bias is not None:
                expert_N = torch.searchsorted(
                    ends, torch.arange(dot_N.shape[0], device=ends.device), right=True
                )
                dot_N = dot_N + (grad_NO.to(scale.dtype) * bias[expert_N].to(scale.dtype)).sum(1)
            grad_scale = dot_N if slot is None else torch.zeros_like(scale).scatter(0, slot.long(), dot_N)
        if needs[0]:
            scaled = plain_NI if scale_N1 is None else (plain_NI * scale_N1).to(rows.dtype)
            grad_rows = _to_tokens(scaled, gather_slot, ctx.top_k, rows.shape[0])
    if needs[1] or needs[3]:
        scaled = grad_NO if scale_N1 is None else (grad_NO * scale_N1).to(rows.dtype)
        if needs[1]:
            grad_weight = _weight_gradient_op(scaled, rows, ends, gather_slot, ctx.top_k)
        if needs[3]:
            grad_bias = sum_by_expert(scaled, ends)
    return grad_rows, grad_weight, None, grad_bias, grad_scale, None, None, None


_product_op.register_autograd(_product_backward, setup_context=_save_product)


def _save_hidden(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, weight, ends, bias, slot, top_k, activation = inputs
    ctx.save_for_backward(rows, weight, ends, slot, output[0])
    ctx.top_k, ctx.activation, ctx.has_bias = top_k, activation, bias is not None


def _hidden_backward(ctx: Any, grad_hidden: Tensor, grad_active: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, ends, slot, hidden_NG = ctx.saved_tensors
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = grad_hidden.to(wide) + _slope(ctx.activation, hidden_NG.to(wide), grad_active.to(wide))
    total = total.to(rows.dtype).contiguous()
    grad_rows = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_rows = _to_tokens(_input_gradient_op(total, weight, ends), slot, ctx.top_k, rows.shape[0])
    if ctx.needs_input_grad[1]:
        grad_weight = _weight_gradient_op(total, rows, ends, slot, ctx.top_k)
    if ctx.has_bias and ctx.needs_input_grad[3]:
        grad_bias = sum_by_expert(total, ends)
    return grad_rows, grad_weight, None, grad_bias, None, None, None


_hidden_op.register_autograd(_hidden_backward, setup_context=_save_hidden)


def grouped_product(
    rows: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    *,
    bias_EO: Tensor | None = None,
    scale: Tensor | None = None,
    slots: Slots | None = None,
    gathered: bool = False,
) -> Tensor:
    """`product` with gradients of rows, weight, bias and scale; ends[E - 1] must be N."""
    slot_N, top_k = (None, 1) if slots is None else (slots.slot_N, slots.top_k)
    found: Tensor = _product_op(rows, weight_EOI, ends_E, bias_EO, scale, slot_N, top_k, gathered)
    return found


def grouped_hidden(
    rows: Tensor,
    weight_EGI: Tensor,
    ends_E: Tensor,
    *,
    activation: str,
    bias_EG: Tensor | None = None,
    slots: Slots | None = None,
) -> tuple[Tensor, Tensor]:
    """`hidden` with gradients of rows (gathered where slots are given), weight and bias."""
    slot_N, top_k = (None, 1) if slots is None else (slots.slot_N, slots.top_k)
    found: tuple[Tensor, Tensor] = _hidden_op(rows, weight_EGI, ends_E, bias_EG, slot_N, top_k, activation)
    return found
