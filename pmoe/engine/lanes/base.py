"""Runs the tasks of a schedule on lanes, side by side.

On the CPU a lane is a thread or asynchronous messages, on a GPU a stream (`pmoe.engine.lanes.cuda`). Both run
the same schedule by the same three methods, so tests with gloo on the CPU test the order on a GPU too:

    run(task, action)   for each task in list order: waits for the tasks that it names, then starts it
    finish()            after the last task: waits for all
    abandon()           after an error: makes buffers safe to free
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch.distributed as dist

from pmoe.comm.ranks import Ranks, at_stage, wait_for
from pmoe.schedule.tasks import Kind, Lane, Schedule, Task

Action = Callable[[], "dist.Work | None"]
"""The work of one task. Returns the Work that it started, or None if it has ended."""
TaskAction = Callable[[Task], "dist.Work | None"]
"""The work of any task, which it takes as its argument."""


class Lanes(abc.ABC):
    """The lanes of one pass, which run its tasks. Each pass makes its own object."""

    def __init__(self, schedule: Schedule, ranks: Ranks) -> None:
        self._schedule = schedule
        self._ranks = ranks

    @abc.abstractmethod
    def run(self, task: Task, action: Action) -> None:
        """Runs or starts a task, which begins on its lane after the tasks for which it waits have ended."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Makes the compute lane wait for all others, after the last task, so that it sees all results."""

    def abandon(self) -> None:
        """Makes it safe, after an error, to free buffers that messages in flight still use."""
        self.finish()

    def fail(self, task: Task, error: Exception) -> NoReturn:
        """Raises ``error`` again, as a RuntimeError that names the stage and this rank."""
        chunk = "" if task.chunk < 0 else f" of chunk {task.chunk}"
        stage = f"{task.kind.name.lower()} ({task.name}){chunk}, {self._schedule.direction}"
        with at_stage(stage, self._ranks):
            raise error


class CpuLanes(Lanes):
    """Lanes on the CPU: this thread computes, and gloo's threads carry asynchronous messages.

    `pmoe.engine.lanes.threads` adds lanes that are threads of their own.
    """

    def __init__(self, schedule: Schedule, ranks: Ranks) -> None:
        super().__init__(schedule, ranks)
        self._works: dict[str, tuple[Task, Any]] = {}

    def run(self, task: Task, action: Action) -> None:
        for name in task.waits:
            if name in self._works:
                self._wait(name)
        try:
            work = action()
        except RuntimeError as error:
            if task.lane is Lane.COMPUTE:
                raise
            self.fail(task, error)
        if work is not None and task.lane is not Lane.COMPUTE:
            self._works[task.name] = (task, work)

    def finish(self) -> None:
        for name in list(self._works):
            self._wait(name)

    def abandon(self) -> None:
        self._works.clear()  # not awaited, for a peer may be missing; each Work keeps its own buffers alive

    def _wait(self, name: str) -> None:
        """Waits for the Work that a task started. Raises as `fail` does."""
        task, work = self._works.pop(name)
        try:
            wait_for(work, self._ranks.group)
        except RuntimeError as error:
            self.fail(task, error)


Actions = Mapping[Kind, Callable[[int], "dist.Work | None"]]
"""The action of each kind of task, which takes the chunk."""

watchers: list[Any] = []
"""The journals (`pmoe.engine.lanes.recorder.Journal`) that are open now. The newest records each pass."""
