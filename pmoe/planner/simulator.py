"""The simulator: how long a schedule takes, for given task costs and lanes. It reads the engine's own list.

Lanes run their tasks one after another in list order; a task also waits for the tasks it names. That is
all the engine promises, so it is all the simulator assumes.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pmoe.schedule.tasks import Kind, Task


class Timed(Protocol):
    """What the simulator reads of a task."""

    @property
    def name(self) -> str: ...

    @property
    def lane(self) -> str: ...

    @property
    def waits(self) -> tuple[str, ...]: ...


T = TypeVar("T", bound=Timed)


@dataclass(frozen=True, kw_only=True)
class Simulated(Generic[T]):
    """A task with its predicted start and end, in seconds from the start of the pass."""

    task: T
    start: float
    end: float


def simulate(tasks: Iterable[T], seconds: Callable[[T], float]) -> list[Simulated[T]]:
    """Start and end of each task, in list order.

    Example: S (2 s, communicate), L (1 s, compute), C (3 s, compute, waits for S) -> C runs from 2 to 5.
    """
    end_of: dict[str, float] = {}
    lane_free: dict[str, float] = {}
    done = []
    for task in tasks:
        start = lane_free.get(task.lane, 0.0)
        for name in task.waits:  # max() would take half as long again
            if end_of[name] > start:
                start = end_of[name]
        end = start + seconds(task)
        end_of[task.name] = lane_free[task.lane] = end
        done.append(Simulated(task=task, start=start, end=end))
    return done


def simulate_slowed(
    tasks: Sequence[T], seconds: Callable[[T], float], speeds: Callable[[frozenset[str]], Mapping[str, float]]
) -> list[Simulated[T]]:
    """`simulate` where lanes slow each other: seconds are those of a task that runs alone.

    speeds: from the lanes that are busy to the speed of each, over 0; 1.0 for a lane that it leaves out. With
    no lane slowed the result is that of `simulate`.
    Example: S (2 s) and L (3 s) on two lanes, each at half speed beside the other -> S to 4, L to 5.
    """
    speeds = functools.cache(speeds)
    waiting: dict[str, deque[T]] = {}
    for task in tasks:
        waiting.setdefault(task.lane, deque()).append(task)
    running: dict[str, tuple[T, float]] = {}  # lane -> its task and the seconds alone that are left of it
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    now = 0.0
    while len(end) < len(tasks):
        for lane, queue in waiting.items():
            if lane not in running and queue and all(name in end for name in queue[0].waits):
                task = queue.popleft()
                start[task.name] = now
                running[lane] = (task, seconds(task))
        speed = speeds(frozenset(lane for lane, (_, left) in running.items() if left))
        step = min(left / speed.get(lane, 1.0) for lane, (_, left) in running.items())
        now += step
        for lane, (task, left) in list(running.items()):
            if left / speed.get(lane, 1.0) <= step:
                end[task.name] = now
                del running[lane]
            else:
                running[lane] = (task, left - step * speed.get(lane, 1.0))
    return [Simulated(task=task, start=start[task.name], end=end[task.name]) for task in tasks]


def makespan(simulated: Iterable[Simulated[T]]) -> float:
    """Seconds from the start of the pass to the end of its last task."""
    return max((item.end for item in simulated), default=0.0)


# ---- seconds of tasks from what each kind of task costs


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
