"""MPipeMoE's cost model: how long each lane works in a pass, for all nine restore pairs.

    seconds of a pass = max over lanes of (units of work / rate of the lane)        Eq. 10

Table II gives the units of work of each lane, Eq. 7-9 the size of a unit. A lane is slower while other
lanes are busy (Section II.C). The sum of forward and backward ranks the pairs.

Eq. 10 describes a pipeline in its steady state. It leaves out how a pipeline fills and empties, and the
part of a task's seconds that does not depend on its size. The simulator includes both.

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
"""The three kinds of work that slow each other."""

LANES_OF: Mapping[str, tuple[Lane, ...]] = {
    COMPUTE: (Lane.COMPUTE,),
    COMMUNICATE: (Lane.COMMUNICATE, Lane.INTRA_NODE),
    COPY: (Lane.COPY_OUT, Lane.COPY_IN),
}
"""Lanes of a schedule that do each kind of work."""

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
"""Fig. 3: for each field of `Interference`, (the work that is slowed, all work in progress then)."""


@dataclass(frozen=True, kw_only=True)
class Interference:
    """Speeds of lanes while other lanes are busy, relative to running alone: above 0, at most 1.

    See MPipeMoE, Section II.C and Fig. 3. The prefix names the work that is slowed, the suffix what runs
    beside it:

        mu      communication        comm   communication
        sigma   computation          comp   computation
        eta     copies               mem    copies
                                     all    both others

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
        """Returns the speed of each lane while the lanes in ``busy`` work.

        Both communication lanes count as one kind of work, and so do copies in both directions.
        """
        works = tuple(work for work, lanes in LANES_OF.items() if any(lane in busy for lane in lanes))
        speed_of = {
            slowed: getattr(self, name)
            for name, (slowed, in_progress) in FACTORS.items()
            if in_progress == works
        }
        return {lane: speed_of.get(work, 1.0) for work, lanes in LANES_OF.items() for lane in lanes}


LaneSeconds = tuple[float, float, float]
"""Seconds of computation, of communication, and of copies."""


def workload(
    restore: Restore, direction: PassDirection, *, hidden_per_model: float = 4.0, swiglu: bool = False
) -> tuple[float, float, float]:
    """Returns the row [q1, q2, q3] of Table II: units of compute, of all-to-all, and of copies (Eq. 7-9).

        compute       forward has 2 products; backward has 4, and 1 more if it recomputes T_M
        all-to-all    2 in each pass; 1 more in backward if it sends T_DI again
        copies        in each pass 1 if T_DI is offloaded, and C / M if T_M is, which has C columns

    hidden_per_model: H / M, 4 in the paper's table.
    swiglu: whether experts are gated. Their first product counts 2 units, and T_M has C = 2 H columns
        instead of H.

    Example: S4 -> [2, 2, 0] forward, [5, 3, 0] backward.
    """
    first = 2.0 if swiglu else 1.0  # units of the first product; also the columns of T_M over H
    second = 1.0
    computed = first + second
    sent = 2.0
    copied = 0.0
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
    """Returns the seconds of b rows on each lane if it runs alone: the terms of Eq. 10.

        compute        q1 b H M                           * beta of a product (per multiply-add)
        communicate    q2 b M element_size * travelling   * beta of a message (per byte)
        copy           q3 b M element_size                * beta of the slower copy direction (per byte)

    q1, q2, q3 are those of `workload`. The betas are the slopes of the profile's lines. alpha is left out,
    because tasks are assumed to be large. `slowest_lane` applies sigma, mu and eta.

    The paper's short form (alpha, beta) drops the volumes, although the volume of compute is H times that
    of the other lanes. This function keeps them.

    travelling: fraction of the b rows that change rank. The paper has 1; even routing over W ranks gives (W
        - 1) / W. On one rank it is 0: sending T_DI again is then a local gather, which counts as free.
    """
    q1, q2, q3 = workload(restore, direction, hidden_per_model=H / M, swiglu=swiglu)
    num_bytes = b * M * element_size
    return (
        q1 * b * H * M * profile.compute.beta_seconds,
        q2 * num_bytes * travelling * profile.message.beta_seconds,
        q3 * num_bytes * profile.slower_copy.beta_seconds,
    )


def slowest_lane(alone: LaneSeconds, interference: Interference) -> float:
    """Returns the seconds until the slowest lane has finished, if all lanes start together (Eq. 10).

    The paper divides a lane's seconds by its sigma, mu or eta for the whole pass (and prints mu for eta in
    the third term). Here lanes slow each other only while they are busy, so a short copy does not slow what
    runs after it.

    alone: seconds of each lane, from `lane_seconds`.
    """
    lanes = {Lane.COMPUTE: Kind.COMPUTE, Lane.COMMUNICATE: Kind.DISPATCH, Lane.COPY_OUT: Kind.COPY_ROWS_OUT}
    tasks = [Task(kind=kind, chunk=-1, lane=lane, reads=(), writes=()) for lane, kind in lanes.items()]
    seconds = dict(zip(lanes, alone, strict=True))
    return makespan(simulate_slowed(tasks, lambda task: seconds[task.lane], interference.speeds))


# ---- Eq. 10 for a given layer and profile


def eq10_seconds(sizes: LayerSizes, profile: Profile, num_tokens: int, restore: Restore) -> float:
    """Returns the seconds of a forward and a backward pass by Eq. 10.

    num_tokens: of this rank, evenly routed.
    """
    passes = _both_passes(sizes, profile, num_tokens, restore)
    return sum(slowest_lane(alone, profile.interference) for alone in passes)


def cheapest_pair(
    sizes: LayerSizes, profile: Profile, num_tokens: int, pairs: Iterable[Restore]
) -> tuple[Restore, dict[Restore, float]]:
    """Returns the pair that takes least time by Eq. 10, and the seconds of every pair.

    Many pairs are equal, because only the slowest lane counts. Of equals it takes the pair with the least
    work on all lanes together, since work on the other lanes still costs time while the pipeline fills and
    empties. Of those it takes the first in ``pairs``, so ranks that share all numbers take the same pair.
    """
    seconds = {pair: eq10_seconds(sizes, profile, num_tokens, pair) for pair in pairs}
    work = {pair: sum(map(sum, _both_passes(sizes, profile, num_tokens, pair))) for pair in seconds}
    return min(seconds, key=lambda pair: (seconds[pair], work[pair])), seconds


def _both_passes(sizes: LayerSizes, profile: Profile, num_tokens: int, restore: Restore) -> list[LaneSeconds]:
    """Returns the seconds of each lane alone, for forward and for backward."""
    across = (sizes.num_ranks - 1) / sizes.num_ranks if sizes.bypass_local else float(sizes.travels)
    return [
        lane_seconds(
            restore,
            direction,
            profile,
            b=num_tokens * sizes.top_k * sizes.esp_size,
            M=sizes.d_model,
            H=sizes.columns.scratch,
            element_size=sizes.element_size,
            swiglu=sizes.columns.hidden > sizes.columns.scratch,
            travelling=across / sizes.esp_size,  # b counts rows once they are gathered
        )
        for direction in get_args(PassDirection)
    ]
