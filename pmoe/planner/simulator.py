"""The simulator: predicts when each task of a schedule starts and ends, from the seconds of each task.

The schedule is the list of tasks that the engine runs. The simulator relies only on rules that the engine
guarantees. A lane is a queue, such as a CUDA stream: it runs its tasks one after another, in list order. A
task starts when its lane is free and all tasks that it waits for have ended.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pmoe.schedule.tasks import Kind, Task


class Timed(Protocol):
    """The attributes of a task that the simulator reads.

    name: unique in a schedule.
    lane: name of the lane that runs the task: a queue, such as a CUDA stream.
    waits: names of the tasks that must end before this task starts.
    """

    @property
    def name(self) -> str: ...

    @property
    def lane(self) -> str: ...

    @property
    def waits(self) -> tuple[str, ...]: ...


T = TypeVar("T", bound=Timed)


@dataclass(frozen=True, kw_only=True)
class Simulated(Generic[T]):
    """A task with its predicted start and end, in seconds from the start of the simulated pass."""

    task: T
    start: float
    end: float


def simulate(tasks: Iterable[T], seconds: Callable[[T], float]) -> list[Simulated[T]]:
    """Returns each task with its predicted start and end, in list order.

    A lane is a queue, such as a CUDA stream: it runs one task at a time. A task starts when its lane is free
    and the tasks that it waits for have ended.

    tasks: the tasks, in the order in which lanes run them. A task waits only for tasks before it in this
        order.
    seconds: function that returns the seconds of a task.

    Example: S (2 s, on lane communicate), L (1 s, on lane compute), C (3 s, on lane compute, waits for S) ->
    L runs from 0 to 1, and C from 2 to 5.
    """
    end_of: dict[str, float] = {}
    lane_free: dict[str, float] = {}
    done = []
    for task in tasks:
        start = lane_free.get(task.lane, 0.0)
        for name in task.waits:  # a loop: with max() a simulation takes 1.5 times as long
            if end_of[name] > start:
                start = end_of[name]
        end = start + seconds(task)
        end_of[task.name] = lane_free[task.lane] = end
        done.append(Simulated(task=task, start=start, end=end))
    return done


def simulate_slowed(
    tasks: Sequence[T], seconds: Callable[[T], float], speeds: Callable[[frozenset[str]], Mapping[str, float]]
) -> list[Simulated[T]]:
    """Returns each task with its start and end, for lanes that slow each other while they are busy.

    Two tasks that run at the same time share the device's memory and multiprocessors, so each may be slower
    than alone. A lane is a queue, such as a CUDA stream: it runs one task at a time. A task starts when its
    lane is free and the tasks that it waits for have ended. If a lane has the same speed all the time, a task
    that takes x seconds alone takes x / speed seconds. Speeds change only when a task ends, because the same
    lanes are busy until then.

    Args:
        tasks: the tasks, in the order in which lanes run them.
        seconds: function that returns the seconds of a task if it runs alone.
        speeds: function that returns the speed of each lane while a given set of lanes is busy. Speeds are
            above 0. A lane that is missing has speed 1. If all speeds are 1, the result is that of
            `simulate`.

    Example: S (2 s) and L (3 s) on two lanes, each at half speed while both are busy -> S ends at 4 s. L has
    then 1 s of work left, which it does at full speed, so it ends at 5 s.
    """
    speeds = functools.cache(speeds)
    waiting: dict[str, deque[T]] = {}
    for task in tasks:
        waiting.setdefault(task.lane, deque()).append(task)
    running: dict[str, tuple[T, float]] = {}  # lane -> (task that it runs, seconds left if alone)
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    now = 0.0
    while len(end) < len(tasks):
        for lane, queue in waiting.items():
            if lane not in running and queue and all(name in end for name in queue[0].waits):
                task = queue.popleft()
                start[task.name] = now
                running[lane] = (task, seconds(task))
        # A task of 0 seconds is in ``running`` until the end of this round, but must not slow other lanes.
        speed = speeds(frozenset(lane for lane, (_, remaining) in running.items() if remaining))
        step = min(remaining / speed.get(lane, 1.0) for lane, (_, remaining) in running.items())
        now += step
        for lane, (task, remaining) in list(running.items()):
            # Tasks of NaN seconds end, too, such as 0 rows of infinite seconds. Else the loop has no end.
            if not remaining / speed.get(lane, 1.0) > step:
                end[task.name] = now
                del running[lane]
            else:
                running[lane] = (task, remaining - step * speed.get(lane, 1.0))
    return [Simulated(task=task, start=start[task.name], end=end[task.name]) for task in tasks]


def makespan(simulated: Iterable[Simulated[T]]) -> float:
    """Returns the seconds from the start of the pass to the end of its last task; 0 if there are no tasks."""
    return max((item.end for item in simulated), default=0.0)


# ---- seconds of a task, from costs by kind of task


TaskCost = float | Callable[[Task], float]
"""Seconds of a kind of task: a number for all tasks of the kind, or a function of the task."""

COSTS_AS: Mapping[Kind, Kind] = {
    Kind.COMBINE: Kind.DISPATCH,
    Kind.DISPATCH_AGAIN: Kind.DISPATCH,
    Kind.ALL_GATHER_AGAIN: Kind.ALL_GATHER,
    Kind.SHARE_WEIGHTS: Kind.WEIGHTS,
}
"""Maps a kind of task to the kind whose seconds count for it if costs name no seconds of its own."""

LOCAL_TWIN: Mapping[Kind, Kind] = {Kind.COMPUTE: Kind.LOCAL} | {
    Kind[kind.name.removeprefix("LOCAL_")]: kind for kind in Kind if kind.name.startswith("LOCAL_")
}
"""Maps a kind of task for received rows to the kind with the same work for rows that stay on their rank."""


def task_seconds(costs: Mapping[Kind, TaskCost]) -> Callable[[Task], float]:
    """Returns a function that gives the seconds of a task, looked up by the task's kind.

    costs: seconds by kind of task. A kind that is missing costs as much as the kind that `COSTS_AS` names for
        it. If that kind is missing too, its tasks take 0 seconds.

    Example: costs {DISPATCH: 2.0} -> dispatches (S) and combines (R) of all chunks take 2 s each, all other
    tasks 0 s.
    """
    cost_of = {kind: costs[model] for kind, model in COSTS_AS.items() if model in costs} | dict(costs)

    def seconds(task: Task) -> float:
        cost = cost_of.get(task.kind, 0.0)
        return cost if isinstance(cost, (int, float)) else cost(task)

    return seconds
