"""The bytes of a pass without rings, from the lifetimes of its schedule's buffers.

What a collective touches lives as long as the pass; what the experts make for a unit lives while its task
runs, or until the task that needs it last. What goes from forward to backward is counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.pass_rows import PassRows
from pmoe.schedule.slots import BufferSizes
from pmoe.schedule.straight import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, local_pieces


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
