"""Runs a schedule on the lanes of a device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from pmoe.comm.ranks import Ranks
from pmoe.engine.lanes.base import Actions, CpuLanes, Lanes, TaskAction, watchers
from pmoe.schedule.tasks import Lane, Schedule


def lanes_for(rows: Tensor, schedule: Schedule, ranks: Ranks, in_steps: bool = False) -> Lanes:
    """Returns the lanes for a pass on the device of ``rows``.

    in_steps: whether tasks of communication wait for collectives before they return. On the CPU they need
        threads then, so that computing goes on.
    """
    if rows.device.type == "cuda":
        from pmoe.engine.lanes.cuda import CudaLanes

        return CudaLanes(schedule, ranks, rows.device)
    if in_steps or not schedule.lanes <= {Lane.COMPUTE, Lane.COMMUNICATE}:
        from pmoe.engine.lanes.threads import ThreadLanes

        return ThreadLanes(schedule, ranks, in_steps)
    return CpuLanes(schedule, ranks)


# ---- Running a schedule. Nothing in this part knows of experts or rows


def run_schedule(
    schedule: Schedule,
    actions: Actions,
    rows: Tensor,
    ranks: Ranks,
    in_steps: bool = False,
    of: object = None,
) -> None:
    """Runs each task of ``schedule``: calls actions[kind](chunk) on the lanes of the device of ``rows``.

    actions: an action of a communication lane returns the Work that it started; None if it had nothing to do,
        or has ended. The engine waits for the Work before the first task that the schedule lets wait for it.
    ranks: the ranks of the layer.
    in_steps: as in `lanes_for`.
    of: the object whose pass it is, for `watchers`.
    """
    lanes = lanes_for(rows, schedule, ranks, in_steps)
    recorded: TaskAction | None = None
    if watchers or _profiler_enabled():
        from pmoe.engine.lanes import recorder

        recorded = recorder.seen(schedule, actions, rows.device, ranks, of)
    try:
        for task in schedule.tasks:
            action = functools.partial(actions[task.kind], task.chunk)
            lanes.run(task, action if recorded is None else functools.partial(recorded, task))
    except BaseException:
        lanes.abandon()
        raise
    lanes.finish()


def is_captured(device: torch.device) -> bool:
    """Whether kernels launched on ``device`` now become part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
