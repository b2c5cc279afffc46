"""Runs a schedule on the lanes of a device: on CUDA streams, or on the CPU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from pmoe.comm.ranks import Ranks
from pmoe.engine.lanes.base import Actions, CpuLanes, Lanes, TaskAction, watchers
from pmoe.schedule.tasks import Lane, Schedule


def lanes_for(rows: Tensor, schedule: Schedule, ranks: Ranks, in_steps: bool = False) -> Lanes:
    """Returns an object that runs the tasks of a pass on lanes: queues of tasks that run side by side.

    On a GPU, lanes are CUDA streams. On the CPU, the calling thread computes while gloo sends messages. Lanes
    that copy, or that communicate in several steps, are threads there.

    rows: a tensor on the device of the pass.
    schedule: the tasks that the lanes will run.
    ranks: the layer's ranks.
    in_steps: whether some communication tasks consist of several collectives, one after another. On the CPU
        such a task must wait for each collective. So it runs in a thread of its own, and the calling thread
        can go on computing.
    """
    if rows.device.type == "cuda":
        from pmoe.engine.lanes.cuda import CudaLanes

        return CudaLanes(schedule, ranks, rows.device)
    if in_steps or not schedule.lanes <= {Lane.COMPUTE, Lane.COMMUNICATE}:
        from pmoe.engine.lanes.threads import ThreadLanes

        return ThreadLanes(schedule, ranks, in_steps)
    return CpuLanes(schedule, ranks)


# ---- Running a schedule. This part does not depend on what tasks do


def run_schedule(
    schedule: Schedule,
    actions: Actions,
    rows: Tensor,
    ranks: Ranks,
    in_steps: bool = False,
    of: object = None,
) -> None:
    """Runs each task of a schedule, by calling actions[kind](chunk), on the lanes of a device.

    actions: the function for each kind of task. The function of a communication task may return the Work of a
        collective that it started. A lane waits for this Work before its first task that depends on the
        communication task.
    rows: a tensor on the device of the pass.
    ranks: the layer's ranks.
    in_steps: whether some communication tasks run several collectives, and wait inside the task for each. On
        the CPU, communication lanes are then threads.
    of: the layer's experts module, under which a journal or the profiler records the times of tasks.
    """
    recorded: TaskAction | None = None
    if watchers or _profiler_enabled():
        from pmoe.engine.lanes import recorder

        recorded = recorder.seen(schedule, actions, rows.device, ranks, of)
    lanes = lanes_for(rows, schedule, ranks, in_steps)
    try:
        for task in schedule.tasks:
            action = functools.partial(actions[task.kind], task.chunk)
            lanes.run(task, action if recorded is None else functools.partial(recorded, task))
    except BaseException:
        lanes.abandon()
        raise
    lanes.finish()


def is_captured(device: torch.device) -> bool:
    """Returns whether a CUDA graph is being captured on the current stream of ``device``."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
