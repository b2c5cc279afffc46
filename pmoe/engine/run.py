"""The engine: runs a schedule. It knows lanes and tasks, nothing of experts or rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.ranks import Ranks
from pmoe.engine.lanes import lanes_for
from pmoe.schedule.tasks import Kind, Schedule, Task

Act = Callable[[Task], "dist.Work | None"]
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
    for a `Watcher`.
    """
    lanes = lanes_for(rows, schedule, ranks, in_steps)

    def act(task: Task) -> dist.Work | None:
        return actions[task.kind](task.chunk)

    step = watchers[-1].watch(schedule, act, rows.device, of) if watchers else act
    try:
        for task in schedule.tasks:
            lanes.run(task, step)
    except BaseException:
        lanes.abandon()
        raise
    lanes.finish()


class Watcher(Protocol):
    """What is told of each pass: a `pmoe.engine.recording.Journal`."""

    def watch(self, schedule: Schedule, act: Act, device: torch.device, of: object) -> Act:
        """``act``, which runs a task, with something noted of it."""


watchers: list[Watcher] = []
"""Those that watch now; the newest is told."""
