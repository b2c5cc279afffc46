"""Runs the tasks of a schedule on lanes. A lane runs its tasks in order; lanes run side by side.

On a GPU a lane is a CUDA stream (`pmoe.engine.lanes.cuda`). On the CPU the calling thread computes, gloo
sends messages asynchronously, and other lanes are threads. All classes of lanes run the same schedules, and
have the same three methods. So tests on the CPU with gloo also test the order of tasks on a GPU:

    run(task, action)   for each task, in the schedule's order: starts it after the tasks for which it waits
    finish()            after the last task: waits for all lanes
    abandon()           after an error: makes it safe to free the buffers
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch.distributed as dist

from pmoe.comm.failures import at_stage, wait_for
from pmoe.comm.ranks import Ranks
from pmoe.schedule.tasks import Kind, Lane, Schedule, Task

Action = Callable[[], "dist.Work | None"]
"""A function that runs one task. It returns the Work of the collective that it started, or None.

None means that the task has ended, or that its kernels are in the queue of the current CUDA stream.
"""
TaskAction = Callable[[Task], "dist.Work | None"]
"""A function that runs any task, which is its argument. It returns the same as an `Action`."""


class Lanes(abc.ABC):
    """The lanes that run the tasks of one pass: queues of tasks, which run side by side.

    Each pass creates an object of its own.

    schedule: the tasks of the pass, each with its lane.
    ranks: the layer's ranks.
    """

    def __init__(self, schedule: Schedule, ranks: Ranks) -> None:
        self._schedule = schedule
        self._ranks = ranks

    @abc.abstractmethod
    def run(self, task: Task, action: Action) -> None:
        """Runs or starts a task on its lane, after the tasks that it waits for (`Task.waits`) have ended.

        task: the task, with the name of its lane.
        action: the function that does the task's work.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Makes the compute lane wait for all other lanes, so that later computation can read all results.

        Called after the last task.
        """

    def abandon(self) -> None:
        """Makes it safe to free the buffers of the pass after an error, even if messages still use them."""
        self.finish()

    def fail(self, task: Task, error: Exception) -> NoReturn:
        """Raises a task's error again, as a RuntimeError that names the failed task and this rank."""
        chunk = "" if task.chunk < 0 else f" of chunk {task.chunk}"
        stage = f"{task.kind.name.lower()} ({task.name}){chunk}, {self._schedule.direction}"
        with at_stage(stage, self._ranks):
            raise error


class CpuLanes(Lanes):
    """Lanes (queues of tasks) on the CPU: the calling thread computes, while gloo sends messages.

    The subclass `pmoe.engine.lanes.threads.ThreadLanes` adds lanes that are threads of their own.
    """

    def __init__(self, schedule: Schedule, ranks: Ranks) -> None:
        super().__init__(schedule, ranks)
        self._works: dict[str, tuple[Task, Any]] = {}

    def run(self, task: Task, action: Action) -> None:
        for name in self._schedule.waits_beside_compute[task.name]:
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
        self._works.clear()  # not awaited: a peer may be missing, and each Work keeps its own buffers alive

    def _wait(self, name: str) -> None:
        """Waits until the collective that a task started has ended.

        name: the task's name, "S0" for example.

        Raises RuntimeError if the collective failed. The message names the failed task and this rank.
        """
        task, work = self._works.pop(name)
        try:
            wait_for(work, self._ranks.group)
        except RuntimeError as error:
            self.fail(task, error)


Actions = Mapping[Kind, Callable[[int], "dist.Work | None"]]
"""The function that runs each kind of task. Its argument is the number of the chunk."""

watchers: list[Any] = []
"""The open journals (`pmoe.engine.lanes.recorder.Journal`). Only the newest one records tasks."""
