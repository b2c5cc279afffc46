"""The lanes of a GPU leave multiprocessors for communication, and name what fails. Streams are stand-ins
here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pmoe.comm.ranks import Ranks
from pmoe.engine.lanes.cuda import CudaLanes
from pmoe.kernels.grouped_gemm import launch
from pmoe.schedule.restore import STRATEGIES
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.separate_buffers import forward_schedule
from pmoe.schedule.tasks import Lane, Stages


@pytest.fixture(autouse=True)
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("current_stream", "Stream", "stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(CudaLanes, "_streams", {})


@pytest.mark.parametrize(
    ("ranks", "chunks", "spare"),
    [(2, 2, launch.SPARE), (2, 1, 0), (1, 2, 0)],
    ids=["beside", "after", "alone"],
)
def test_products_leave_multiprocessors_free_where_other_chunks_travel(
    ranks: int, chunks: int, spare: int
) -> None:
    tasks = [
        SimpleNamespace(name=f"{lane.value}{chunk}", lane=lane, waits=(), chunk=chunk)
        for lane in (Lane.COMMUNICATE, Lane.COMPUTE)
        for chunk in range(chunks)
    ]
    lanes = CudaLanes(
        cast(
            Any,
            SimpleNamespace(
                tasks=tasks,
                has_several_chunks=chunks > 1,
                lanes={task.lane for task in tasks},
                lane_waits={task.name: () for task in tasks},
                awaited=(),
            ),
        ),
        cast(Any, SimpleNamespace(size=ranks)),
        torch.device("cuda", 0),
    )
    found: dict[str, int] = {}
    for task in tasks:
        lanes.run(cast(Any, task), lambda task=task: found.update({task.name: launch.spare_of_thread.get()}))
    lanes.finish()
    assert all(found[task.name] == spare for task in tasks if task.lane is Lane.COMPUTE)
    assert launch.spare_of_thread.get() == 0, "products of others have all multiprocessors again"


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_schedule_has_several_chunks_unless_it_has_one(chunks: int) -> None:
    stages = Stages(local=True, remote=True)
    schedules = [
        forward_schedule(chunks, stages),
        rotating("backward", chunks, stages, restore=STRATEGIES["S4"]),
    ]
    assert [schedule.has_several_chunks for schedule in schedules] == [chunks > 1] * 2


class LateWork:
    """A Work like NCCL's: an error in it is raised when it is waited for, or never on the host."""

    def wait(self) -> None:
        raise dist.DistBackendError("NCCL communicator was aborted on rank 1.")


@pytest.mark.parametrize("failing", ["at its wait", "as it is issued"])
def test_an_error_that_a_collective_tells_late_has_the_stage_at_which_it_was_seen(failing: str) -> None:
    """The error may be that of an earlier collective, because NCCL raises it at any later one."""
    schedule = forward_schedule(2, Stages(local=False, remote=True))
    ranks = Ranks.single()
    ranks.size, ranks.layer = 2, "MoELayer 1"
    lanes = CudaLanes(schedule, ranks, torch.device("cuda", 0))

    def action() -> Any:
        if failing == "at its wait":
            return LateWork()
        return LateWork().wait()

    *earlier, task = schedule.tasks[: [each.name for each in schedule.tasks].index("S1") + 1]
    for each in earlier:
        lanes.run(each, lambda: None)
    said = r"rank 0 of 2 failed in dispatch \(S1\) of chunk 1, forward of MoELayer 1; .*aborted on rank 1"
    with pytest.raises(RuntimeError, match=said) as raised:
        lanes.run(task, action)
    lanes.abandon()
    assert isinstance(raised.value.__cause__, dist.DistBackendError)


@pytest.mark.parametrize(("direction", "waits"), [("forward", 16), ("backward", 24)])
def test_streams_wait_only_for_what_no_earlier_wait_implies(direction: str, waits: int) -> None:
    """Also, tasks of the compute lane run without a stream context: their stream is the current one."""
    restore = STRATEGIES["S4"]
    schedule = rotating(direction, 4, Stages(local=True, remote=True), restore=restore)
    ranks = Ranks.single()
    ranks.size = 2
    lanes = CudaLanes(schedule, ranks, torch.device("cuda", 0))
    for task in schedule.tasks:
        lanes.run(task, lambda: None)
    lanes.finish()
    streams = lanes._stream.values()
    assert sum(cast(Any, stream).wait_event.call_count for stream in streams) == waits
    others = [task for task in schedule.tasks if task.lane is not Lane.COMPUTE]
    assert cast(Any, torch.cuda.stream).call_count == len(others)
    assert cast(Any, torch.cuda.Event).call_count == len(schedule.awaited)
