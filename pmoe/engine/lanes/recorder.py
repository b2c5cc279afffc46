"""Records when each task of a pass ran: for the timeline, for statistics, and to measure rates."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from pmoe.comm.ranks import Ranks
from pmoe.engine.lanes.base import Actions, TaskAction, watchers
from pmoe.planner.timeline import Span
from pmoe.schedule.tasks import Schedule, Task


@dataclass(frozen=True)
class RecordedPass:
    """The times at which the tasks of one pass ran.

    of: the layer's experts module. It identifies the layer.
    direction: "forward" or "backward".
    spans: the start and end of each task that has ended.
    """

    of: object
    direction: str
    spans: list[Span] = field(default_factory=list)


@dataclass(eq=False)
class Journal:
    """The times at which tasks ran, for every pass that ran in a `recording` block.

    A journal is complete only after the block has ended, because on a GPU the times are read from CUDA events
    at the end of the block.

    spans: the start and end of each task, of all passes.
    passes: one record for each pass, in the order in which the passes began.
    """

    spans: list[Span] = field(default_factory=list)
    passes: list[RecordedPass] = field(default_factory=list)
    _unfilled: list[Callable[[], None]] = field(default_factory=list)

    def last(self, of: object, direction: str) -> list[Span] | None:
        """Returns the task times of a layer's last recorded pass in one direction; None if there is none.

        of: the layer's experts module, which identifies the layer.
        direction: "forward" or "backward".
        """
        matching = (one for one in reversed(self.passes) if one.of is of and one.direction == direction)
        return next((one.spans for one in matching), None)

    def watch(self, schedule: Schedule, act: TaskAction, device: torch.device, of: object) -> TaskAction:
        """Returns a function that runs a task by ``act``, and records when the task started and ended.

        On CUDA the function records events around the task, on the CPU it reads the clock.

        schedule: the schedule of the pass.
        act: the function that runs a task.
        device: the device of the pass.
        of: the layer's experts module, under which the times are recorded.
        """
        noted = RecordedPass(of, schedule.direction)
        self.passes.append(noted)

        def note(task: Task, start: float, end: float) -> None:
            span = Span(
                direction=schedule.direction,
                name=task.name,
                kind=task.kind,
                chunk=task.chunk,
                lane=task.lane,
                start=start,
                end=end,
            )
            self.spans.append(span)
            noted.spans.append(span)

        def on_cuda(task: Task) -> dist.Work | None:
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            work = act(task)
            if work is not None:
                work.wait()
            end.record()
            if not hasattr(self, "_origin"):
                self._origin = start
            since = self._origin.elapsed_time
            self._unfilled.append(lambda: note(task, since(start) / 1e3, since(end) / 1e3))
            return None

        def on_cpu(task: Task) -> dist.Work | None:
            start = time.perf_counter()
            work = act(task)
            if work is None:
                note(task, start, time.perf_counter())
                return None

            # A thread waits for the end. The engine itself waits only when a later task needs the result.
            def wait() -> None:
                with contextlib.suppress(RuntimeError):
                    work.wait()
                note(task, start, time.perf_counter())

            watcher = threading.Thread(target=wait, daemon=True)
            watcher.start()
            self._unfilled.append(watcher.join)
            return work

        return on_cuda if device.type == "cuda" else on_cpu


@contextlib.contextmanager
def recording() -> Iterator[Journal]:
    """Records the times of all tasks of all layers in this process: ``with recording() as journal: step()``.

    On the CPU the recorded time of a message begins when the message is issued. So the time includes waiting
    for the previous message of the lane (queue of tasks).
    """
    journal = Journal()
    watchers.append(journal)
    try:
        yield journal
    finally:
        watchers.remove(journal)  # blocks may end in any order
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for fill in journal._unfilled:
            fill()
        journal._unfilled.clear()


def seen(schedule: Schedule, actions: Actions, device: torch.device, ranks: Ranks, of: object) -> TaskAction:
    """Returns a function that runs a task, and records it for torch's profiler or a `recording` block.

    In the profiler each task has a range, named by task, direction and layer.

    schedule: the schedule of the pass.
    actions: the function that runs each kind of task.
    device, ranks: the device of the pass, and the layer's ranks.
    of: the layer's experts module, under which times are recorded.
    """

    def act(task: Task) -> dist.Work | None:
        if not _profiler_enabled():
            return actions[task.kind](task.chunk)
        with record_function(f"{task.name} {schedule.direction} {ranks.layer}"):
            return actions[task.kind](task.chunk)

    return watchers[-1].watch(schedule, act, device, of) if watchers else act
