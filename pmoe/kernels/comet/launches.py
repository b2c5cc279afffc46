"""The four fused steps and the plain dispatch, each one launch for the ranks of this process.

What belongs to a rank is in lists, one rank after the other; tensors by token are those of all ranks here.
First come the fields of a launch: addresses and sizes of a journey, and of where rows leave and arrive. They
raise ValueError, naming the tensor, for what the kernels would not read right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pmoe.kernels.comet.launcher import COMBINE, DISPATCH, Divide, DivisionPoint, HeapView, Launcher
from pmoe.kernels.comet.steps import Journey
from pmoe.kernels.gemm import ACTIVATIONS, FORWARD, HIDDEN, HIDDEN_GRADIENT, INPUT
from pmoe.kernels.operands import address, check_memory, check_tensor
from pmoe.schedule.tasks import PassDirection

MAX_CHUNKS = 64
"""Of columns, as in cuda/comet/layout.h."""


def journey_fields(heap: HeapView, journey: Journey) -> dict[str, int]:
    """Where rows go."""
    shape, device = heap.shape, heap.device
    if journey.num_received > shape.rows:
        raise ValueError(
            f"num_received ({journey.num_received}) must be at most the heap's {shape.rows} rows"
        )
    sent = journey.slot_S.shape[0]
    if journey.num_tokens is not None:
        sent = min(sent, journey.num_tokens * journey.top_k)
    if sent > shape.home_rows:
        raise ValueError(
            f"rows that may be sent ({sent}) must be at most the heap's home_rows ({shape.home_rows})"
        )
    sizes = (shape.num_ranks, shape.experts)
    check_tensor("send_WE", journey.send_WE, shape=sizes)
    for name in ("expert_TK", "position_TK", "slot_S", "send_WE"):
        check_tensor(name, getattr(journey, name), dtypes=[torch.int32], device=device, contiguous=True)
    recv_WE = journey.recv_WE
    check_tensor("recv_WE", recv_WE, dtypes=[torch.int32], device=device)
    if recv_WE.stride(1) != 1:
        raise ValueError(f"recv_WE of strides {recv_WE.stride()} must have a rank's counts side by side")
    return {
        "send_counts": journey.send_WE.data_ptr(),
        "recv_counts": recv_WE.data_ptr(),
        "recv_stride": recv_WE.stride(0),
        "expert": journey.expert_TK.data_ptr(),
        "position": journey.position_TK.data_ptr(),
        "slot": journey.slot_S.data_ptr(),
        "first_row": journey.first_row,
        "top_k": journey.top_k,
        "computes": 1,
    }


def dispatch_fields(heap: HeapView, journey: Journey, source_TM: Tensor, weight_TK: Tensor) -> dict[str, int]:
    """Rows of tokens leave, and arrive as A of the product."""
    shape = heap.shape
    wanted = (journey.expert_TK.shape[0], shape.d_model)
    check_tensor("rows", source_TM, shape=wanted, dtypes=[shape.dtype], device=heap.device)
    check_memory(dense={"rows": source_TM})
    check_tensor(
        "weight", weight_TK, shape=journey.expert_TK.shape, dtypes=[torch.float32], device=heap.device,
        contiguous=True,
    )  # fmt: skip
    places = shape.places
    return {
        **journey_fields(heap, journey),
        "source": source_TM.data_ptr(),
        "source_stride": shape.row_bytes,
        "weight": weight_TK.data_ptr(),
        "a": heap.base + places["inbox"],
        "a_rows": max(shape.rows, 1),  # a heap without rows has an address, a missing a has none
        "a_stride": shape.d_model,
        "row_weight": heap.base + places["weights"],
        "k": shape.d_model,
    }


def combine_fields(
    heap: HeapView, journey: Journey, a: Tensor, result_TM: Tensor, *, chunk_columns: int
) -> dict[str, int]:
    """Products of A's rows are written where dispatched rows lay, summed, and sent to their tokens."""
    shape = heap.shape
    check_tensor("rows", a, dtypes=[shape.dtype], device=heap.device)
    check_memory(dense={"rows": a, "result": result_TM})
    return {
        **journey_fields(heap, journey),
        "a": a.data_ptr(),
        "a_rows": a.shape[0],
        "a_stride": a.shape[1],
        "rows": a.shape[0],
        "d": heap.base + shape.places["inbox"],
        "d_stride": shape.d_model,
        "n": shape.d_model,
        "k": a.shape[1],
        "columns": shape.d_model,
        "chunk_columns": chunk_columns,
        "result": result_TM.data_ptr(),
        "result_stride": shape.row_bytes,
        "first_token": journey.first_token,
        "tokens": journey.expert_TK.shape[0] if journey.num_tokens is None else journey.num_tokens,
    }


def chunk_columns(division: DivisionPoint, columns: int, tile_columns: int) -> int:
    """Columns that are sent at a time: whole tiles, and at most 64 chunks.

    Example: chunks of 200 of 600 columns, in tiles of 128 -> 256; of 1000 -> 640, all that there are.
    """
    every = -(-columns // tile_columns) * tile_columns
    min_columns = max(division.chunk_columns, -(-every // MAX_CHUNKS))
    return min(-(-min_columns // tile_columns) * tile_columns, every)


def check_expert_weight(
    name: str, weight: Tensor, bias: Tensor | None, heap: HeapView, *, columns: int
) -> tuple[int, int, int]:
    """Its shape. columns: which of its dimensions is d_model."""
    check_memory(dense={name: weight, "bias": bias})
    shape = heap.shape
    wanted: list[int | str] = [shape.experts, "columns", "columns"]
    wanted[columns] = shape.d_model
    check_tensor(name, weight, shape=wanted, dtypes=[shape.dtype], device=heap.device)
    if bias is not None:
        check_tensor("bias", bias, shape=weight.shape[:2], dtypes=[shape.dtype], device=heap.device)
    first, second, third = weight.shape
    return first, second, third


# ---- launches


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


# ---- the steps of one rank


class KernelSteps:
    """`Steps` of one rank of this process, by the kernels.

    find_heap: the heap that serves this call now. Between forward and backward a larger one may have taken
    its place, for larger batches; the rounds of the two need no memory in common.
    """

    def __init__(self, find_heap: Callable[[], HeapView], divide: Divide) -> None:
        self._find_heap, self._divide = find_heap, divide
        self._made = Launcher([find_heap()], divide)

    @property
    def _heap(self) -> HeapView:
        return self._launcher.heaps[0]

    @property
    def _launcher(self) -> Launcher:
        heap = self._find_heap()
        if heap is not self._made.heaps[0]:
            self._made = Launcher([heap], self._divide)
        return self._made

    def dispatch(self, journey: Journey, x_TM: Tensor, weight_TK: Tensor) -> None:
        dispatch(self._launcher, [journey], x_TM, _weights(weight_TK))

    def give_up(self, why: str) -> None:
        self._made.heaps[0].give_up(why)

    def rows(self, journey: Journey) -> Tensor:
        return self._heap.rows(journey.num_received)

    def row_weight(self, journey: Journey) -> Tensor:
        return self._heap.row_weight(journey.num_received)

    def dispatch_hidden(
        self, journey: Journey, x_TM: Tensor, weight_TK: Tensor, w1: Tensor, b1: Tensor | None, **options: Any
    ) -> tuple[Tensor | None, Tensor]:
        hidden, active = dispatch_hidden(
            self._launcher, [journey], x_TM, _weights(weight_TK), [w1], [b1], **options
        )
        return (None if hidden is None else hidden[0]), active[0]

    def product_combine(self, journey: Journey, active_NH: Tensor, w2: Tensor, b2: Tensor | None) -> Tensor:
        return product_combine(self._launcher, [journey], [active_NH], [w2], [b2])

    def dispatch_hidden_gradient(
        self,
        journey: Journey,
        grad_TM: Tensor,
        weight_TK: Tensor,
        w2: Tensor,
        b2: Tensor | None,
        hidden_NG: Tensor,
        *,
        activation: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_hidden, active, dots = dispatch_hidden_gradient(
            self._launcher, [journey], grad_TM, _weights(weight_TK), [w2], [b2], [hidden_NG],
            activation=activation,
        )  # fmt: skip
        return of_hidden[0], active[0], dots[0]

    def gradient_combine(
        self, journey: Journey, grad_hidden_NG: Tensor, w1: Tensor, dots_PN: Tensor
    ) -> tuple[Tensor, Tensor]:
        return gradient_combine(self._launcher, [journey], [grad_hidden_NG], [w1], [dots_PN])


def _weights(weight_TK: Tensor) -> Tensor:
    return weight_TK.detach().to(torch.float32).contiguous()
