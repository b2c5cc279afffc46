"""How many bytes a layer's forward and backward take, predicted from its schedules and row counts.

A pass holds at once: the ring slots of its schedule (`pmoe.schedule.slots`, the sizes that the engine itself
allocates), or where nothing rotates its buffers by their lifetimes; what goes from forward to backward, the
result, and small things for each row. Nothing is measured or fitted. tests/unit/test_memory_model.py shows
that MPipeMoE's Eq. 1-6 follow from the slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pmoe.gates.logits import BLOCK_ROWS
from pmoe.planner.degree import Choice
from pmoe.planner.layer_sizes import CallRows, LayerSizes
from pmoe.planner.pass_rows import PassRows
from pmoe.schedule.restore import KEEP, Restore
from pmoe.schedule.rings import rotating
from pmoe.schedule.slots import BufferSizes, arena_elements, slot_elements
from pmoe.schedule.straight import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, local_pieces

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
    - unknown: what is a user's own and not counted, in words.
    - candidates: where n or the pair is chosen at a call, the bytes of each choice; those above are then of
      the one with the largest peak.
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
    """The bytes of a forward and a backward.

    call: how many rows. forward, backward: the rows of each pass. restore: how T_DI and T_M are restored.
    rearranged: backward has other chunks than forward.
    """
    if not sizes.rotates:
        forward, backward = (in_pieces(sizes, rows) for rows in (forward, backward))
    width = sizes.d_model * sizes.element_size
    rows_T, made = call.tokens * width, call.inner * width * bool(call.spread)
    kept, host = _kept_and_offloaded(sizes, forward, restore)
    shared = call.tokens * sizes.element_size * sizes.shared_columns.hidden
    small = _saved_by_row(sizes, call, forward)
    small += rearranged * _plan_bytes(sizes, call, backward)
    # Under autocast: narrow copies of the parameters and of the tokens, and a wide gradient of the latter.
    parameters = sizes.expert_parameters + sizes.shared_parameters
    cast = (parameters * sizes.element_size + rows_T) * bool(sizes.cast_from)
    wide_dx = call.tokens * sizes.d_model * sizes.cast_from
    # Where rows are mixtures: their results, and the mixtures themselves where they are sent again.
    mixtures = made * (1 + (restore.dispatched == "communicate")) * (call.spread == "mixed")
    saved = rows_T + sum(kept.values()) + shared + small + cast + mixtures

    forward_held = _held(sizes, rows=forward, direction="forward", restore=restore, rearranged=rearranged)
    backward_held = _held(sizes, rows=backward, direction="backward", restore=restore, rearranged=rearranged)
    padded = call.spread == "padded"  # those that are sent again are made again
    forward_work = _forward_work(sizes, call, forward, backward, forward_held) + made * (1 + padded)
    backward_work = _backward_work(sizes, call, backward, backward_held)
    backward_work += made * (1 + (padded and restore.dispatched == "communicate"))
    expert_gradients = _expert_gradients(sizes, backward) + sizes.shared_parameters * sizes.element_size

    # Where rows are padded or mixed, the output is made of a pass's result when that has ended.
    in_forward = saved + forward_work - rows_T * bool(made)
    forward_peak = max(in_forward, saved + made + rows_T * sizes.top_k * (call.spread == "padded"))
    in_backward = saved + (made or rows_T) + wide_dx + backward_work
    backward_peak = in_backward + expert_gradients
    # While the gate decides and rows are sorted, before any row moves.
    routing_peak = _scores(sizes, call) * 5 + call.slots * INDEX * 12 + _widened(sizes, call)
    # SoftMoE divides by the tokens' lengths, which have a gradient of their own.
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
    """Bytes of T_DI and of T_M where they are kept, and the bytes of those that are offloaded."""
    rows_bytes = (forward.received + forward.local) * sizes.element_size
    t_di, t_m = rows_bytes * sizes.d_model, rows_bytes * sizes.columns.hidden
    kept = {"T_DI": t_di * (restore.dispatched == "keep"), "T_M": t_m * (restore.hidden == "keep")}
    return kept, t_di * (restore.dispatched == "offload") + t_m * (restore.hidden == "offload")


def _held(sizes: LayerSizes, *, rows: PassRows, direction: str, restore: Restore, rearranged: bool) -> Held:
    """Bytes of a pass's buffers: all ring slots, the whole time, where there are rings."""
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
    return Held(num_bytes, num_bytes, num_bytes, num_bytes)


# ---- what a pass needs beside its buffers


def _forward_work(
    sizes: LayerSizes, call: CallRows, forward: PassRows, backward: PassRows, held: Held
) -> int:
    """All that forward works with."""
    weights = 3 * (forward.received + forward.sent) * sizes.weight_size
    shared = call.tokens * sizes.element_size * sizes.shared_columns.scratch
    largest = max(
        held.summing + _one_choice_rows(sizes, forward),
        held.computing + _graph(sizes, backward),
        held.first + shared,
        held.leaving,
    )
    return largest + weights + _unit_bytes(sizes, forward) + _whole_rows(sizes, call, forward)


def _backward_work(sizes: LayerSizes, call: CallRows, backward: PassRows, held: Held) -> int:
    """All that backward works with. Products of a block of rows are summed to the gradients of their routing
    weights."""
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
        unit = max(unit, _largest_weight(sizes) * sizes.element_size)  # its gradient is staged, too
    elif sizes.element_size < WIDE:  # an expert's gradient is made before it is added
        num_local = sizes.num_experts // sizes.num_across
        unit = max(unit, sizes.expert_parameters // num_local * sizes.element_size)
    return largest + weights + unit + _whole_rows(sizes, call, backward)


def _whole_rows(sizes: LayerSizes, call: CallRows, rows: PassRows) -> int:
    """What the shared expert adds to all tokens, and two copies of what a rank carries for others, a part of
    the way, in one collective."""
    num_rows = call.tokens * bool(sizes.shared_parameters) + 2 * rows.relayed
    return num_rows * sizes.d_model * sizes.element_size


def _shared_gradients(sizes: LayerSizes, call: CallRows) -> int:
    """Its incoming gradient, the gradient of its T_M, the activated hidden, and products of a block."""
    if not sizes.shared_parameters:
        return 0
    columns, size = sizes.shared_columns, sizes.element_size
    elements = call.tokens * (sizes.d_model + columns.hidden + columns.scratch)
    return elements * size + min(columns.scratch_rows, call.tokens) * columns.scratch * max(size, WIDE)


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
    # Summed wide and rounded one by one at the end.
    return sizes.expert_parameters * WIDE + _largest_weight(sizes) * sizes.element_size


def _largest_weight(sizes: LayerSizes) -> int:
    """Elements of w1, which gated experts have twice; of modules, whose weights nobody knows, of all."""
    wide, width = sizes.columns.hidden, sizes.columns.scratch
    return (
        math.ceil(sizes.expert_parameters * wide / (wide + width))
        if wide and width
        else sizes.expert_parameters
    )


# ---- what is small for each row


def _saved_by_row(sizes: LayerSizes, call: CallRows, rows: PassRows) -> int:
    """The gate's probabilities, choices and weights, the order of rows, and routing weights that arrived."""
    gate = _scores(sizes, call) * sizes.gate_scores
    # Weights that are scaled to sum 1 are saved before and after.
    choices = call.slots * (INDEX + sizes.weight_size * (1 + (sizes.top_k > 1)))
    received = rows.received * sizes.weight_size
    shared = call.tokens * sizes.weight_size * bool(sizes.shared_parameters)
    if call.spread == "padded":
        choices += (call.inner + call.tokens * sizes.top_k) * INDEX
    return gate + choices + received + shared + _plan_bytes(sizes, call, rows)


def _plan_bytes(sizes: LayerSizes, call: CallRows, rows: PassRows) -> int:
    """Where each row stands, its token, and how received rows are regrouped."""
    picked = call.choices > sizes.top_k  # the token of each slot, and where it was picked
    order = call.slots * INDEX * (2 + (sizes.top_k > 1) + 2 * picked)
    order += call.slots * (INDEX + INDEX // 2) * rows.merged  # whose row carries a slot
    regrouped = any(rows.extent.regrouped)
    return order + rows.sent * INDEX + rows.received * INDEX * 2 * regrouped


def _gate_gradients(sizes: LayerSizes, call: CallRows) -> int:
    """Of the routing weights, and of two steps from them to the logits."""
    return (
        _scores(sizes, call) * 2 * bool(sizes.gate_scores)
        + call.slots * sizes.weight_size * 2
        + _widened(sizes, call)
    )


def _scores(sizes: LayerSizes, call: CallRows) -> int:
    """A number for each token and expert."""
    return call.tokens * sizes.num_experts * sizes.weight_size


def _widened(sizes: LayerSizes, call: CallRows) -> int:
    """Narrow tokens, as the gate reads them."""
    return min(call.tokens, BLOCK_ROWS) * sizes.d_model * WIDE * (sizes.element_size < WIDE)


# ---- without rings: what a collective touches lives as long as the pass, what the experts make for a unit
# while its task runs, or until the task that needs it last


@dataclass(frozen=True, kw_only=True)
class Makes:
    """Names of the buffers that a task makes, by how long they live.

    stay: until the pass ends. Where rows are sorted for the experts, and where experts are sharded, these are
    made when the experts are done. pending: until the weight gradient of the same unit. brief: until the
    experts are done; result: until the task ends.
    """

    stay: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    brief: tuple[str, ...] = ()
    result: tuple[str, ...] = ()


MAKES: Mapping[str, Mapping[Kind, Makes]] = {
    "forward": {
        Kind.COMPUTE: Makes(stay=("T_DO", "leaving", "parts"), brief=("active",), result=("T_DO_sorted",)),
        Kind.LOCAL: Makes(brief=("active_L",)),
    },
    "backward": {
        Kind.COMPUTE: Makes(
            stay=("dT_DI", "leaving", "parts"),
            pending=("dT_M", "active", "dT_DO_sorted"),
            result=("dT_DI_sorted",),
        ),
        Kind.LOCAL: Makes(pending=("dT_M_L", "active_L", "dT_DO_L")),
    },
}
ENDS = {Kind.WGRAD: Kind.COMPUTE, Kind.LOCAL_WGRAD: Kind.LOCAL}


class Held(NamedTuple):
    """What the buffers of a pass hold: at first, at most while experts compute, at most when they are done
    and results are made ready to leave, and while a token's rows are summed. In bytes."""

    first: int
    computing: int
    leaving: int
    summing: int


def in_pieces(sizes: LayerSizes, rows: PassRows) -> PassRows:
    """The same with the rows that stay by piece, as a pass without rings has them."""
    n, local = rows.num_chunks, rows.extent.local
    m = local_pieces(n, local=sizes.bypass_local, remote=sizes.travels)
    if not m:
        return rows
    joined = n - m + 1
    return replace(rows, extent=replace(rows.extent, local=(sum(local[:joined]), *local[joined:])))


def without_rings(sizes: LayerSizes, rows: PassRows, buffers: BufferSizes) -> Held:
    """Of the buffers of a pass. rows: `in_pieces`."""
    direction, n = buffers.direction, rows.num_chunks
    build = forward_schedule if direction == "forward" else backward_schedule

    def num_bytes(names: Iterable[str], chunk: int) -> int:
        shapes = (buffers.shape(f"{name}.{chunk}") for name in names)
        return sum(rows * columns for rows, columns in shapes) * sizes.element_size

    sharded = sizes.inside > 1
    start = ["send", "T_DI" if direction == "forward" else "dT_DO"] + ["arrived", "copies"] * sharded
    home = sum(rows.extent.send) + sum(rows.extent.local) + sizes.has_drops
    live = home * sizes.d_model * sizes.element_size + sum(num_bytes(start, i) for i in range(n))
    first = computing = leaving = live
    makes = MAKES[direction]
    for task in build(n, sizes.stages).tasks:
        i = task.chunk
        if task.kind in ENDS:
            live -= num_bytes(makes[ENDS[task.kind]].pending, i)
        made = makes.get(task.kind)
        if made is None:
            continue
        live += num_bytes(made.pending, i)
        early, late = made.stay[:1], made.stay[1:] if sharded else ()
        if made.stay and rows.extent.regrouped[i]:
            early, late = (), (*early, *late)
        live += num_bytes(early, i)
        computing = max(computing, live + num_bytes(made.brief, i) + num_bytes(made.result, i))
        live += num_bytes(late, i)
        leaving = max(leaving, live + num_bytes(made.result, i))
    return Held(first, computing, leaving, live)
