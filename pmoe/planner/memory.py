"""How many bytes a layer's forward and backward take, predicted from its schedules and row counts.

A pass holds at once: the ring slots of its schedule (`pmoe.schedule.slots`, the sizes that the engine itself
allocates), what goes from forward to backward, the result, and small things for each row. Nothing is measured
or fitted. tests/unit/test_memory_model.py shows that MPipeMoE's Eq. 1-6 follow from the slots.

Letters: T tokens, K choices, N rows, E experts, M = d_model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pmoe.gates.logits import BLOCK_ROWS
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.pass_rows import PassRows
from pmoe.schedule.restore import Restore
from pmoe.schedule.rings import rotating
from pmoe.schedule.slots import BufferSizes, arena_elements, slot_elements

INDEX = 8
"""Bytes of an index."""

SMALL = 4096
"""Bytes: scalars, counts, and what allocators add to them."""

WIDE = 4
"""Bytes of an element of float32, in which narrower numbers are added up."""


@dataclass(frozen=True, kw_only=True)
class PredictedMemory:
    """Predicted bytes of one forward and backward of a layer.

    Its input, its parameters and the gradient that comes in are the caller's and not counted.

    - saved: held between the passes, the output among them.
    - temporary: the most that a pass adds to saved, without dx and the parameters' gradients.
    - gradients: of the parameters.
    - host: offloaded to the host.
    - peak: the most that is held on the device at once; forward_peak, backward_peak: of each pass.
    - promised: the peak without the parameters' gradients, which a memory budget counts.
    - is_bound: True where rows were not given: then all these are upper bounds for any routing.
    - tensors: bytes by name.
    """

    saved: int
    temporary: int
    gradients: int
    host: int
    peak: int
    forward_peak: int
    backward_peak: int
    promised: int
    is_bound: bool
    tensors: dict[str, int] = field(default_factory=dict)


def predict(
    sizes: LayerSizes,
    num_tokens: int,
    forward: PassRows,
    backward: PassRows,
    restore: Restore,
    *,
    rearranged: bool = False,
) -> PredictedMemory:
    """The bytes of a forward and a backward through rings.

    num_tokens: T. forward, backward: the rows of each pass. restore: how T_DI and T_M are restored.
    rearranged: backward has other chunks than forward.
    """
    rows_T = num_tokens * sizes.d_model * sizes.element_size
    kept, host = _kept_and_offloaded(sizes, forward, restore)
    small = _saved_by_row(sizes, num_tokens, forward)
    small += rearranged * _plan_bytes(sizes, num_tokens * sizes.top_k, backward)
    # Under autocast: narrow copies of the parameters and of the tokens, and a wide gradient of the latter.
    cast = (sizes.expert_parameters * sizes.element_size + rows_T) * bool(sizes.cast_from)
    wide_dx = num_tokens * sizes.d_model * sizes.cast_from
    saved = rows_T + sum(kept.values()) + small + cast

    forward_slots = _arena(sizes, forward, "forward", restore, rearranged)
    backward_slots = _arena(sizes, backward, "backward", restore, rearranged)
    forward_work = forward_slots + _beside_forward(sizes, forward, backward)
    backward_work = backward_slots + _beside_backward(sizes, num_tokens, backward)
    expert_gradients = _expert_gradients(sizes, backward)

    forward_peak = saved + forward_work
    in_backward = saved + rows_T + wide_dx + backward_work
    backward_peak = in_backward + expert_gradients
    routing_peak = _routing_peak(sizes, num_tokens)
    gate_backward = 3 * rows_T + wide_dx + small + routing_peak
    gate_peak = gate_backward + sizes.expert_parameters * sizes.element_size
    return PredictedMemory(
        saved=saved,
        temporary=max(forward_work, backward_work),
        gradients=(sizes.expert_parameters + sizes.gate_parameters) * (sizes.cast_from or sizes.element_size),
        host=host,
        peak=max(forward_peak, backward_peak, routing_peak, gate_peak),
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        promised=max(forward_peak, in_backward, routing_peak, gate_backward),
        is_bound=not (forward.exact and backward.exact),
        tensors={
            "T_O": rows_T,
            "dT_I": rows_T,
            **kept,
            "routing": small,
            "forward slots": forward_slots,
            "backward slots": backward_slots,
            "parameters' gradients": expert_gradients,
        },
    )


def _kept_and_offloaded(sizes: LayerSizes, forward: PassRows, restore: Restore) -> tuple[dict[str, int], int]:
    """Bytes of T_DI and of T_M where they are kept, and the bytes of those that are offloaded."""
    rows_bytes = (forward.received + forward.local) * sizes.element_size
    t_di, t_m = rows_bytes * sizes.d_model, rows_bytes * sizes.columns.hidden
    kept = {"T_DI": t_di * (restore.dispatched == "keep"), "T_M": t_m * (restore.hidden == "keep")}
    return kept, t_di * (restore.dispatched == "offload") + t_m * (restore.hidden == "offload")


def _arena(sizes: LayerSizes, rows: PassRows, direction: str, restore: Restore, rearranged: bool) -> int:
    """All ring slots of a pass."""
    schedule = rotating(direction, rows.num_chunks, sizes.stages, restore=restore, rearranged=rearranged)
    buffers = BufferSizes(
        direction=direction,
        extent=rows.extent,
        d_model=sizes.d_model,
        columns=sizes.columns,
        restore=restore,
        rearranged=rearranged,
    )
    elements = slot_elements(schedule, buffers)
    return arena_elements(elements, sizes.element_size)[1] * sizes.element_size


# ---- what a pass needs beside its slots


def _beside_forward(sizes: LayerSizes, forward: PassRows, backward: PassRows) -> int:
    weights = 3 * (forward.received + forward.sent) * sizes.weight_size
    return (
        max(_one_choice_rows(sizes, forward), _graph(sizes, backward)) + weights + _unit_bytes(sizes, forward)
    )


def _beside_backward(sizes: LayerSizes, num_tokens: int, backward: PassRows) -> int:
    """Products of a block of rows are summed to the gradients of their routing weights."""
    wide = sizes.element_size if sizes.element_size >= WIDE else 2 * WIDE
    products = _block_rows(sizes, backward) * sizes.columns.scratch * wide
    largest = max(products, _one_choice_rows(sizes, backward), _graph(sizes, backward))
    weights = (3 * backward.received + 2 * num_tokens * sizes.top_k) * sizes.weight_size
    unit = _unit_bytes(sizes, backward)
    if sizes.columns.staged:
        unit = max(unit, sizes.expert_parameters * sizes.element_size)  # a weight's gradient is staged, too
    elif sizes.element_size < WIDE:  # an expert's gradient is made before it is added
        num_local = sizes.num_experts // sizes.num_across
        unit = max(unit, sizes.expert_parameters // num_local * sizes.element_size)
    return largest + weights + unit


def _block_rows(sizes: LayerSizes, backward: PassRows) -> int:
    return min(sizes.columns.scratch_rows, backward.largest_unit)


def _graph(sizes: LayerSizes, backward: PassRows) -> int:
    """What autograd holds of a block of rows that it differentiates."""
    return _block_rows(sizes, backward) * sizes.columns.graph * max(sizes.element_size, WIDE)


def _one_choice_rows(sizes: LayerSizes, rows: PassRows) -> int:
    """One choice's rows of a chunk's tokens, where tokens have several."""
    return max(rows.extent.home, default=0) * sizes.d_model * sizes.element_size * (sizes.top_k > 1)


def _unit_bytes(sizes: LayerSizes, rows: PassRows) -> int:
    """The routing weights of the largest product's rows, their gradients and indices, what is staged, and
    what is too small to name. Narrow rows times wide weights: both sides are made wide first."""
    unit = rows.largest_unit
    found = unit * (4 * sizes.weight_size + INDEX + sizes.columns.staged * sizes.element_size) + SMALL
    widened = not sizes.columns.staged and sizes.element_size < WIDE
    return found + unit * sizes.d_model * 2 * WIDE * widened


def _expert_gradients(sizes: LayerSizes, backward: PassRows) -> int:
    additions = backward.num_chunks * (sizes.bypass_local + sizes.travels)
    narrow = sizes.expert_parameters * sizes.element_size
    if sizes.element_size >= WIDE or additions < 2:
        return narrow
    # Summed wide and rounded one by one at the end, the largest of them two thirds of all.
    return sizes.expert_parameters * WIDE + narrow * 2 // 3


# ---- what is small for each row


def _saved_by_row(sizes: LayerSizes, num_tokens: int, rows: PassRows) -> int:
    """The gate's probabilities, choices and weights, the order of rows, and routing weights that arrived."""
    slots = num_tokens * sizes.top_k
    gate = num_tokens * sizes.num_experts * sizes.weight_size * sizes.gate_scores
    # Weights that are scaled to sum 1 are saved before and after.
    choices = slots * (INDEX + sizes.weight_size * (1 + (sizes.top_k > 1)))
    received = rows.received * sizes.weight_size
    return gate + choices + received + _plan_bytes(sizes, slots, rows)


def _plan_bytes(sizes: LayerSizes, slots: int, rows: PassRows) -> int:
    """Where each row stands, its token, and how received rows are regrouped."""
    order = slots * INDEX * (2 + (sizes.top_k > 1))
    regrouped = any(rows.extent.regrouped)
    return order + rows.sent * INDEX + rows.received * INDEX * 2 * regrouped


def _routing_peak(sizes: LayerSizes, num_tokens: int) -> int:
    """While the gate decides and rows are sorted, before any row moves; the same after they came back."""
    slots = num_tokens * sizes.top_k
    widened = min(num_tokens, BLOCK_ROWS) * sizes.d_model * WIDE * (sizes.element_size < WIDE)
    return num_tokens * sizes.num_experts * sizes.weight_size * 5 + slots * INDEX * 12 + widened
