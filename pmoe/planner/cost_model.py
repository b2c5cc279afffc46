"""MPipeMoE's cost model: how long each lane works in a pass, for every restore pair.

    seconds of a pass = max over lanes of (units of work / rate of the lane)        Eq. 10

A lane is a queue of tasks of one sort: computation, communication, or copies. A restore pair says how T_DI
(rows that experts received) and T_M (their hidden activations) are restored for backward.

The paper's Table II gives the units of work of each lane, and Eq. 7-9 give the size of a unit. A lane is
slower while other lanes are busy (Section II.C). Pairs are compared by their seconds of forward and backward
together.

Eq. 10 describes a pipeline in its steady state. It leaves out two things that the simulator includes: how a
pipeline fills and empties, and the part of a task's seconds that does not depend on its size.

Letters: b rows that the experts of a rank receive, M = d_model, H = d_hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, get_args

from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.simulator import makespan, simulate_slowed
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Kind, Lane, PassDirection, Task
from pmoe.schedule.wire import AS_THEY_ARE, Wires, message_bytes

if TYPE_CHECKING:
    from pmoe.planner.profile import Profile


COMPUTE, COMMUNICATE, COPY = "compute", "communicate", "copy"
"""The three sorts of work that slow each other when they run at the same time."""

LANES_OF: Mapping[str, tuple[Lane, ...]] = {
    COMPUTE: (Lane.COMPUTE,),
    COMMUNICATE: (Lane.COMMUNICATE, Lane.INTRA_NODE),
    COPY: (Lane.COPY_OUT, Lane.COPY_IN),
}
"""Lanes of a schedule that do each sort of work: computation, communication, copies."""

FACTORS = {
    "mu_comp": (COMMUNICATE, (COMPUTE, COMMUNICATE)),
    "mu_mem": (COMMUNICATE, (COMMUNICATE, COPY)),
    "mu_all": (COMMUNICATE, (COMPUTE, COMMUNICATE, COPY)),
    "sigma_comm": (COMPUTE, (COMPUTE, COMMUNICATE)),
    "sigma_mem": (COMPUTE, (COMPUTE, COPY)),
    "sigma_all": (COMPUTE, (COMPUTE, COMMUNICATE, COPY)),
    "eta_comm": (COPY, (COMMUNICATE, COPY)),
    "eta_comp": (COPY, (COMPUTE, COPY)),
    "eta_all": (COPY, (COMPUTE, COMMUNICATE, COPY)),
}
"""Maps each field of `Interference` to (the work that is slowed, all work in progress at that time).

The names are those of MPipeMoE's Fig. 3.
"""


@dataclass(frozen=True, kw_only=True)
class Interference:
    """Speeds of computation, communication and copies while several of them run: above 0, at most 1.

    1 is the speed of work that runs alone (MPipeMoE, Section II.C and Fig. 3). The prefix of a field names
    the work that is slowed, the suffix names the work that runs at the same time:

        mu      communication        comm   communication
        sigma   computation          comp   computation
        eta     copies               mem    copies
                                     all    both other sorts of work

    The paper takes sigma = 1. Raises ValueError for a speed outside (0, 1].
    """

    mu_comp: float = 1.0
    mu_mem: float = 1.0
    mu_all: float = 1.0
    sigma_comm: float = 1.0
    sigma_mem: float = 1.0
    sigma_all: float = 1.0
    eta_comm: float = 1.0
    eta_comp: float = 1.0
    eta_all: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            speed = getattr(self, field.name)
            if not 0 < speed <= 1:
                raise ValueError(f"{field.name} ({speed}) must be over 0 and at most 1")

    def speeds(self, busy: Collection[str]) -> dict[str, float]:
        """Returns the speed of each lane while several lanes are busy.

        A lane is a queue of tasks that run one after another. 1 is the speed of a lane that runs alone.

        busy: names of the lanes that are working. The two lanes of messages, between nodes and inside a node,
            both count as communication. The two lanes of copies, to and from the host, both count as copies.
        """
        works = tuple(work for work, lanes in LANES_OF.items() if any(lane in busy for lane in lanes))
        speed_of = {
            slowed: getattr(self, name)
            for name, (slowed, in_progress) in FACTORS.items()
            if in_progress == works
        }
        return {lane: speed_of.get(work, 1.0) for work, lanes in LANES_OF.items() for lane in lanes}


LaneSeconds = tuple[float, float, float]
"""Seconds of (computation, communication, copies) in one pass."""


def workload(
    restore: Restore,
    direction: PassDirection,
    *,
    hidden_per_model: float = 4.0,
    swiglu: bool = False,
    dispatched: float = 1.0,
    again: float = 1.0,
    returned: float = 1.0,
) -> tuple[float, float, float]:
    """Returns a row [q1, q2, q3] of MPipeMoE's Table II: units of work of computing, all-to-alls and copies.

        q1, compute       forward has 2 products; backward has 4, and 1 more if it recomputes T_M
        q2, all-to-alls   2 in each pass; 1 more in backward if it sends T_DI again
        q3, copies        in each pass: 1 if T_DI is offloaded, and C / M more if T_M (C columns) is offloaded

    A T_DI that is kept in the messages in which it arrived, and a T_M that is kept in e4m3, add nothing. They
    are packed and unpacked within the device, and the table counts no work of this sort.

    restore: whether T_DI (rows that experts received, M columns) and T_M (hidden activations) are kept,
        offloaded or made again.
    direction: "forward" or "backward".
    hidden_per_model: H / M, where H = d_hidden and M = d_model; 4 in the paper's table.
    swiglu: whether experts are gated. Their first product counts 2 units, and T_M has C = 2 H columns. Other
        experts have C = H.
    dispatched: bytes of a row as this pass's dispatch sends it, divided by the bytes of the row itself; below
        1 if rows are sent in a narrower number format (`pmoe.schedule.wire`).
    again: the same quotient for the rows (T_DI) that backward sends again.
    returned: the same quotient for the results that are sent back.

    MPipeMoE's Eq. 7-9 say how many seconds a unit takes. Example: S4 (sends T_DI again, recomputes T_M) ->
    [2, 2, 0] forward, [5, 3, 0] backward.
    """
    first = 2.0 if swiglu else 1.0  # units of the first product; also the columns of T_M over H
    second = 1.0
    computed = first + second
    sent = dispatched + returned
    copied = 0.0
    if direction == "backward":
        computed *= 2  # the gradients of the inputs and those of the weights
        computed += first if restore.hidden == "recompute" else 0.0
        sent += again if restore.dispatched == "communicate" else 0.0
    if restore.dispatched == "offload":
        copied += 1.0
    if restore.hidden == "offload":
        copied += first * hidden_per_model
    return computed, sent, copied


def lane_seconds(
    restore: Restore,
    direction: PassDirection,
    profile: Profile,
    *,
    b: float,
    M: int,
    H: int,
    element_size: int,
    swiglu: bool = False,
    travelling: float = 1.0,
    wires: Wires = AS_THEY_ARE,
) -> LaneSeconds:
    """Returns the seconds of computation, communication and copies for b rows: the terms of Eq. 10.

        compute        q1 b H M                           * beta of a product (per multiply-add)
        communicate    q2 b M element_size * travelling   * beta of a message (per byte)
        copy           q3 b M element_size                * beta of the slower copy direction (per byte)

    Each number is the time that this work takes if nothing else runs. `slowest_lane` then computes how the
    three sorts of work slow each other. q1, q2 and q3 are units of work (`workload`). The betas are the
    slopes of the profile's lines. The alphas, the fixed times of a task, are left out: tasks are assumed to
    be large.

    The paper's short form of the equation leaves out the sizes of the units, although a unit of compute is H
    times as large as a unit of all-to-alls or copies. This function includes the sizes.

    restore: whether experts' inputs (T_DI) and hidden activations (T_M) are kept, offloaded or made again
        between the passes.
    direction: "forward" or "backward".
    profile: measured rates.
    b: rows that the rank's experts receive.
    M, H: d_model and d_hidden.
    element_size: bytes of an element of the rows.
    swiglu: whether experts are gated, so that their first product is twice as large.
    travelling: fraction of the b rows that come from other ranks. The paper has 1; even routing over W ranks
        gives (W - 1) / W. On one rank it is 0: sending T_DI again is then a local gather, which counts as
        free.
    wires: the number formats in which rows and results are sent, such as bfloat16 for float32 rows.
    """
    row = M * element_size
    dispatched, again, returned = (
        message_bytes(wire, M, element_size) / row
        for wire in (wires.of(direction), wires.rows, wires.results)
    )
    q1, q2, q3 = workload(
        restore,
        direction,
        hidden_per_model=H / M,
        swiglu=swiglu,
        dispatched=dispatched,
        again=again,
        returned=returned,
    )
    num_bytes = b * M * element_size
    return (
        q1 * b * H * M * profile.compute.beta_seconds,
        q2 * num_bytes * travelling * profile.message.beta_seconds,
        q3 * num_bytes * profile.slower_copy.beta_seconds,
    )


def slowest_lane(alone: LaneSeconds, interference: Interference) -> float:
    """Returns the seconds of a pass by MPipeMoE's Eq. 10: until the slowest of three lanes has finished.

    The lanes (computation, communication, copies) start together. Lanes slow each other only while they are
    busy, so a short copy does not slow work that runs after it. The paper's Eq. 10 differs: in it, a lane has
    its slowed speed (sigma, mu or eta) for the whole pass. The third term of the printed equation has mu,
    which is probably a misprint for eta.

    alone: seconds of each lane if nothing else runs, from `lane_seconds`.
    interference: speeds of lanes while several are busy.
    """
    lanes = {Lane.COMPUTE: Kind.COMPUTE, Lane.COMMUNICATE: Kind.DISPATCH, Lane.COPY_OUT: Kind.COPY_ROWS_OUT}
    tasks = [Task(kind=kind, chunk=-1, lane=lane, reads=(), writes=()) for lane, kind in lanes.items()]
    seconds = dict(zip(lanes, alone, strict=True))
    return makespan(simulate_slowed(tasks, lambda task: seconds[task.lane], interference.speeds))


# ---- Eq. 10 for a given layer and profile


def eq10_seconds(sizes: LayerSizes, profile: Profile, num_tokens: int, restore: Restore) -> float:
    """Returns the seconds of a forward and a backward pass by MPipeMoE's Eq. 10.

    sizes: sizes of the layer.
    profile: measured rates.
    num_tokens: tokens of this rank, evenly routed.
    restore: whether experts' inputs (T_DI) and hidden activations (T_M) are kept, offloaded or made again
        between the passes.
    """
    passes = _both_passes(sizes, profile, num_tokens, restore)
    return sum(slowest_lane(alone, profile.interference) for alone in passes)


def cheapest_pair(
    sizes: LayerSizes, profile: Profile, num_tokens: int, pairs: Iterable[Restore]
) -> tuple[Restore, dict[Restore, float]]:
    """Returns the restore pair that takes least time by MPipeMoE's Eq. 10, and the seconds of every pair.

    A restore pair says what is kept, offloaded or made again between the passes. Many pairs take equally
    long, because Eq. 10 counts only the slowest of computation, communication and copies. Of pairs that take
    equally long, the function takes the pair with the least work in all three lanes together
    (`work_seconds`), because the work of the two faster lanes still costs time while the pipeline fills and
    empties. If pairs are still equal, the first in ``pairs`` is taken, so that all ranks take the same pair.

    sizes: sizes of the layer.
    profile: measured rates.
    num_tokens: tokens of this rank, evenly routed.
    pairs: restore pairs to choose from.
    """
    seconds = {pair: eq10_seconds(sizes, profile, num_tokens, pair) for pair in pairs}
    work = {pair: work_seconds(sizes, profile, num_tokens, pair) for pair in seconds}
    return min(seconds, key=lambda pair: (seconds[pair], work[pair])), seconds


def work_seconds(sizes: LayerSizes, profile: Profile, num_tokens: int, restore: Restore) -> float:
    """Returns the seconds of a step if its computation, communication and copies ran one after the other.

    Of two restore pairs, one may do more work than the other and still take equally long by Eq. 10 and by the
    simulator, because longer work of another lane hides the additional work. On a real machine, hidden work
    is not quite free, so the pair with more work is a little slower.

    sizes: sizes of the layer.
    profile: measured rates.
    num_tokens: tokens of this rank, evenly routed.
    restore: whether experts' inputs (T_DI) and hidden activations (T_M) are kept, offloaded or made again
        between the passes.
    """
    return sum(map(sum, _both_passes(sizes, profile, num_tokens, restore)))


def _both_passes(sizes: LayerSizes, profile: Profile, num_tokens: int, restore: Restore) -> list[LaneSeconds]:
    """Returns the seconds of computation, communication and copies of the forward and the backward pass.

    Each number is the time that this work takes if nothing else runs.

    sizes: sizes of the layer.
    profile: measured rates.
    num_tokens: tokens of this rank, evenly routed.
    restore: whether experts' inputs (T_DI) and hidden activations (T_M) are kept, offloaded or made again
        between the passes.
    """
    across = (sizes.num_ranks - 1) / sizes.num_ranks if sizes.bypass_local else float(sizes.sends_rows)
    passes = []
    for direction in get_args(PassDirection):
        computing, communicating, copying = lane_seconds(
            restore,
            direction,
            profile,
            b=num_tokens * sizes.top_k * sizes.esp_size,
            M=sizes.d_model,
            H=sizes.columns.scratch,
            element_size=sizes.element_size,
            swiglu=sizes.columns.hidden > sizes.columns.scratch,
            wires=sizes.wires,
            travelling=across / sizes.esp_size,  # b counts rows after the all-gather
        )
        copied_bytes = sizes.copy_work.experts_sent(direction, restore) * sizes.expert_bytes
        communicating += copied_bytes * profile.message.beta_seconds
        passes.append((computing, communicating, copying))
    return passes
