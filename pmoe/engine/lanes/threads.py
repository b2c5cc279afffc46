"""Lanes on the CPU that are threads: those that copy, and those that communicate in several steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from pmoe.comm.ranks import Ranks, wait_for
from pmoe.engine.lanes.base import Action, CpuLanes
from pmoe.schedule.tasks import Lane, Schedule, Task

COPIES = (Lane.COPY_OUT, Lane.COPY_IN)
"""The lanes that copy between device and host."""


class ThreadLanes(CpuLanes):
    """Lanes on the CPU where each copy lane is a thread.

    in_steps: whether communication lanes are threads too. Their tasks then wait for collectives before they
        return, and computing must go on meanwhile.
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
            ]  # in_steps: each task is a thread's
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
        self._has_failed = True  # a thread may be between two tasks: it must not begin another

    def _wait(self, name: str) -> None:
        work = self._works[name][1]
        if isinstance(work, Future):
            del self._works[name]
            work.result()  # its error names the stage already
        else:
            super()._wait(name)

    def _communicate(self, task: Task, action: Action, awaited: Sequence[Future[Any]]) -> None:
        """Runs a task of communication in its lane's thread, from its begin to its end.

        After a task that failed, no other begins: a peer that is still at the failed one would take the rows
        of the next for its rows.
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
    """Returns the thread of a lane. All passes of the process share it."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"pmoe {lane.value}")
