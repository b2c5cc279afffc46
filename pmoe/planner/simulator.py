"""The simulator: predicts when each task of a schedule runs, from the seconds of the tasks.

It reads the same list of tasks as the engine, and assumes only what the engine guarantees: each lane runs
its tasks one after another in list order, and a task starts when all tasks that it waits for have ended.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pmoe.schedule.tasks import Kind, Task


class Timed(Protocol):
    """Interface of a task, as far as the simulator reads it."""

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
    """Returns the start and end of each task, in list order.

    seconds: gives the seconds of a task that runs alone.

    Example: S (2 s, communicate), L (1 s, compute), C (3 s, compute, waits for S) -> C runs from 2 to 5.
    """
    end_of: dict[str, float] = {}
    lane_free: dict[str, float] = {}
    done = []
    for task in tasks:
        start = lane_free.get(task.lane, 0.0)
        for name in task.waits:  # a loop, because max() makes the simulation half as long again
            if end_of[name] > start:
                start = end_of[name]
        end = start + seconds(task)
        end_of[task.name] = lane_free[task.lane] = end
        done.append(Simulated(task=task, start=start, end=end))
    return done


def simulate_slowed(
    tasks: Sequence[T], seconds: Callable[[T], float], speeds: Callable[[frozenset[str]], Mapping[str, float]]
) -> list[Simulated[T]]:
    """Does what `simulate` does, for lanes that slow each other while they are busy.

    Time advances from the end of one task to the end of the next. In between every busy lane works at a
    constant speed, so a task that needs x seconds alone takes x / speed.

    Args:
        seconds: gives the seconds of a task that runs alone.
        speeds: gives, for a set of busy lanes, the speed of each, above 0. A lane that it leaves out has
            speed 1. If all speeds are 1 the result is that of `simulate`.

    Example: S (2 s) and L (3 s) on two lanes, each at half speed beside the other -> S ends at 4, L at 5.
    """
    speeds = functools.cache(speeds)
    waiting: dict[str, deque[T]] = {}
    for task in tasks:
        waiting.setdefault(task.lane, deque()).append(task)
    running: dict[str, tuple[T, float]] = {}  # lane -> (its task, seconds left of it if it ran alone)
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    now = 0.0
    while len(end) < len(tasks):
        for lane, queue in waiting.items():
            if lane not in running and queue and all(name in end for name in queue[0].waits):
                task = queue.popleft()
                start[task.name] = now
                running[lane] = (task, seconds(task))
        # A task of 0 seconds is in ``running`` until the end of this round, but its lane slows no other.
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
    """Returns the seconds from the start of the pass to the end of its last task."""
    return max((item.end for item in simulated), default=0.0)


# ---- seconds of a task, from the costs of each kind of task


TaskCost = float | Callable[[Task], float]
"""Seconds of every task of a kind, or a function of the task if its chunks differ."""

COSTS_AS: Mapping[Kind, Kind] = {
    Kind.COMBINE: Kind.DISPATCH,
    Kind.DISPATCH_AGAIN: Kind.DISPATCH,
    Kind.ALL_GATHER_AGAIN: Kind.ALL_GATHER,
    Kind.SHARE_WEIGHTS: Kind.WEIGHTS,
}
"""Kinds that cost the same as another kind, unless a cost of their own is given."""

LOCAL_TWIN: Mapping[Kind, Kind] = {Kind.COMPUTE: Kind.LOCAL} | {
    Kind[kind.name.removeprefix("LOCAL_")]: kind for kind in Kind if kind.name.startswith("LOCAL_")
}
"""Maps each kind that works on rows that travel to the kind that does the same with rows that stay."""


def task_seconds(costs: Mapping[Kind, TaskCost]) -> Callable[[Task], float]:
    """Returns a function that gives the seconds of a task by its kind.

    costs: by kind. A kind that is missing costs what `COSTS_AS` says, or else nothing.

    Example: costs {DISPATCH: 2.0} -> S and R of any chunk take 2 s, all other tasks 0 s.
    """
    cost_of = {kind: costs[model] for kind, model in COSTS_AS.items() if model in costs} | dict(costs)

    def seconds(task: Task) -> float:
        cost = cost_of.get(task.kind, 0.0)
        return cost if isinstance(cost, (int, float)) else cost(task)

    return seconds
