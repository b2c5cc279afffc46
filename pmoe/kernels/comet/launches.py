"""The four fused steps and the plain dispatch, each one launch for the ranks of this process.

What belongs to a rank is in lists, one rank after the other; tensors by token are those of all ranks here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pmoe.kernels.comet.fields import (
    check_expert_weight,
    chunk_columns,
    combine_fields,
    dispatch_fields,
)
from pmoe.kernels.comet.launcher import COMBINE, DISPATCH, DivisionPoint, Launcher
from pmoe.kernels.comet.steps import Journey
from pmoe.kernels.gemm import ACTIVATIONS, FORWARD, HIDDEN, HIDDEN_GRADIENT, INPUT
from pmoe.kernels.operands import address, check_memory, check_tensor
from pmoe.schedule.tasks import PassDirection


def dispatch(launcher: Launcher, journeys: Sequence[Journey], x_TM: Tensor, weight_TK: Tensor) -> None:
    """See `Steps.dispatch`; x_TM and weight_TK: of all ranks here."""
    fields = []
    for heap, journey in zip(launcher.heaps, journeys, strict=True):
        fields.append({**dispatch_fields(heap, journey, x_TM, weight_TK), "computes": 0})
    division = launcher.divide("dispatch", "forward")
    launcher.launch(DISPATCH, FORWARD, division, fields, epilogue=HIDDEN, activation=ACTIVATIONS["relu"])


def dispatch_hidden(
    launcher: Launcher,
    journeys: Sequence[Journey],
    x_TM: Tensor,
    weight_TK: Tensor,
    w1: Sequence[Tensor],
    b1: Sequence[Tensor | None],
    *,
    activation: str,
    keep: bool,
) -> tuple[list[Tensor] | None, list[Tensor]]:
    """See `Steps.dispatch_hidden`; w1, b1 and the results: by rank here, x_TM and weight_TK of all."""
    fields, hidden, active = [], [], []
    for heap, journey, weight_EGM, bias in zip(launcher.heaps, journeys, w1, b1, strict=True):
        _, num_hidden, _ = check_expert_weight("w1", weight_EGM, bias, heap, columns=2)
        width = num_hidden // 2 if activation == "swiglu" else num_hidden
        active.append(x_TM.new_empty(journey.num_received, width))
        if keep:
            hidden.append(x_TM.new_empty(journey.num_received, num_hidden))
        fields.append(
            {
                **dispatch_fields(heap, journey, x_TM, weight_TK),
                "b": weight_EGM.data_ptr(),
                "n": num_hidden,
                "rows": journey.num_received,
                "bias": address(bias),
                "d": hidden[-1].data_ptr() if keep else 0,
                "d_stride": num_hidden,
                "active": active[-1].data_ptr(),
                "active_stride": width,
            }
        )
    division = launcher.divide("dispatch", "forward")
    launcher.launch(DISPATCH, FORWARD, division, fields, epilogue=HIDDEN, activation=ACTIVATIONS[activation])
    return (hidden if keep else None), active


def product_combine(
    launcher: Launcher,
    journeys: Sequence[Journey],
    active: Sequence[Tensor],
    w2: Sequence[Tensor],
    b2: Sequence[Tensor | None],
) -> Tensor:
    """See `Steps.product_combine`; (T, M) of all ranks here."""
    fields = []
    result_TM = active[0].new_empty(journeys[0].expert_TK.shape[0], launcher.heaps[0].shape.d_model)
    division, columns = _combine_division(launcher, "forward")
    for heap, journey, active_NH, weight_EMH, bias in zip(
        launcher.heaps, journeys, active, w2, b2, strict=True
    ):
        _, _, width = check_expert_weight("w2", weight_EMH, bias, heap, columns=1)
        check_tensor("active", active_NH, shape=("rows", width))
        fields.append(
            {
                **combine_fields(heap, journey, active_NH, result_TM, chunk_columns=columns),
                "b": weight_EMH.data_ptr(),
                "bias": address(bias),
                "row_weight": heap.base + heap.shape.places["weights"],
            }
        )
    launcher.launch(COMBINE, FORWARD, division, fields)
    return result_TM


def dispatch_hidden_gradient(
    launcher: Launcher,
    journeys: Sequence[Journey],
    grad_TM: Tensor,
    weight_TK: Tensor,
    w2: Sequence[Tensor],
    b2: Sequence[Tensor | None],
    hidden: Sequence[Tensor],
    *,
    activation: str,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """See `Steps.dispatch_hidden_gradient`; by rank here but grad_TM and weight_TK."""
    fields, of_hidden, active, dots = [], [], [], []
    for heap, journey, weight_EMH, hidden_NG, bias in zip(
        launcher.heaps, journeys, w2, hidden, b2, strict=True
    ):
        _, _, width = check_expert_weight("w2", weight_EMH, None, heap, columns=1)
        check_memory(dense={"hidden": hidden_NG})
        count, parts = hidden_NG.shape[0], launcher.row_dot_parts(width)
        of_hidden.append(torch.empty_like(hidden_NG))
        active.append(hidden_NG.new_empty(count, width))
        dots.append(hidden_NG.new_empty(parts + (bias is not None), count, dtype=torch.float32))
        fields.append(
            {
                **dispatch_fields(heap, journey, grad_TM, weight_TK),
                "b": weight_EMH.data_ptr(),
                "n": width,
                "rows": count,
                "d": of_hidden[-1].data_ptr(),
                "d_stride": hidden_NG.shape[1],
                "hidden": hidden_NG.data_ptr(),
                "hidden_stride": hidden_NG.shape[1],
                "active": active[-1].data_ptr(),
                "active_stride": width,
                "made_dots": dots[-1].data_ptr(),
                "weighs_active": 1,
            }
        )
    division = launcher.divide("dispatch", "backward")
    kind = ACTIVATIONS[activation]
    launcher.launch(DISPATCH, INPUT, division, fields, epilogue=HIDDEN_GRADIENT, activation=kind)
    for heap, journey, bias, dots_PN in zip(launcher.heaps, journeys, b2, dots, strict=True):
        if bias is not None:
            dots_PN[-1] = _dots_with_bias(heap.rows(dots_PN.shape[1]), bias, journey.ends_E)
    return of_hidden, active, dots


def _dots_with_bias(rows_NM: Tensor, bias_EM: Tensor, ends_E: Tensor) -> Tensor:
    """<row, bias of its expert>, (N,) float32. Rows beyond the last expert's get that one's."""
    by_expert_NE = rows_NM.float() @ bias_EM.float().t()
    row_N = torch.arange(rows_NM.shape[0], dtype=torch.int32, device=rows_NM.device)
    expert_N = torch.searchsorted(ends_E, row_N, right=True).clamp_(max=bias_EM.shape[0] - 1)
    return by_expert_NE.gather(1, expert_N.unsqueeze(1)).squeeze(1)


def gradient_combine(
    launcher: Launcher,
    journeys: Sequence[Journey],
    of_hidden: Sequence[Tensor],
    w1: Sequence[Tensor],
    dots: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """See `Steps.gradient_combine`; (T, M) and (T, K) of all ranks here."""
    fields = []
    num_tokens, top_k = journeys[0].expert_TK.shape
    result_TM = of_hidden[0].new_empty(num_tokens, launcher.heaps[0].shape.d_model)
    of_weight_TK = of_hidden[0].new_empty(num_tokens, top_k, dtype=torch.float32)
    division, columns = _combine_division(launcher, "backward")
    for heap, journey, grad_NG, weight_EGM, dots_PN in zip(
        launcher.heaps, journeys, of_hidden, w1, dots, strict=True
    ):
        _, width, _ = check_expert_weight("w1", weight_EGM, None, heap, columns=2)
        check_tensor("gradient of the hidden", grad_NG, shape=("rows", width))
        fields.append(
            {
                **combine_fields(heap, journey, grad_NG, result_TM, chunk_columns=columns),
                "b": weight_EGM.data_ptr(),
                "row_dots": dots_PN.data_ptr(),
                "dot_parts": dots_PN.shape[0],
                "dot_rows": dots_PN.shape[1],
                "weight_gradient": of_weight_TK.data_ptr(),
            }
        )
    launcher.launch(COMBINE, INPUT, division, fields)
    return result_TM, of_weight_TK


def _combine_division(launcher: Launcher, direction: PassDirection) -> tuple[DivisionPoint, int]:
    """With the columns that are sent at a time."""
    division = launcher.divide("combine", direction)
    return division, chunk_columns(division, launcher.heaps[0].shape.d_model, launcher.tile_columns)
