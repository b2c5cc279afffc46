"""Lanes on the CPU that are threads, for copies and for communication in several steps.

A lane is a queue of tasks that run one after another, beside the tasks of other lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from pmoe.comm.failures import wait_for
from pmoe.comm.ranks import Ranks
from pmoe.engine.lanes.base import Action, CpuLanes
from pmoe.schedule.tasks import Lane, Schedule, Task

COPIES = (Lane.COPY_OUT, Lane.COPY_IN)
"""The lanes that copy between device memory and host memory."""


class ThreadLanes(CpuLanes):
    """Lanes (queues of tasks) on the CPU, some of which run in threads of their own.

    Lanes that copy are always threads.

    in_steps: whether lanes that communicate are threads, too. It must be True if some communication tasks
        wait for a collective before they return: in a thread, such a task does not delay the calling thread.
    """

    def __init__(self, schedule: Schedule, ranks: Ranks, in_steps: bool) -> None:
        super().__init__(schedule, ranks)
        self._in_steps = in_steps
        self._inference = torch.is_inference_mode_enabled()
        self._has_failed = False

    def run(self, task: Task, action: Action) -> None:
        if task.lane in COPIES:
            submit: Any = _thread(task.lane).submit
            super().run(task, functools.partial(submit, action))
        elif self._in_steps and task.lane is not Lane.COMPUTE:
            begun = [self._works[name][1] for name in task.waits if name in self._works]
            awaited = [
                work for work in begun if isinstance(work, Future)
            ]  # these are all tasks to wait for: with in_steps, every task in _works runs in a thread
            future = _thread(task.lane).submit(self._communicate, task, action, awaited)
            self._works[task.name] = (task, future)
        else:
            super().run(task, action)

    def abandon(self) -> None:
        # Copies are awaited, because they end soon. Messages are not, because a peer may be missing.
        for task, work in self._works.values():
            if isinstance(work, Future):
                if task.lane in COPIES:
                    work.result()
                else:
                    work.cancel()
        super().abandon()
        self._has_failed = True  # a thread may be between two tasks, and must not begin the second

    def _wait(self, name: str) -> None:
        work = self._works[name][1]
        if isinstance(work, Future):
            del self._works[name]
            work.result()  # an error names the stage already, because `_communicate` raised it by `fail`
        else:
            super()._wait(name)

    def _communicate(self, task: Task, action: Action, awaited: Sequence[Future[Any]]) -> None:
        """Runs a communication task from beginning to end, in the thread of its lane.

        After a task has failed, this rank starts no other task. Another rank may still wait in the collective
        that failed. If this rank started its next collective, the waiting rank would receive its rows as rows
        of the failed collective.

        task: the task.
        action: the function that does the task's work.
        awaited: the results of the tasks that must end before this task.
        """
        for future in awaited:
            future.result()
        if self._has_failed:
            return
        try:
            # Threads do not inherit torch's modes.
            with torch.inference_mode(self._inference), torch.no_grad():
                begun = action()
                if begun is not None:
                    wait_for(begun, self._ranks.group)
        except Exception as error:
            self._has_failed = True
            self.fail(task, error)


@functools.cache
def _thread(lane: Lane) -> ThreadPoolExecutor:
    """Returns the thread of a lane, as an executor. All passes of this process share it."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"pmoe {lane.value}")
