"""Predicted seconds of a layer's passes, from its schedules and a measured profile.

Tokens are assumed to be evenly routed: every rank gets the same number of rows, even with copies of busy
experts.
"""

from __future__ import annotations

from typing import get_args

from pmoe.planner.cost_model import Interference
from pmoe.planner.degree import Choice
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.profile import Profile
from pmoe.planner.simulator import LOCAL_TWIN, Simulated, makespan, simulate, simulate_slowed, task_seconds
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.tasks import Kind, PassDirection, Task
from pmoe.schedule.wire import AS_THEY_ARE, WireName


def even_task_costs(
    sizes: LayerSizes, profile: Profile, num_tokens: int, n: int, direction: PassDirection = "forward"
) -> dict[Kind, float]:
    """Returns the seconds of each kind of task when it runs alone, in a pass of n chunks.

    A task with matrix products takes time for its multiply-adds and for reading its weights. Every chunk
    reads the weights again. Messages, and copies between device and host, take time for their bytes. Tasks
    that count as free are not in the result: moving rows within the device, and packing rows or T_M into a
    narrower number format.

    sizes: sizes of the layer.
    profile: measured rates.
    num_tokens: tokens of this rank, evenly routed.
    n: number of chunks of the pass.
    direction: "forward" or "backward". It matters only if rows are sent in a narrower number format
        (`Wires`), because each pass may have a format of its own.
    """
    rows = num_tokens * sizes.top_k / n
    crossing = (sizes.ep_size - 1) / sizes.ep_size  # rows for the own rank cross no link
    travelling = crossing if sizes.bypass_local else 1.0  # fraction of rows in S and R tasks

    def message(wire: WireName | None = None) -> float:
        return profile.message(rows * crossing * sizes.sent_bytes(wire))

    def shared(wire: WireName | None = None) -> float:
        return profile.sharing(sizes.esp_size)(rows * (sizes.esp_size - 1) * sizes.sent_bytes(wire))

    costs = {
        Kind.DISPATCH: message(),
        Kind.ALL_GATHER: shared(),
        Kind.REDUCE_SCATTER: shared(),
    }
    if sizes.wires != AS_THEY_ARE:
        dispatched = sizes.wires.of(direction)
        costs |= {
            Kind.DISPATCH: message(dispatched),
            Kind.DISPATCH_AGAIN: message(sizes.wires.rows),
            Kind.COMBINE: message(sizes.wires.results),
            Kind.ALL_GATHER: shared(dispatched),
            Kind.ALL_GATHER_AGAIN: shared(sizes.wires.rows),
        }
    local = _costs_of_rows(sizes, profile, rows * (1 - travelling) * sizes.esp_size)
    received = _costs_of_rows(sizes, profile, rows * travelling * sizes.esp_size)
    return {
        **costs,
        Kind.WEIGHTS: profile.message(n * (rows * travelling) * sizes.weight_size),
        **received,
        **{LOCAL_TWIN[kind]: seconds for kind, seconds in local.items()},
        **sizes.copy_work.shared_wgrad(received[Kind.WGRAD]),
        **sizes.copy_work.message_seconds(profile.message.shared(sizes.expert_bytes)),
    }


def _costs_of_rows(sizes: LayerSizes, profile: Profile, rows: float) -> dict[Kind, float]:
    """Returns the seconds, by kind, of tasks that compute experts' rows or copy rows from or to the host.

    sizes: sizes of the layer.
    profile: measured rates.
    rows: number of rows of one task.
    """
    hidden, active, size = sizes.columns.hidden, sizes.columns.scratch, sizes.element_size
    weights = sizes.d_model * sizes.num_experts / sizes.ep_size
    return {
        Kind.COMPUTE: profile.products(rows * sizes.multiply_adds, weights * (hidden + active)),
        Kind.WGRAD: profile.compute(rows * sizes.gradient_multiply_adds),
        Kind.RECOMPUTE: profile.products(rows * sizes.d_model * hidden, weights * hidden),
        Kind.COPY_ROWS_OUT: profile.copy_out(rows * sizes.d_model * size),
        Kind.COPY_HIDDEN_OUT: profile.copy_out(rows * hidden * size),
        Kind.COPY_ROWS_IN: profile.copy_in(rows * sizes.d_model * size),
        Kind.COPY_HIDDEN_IN: profile.copy_in(rows * hidden * size),
    }


def simulated_step(
    sizes: LayerSizes, profile: Profile, num_tokens: int, choice: Choice
) -> dict[str, list[Simulated[Task]]]:
    """Returns the simulated tasks of both passes, by direction ("forward", "backward").

    Each task has its start and end, in seconds from the start of its pass. Lanes (queues of tasks, for
    computation, communication and copies) slow each other while they are busy, by the factors in
    ``profile.interference`` (MPipeMoE, Fig. 3).

    sizes: sizes of the layer.
    profile: measured rates.
    num_tokens: tokens of this rank, evenly routed.
    choice: number of chunks of each pass, and the restore pair (what is kept, offloaded or made again).
    """
    simulated = {}
    for direction, n in zip(get_args(PassDirection), (choice.forward, choice.backward), strict=True):
        restore = choice.restore
        rearranged = choice.rearranged
        stages = sizes.copy_work.in_stages(sizes.stages, restore)
        schedule = rotating(direction, n, stages, restore=restore, rearranged=rearranged)
        schedule = schedule.frozen if sizes.is_frozen else schedule
        alone = task_seconds(even_task_costs(sizes, profile, num_tokens, n, direction))
        if profile.interference == Interference():  # no lane is slowed: the simpler simulation is faster
            simulated[direction] = simulate(schedule.tasks, alone)
        else:
            simulated[direction] = simulate_slowed(schedule.tasks, alone, profile.interference.speeds)
    return simulated


def step_seconds(sizes: LayerSizes, profile: Profile, num_tokens: int, choice: Choice) -> float:
    """Returns the simulated seconds of a forward pass and the backward pass after it.

    sizes: sizes of the layer.
    profile: measured rates.
    num_tokens: tokens of this rank, evenly routed.
    choice: number of chunks of each pass, and the restore pair (what is kept, offloaded or made again).
    """
    return sum(map(makespan, simulated_step(sizes, profile, num_tokens, choice).values()))
