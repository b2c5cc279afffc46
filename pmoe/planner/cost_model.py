"""How long each lane works to restore T_DI and T_M: MPipeMoE's Eq. 7-10 and Table II, for all nine pairs.

Each lane has an amount of work (Table II) in units (Eq. 7-9), and a rate that suffers while other lanes are
busy (Section II.C). The slowest lane sets the time of a pass (Eq. 10), once for forward and once for
backward. That is a pipeline in its steady state: filling and emptying it, and the part of a task's seconds
that does not depend on its size, are left to the simulator.

b rows that the experts of a rank receive, M = d_model, H = d_hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, get_args

from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.simulator import makespan, simulate_slowed
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Kind, Lane, PassDirection, Task

if TYPE_CHECKING:
    from pmoe.planner.profile import Profile


COMPUTE, COMMUNICATE, COPY = "compute", "communicate", "copy"

LANES_OF: Mapping[str, tuple[Lane, ...]] = {
    COMPUTE: (Lane.COMPUTE,),
    COMMUNICATE: (Lane.COMMUNICATE, Lane.INTRA_NODE),
    COPY: (Lane.COPY_OUT, Lane.COPY_IN),
}

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
"""Fig. 3, by field of `Interference`: whose speed, and which work is under way."""


@dataclass(frozen=True, kw_only=True)
class Interference:
    """Speeds while other lanes are busy, relative to running alone: over 0, at most 1 (Section II.C, Fig. 3).

    mu is for communication, sigma for computation, eta for copies; the suffix names the lanes beside it:
    comm, comp, mem (copies), or all three lanes. The paper takes sigma = 1.
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
        """The speed of each lane while these are busy. Both links count as one, copies both ways too."""
        works = tuple(work for work, lanes in LANES_OF.items() if any(lane in busy for lane in lanes))
        found = {whose: getattr(self, name) for name, (whose, beside) in FACTORS.items() if beside == works}
        return {lane: found.get(work, 1.0) for work, lanes in LANES_OF.items() for lane in lanes}


LaneSeconds = tuple[float, float, float]
"""Seconds of computation, of communication, and of copies."""


def workload(
    restore: Restore, direction: PassDirection, *, hidden_per_model: float = 4.0, swiglu: bool = False
) -> tuple[float, float, float]:
    """Table II's [q1, q2, q3]: units of compute (Eq. 7), of all-to-all (Eq. 8), of copies (Eq. 9).

    Forward has two products and two all-to-alls, backward four and two. An offloaded T_DI is one unit of
    copies each way, an offloaded T_M as many as its columns over M: hidden_per_model = H / M (4 in the
    paper's table), twice that for SwiGLU. Backward sends T_DI again for one unit of all-to-all and recomputes
    T_M for one of compute. SwiGLU's first product is twice as large and counts two.

    Example: S4 -> [2, 2, 0] forward, [5, 3, 0] backward.
    """
    first = 2.0 if swiglu else 1.0  # products of one unit, and multiples of H that T_M is wide
    second = 1.0
    computed, sent, copied = first + second, 2.0, 0.0
    if direction == "backward":
        computed *= 2  # the gradients of the inputs and those of the weights
        computed += first if restore.hidden == "recompute" else 0.0
        sent += 1.0 if restore.dispatched == "communicate" else 0.0
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
) -> LaneSeconds:
    """The terms of Eq. 10, seconds of b rows on each lane alone: q1 v_comp / W_comp, q2 v_comm / W_comm and
    q3 v_mem / W_mem. A unit (Eq. 7-9) is b H M multiply-adds, b M elements sent, b M elements copied.

    1 / W_comp, 1 / W_comm and 1 / W_mem are the betas of the profile's lines, so large tasks are assumed:
    alpha is left out. Copies go at the slower direction's rate.

    The paper's short form (alpha, beta) drops the volumes, although computation has H times those of the
    other lanes; that is put right here. sigma, mu and eta come in `slowest_lane`.

    travelling: the share of the b rows that change rank, 1 in the paper, (W - 1) / W for even routing over W
    ranks, 0 on one rank, where communicating T_DI again is a local gather and counts as free.
    """
    q1, q2, q3 = workload(restore, direction, hidden_per_model=H / M, swiglu=swiglu)
    num_bytes = b * M * element_size
    return (
        q1 * b * H * M * profile.compute.beta_seconds,
        q2 * num_bytes * travelling * profile.message.beta_seconds,
        q3 * num_bytes * profile.slower_copy.beta_seconds,
    )


def slowest_lane(alone: LaneSeconds, interference: Interference) -> float:
    """Eq. 10: seconds until the slowest lane is done, where all begin together.

    alone: of each lane, as `lane_seconds` gives them. The paper divides a lane's seconds by its sigma, mu or
    eta for the whole pass (and prints mu for eta in the third term). Here lanes slow each other only while
    they are busy: a short copy does not slow what runs after it.
    """
    lanes = {Lane.COMPUTE: Kind.COMPUTE, Lane.COMMUNICATE: Kind.DISPATCH, Lane.COPY_OUT: Kind.COPY_ROWS_OUT}
    tasks = [Task(kind=kind, chunk=-1, lane=lane, reads=(), writes=()) for lane, kind in lanes.items()]
    seconds = dict(zip(lanes, alone, strict=True))
    return makespan(simulate_slowed(tasks, lambda task: seconds[task.lane], interference.speeds))


# ---- Eq. 10 for a layer's sizes and a machine's profile


def eq10_seconds(sizes: LayerSizes, profile: Profile, num_tokens: int, restore: Restore) -> float:
    """Seconds of a forward and a backward by Eq. 10. num_tokens: of this rank, evenly routed."""
    passes = _both_passes(sizes, profile, num_tokens, restore)
    return sum(slowest_lane(alone, profile.interference) for alone in passes)


def cheapest_pair(
    sizes: LayerSizes, profile: Profile, num_tokens: int, pairs: Iterable[Restore]
) -> tuple[Restore, dict[Restore, float]]:
    """The pair of least time by Eq. 10, and the seconds of all.

    Pairs often are equal, for the slowest lane alone counts. Of equals the one with the least work on all
    lanes together is taken: what fills and empties the pipeline is a part of that. Then the first, so that
    ranks that share these numbers take the same.
    """
    seconds = {pair: eq10_seconds(sizes, profile, num_tokens, pair) for pair in pairs}
    work = {pair: sum(map(sum, _both_passes(sizes, profile, num_tokens, pair))) for pair in seconds}
    return min(seconds, key=lambda pair: (seconds[pair], work[pair])), seconds


def _both_passes(sizes: LayerSizes, profile: Profile, num_tokens: int, restore: Restore) -> list[LaneSeconds]:
    """Seconds of each lane alone, of forward and of backward."""
    across = (sizes.num_ranks - 1) / sizes.num_ranks if sizes.bypass_local else float(sizes.travels)
    return [
        lane_seconds(
            restore,
            direction,
            profile,
            b=num_tokens * sizes.top_k * sizes.inside,
            M=sizes.d_model,
            H=sizes.columns.scratch,
            element_size=sizes.element_size,
            swiglu=sizes.columns.hidden > sizes.columns.scratch,
            travelling=across / sizes.inside,  # b counts rows once they are gathered
        )
        for direction in get_args(PassDirection)
    ]
