"""The memory model: predicts the bytes of a layer's passes from its schedules and row counts.

At any time a pass holds

- its buffers. If buffers rotate, these are all ring slots of its schedule, with the sizes that the engine
  allocates (`pmoe.schedule.buffer_sizes`). If not, each buffer counts while it lives.
- what goes from forward to backward, and the result;
- small tensors with a few numbers for each row.

Nothing is measured or fitted. tests/unit/test_memory_model.py derives MPipeMoE's Eq. 1-6 from the slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pmoe.gates.logits import BLOCK_ROWS
from pmoe.planner.degree import Choice
from pmoe.planner.layer_sizes import CallRows, LayerSizes
from pmoe.planner.rows_per_pass import PassRows
from pmoe.schedule.buffer_sizes import BufferSizes, arena_elements, slot_elements
from pmoe.schedule.restore import KEEP, Restore
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, local_pieces

INDEX = 8
"""Bytes of an index (int64)."""

SMALL = 4096
"""Bytes of everything that is too small to name: scalars, counts, and what allocators add to them."""

WIDE = 4
"""Bytes of a float32 element. Narrower numbers are summed in float32."""


@dataclass(frozen=True, kw_only=True)
class PredictedMemory:
    """Predicted bytes of one forward and one backward pass of a layer.

    The layer's input, its parameters and the incoming gradient belong to the caller and are not counted.

    - saved: held between the passes, the output included.
    - temporary: the most that a pass holds beyond saved, without dx and the parameters' gradients.
    - gradients: the parameters' gradients.
    - host: offloaded to host memory.
    - peak: the most that the device holds at once, over both passes.
    - forward_peak, backward_peak: the peak of each pass.
    - promised: the peak without the parameters' gradients. A memory budget limits this number.
    - is_bound: True if row counts were not given. All numbers are then upper bounds for any routing.
    - tensors: bytes by name of a tensor.
    - unknown: what only the user can know and is not counted, in words.
    - candidates: the bytes of each choice, if n or the restore pair is chosen at a call; the numbers above
      are then those of the choice with the largest peak. Otherwise empty.
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
    unknown: tuple[str, ...] = ()
    candidates: Mapping[Choice, PredictedMemory] = field(default_factory=dict)


def predict(
    sizes: LayerSizes,
    call: CallRows,
    forward: PassRows,
    backward: PassRows,
    restore: Restore,
    *,
    rearranged: bool = False,
) -> PredictedMemory:
    """Predicts the bytes of a forward and a backward pass.

    Args:
        sizes: sizes of the layer.
        call: numbers of rows of the call.
        forward, backward: rows of each pass, counted or at most.
        restore: what becomes of T_DI and T_M between the passes.
        rearranged: whether backward has other chunks than forward.
    """
    if not sizes.rotates:
        forward, backward = (in_pieces(sizes, rows) for rows in (forward, backward))
    width = sizes.d_model * sizes.element_size
    rows_T = call.tokens * width
    inner_bytes = call.inner * width * bool(call.spread)
    kept, host = _kept_and_offloaded(sizes, forward, restore)
    shared = call.tokens * sizes.element_size * sizes.shared_columns.hidden
    small = _saved_by_row(sizes, call, forward)
    small += rearranged * _plan_bytes(sizes, call, backward)
    # Autocast makes narrow copies of the parameters and of the tokens, and a wide gradient of the tokens.
    parameters = sizes.expert_parameters + sizes.shared_parameters
    cast = (parameters * sizes.element_size + rows_T) * bool(sizes.cast_from)
    wide_dx = call.tokens * sizes.d_model * sizes.cast_from
    # SoftMoE saves the experts' results, and also the mixed rows themselves if backward sends them again.
    mixtures = inner_bytes * (1 + (restore.dispatched == "communicate")) * (call.spread == "mixed")
    saved = rows_T + sum(kept.values()) + shared + small + cast + mixtures

    forward_held = _held(sizes, rows=forward, direction="forward", restore=restore, rearranged=rearranged)
    backward_held = _held(sizes, rows=backward, direction="backward", restore=restore, rearranged=rearranged)
    padded = call.spread == "padded"  # backward makes padded rows again if it sends them again
    forward_work = _forward_work(sizes, call, forward, backward, forward_held) + inner_bytes * (1 + padded)
    backward_work = _backward_work(sizes, call, backward, backward_held)
    backward_work += inner_bytes * (1 + (padded and restore.dispatched == "communicate"))
    expert_gradients = _expert_gradients(sizes, backward) + sizes.shared_parameters * sizes.element_size

    # For padded or mixed rows the output is made after the pass, from its result: the pass does not hold it.
    in_forward = saved + forward_work - rows_T * bool(inner_bytes)
    forward_peak = max(in_forward, saved + inner_bytes + rows_T * sizes.top_k * (call.spread == "padded"))
    in_backward = saved + (inner_bytes or rows_T) + wide_dx + backward_work
    backward_peak = in_backward + expert_gradients
    # The peak while the gate routes and rows are sorted, before any row moves: at most 5 tensors of scores,
    # and 12 with an index for each slot.
    routing_peak = _scores(sizes, call) * 5 + call.slots * INDEX * 12 + _widened(sizes, call)
    # The gate's backward holds 3 tensors like T_I; SoftMoE's holds one more, as it normalizes the tokens.
    gate_backward = (
        (4 if call.spread == "mixed" else 3) * rows_T + wide_dx + small + _gate_gradients(sizes, call)
    )
    gate_peak = gate_backward + parameters * sizes.element_size
    gradients = parameters + sizes.gate_parameters
    return PredictedMemory(
        saved=saved,
        temporary=max(forward_work, backward_work),
        gradients=gradients * (sizes.cast_from or sizes.element_size),
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
            "forward buffers": max(forward_held),
            "backward buffers": max(backward_held),
            "parameters' gradients": expert_gradients,
        }
        | ({"shared T_M": shared} if shared else {}),
    )


def _kept_and_offloaded(sizes: LayerSizes, forward: PassRows, restore: Restore) -> tuple[dict[str, int], int]:
    """Returns the bytes of T_DI and T_M that stay on the device, by name, and the offloaded bytes."""
    rows_bytes = (forward.received + forward.local) * sizes.element_size
    t_di, t_m = rows_bytes * sizes.d_model, rows_bytes * sizes.columns.hidden
    kept = {"T_DI": t_di * (restore.dispatched == "keep"), "T_M": t_m * (restore.hidden == "keep")}
    return kept, t_di * (restore.dispatched == "offload") + t_m * (restore.hidden == "offload")


def _held(
    sizes: LayerSizes, *, rows: PassRows, direction: str, restore: Restore, rearranged: bool
) -> PassBytes:
    """Returns the bytes of a pass's buffers. With rings these are all slots, for the whole pass."""
    size = sizes.element_size
    buffers = BufferSizes(
        direction=direction,
        extent=rows.extent,
        d_model=sizes.d_model,
        columns=sizes.columns,
        restore=restore if sizes.rotates else KEEP,
        rearranged=rearranged,
    )
    if not sizes.rotates:
        return without_rings(sizes, rows, buffers)
    schedule = rotating(direction, rows.num_chunks, sizes.stages, restore=restore, rearranged=rearranged)
    num_bytes = arena_elements(slot_elements(schedule, buffers), size)[1] * size
    return PassBytes(num_bytes, num_bytes, num_bytes, num_bytes)


# ---- memory that a pass needs beside its buffers


def _forward_work(
    sizes: LayerSizes, call: CallRows, forward: PassRows, backward: PassRows, held: PassBytes
) -> int:
    """Returns the bytes that forward works with at its worst moment.

    It is the largest of four moments: the shared expert at the start, the experts, results before they
    leave, and the sum of each token's rows. Routing weights and what `_unit_bytes` and `_whole_rows` count
    come on top.
    """
    weights = 3 * (forward.received + forward.sent) * sizes.weight_size
    shared = call.tokens * sizes.element_size * sizes.shared_columns.scratch
    largest = max(
        held.summing + _one_choice_rows(sizes, forward),
        held.computing + _graph(sizes, backward),
        held.first + shared,
        held.leaving,
    )
    return largest + weights + _unit_bytes(sizes, forward) + _whole_rows(sizes, call, forward)


def _backward_work(sizes: LayerSizes, call: CallRows, backward: PassRows, held: PassBytes) -> int:
    """Returns the bytes that backward works with, at the worst of the moments that `_forward_work` names.

    The gradient of a routing weight is an inner product over the hidden columns. The experts compute these
    products for a block of rows at a time, in float32 at least.
    """
    wide = sizes.element_size if sizes.element_size >= WIDE else 2 * WIDE
    products = _block_rows(sizes, backward) * sizes.columns.scratch * wide
    largest = max(
        held.computing + max(products, _graph(sizes, backward)),
        held.summing + _one_choice_rows(sizes, backward),
        held.first + _shared_gradients(sizes, call),
        held.leaving,
    )
    weights = (3 * backward.received + 2 * call.slots) * sizes.weight_size
    unit = _unit_bytes(sizes, backward)
    if sizes.columns.staged:
        unit = max(unit, _largest_weight(sizes) * sizes.element_size)  # a weight's gradient is staged, too
    elif sizes.element_size < WIDE:  # one expert's narrow gradient exists before it is added to the wide sum
        num_local = sizes.num_experts // sizes.ep_size
        unit = max(unit, sizes.expert_parameters // num_local * sizes.element_size)
    return largest + weights + unit + _whole_rows(sizes, call, backward)


def _whole_rows(sizes: LayerSizes, call: CallRows, rows: PassRows) -> int:
    """Returns the bytes of rows that are not cut into chunks.

    These are the shared expert's results for all tokens, and two copies of the rows that this rank passes
    on for others in one collective.
    """
    num_rows = call.tokens * bool(sizes.shared_parameters) + 2 * rows.relayed
    return num_rows * sizes.d_model * sizes.element_size


def _shared_gradients(sizes: LayerSizes, call: CallRows) -> int:
    """Returns the bytes of the shared expert's backward; 0 without one.

    It holds the incoming gradient, the gradient of T_M, the activated hidden, and products of a block of
    rows.
    """
    if not sizes.shared_parameters:
        return 0
    columns = sizes.shared_columns
    size = sizes.element_size
    elements = call.tokens * (sizes.d_model + columns.hidden + columns.scratch)
    return elements * size + min(columns.scratch_rows, call.tokens) * columns.scratch * max(size, WIDE)


def _block_rows(sizes: LayerSizes, backward: PassRows) -> int:
    """Returns the rows of the largest block that the experts' backward works on at a time."""
    return min(sizes.columns.scratch_rows, backward.largest_unit)


def _graph(sizes: LayerSizes, backward: PassRows) -> int:
    """Returns the bytes that autograd holds while it differentiates a block of rows."""
    return _block_rows(sizes, backward) * sizes.columns.graph * max(sizes.element_size, WIDE)


def _one_choice_rows(sizes: LayerSizes, rows: PassRows) -> int:
    """Returns the bytes of one choice's rows for the tokens of the largest chunk.

    They are 0 if each token has one choice.
    """
    return max(rows.extent.home, default=0) * sizes.d_model * sizes.element_size * (sizes.top_k > 1)


def _unit_bytes(sizes: LayerSizes, rows: PassRows) -> int:
    """Returns the bytes of small tensors for the largest product.

    They are the routing weights of its rows, their gradients, indices, staged columns, and `SMALL`. If
    narrow rows are multiplied with wide weights outside of a kernel, both sides are first copied to
    float32.
    """
    unit = rows.largest_unit
    num_bytes = unit * (4 * sizes.weight_size + INDEX + sizes.columns.staged * sizes.element_size) + SMALL
    widened = not sizes.columns.staged and sizes.element_size < WIDE
    return num_bytes + unit * sizes.d_model * 2 * WIDE * widened


def _expert_gradients(sizes: LayerSizes, backward: PassRows) -> int:
    """Returns the bytes of the experts' gradients while they are summed."""
    additions = backward.num_chunks * (sizes.bypass_local + sizes.travels)
    narrow = sizes.expert_parameters * sizes.element_size
    if sizes.element_size >= WIDE or additions < 2:
        return narrow
    # Several narrow additions would lose bits: sums are float32, and each weight's is rounded at the end.
    return sizes.expert_parameters * WIDE + _largest_weight(sizes) * sizes.element_size


def _largest_weight(sizes: LayerSizes) -> int:
    """Returns the elements of w1, the largest weight (gated experts have two of its size in it).

    The weights of modules are unknown: all parameters count as one.
    """
    wide = sizes.columns.hidden
    width = sizes.columns.scratch
    return (
        math.ceil(sizes.expert_parameters * wide / (wide + width))
        if wide and width
        else sizes.expert_parameters
    )


# ---- small tensors: a few numbers for each row


def _saved_by_row(sizes: LayerSizes, call: CallRows, rows: PassRows) -> int:
    """Returns the bytes of small tensors that forward saves.

    They are the gate's scores, choices and weights, the plan (`_plan_bytes`), and routing weights that
    arrived.
    """
    gate = _scores(sizes, call) * sizes.gate_scores
    # With several choices the weights of a token are scaled to sum 1. Autograd saves them before and after.
    choices = call.slots * (INDEX + sizes.weight_size * (1 + (sizes.top_k > 1)))
    received = rows.received * sizes.weight_size
    shared = call.tokens * sizes.weight_size * bool(sizes.shared_parameters)
    if call.spread == "padded":
        choices += (call.inner + call.tokens * sizes.top_k) * INDEX
    return gate + choices + received + shared + _plan_bytes(sizes, call, rows)


def _plan_bytes(sizes: LayerSizes, call: CallRows, rows: PassRows) -> int:
    """Returns the bytes of a plan's indices.

    It holds the place and the token of each row, and how received rows are regrouped.
    """
    # Experts pick tokens: the token of each slot is stored, and the place where it was picked.
    picked = call.choices > sizes.top_k
    order = call.slots * INDEX * (2 + (sizes.top_k > 1) + 2 * picked)
    order += call.slots * (INDEX + INDEX // 2) * rows.merged  # the sent row that carries each slot
    regrouped = any(rows.extent.regrouped)
    return order + rows.sent * INDEX + rows.received * INDEX * 2 * regrouped


def _gate_gradients(sizes: LayerSizes, call: CallRows) -> int:
    """Returns the bytes of the gradients of routing weights and of two steps from them to the logits."""
    return (
        _scores(sizes, call) * 2 * bool(sizes.gate_scores)
        + call.slots * sizes.weight_size * 2
        + _widened(sizes, call)
    )


def _scores(sizes: LayerSizes, call: CallRows) -> int:
    """Returns the bytes of one score for each token and expert."""
    return call.tokens * sizes.num_experts * sizes.weight_size


def _widened(sizes: LayerSizes, call: CallRows) -> int:
    """Returns the bytes of a block of narrow tokens that the gate copies to float32."""
    return min(call.tokens, BLOCK_ROWS) * sizes.d_model * WIDE * (sizes.element_size < WIDE)


# ---- memory of a pass without rings
#
# A buffer that a collective reads or writes lives until the pass ends. A buffer that the experts make for a
# chunk lives until its last task:
#
#     tasks of a chunk in backward     ... S1      C1                W1
#     stay     (dT_DI)                             |================================> end of the pass
#     pending  (dT_M, dT_DO_sorted)                |================|
#     result   (dT_DI_sorted)                      |====|


@dataclass(frozen=True, kw_only=True)
class BufferLifetimes:
    """Names of the buffers that a task makes, by how long they live.

    stay: until the pass ends. The first is made when the experts start, or, if rows are sorted for the
        experts, when they are done. The others exist only if experts are sharded, and are made when the
        experts are done.
    pending: until the weight gradient of the same chunk.
    brief: until the experts are done.
    result: until the task ends.
    """

    stay: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    brief: tuple[str, ...] = ()
    result: tuple[str, ...] = ()


MAKES: Mapping[str, Mapping[Kind, BufferLifetimes]] = {
    "forward": {
        Kind.COMPUTE: BufferLifetimes(
            stay=("T_DO", "leaving", "parts"), brief=("active",), result=("T_DO_sorted",)
        ),
        Kind.LOCAL: BufferLifetimes(brief=("active_L",)),
    },
    "backward": {
        Kind.COMPUTE: BufferLifetimes(
            stay=("dT_DI", "leaving", "parts"),
            pending=("dT_M", "active", "dT_DO_sorted"),
            result=("dT_DI_sorted",),
        ),
        Kind.LOCAL: BufferLifetimes(pending=("dT_M_L", "active_L", "dT_DO_L")),
    },
}
"""Buffers that each kind of task makes, by direction. Kinds that are missing make none that count here."""
ENDS = {Kind.WGRAD: Kind.COMPUTE, Kind.LOCAL_WGRAD: Kind.LOCAL}
"""Maps a kind of task to the kind whose ``pending`` buffers end with it."""


class PassBytes(NamedTuple):
    """Bytes that the buffers of a pass hold at four moments.

    first: at the start of the pass.
    computing: the most while experts compute.
    leaving: the most when experts are done and results are prepared for combine.
    summing: at the end, while the rows of each token are summed.
    """

    first: int
    computing: int
    leaving: int
    summing: int


def in_pieces(sizes: LayerSizes, rows: PassRows) -> PassRows:
    """Returns the same rows, with local rows by piece, as a pass without rings cuts them.

    Example: local rows (4, 4, 4) in 2 pieces -> (8, 4).
    """
    n = rows.num_chunks
    local = rows.extent.local
    m = local_pieces(n, local=sizes.bypass_local, remote=sizes.travels)
    if not m:
        return rows
    joined = n - m + 1
    return replace(rows, extent=replace(rows.extent, local=(sum(local[:joined]), *local[joined:])))


def without_rings(sizes: LayerSizes, rows: PassRows, buffers: BufferSizes) -> PassBytes:
    """Returns the bytes of the buffers of a pass without rings, by walking through its tasks.

    rows: as `in_pieces` returns them.
    """
    direction = buffers.direction
    n = rows.num_chunks
    build = forward_schedule if direction == "forward" else backward_schedule

    def num_bytes(names: Iterable[str], chunk: int) -> int:
        shapes = (buffers.shape(f"{name}.{chunk}") for name in names)
        return sum(rows * columns for rows, columns in shapes) * sizes.element_size

    sharded = sizes.esp_size > 1
    start = ["send", "T_DI" if direction == "forward" else "dT_DO"] + ["arrived", "copies"] * sharded
    # The engine makes the buffers of collectives, and the home rows of all chunks, before the first task.
    home = sum(rows.extent.send) + sum(rows.extent.local) + sizes.has_drops
    live = home * sizes.d_model * sizes.element_size + sum(num_bytes(start, i) for i in range(n))
    first = computing = leaving = live
    makes = MAKES[direction]
    for task in build(n, sizes.stages).tasks:
        i = task.chunk
        if task.kind in ENDS:
            live -= num_bytes(makes[ENDS[task.kind]].pending, i)
        task_buffers = makes.get(task.kind)
        if task_buffers is None:
            continue
        live += num_bytes(task_buffers.pending, i)
        early, late = task_buffers.stay[:1], task_buffers.stay[1:] if sharded else ()
        if task_buffers.stay and rows.extent.regrouped[i]:
            early, late = (), (*early, *late)
        live += num_bytes(early, i)
        # While the experts run they need everything made so far, and brief buffers and the result besides.
        computing = max(
            computing, live + num_bytes(task_buffers.brief, i) + num_bytes(task_buffers.result, i)
        )
        live += num_bytes(late, i)
        leaving = max(leaving, live + num_bytes(task_buffers.result, i))
    return PassBytes(first, computing, leaving, live)
