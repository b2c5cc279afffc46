"""The lanes of a GPU: each lane is a stream, and streams wait for each other by events."""

from __future__ import annotations

import contextlib

import torch

from pmoe.comm.ranks import Ranks
from pmoe.engine.lanes.base import Action, Lanes
from pmoe.kernels.grouped_gemm.launch import beside_communication
from pmoe.schedule.tasks import Lane, Schedule, Task


class CudaLanes(Lanes):
    """Lanes that are streams. The compute lane is the current stream; the others are shared by all passes.

    Every buffer is allocated on the compute stream and lives until `finish`. By then the compute stream has
    waited for the other streams, so the allocator may reuse the memory without record_stream. Tensors that
    users' modules made do not live so long: see `pmoe.engine.variants.offload.hold_for`.
    """

    _streams: dict[tuple[torch.device, Lane], torch.cuda.Stream] = {}

    def __init__(self, schedule: Schedule, ranks: Ranks, device: torch.device) -> None:
        super().__init__(schedule, ranks)
        compute = torch.cuda.current_stream(device)
        self._stream = {Lane.COMPUTE: compute}
        for lane in schedule.lanes - {Lane.COMPUTE}:
            if (device, lane) not in self._streams:
                self._streams[device, lane] = torch.cuda.Stream(device)
            self._stream[lane] = self._streams[device, lane]
            # The caller's work on the current stream comes before the pass.
            self._stream[lane].wait_stream(compute)
        self._await_readers_of_the_host(device)
        lane_of = {task.name: task.lane for task in schedule.tasks}
        self._awaited = {
            name for task in schedule.tasks for name in task.waits if lane_of[name] is not task.lane
        }
        self._events: dict[str, tuple[Lane, torch.cuda.Event]] = {}
        travels = ranks.size > 1 and any(task.chunk > 0 for task in schedule.tasks)
        self._beside = beside_communication if travels else contextlib.nullcontext

    def run(self, task: Task, action: Action) -> None:
        stream = self._stream[task.lane]
        for name in task.waits:
            if name in self._events and self._events[name][0] is not task.lane:
                stream.wait_event(self._events[name][1])
        with torch.cuda.stream(stream):
            if task.lane not in (Lane.COMMUNICATE, Lane.INTRA_NODE):
                with self._beside():
                    action()
            else:
                try:
                    work = action()
                    if work is not None:
                        work.wait()  # the lane's stream waits for the collective's own; the host does not
                except RuntimeError as error:
                    self.fail(task, error)
            if task.name in self._awaited:
                event = torch.cuda.Event()
                event.record(stream)
                self._events[task.name] = (task.lane, event)

    def _await_readers_of_the_host(self, device: torch.device) -> None:
        """Makes copies out wait for copies in of earlier passes, which may still read the same host memory.

        The host frees that memory when it has issued the copies in, not when they have ended. A pass on
        another of the caller's streams may get it, without having waited for them.
        """
        copies_in = self._streams.get((device, Lane.COPY_IN))
        if Lane.COPY_OUT in self._stream and copies_in is not None:
            self._stream[Lane.COPY_OUT].wait_stream(copies_in)

    def finish(self) -> None:
        for lane, stream in self._stream.items():
            if lane is not Lane.COMPUTE:
                self._stream[Lane.COMPUTE].wait_stream(stream)
