"""How tasks of the lanes run side by side: asynchronous works on the CPU, or CUDA streams and events
(`pmoe.engine.cuda_lanes`), in the same three steps: what is tested with gloo is what runs on a GPU.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from pmoe.comm.ranks import Ranks, at_stage, wait_for
from pmoe.schedule.tasks import Kind, Lane, Schedule, Task

Action = Callable[[Task], "dist.Work | None"]


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
    """The compute lane is this thread; the communication lane is whatever carries asynchronous works; each
    copy lane is a thread. in_steps: communication lanes are threads too, for their tasks wait for each other,
    or for a part of themselves, and computing must not."""

    def __init__(self, schedule: Schedule, ranks: Ranks, in_steps: bool = False) -> None:
        super().__init__(schedule, ranks)
        self._in_steps, self._inference = in_steps, torch.is_inference_mode_enabled()
        self._works: dict[str, tuple[Task, dist.Work | Future[Any]]] = {}
        self._has_failed = False

    def run(self, task: Task, action: Action) -> None:
        if self._in_steps and task.lane in (Lane.COMMUNICATE, Lane.INTRA_NODE):
            begun = [self._works[name][1] for name in task.waits if name in self._works]
            awaited = [work for work in begun if isinstance(work, Future)]  # here all are threads'
            future = _thread(task.lane).submit(self._communicate, task, action, awaited)
            self._works[task.name] = (task, future)
            return
        for name in task.waits:
            if name in self._works:
                self._wait(name)
        if task.lane is Lane.COMPUTE:
            action(task)
            return
        work: dist.Work | Future[Any] | None
        if task.lane is Lane.COMMUNICATE:
            try:
                work = action(task)
            except RuntimeError as error:
                self.fail(task, error)
        else:
            work = _thread(task.lane).submit(action, task)
        if work is not None:
            self._works[task.name] = (task, work)

    def finish(self) -> None:
        for name in list(self._works):
            self._wait(name)

    def abandon(self) -> None:
        # gloo's works hold their own buffers, and a missing peer must not be waited for; copies end by
        # themselves, and soon.
        for task, work in self._works.values():
            if isinstance(work, Future):
                if task.lane in (Lane.COPY_OUT, Lane.COPY_IN):
                    work.result()
                else:
                    work.cancel()
        self._works.clear()
        self._has_failed = True  # threads may be in the middle of their tasks

    def _wait(self, name: str) -> None:
        task, work = self._works.pop(name)
        if isinstance(work, Future):
            work.result()  # its thread has named the stage
            return
        try:
            wait_for(work, self._ranks.group)
        except RuntimeError as error:
            self.fail(task, error)

    def _communicate(self, task: Task, action: Action, awaited: Sequence[Future[Any]]) -> None:
        """In a lane's thread: a task of communication, begun and ended. After one that failed no other
        begins: a peer that is still at that one would take its rows for those."""
        for future in awaited:
            future.result()
        if self._has_failed:
            return
        try:
            # A thread has modes of its own.
            with torch.inference_mode(self._inference), torch.no_grad():
                begun = action(task)
                if begun is not None:
                    wait_for(begun, self._ranks.group)
        except Exception as error:
            self._has_failed = True
            self.fail(task, error)


@functools.cache
def _thread(lane: Lane) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=f"pmoe {lane.value}")


def current_stream(tensor: Tensor) -> torch.cuda.Stream | None:
    """The stream that operators on ``tensor`` are issued to; None on the CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def hold_for(stream: torch.cuda.Stream | None, tensor: Tensor) -> None:
    """``tensor``, made on another stream, is used on ``stream``: once freed, its memory is not handed out
    again before that use has ended."""
    if stream is not None:
        tensor.record_stream(stream)


def lanes_for(rows: Tensor, schedule: Schedule, ranks: Ranks, in_steps: bool = False) -> Lanes:
    if rows.device.type == "cuda":
        from pmoe.engine.cuda_lanes import CudaLanes

        return CudaLanes(schedule, ranks, rows.device)
    return CpuLanes(schedule, ranks, in_steps)


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

    def act(task: Task) -> dist.Work | None:
        if not _profiler_enabled():
            return actions[task.kind](task.chunk)
        with record_function(f"{task.name} {schedule.direction} {ranks.layer}"):
            return actions[task.kind](task.chunk)

    step: Action = watchers[-1].watch(schedule, act, rows.device, of) if watchers else act
    try:
        for task in schedule.tasks:
            lanes.run(task, step)
    except BaseException:
        lanes.abandon()
        raise
    lanes.finish()


watchers: list[Any] = []
"""Each a `pmoe.engine.recording.Journal`; the newest is told of each pass."""
