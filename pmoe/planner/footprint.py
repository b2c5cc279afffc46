"""How many bytes a layer's forward and backward take, predicted from its schedules and row counts.

What a pass holds at once: the ring slots of its schedule (`pmoe.schedule.slots`, the sizes that the engine
itself allocates), what goes from forward to backward, the result, and small things by the row. Nothing is
measured or fitted.

Letters: T tokens, K choices, B the largest T of a rank, W ranks, E experts, N rows, M = d_model, n chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pmoe.comm.counts import RankCounts
from pmoe.experts import FFNExperts, SwiGLUExperts
from pmoe.gates.logits import BLOCK_ROWS
from pmoe.planner.theory import check_sizes
from pmoe.schedule.restore import Restore
from pmoe.schedule.rings import rotating
from pmoe.schedule.slots import BufferSizes, ChunkRows, HiddenColumns, arena_elements, slot_elements
from pmoe.schedule.tasks import Stages

INDEX = 8
"""Bytes of an index."""

SMALL = 4096
"""Bytes: scalars, counts, and what allocators add to them."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a layer its memory depends on. element_size: of the rows; weight_size: of routing weights.
    expert_parameters, gate_parameters: elements. gate_scores: tensors of a score for each token and expert
    that the gate saves. cast_from: under autocast the element size of tokens and parameters, else 0. inside:
    ranks that each expert is split over.
    """

    d_model: int
    num_experts: int
    top_k: int
    num_ranks: int
    columns: HiddenColumns
    element_size: int
    weight_size: int
    expert_parameters: int
    gate_parameters: int
    bypass_local: bool = True
    has_drops: bool = False
    gate_scores: int = 1
    cast_from: int = 0
    inside: int = 1

    @property
    def num_across(self) -> int:
        """Ranks that experts are spread over; each expert's hidden columns are split over those inside."""
        return self.num_ranks // self.inside

    @property
    def travels(self) -> bool:
        return self.num_ranks > 1 or not self.bypass_local

    @property
    def stages(self) -> Stages:
        return Stages(local=self.bypass_local, remote=self.travels, sharded=self.inside > 1)


@dataclass(frozen=True, kw_only=True)
class PassRows:
    """Rows of one pass: by chunk, and in all. exact: the very rows, else what they are at most."""

    extent: ChunkRows
    received: int
    local: int
    sent: int
    exact: bool

    @property
    def num_chunks(self) -> int:
        return len(self.extent.send)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Predicted bytes of one forward and backward of a layer, beyond its input, its parameters and the
    gradient that comes in.

    saved: held between the passes, the output with it. temporary: what a pass adds to that at most, the
    result of backward (dx) and the parameters' gradients left out. gradients: of the parameters. host:
    offloaded. peak: all that is held on the device at once, at most; forward_peak, backward_peak: of each
    pass. promised: what a memory budget counts, the peak without the parameters' gradients. is_bound: whether
    rows were not given, so that all these are upper bounds for any routing. tensors: bytes by name.
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


def counted_rows(shape: Shape, counts: RankCounts, rank: int, n: int, inside_rank: int = 0) -> PassRows:
    """The rows of rank ``rank`` in n chunks, from the counts that ranks exchanged (`pmoe.comm.counts`).
    inside_rank: its place among the ranks that share its experts."""
    own = slice(inside_rank * shape.num_across, (inside_rank + 1) * shape.num_across)
    counts = counts.joined(n)
    send, recv = counts.send.clone(), counts.recv.clone()
    home = [rows + shape.has_drops for rows in send.sum((1, 2)).tolist()]
    local = [0] * n
    if shape.bypass_local:
        local = send[:, rank].sum(1).tolist()
        send[:, rank] = 0
        recv[:, rank] = 0
    extent = ChunkRows(
        send=tuple(send.sum((1, 2)).tolist()),
        received=tuple(recv.sum((1, 2)).tolist()),
        local=tuple(local),
        home=tuple(home),
        regrouped=tuple((recv.sum(2) > 0).sum(1).gt(1).tolist()),
        arrived=tuple(recv[:, own].sum((1, 2)).tolist()) if shape.inside > 1 else None,
        gathered=tuple(recv.sum((1, 2)).tolist()) if shape.inside > 1 else None,
        inside=shape.inside,
    )
    return PassRows(
        extent=extent,
        received=sum(extent.received),
        local=sum(local),
        sent=sum(extent.send),
        exact=True,
    )


def worst_rows(shape: Shape, num_tokens: int, n: int, bins: int, slot_rows: int) -> PassRows:
    """The most rows that any routing brings a rank, where no rank has more than ``num_tokens`` tokens.

    slot_rows: the rows of a slot; chunks are cut finer until none brings more, down to the ``bins``.
    """
    sources = shape.num_ranks - 1 if shape.bypass_local else shape.num_ranks
    own = math.ceil(num_tokens / n) * shape.top_k
    cuts = n
    while bins % (2 * cuts) == 0:
        cuts *= 2
    finest = math.ceil(num_tokens / cuts) * shape.top_k
    received = min(sources * own, max(slot_rows, sources * finest))
    local = own if shape.bypass_local else 0
    # A skewed batch of one or two chunks is cut into more, which use every slot of a ring.
    chunks = max(n, 3) if sources else n
    extent = ChunkRows(
        send=(own * shape.travels,) * chunks,
        received=(received,) * chunks,
        local=(local,) * chunks,
        home=(own + shape.has_drops,) * chunks,
        regrouped=(sources > 1,) * chunks,
        arrived=(min(received, shape.num_across * own),) * chunks if shape.inside > 1 else None,
        gathered=(received,) * chunks if shape.inside > 1 else None,
        inside=shape.inside,
    )
    slots = num_tokens * shape.top_k
    return PassRows(
        extent=extent,
        received=sources * slots,
        local=slots if shape.bypass_local else 0,
        sent=slots * shape.travels,
        exact=False,
    )


def predict(
    shape: Shape,
    num_tokens: int,
    forward: PassRows,
    backward: PassRows,
    restore: Restore,
    *,
    rearranged: bool = False,
) -> Memory:
    """The bytes of a forward and a backward through rings, with T_DI and T_M restored as ``restore`` says."""
    size, slots = shape.element_size, num_tokens * shape.top_k
    rows_T = num_tokens * shape.d_model * size
    computed = forward.received + forward.local
    t_di, t_m = computed * shape.d_model * size, computed * shape.columns.hidden * size
    kept = {
        "T_DI": t_di * (restore.dispatched == "keep"),
        "T_M": t_m * (restore.hidden == "keep"),
    }
    host = t_di * (restore.dispatched == "offload") + t_m * (restore.hidden == "offload")
    small = _saved_by_row(shape, num_tokens, forward) + rearranged * _plan_bytes(shape, slots, backward)
    # Under autocast: narrow copies of the parameters and of the tokens, and a wide gradient of the latter.
    cast = (shape.expert_parameters * size + rows_T) * bool(shape.cast_from)
    wide_dx = num_tokens * shape.d_model * shape.cast_from
    saved = rows_T + sum(kept.values()) + small + cast

    arenas = {
        "forward": _arena(shape, forward, "forward", restore, rearranged),
        "backward": _arena(shape, backward, "backward", restore, rearranged),
    }
    # A block of rows' products, before they are summed to the routing weights' gradients.
    block = min(
        shape.columns.scratch_rows, max((*backward.extent.received, *backward.extent.local), default=0)
    )
    chosen, chosen_backward = (
        max(rows.extent.home, default=0) * shape.d_model * size * (shape.top_k > 1)
        for rows in (forward, backward)
    )
    weights = 3 * (forward.received + forward.sent) * shape.weight_size
    backward_weights = (3 * backward.received + 2 * slots) * shape.weight_size
    # Each unit's own routing weights, their gradients and rows, and what is too small to name.
    units = [max((*rows.extent.received, *rows.extent.local), default=0) for rows in (forward, backward)]
    unit_bytes = [
        rows * (4 * shape.weight_size + INDEX + shape.columns.staged * size) + SMALL for rows in units
    ]
    num_local = shape.num_experts // shape.num_across
    if shape.columns.staged:
        unit_bytes[1] = max(unit_bytes[1], shape.expert_parameters * size)  # a weight's gradient, likewise
    elif size < 4:
        # Narrow rows times wide weights: both sides are made wide first. An expert's gradient is made before
        # it is added.
        unit_bytes = [found + rows * shape.d_model * 8 for found, rows in zip(unit_bytes, units, strict=True)]
        unit_bytes[1] = max(unit_bytes[1], shape.expert_parameters // num_local * size)
    graph = block * shape.columns.graph * max(size, 4)
    forward_work = arenas["forward"] + max(chosen, graph) + weights + unit_bytes[0]
    products = block * shape.columns.scratch * (size if size >= 4 else 8)
    backward_work = (
        arenas["backward"] + max(products, chosen_backward, graph) + backward_weights + unit_bytes[1]
    )
    gradients = (shape.expert_parameters + shape.gate_parameters) * (shape.cast_from or size)
    expert_gradients = shape.expert_parameters * size
    additions = backward.num_chunks * (shape.bypass_local + shape.travels)
    if size < 4 and additions > 1:
        # Summed wide and rounded one by one at the end, the largest of them two thirds of all.
        expert_gradients = shape.expert_parameters * 4 + shape.expert_parameters * size * 2 // 3
    forward_peak = saved + forward_work
    backward_peak = saved + rows_T + wide_dx + backward_work + expert_gradients
    routing_peak = _routing_peak(shape, num_tokens)
    gate_backward = 3 * rows_T + wide_dx + small + _routing_peak(shape, num_tokens)
    promised = max(forward_peak, saved + rows_T + wide_dx + backward_work, routing_peak, gate_backward)
    return Memory(
        saved=saved,
        temporary=max(forward_work, backward_work),
        gradients=gradients,
        host=host,
        peak=max(forward_peak, backward_peak, routing_peak, gate_backward + shape.expert_parameters * size),
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        promised=promised,
        is_bound=not (forward.exact and backward.exact),
        tensors={
            "T_O": rows_T,
            "dT_I": rows_T,
            **kept,
            "routing": small,
            "forward slots": arenas["forward"],
            "backward slots": arenas["backward"],
            "parameters' gradients": expert_gradients,
        },
    )


def _arena(shape: Shape, rows: PassRows, direction: str, restore: Restore, rearranged: bool) -> int:
    schedule = rotating(direction, rows.num_chunks, shape.stages, restore=restore, rearranged=rearranged)
    sizes = BufferSizes(
        direction=direction,
        extent=rows.extent,
        d_model=shape.d_model,
        columns=shape.columns,
        restore=restore,
        rearranged=rearranged,
    )
    elements = slot_elements(schedule.slots, sizes)
    return arena_elements(elements, shape.element_size)[1] * shape.element_size


def _saved_by_row(shape: Shape, num_tokens: int, rows: PassRows) -> int:
    """The gate's probabilities, choices and weights, the order of rows, and routing weights that arrived."""
    slots = num_tokens * shape.top_k
    gate = num_tokens * shape.num_experts * shape.weight_size * shape.gate_scores
    # Weights that are scaled to sum 1 are saved before and after.
    choices = slots * (INDEX + shape.weight_size * (1 + (shape.top_k > 1)))
    received = rows.received * shape.weight_size
    return gate + choices + received + _plan_bytes(shape, slots, rows)


def _plan_bytes(shape: Shape, slots: int, rows: PassRows) -> int:
    """Where each row stands, its token, and how received rows are regrouped."""
    order = slots * INDEX * (2 + (shape.top_k > 1))
    regrouped = any(rows.extent.regrouped)
    return order + rows.sent * INDEX + rows.received * INDEX * 2 * regrouped


def _routing_peak(shape: Shape, num_tokens: int) -> int:
    """While the gate decides and rows are sorted, before any row moves; likewise after they came back."""
    slots = num_tokens * shape.top_k
    widened = min(num_tokens, BLOCK_ROWS) * shape.d_model * 4 * (shape.element_size < 4)
    return num_tokens * shape.num_experts * shape.weight_size * 5 + slots * INDEX * 12 + widened


def shape_of_sizes(
    d_model: int,
    d_hidden: int,
    num_experts: int,
    *,
    top_k: int = 1,
    num_ranks: int = 1,
    expert: str = "ffn",
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    device_type: str = "cpu",
) -> Shape:
    """The shape of a layer that nobody has built: what `Shape` would be of MoELayer(d_model, d_hidden, ...).

    Raises TypeError or ValueError naming argument, value and rule.
    """
    sizes = {
        "d_model": d_model,
        "d_hidden": d_hidden,
        "num_experts": num_experts,
        "top_k": top_k,
        "num_ranks": num_ranks,
    }
    check_sizes(**sizes)
    if top_k > num_experts:
        raise ValueError(f"top_k ({top_k}) must be at most num_experts ({num_experts})")
    if num_experts % num_ranks:
        raise ValueError(f"num_experts ({num_experts}) must be divisible by num_ranks ({num_ranks})")
    if expert not in STACKED:
        raise ValueError(f"expert ({expert!r}) must be one of {', '.join(STACKED)}")
    local = num_experts // num_ranks
    experts = STACKED[expert](d_model, d_hidden, local, bias=bias, device="meta", dtype=dtype)
    return Shape(
        d_model=d_model,
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
        columns=experts.columns(device_type),
        element_size=dtype.itemsize,
        weight_size=max(4, dtype.itemsize),
        expert_parameters=sum(parameter.numel() for parameter in experts.parameters()),
        gate_parameters=num_experts * d_model,
    )


STACKED: dict[str, Callable[..., FFNExperts | SwiGLUExperts]] = {"ffn": FFNExperts, "swiglu": SwiGLUExperts}
