"""Predicted seconds of a layer's passes, from its schedules and a measured profile.

Tokens are evenly routed: every expert gets as many rows as every other.
"""

from __future__ import annotations

from pmoe.planner.cost_model import Interference
from pmoe.planner.degree import Choice
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.profile import Profile
from pmoe.planner.simulator import LOCAL_TWIN, Simulated, makespan, simulate, simulate_slowed, task_seconds
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.tasks import Kind, Task


def even_task_costs(sizes: LayerSizes, profile: Profile, num_tokens: int, n: int) -> dict[Kind, float]:
    """Returns the seconds of each kind of task when it runs alone, in a pass of n chunks.

    Products cost by their multiply-adds and by the weights that every chunk reads again. Messages and
    copies cost by their bytes. Kinds that only move rows inside the device are left out: they cost nothing
    here.

    num_tokens: of this rank, evenly routed.
    """
    rows = num_tokens * sizes.top_k / n
    crossing = (sizes.ep_size - 1) / sizes.ep_size  # what a rank sends to itself crosses no link
    travelling = crossing if sizes.bypass_local else 1.0  # of a rank's rows, those in S and R tasks
    shared = profile.sharing(sizes.esp_size)(rows * (sizes.esp_size - 1) * sizes.d_model * sizes.element_size)
    local = _costs_of_rows(sizes, profile, rows * (1 - travelling) * sizes.esp_size)
    return {
        Kind.DISPATCH: profile.message(rows * crossing * sizes.d_model * sizes.element_size),
        Kind.ALL_GATHER: shared,
        Kind.REDUCE_SCATTER: shared,
        Kind.WEIGHTS: profile.message(n * (rows * travelling) * sizes.weight_size),
        **_costs_of_rows(sizes, profile, rows * travelling * sizes.esp_size),
        **{LOCAL_TWIN[kind]: seconds for kind, seconds in local.items()},
    }


def _costs_of_rows(sizes: LayerSizes, profile: Profile, rows: float) -> dict[Kind, float]:
    """Returns the seconds of the kinds of tasks that compute or copy the experts' rows.

    rows: number of rows that one task multiplies.
    """
    hidden, active, size = sizes.columns.hidden, sizes.columns.scratch, sizes.element_size
    of_row = sizes.d_model * (hidden + active)
    weights = sizes.d_model * sizes.num_experts / sizes.ep_size
    return {
        Kind.COMPUTE: profile.products(rows * of_row, weights * (hidden + active)),
        Kind.WGRAD: profile.compute(rows * of_row),
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

    Lanes slow each other while they are busy, as the profile's interference says (MPipeMoE, Fig. 3).
    """
    simulated = {}
    for direction, n in (("forward", choice.forward), ("backward", choice.backward)):
        restore = choice.restore
        rearranged = choice.rearranged
        schedule = rotating(direction, n, sizes.stages, restore=restore, rearranged=rearranged)
        alone = task_seconds(even_task_costs(sizes, profile, num_tokens, n))
        if profile.interference == Interference():  # no lane is slowed: the simpler simulation is faster
            simulated[direction] = simulate(schedule.tasks, alone)
        else:
            simulated[direction] = simulate_slowed(schedule.tasks, alone, profile.interference.speeds)
    return simulated


def step_seconds(sizes: LayerSizes, profile: Profile, num_tokens: int, choice: Choice) -> float:
    """Returns the seconds of a forward pass and the backward pass after it, by `simulated_step`."""
    return sum(map(makespan, simulated_step(sizes, profile, num_tokens, choice).values()))
