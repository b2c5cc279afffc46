"""The simulator: how long a schedule takes, for given task costs. It reads the engine's own list.

Lanes run their tasks one after another in list order; a task also waits for the tasks it names. That is
all the engine promises, so it is all the simulator assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


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
    Raises ValueError for a task that waits for one not before it.
    """
    end_of: dict[str, float] = {}
    lane_free: dict[str, float] = {}
    done = []
    for task in tasks:
        unknown = [name for name in task.waits if name not in end_of]
        if unknown:
            raise ValueError(f"task {task.name} waits for {unknown[0]}, which is not before it")
        ready = max((end_of[name] for name in task.waits), default=0.0)
        start = max(ready, lane_free.get(task.lane, 0.0))
        end = start + seconds(task)
        end_of[task.name] = lane_free[task.lane] = end
        done.append(Simulated(task=task, start=start, end=end))
    return done


def makespan(simulated: Iterable[Simulated[T]]) -> float:
    """Seconds from the start of the pass to the end of its last task."""
    return max((item.end for item in simulated), default=0.0)
