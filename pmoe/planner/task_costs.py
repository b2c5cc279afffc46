"""Seconds of a schedule's tasks from what each kind of task costs: what the simulator asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pmoe.schedule.tasks import Kind, Task

TaskCost = float | Callable[[Task], float]
"""Seconds of a task, or a function of the task where its chunks differ."""

COSTS_AS: Mapping[Kind, Kind] = {
    Kind.COMBINE: Kind.DISPATCH,
    Kind.DISPATCH_AGAIN: Kind.DISPATCH,
    Kind.ALL_GATHER_AGAIN: Kind.ALL_GATHER,
    Kind.SHARE_WEIGHTS: Kind.WEIGHTS,
}
"""Kinds that cost what another kind costs, unless they have a cost of their own."""

LOCAL_TWIN: Mapping[Kind, Kind] = {Kind.COMPUTE: Kind.LOCAL} | {
    Kind[kind.name.removeprefix("LOCAL_")]: kind for kind in Kind if kind.name.startswith("LOCAL_")
}
"""By a kind that works on rows that travel, the kind that does the same to rows that stay."""


def task_seconds(costs: Mapping[Kind, TaskCost]) -> Callable[[Task], float]:
    """Seconds of a task that runs alone, by its kind. Kinds that ``costs`` leaves out take no time.

    Example: costs {DISPATCH: 2.0} -> S and R of any chunk take 2 s, all other tasks 0 s.
    """
    found = {kind: costs[model] for kind, model in COSTS_AS.items() if model in costs} | dict(costs)

    def seconds(task: Task) -> float:
        cost = found.get(task.kind, 0.0)
        return cost if isinstance(cost, (int, float)) else cost(task)

    return seconds
