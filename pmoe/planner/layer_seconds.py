"""Seconds of a layer's passes for evenly routed tokens: its schedules on the simulator, with a profile."""

from __future__ import annotations

from pmoe.planner.cost_model import Interference
from pmoe.planner.degree import Choice
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.profile import Profile
from pmoe.planner.simulator import LOCAL_TWIN, Simulated, makespan, simulate, simulate_slowed, task_seconds
from pmoe.schedule.rings import rotating
from pmoe.schedule.tasks import Kind, Task


def even_task_costs(sizes: LayerSizes, profile: Profile, num_tokens: int, n: int) -> dict[Kind, float]:
    """Seconds of each kind of task alone, in n chunks of ``num_tokens`` tokens of this rank.

    Products cost by their multiply-adds and by the weights that each chunk reads anew, messages and copies by
    their bytes. What only moves rows inside the device costs nothing here.
    """
    rows = num_tokens * sizes.top_k / n
    crossing = (sizes.num_across - 1) / sizes.num_across  # what a rank sends to itself crosses no link
    travelling = crossing if sizes.bypass_local else 1.0
    shared = profile.sharing(sizes.inside)(rows * (sizes.inside - 1) * sizes.d_model * sizes.element_size)
    local = _costs_of_rows(sizes, profile, rows * (1 - travelling) * sizes.inside)
    return {
        Kind.DISPATCH: profile.message(rows * crossing * sizes.d_model * sizes.element_size),
        Kind.ALL_GATHER: shared,
        Kind.REDUCE_SCATTER: shared,
        Kind.WEIGHTS: profile.message(n * (rows * travelling) * sizes.weight_size),
        **_costs_of_rows(sizes, profile, rows * travelling * sizes.inside),
        **{LOCAL_TWIN[kind]: seconds for kind, seconds in local.items()},
    }


def _costs_of_rows(sizes: LayerSizes, profile: Profile, rows: float) -> dict[Kind, float]:
    """Of the kinds that work on the experts' rows, as many as are multiplied at once."""
    hidden, active, size = sizes.columns.hidden, sizes.columns.scratch, sizes.element_size
    of_row, weights = sizes.d_model * (hidden + active), sizes.d_model * sizes.num_experts / sizes.num_across
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
    """By direction, both passes on the lanes of ``profile``, which slow each other while they are busy
    (Fig. 3)."""
    found = {}
    for direction, n in (("forward", choice.forward), ("backward", choice.backward)):
        restore, rearranged = choice.restore, choice.rearranged
        schedule = rotating(direction, n, sizes.stages, restore=restore, rearranged=rearranged)
        alone = task_seconds(even_task_costs(sizes, profile, num_tokens, n))
        if profile.interference == Interference():  # the same, sooner
            found[direction] = simulate(schedule.tasks, alone)
        else:
            found[direction] = simulate_slowed(schedule.tasks, alone, profile.interference.speeds)
    return found


def step_seconds(sizes: LayerSizes, profile: Profile, num_tokens: int, choice: Choice) -> float:
    """Of `simulated_step`, one pass behind the other."""
    return sum(map(makespan, simulated_step(sizes, profile, num_tokens, choice).values()))
