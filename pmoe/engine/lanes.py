"""How tasks of the lanes run side by side: asynchronous works on the CPU, or CUDA streams and events
(`pmoe.engine.cuda_lanes`), in the same three steps: what is tested with gloo is what runs on a GPU.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from pmoe.comm.ranks import Ranks, at_stage, wait_for
from pmoe.schedule.tasks import Kind, Lane, Schedule, Task

Action = Callable[[], "dist.Work | None"]
TaskAction = Callable[[Task], "dist.Work | None"]


class Lanes(abc.ABC):
    """Runs the tasks of one pass in the order given. One instance a pass."""

    def __init__(self, schedule: Schedule, ranks: Ranks) -> None:
        self._schedule, self._ranks = schedule, ranks

    @abc.abstractmethod
    def run(self, task: Task, action: Action) -> None:
        """Runs or starts ``task`` once what it waits for has ended (on its lane's clock)."""

    @abc.abstractmethod
    def finish(self) -> None:
        """After the last task: the compute lane sees everything that the pass wrote."""

    def abandon(self) -> None:
        """After an error: makes it safe to free the buffers that messages in flight still use."""
        self.finish()

    def fail(self, task: Task, error: Exception) -> NoReturn:
        """Raises it again: a RuntimeError with the stage and this rank."""
        chunk = "" if task.chunk < 0 else f" of chunk {task.chunk}"
        stage = f"{task.kind.name.lower()} ({task.name}){chunk}, {self._schedule.direction}"
        with at_stage(stage, self._ranks):
            raise error


class CpuLanes(Lanes):
    """The compute lane is this thread; the communication lane is whatever carries asynchronous works. Lanes
    that are threads are those of `pmoe.engine.thread_lanes`."""

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
        self._works.clear()  # they hold their own buffers, and a missing peer must not be waited for

    def _wait(self, name: str) -> None:
        task, work = self._works.pop(name)
        try:
            wait_for(work, self._ranks.group)
        except RuntimeError as error:
            self.fail(task, error)


def lanes_for(rows: Tensor, schedule: Schedule, ranks: Ranks, in_steps: bool = False) -> Lanes:
    if rows.device.type == "cuda":
        from pmoe.engine.cuda_lanes import CudaLanes

        return CudaLanes(schedule, ranks, rows.device)
    if in_steps or not schedule.lanes <= {Lane.COMPUTE, Lane.COMMUNICATE}:
        from pmoe.engine.thread_lanes import ThreadLanes

        return ThreadLanes(schedule, ranks, in_steps)
    return CpuLanes(schedule, ranks)


# ---- runs a schedule; knows nothing of experts or rows


Actions = Mapping[Kind, Callable[[int], "dist.Work | None"]]


def run_schedule(
    schedule: Schedule,
    actions: Actions,
    rows: Tensor,
    ranks: Ranks,
    in_steps: bool = False,
    of: object = None,
) -> None:
    """Runs each task of ``schedule`` by calling actions[kind](chunk), on the lanes of rows' device.

    An action of a communication lane returns the Work that it started, or None where it had nothing to do, or
    where it has ended (in_steps); the engine waits for it where the schedule says so. of: whose pass it is,
    for `watchers`.
    """
    lanes = lanes_for(rows, schedule, ranks, in_steps)
    seen: TaskAction | None = None
    if watchers or _profiler_enabled():
        from pmoe.engine import recording

        seen = recording.seen(schedule, actions, rows.device, ranks, of)
    try:
        for task in schedule.tasks:
            action = functools.partial(actions[task.kind], task.chunk)
            lanes.run(task, action if seen is None else functools.partial(seen, task))
    except BaseException:
        lanes.abandon()
        raise
    lanes.finish()


watchers: list[Any] = []
"""Each a `pmoe.engine.recording.Journal`; the newest is told of each pass."""
