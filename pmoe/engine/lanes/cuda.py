"""The lanes of a GPU, which run tasks side by side: each lane is a CUDA stream.

If a task must wait for a task of another lane, the stream of the waiting task waits for an event that was
recorded on the other lane's stream.
"""

from __future__ import annotations

import torch

from pmoe.comm.ranks import Ranks
from pmoe.engine.lanes.base import Action, Lanes
from pmoe.kernels.grouped_gemm.launch import BesideCommunication
from pmoe.schedule.tasks import Lane, Schedule, Task


class CudaLanes(Lanes):
    """Lanes that are CUDA streams: queues of tasks that run side by side.

    The compute lane is the caller's current stream. The streams of the other lanes are shared by all passes
    on a device.

    All buffers of a pass are allocated on the compute stream, and kept until `finish`. `finish` makes the
    compute stream wait for the other streams, so torch's allocator may then reuse the memory without
    ``record_stream``. Tensors that users' modules allocate may be freed earlier, so these tensors do need
    ``record_stream`` (`pmoe.engine.variants.offload.hold_for`).
    """

    _streams: dict[tuple[torch.device, Lane], torch.cuda.Stream] = {}

    def __init__(self, schedule: Schedule, ranks: Ranks, device: torch.device) -> None:
        super().__init__(schedule, ranks)
        compute = torch.cuda.current_stream(device)
        self._stream = {Lane.COMPUTE: compute}
        for lane in schedule.lanes - {Lane.COMPUTE}:
            self._stream[lane] = self.stream_of(device, lane)
            # The pass reads tensors that the caller computes on the current stream.
            self._stream[lane].wait_stream(compute)
        self._await_readers_of_the_host(device)
        self._waits = schedule.lane_waits
        self._awaited = schedule.awaited
        self._events: dict[str, torch.cuda.Event] = {}
        self._products: BesideCommunication | None = None
        if ranks.size > 1 and schedule.has_several_chunks:
            self._products = BesideCommunication()
            self._products.__enter__()  # until `finish`

    @classmethod
    def stream_of(cls, device: torch.device, lane: Lane) -> torch.cuda.Stream:
        """Returns the stream of a lane other than the compute lane. It is made when it is first needed."""
        if (device, lane) not in cls._streams:
            cls._streams[device, lane] = torch.cuda.Stream(device)
        return cls._streams[device, lane]

    def run(self, task: Task, action: Action) -> None:
        stream = self._stream[task.lane]
        for name in self._waits[task.name]:
            stream.wait_event(self._events[name])
        if task.lane is Lane.COMPUTE:
            action()  # its stream is the current one
        else:
            try:
                with torch.cuda.stream(stream):
                    work = action()
                    if work is not None:
                        work.wait()  # the lane's stream waits for the collective's own; the host does not
            except RuntimeError as error:
                if task.lane in (Lane.COMMUNICATE, Lane.INTRA_NODE):
                    self.fail(task, error)
                raise
        if task.name in self._awaited:
            event = self._events[task.name] = torch.cuda.Event()
            event.record(stream)

    def _await_readers_of_the_host(self, device: torch.device) -> None:
        """Makes this pass's copies to the host wait for earlier passes' copies from the host to the device.

        An earlier pass may have released host memory while its copies from this memory were still queued. If
        this pass gets the same memory, it must not overwrite values that the queued copies have yet to read.
        """
        copies_in = self._streams.get((device, Lane.COPY_IN))
        if Lane.COPY_OUT in self._stream and copies_in is not None:
            self._stream[Lane.COPY_OUT].wait_stream(copies_in)

    def finish(self) -> None:
        if self._products is not None:
            self._products.__exit__()
        for lane, stream in self._stream.items():
            if lane is not Lane.COMPUTE:
                self._stream[Lane.COMPUTE].wait_stream(stream)
