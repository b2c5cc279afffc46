"""The grouped products without autograd, computed by pmoe's kernels or by PyTorch expressions.

`pmoe.kernels.grouped_gemm.operators` has the products with gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.kernels.gemm import FORWARD, HIDDEN, HIDDEN_GRADIENT, INPUT, WEIGHT, activation_code
from pmoe.kernels.grouped_gemm import checks, reference
from pmoe.kernels.grouped_gemm.launch import gathers_in_load, launch, num_row_dots, path_for
from pmoe.kernels.operands import address, at, check_memory, check_tensor
from pmoe.kernels.permute.operators import permute


def product(
    rows: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    *,
    bias_EO: Tensor | None = None,
    scale: Tensor | None = None,
    slots: checks.RowSlots | None = None,
    gathered: bool = False,
    out: Tensor | None = None,
    form: int = FORWARD,
) -> Tensor:
    """Returns (rows weight[e]^T + bias[e]) * scale for the rows of each expert e, (N, O), rounded once.

    rows: (N, I), N rows sorted by expert. If ``gathered``, this is the tokens, (T, I), and row r of the
        product is rows[slot[r] // top_k].
    weight_EOI: (E, O, I), for E experts.
    ends_E: (E,) int32, the index behind each expert's last row. Result rows from ends[E - 1] on are not
        written.
    bias_EO: (E, O), or None.
    scale: (N,) float32, factor of each row; with slots, (T * K,), factor of each slot. None means 1.
    slots: the slot of each row, its index among all (token, choice) pairs; or None.
    gathered: whether rows are read from tokens.
    out: (N, O), memory for the result, which may have gaps between rows; None allocates it.
    form: FORWARD; or INPUT to compute rows weight[e] without the transpose, (N, I), as `input_gradient` does.
        INPUT takes no slots.

    Raises ValueError for operands that do not fit. `grouped_product` computes this product with gradients.
    """
    columns = 2 if form == FORWARD else 1
    if form != FORWARD and slots is not None:
        raise ValueError(f"slots must be None for form {form}: gradients take rows in place")
    num_rows = checks.check_operands(
        rows, weight_EOI, ends_E, columns, slots=slots, gathered=gathered, bias=bias_EO, scale=scale
    )
    _, num_out, num_in = weight_EOI.shape
    shape = (num_rows, weight_EOI.shape[3 - columns])
    out = rows.new_empty(shape) if out is None else out
    checks.check_rows("out", out, shape, weight_EOI)
    kernels = path_for(rows.device, rows.dtype, in_features=num_in, out_features=num_out)
    if kernels is None:
        weight = weight_EOI if form == FORWARD else weight_EOI.transpose(1, 2)
        scale_N = None if scale is None else reference.by_row(scale, slots)
        rows_N = reference.gather(rows, slots, gathered)
        return reference.product(rows_N, weight, ends_E, bias_EO, scale_N, out)
    name = "rows" if form == FORWARD else "grad"
    check_memory(rows={name: rows, "out": out}, dense={"weight": weight_EOI, "bias": bias_EO})
    _check_scale_memory(scale)
    if num_rows:
        launch(
            kernels, form, rows, ends_E, slots, **at(a=rows, d=out),
            a_rows=rows.shape[0], a_gathered=gathered, b=weight_EOI.data_ptr(), rows=num_rows,
            n=shape[1], k=weight_EOI.shape[columns], bias=address(bias_EO), weight=address(scale),
        )  # fmt: skip
    return out


def input_gradient(
    grad_NO: Tensor, weight_EOI: Tensor, ends_E: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Returns (N, I), the gradient of the rows of a product: for a row of expert e it is grad @ weight[e].

    grad_NO: (N, O), gradient of the product, N rows sorted by expert.
    weight_EOI: (E, O, I), for E experts.
    ends_E: (E,) int32, the index behind each expert's last row.
    out: (N, I), memory for the result; None allocates it.
    """
    return product(grad_NO, weight_EOI, ends_E, out=out, form=INPUT)


def hidden(
    rows: Tensor,
    weight_EGI: Tensor,
    ends_E: Tensor,
    *,
    activation: str,
    bias_EG: Tensor | None = None,
    slots: checks.RowSlots | None = None,
    out: Tensor | None = None,
    active: Tensor | None = None,
    keep: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """Computes an expert's first product and nonlinearity in one kernel.

    rows: (N, I), N rows sorted by expert. With slots, this is the tokens, (T, I), and row r of the product is
        rows[slot[r] // top_k].
    weight_EGI, bias_EG: first weight (E, G, I) and bias (E, G) of E experts; the bias may be None.
    ends_E: (E,) int32, the index behind each expert's last row.
    activation: name of the nonlinearity. G is H = d_hidden, or 2H for "swiglu".
    slots: the slot of each row, its index among all (token, choice) pairs; or None. If ``slots.position_TK``
        is set, a wide product on Hopper first copies the tokens into rows, and does not gather while it loads
        (`gathers_in_load`).
    out, active: memory for the two results; None allocates it.
    keep: whether to store and return the first result.

    Returns two tensors:

    - (N, G), the hidden activation before the nonlinearity: T_M = rows weight[e]^T + bias[e]. None if
      ``keep`` is False.
    - (N, H), the activation after the nonlinearity, computed from T_M after rounding.
    """
    code = activation_code(activation)
    gathered = slots is not None
    num_rows = checks.check_operands(
        rows, weight_EGI, ends_E, 2, slots=slots, gathered=gathered, bias=bias_EG
    )
    _, num_hidden, num_in = weight_EGI.shape
    width = checks.hidden_width(num_hidden, activation)
    active = rows.new_empty(num_rows, width) if active is None else active
    checks.check_rows("active", active, (num_rows, width), weight_EGI)
    kernels = path_for(rows.device, rows.dtype, in_features=num_in, hidden=width)
    if kernels is None:
        out = product(rows, weight_EGI, ends_E, bias_EO=bias_EG, slots=slots, gathered=gathered, out=out)
        active.copy_(reference.activate(activation, out))
        return (out if keep else None), active
    if out is None and keep:
        out = rows.new_empty(num_rows, num_hidden)
    if out is not None:
        checks.check_rows("out", out, (num_rows, num_hidden), weight_EGI)
    position_TK = None if slots is None else slots.position_TK
    if slots is not None and position_TK is not None and num_rows:
        gathered = gathers_in_load(kernels, num_hidden, slots.top_k)
        if not gathered:
            rows = permute(rows, position_TK, num_rows)
            slots = None
    check_memory(
        rows={"rows": rows, "out": out, "active": active}, dense={"weight": weight_EGI, "bias": bias_EG}
    )
    if num_rows:
        launch(
            kernels, FORWARD, rows, ends_E, slots, HIDDEN, activation=code,
            **at(a=rows, d=out if keep else None, active=active),
            a_rows=rows.shape[0], a_gathered=gathered, b=weight_EGI.data_ptr(), rows=num_rows,
            n=num_hidden, k=num_in, bias=address(bias_EG),
        )  # fmt: skip
    return (out if keep else None), active


def hidden_gradient(
    grad_NM: Tensor,
    weight_EMH: Tensor,
    hidden_NG: Tensor,
    scale_N: Tensor,
    ends_E: Tensor,
    *,
    activation: str,
    weighs_active: bool = False,
    out: Tensor | None = None,
    active: Tensor | None = None,
    dots: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradient of an expert's hidden activation, and two more tensors that backward needs.

    grad_NM: (N, M), gradient of the layer's output for each of N rows, not yet multiplied by the routing
        weight. M = d_model.
    weight_EMH: second weight (E, M, H) of E experts. H = d_hidden.
    hidden_NG: (N, G), hidden activation before the nonlinearity (T_M). G is H, or 2H for "swiglu".
    scale_N: (N,) float32, routing weight of each row.
    ends_E: (E,) int32, the index behind each expert's last row.
    activation: name of the nonlinearity.
    weighs_active: whether the second result is multiplied by the routing weights.
    out, active: memory for the first two results; None allocates it. To save memory, out may be hidden_NG
        itself, or active may be the first H columns of hidden_NG, but not both.
    dots: (N,) float32, memory for the third result; None allocates it. If no kernel can run and PyTorch
        operators compute the product, this memory is not written, and the third result is a new tensor.

    Returns three tensors:

        gradient of T_M                     (N, G)        times the routing weights
        activation after the nonlinearity   (N, H)        times the routing weights if ``weighs_active``
        <activation, grad @ weight[e]>      (N,) float32  without a bias, the gradient of the routing weights
    """
    code = activation_code(activation)
    num_rows = checks.check_operands(grad_NM, weight_EMH, ends_E, 1, scale=scale_N)
    _, num_model, width = weight_EMH.shape
    columns = 2 * width if activation == "swiglu" else width
    checks.check_rows("hidden", hidden_NG, (num_rows, columns), weight_EMH)
    out = grad_NM.new_empty(num_rows, columns) if out is None else out
    active = grad_NM.new_empty(num_rows, width) if active is None else active
    checks.check_rows("out", out, (num_rows, columns), weight_EMH)
    checks.check_rows("active", active, (num_rows, width), weight_EMH)
    if num_rows and out.data_ptr() == hidden_NG.data_ptr() == active.data_ptr():
        raise ValueError("out and active must not both lie in hidden: one would overwrite the other")
    kernels = path_for(grad_NM.device, grad_NM.dtype, d_model=num_model, hidden=width)
    if kernels is None:
        dot_N = reference.hidden_gradient(
            grad_NM, weight_EMH, hidden_NG, scale_N, ends_E, activation=activation,
            weighs_active=weighs_active, out=out, active=active,
        )  # fmt: skip
        return out, active, dot_N
    check_memory(
        rows={"grad": grad_NM, "hidden": hidden_NG, "out": out, "active": active},
        dense={"weight": weight_EMH},
    )
    _check_scale_memory(scale_N)
    parts = num_row_dots(kernels, width, num_model, code)
    if dots is not None:
        check_tensor("dots", dots, shape=(num_rows,), dtypes=[torch.float32], contiguous=True)
    if parts == 1 and dots is not None:
        partial = dots.unsqueeze(0)
    else:
        partial = torch.empty(parts, num_rows, dtype=torch.float32, device=grad_NM.device)
    if num_rows:
        launch(
            kernels, INPUT, grad_NM, ends_E, None, HIDDEN_GRADIENT, activation=code,
            **at(a=grad_NM, d=out, active=active, hidden=hidden_NG),
            a_rows=num_rows, b=weight_EMH.data_ptr(), rows=num_rows, n=width, k=num_model,
            weight=scale_N.data_ptr(), row_dots=partial.data_ptr(), weighs_active=weighs_active,
        )  # fmt: skip
    return out, active, partial[0] if parts == 1 else torch.sum(partial, 0, out=dots)


def weight_gradient(
    grad_NO: Tensor,
    rows: Tensor,
    ends_E: Tensor,
    *,
    slots: checks.RowSlots | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Returns (E, O, I), the gradient of each expert's weight: grad[rows of e]^T rows[rows of e].

    The gradient is zero for an expert without rows.

    grad_NO: (N, O), gradient of the product, N rows sorted by expert.
    rows: (N, I), the product's rows. With slots, this is the tokens, (T, I), and row r of the product is
        rows[slot[r] // top_k].
    ends_E: (E,) int32, for each of E experts the index behind its last row.
    slots: the slot of each row, its index among all (token, choice) pairs; or None. On a GPU, only kernels
        that store boxes take slots (`pmoe.kernels.grouped_gemm.launch.gathers_for_weights`), and only with an
        ``out`` that is not float32.
    out: (E, O, I), contiguous, of the rows' dtype or float32; None allocates it.
    accumulate: whether to add the gradient to ``out``, which must be float32.

    Raises ValueError for operands that do not fit, and for slots that the kernel does not take.
    """
    shape = checks.weight_gradient_shape(grad_NO, rows, ends_E, slots)
    num_rows = grad_NO.shape[0]
    device = rows.device
    if out is None:
        if accumulate:
            raise ValueError("accumulate (True) must be False without out: there is nothing to add to")
        out = rows.new_empty(shape)
    check_tensor("out", out, shape=shape, dtypes=[rows.dtype, torch.float32], device=device)
    if accumulate and out.element_size() < 4:
        raise ValueError(f"out of dtype {out.dtype} must be float32 to accumulate")
    kernels = path_for(device, rows.dtype, out_features=shape[1], in_features=shape[2])
    if kernels is None:
        rows_N = reference.gather(rows, slots, slots is not None)
        return reference.weight_gradient(grad_NO, rows_N, ends_E, out, accumulate)
    check_memory(rows={"grad": grad_NO, "rows": rows}, dense={"out": out})
    gathers = {} if slots is None else {"b_gathered": True}
    launch(
        kernels, WEIGHT, rows, ends_E, slots, **at(a=grad_NO, b=rows), a_rows=num_rows, b_rows=rows.shape[0],
        d=out.data_ptr(), d_stride=shape[2], rows=num_rows, m=shape[1], n=shape[2],
        wide=out.dtype == torch.float32, accumulates=accumulate, **gathers,
    )  # fmt: skip
    return out


def _check_scale_memory(scale: Tensor | None) -> None:
    """Raises ValueError if a scale is not float32 or not contiguous, because kernels could not read it.

    None is allowed.
    """
    if scale is not None and scale.numel():
        check_tensor("scale", scale, dtypes=[torch.float32], contiguous=True)
