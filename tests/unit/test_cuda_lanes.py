"""The lanes of a GPU leave room for communication. Streams are stand-ins here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from pmoe.engine.cuda_lanes import CudaLanes
from pmoe.kernels.grouped_gemm import launch
from pmoe.schedule.tasks import Lane


@pytest.mark.parametrize(
    ("ranks", "chunks", "spare"),
    [(2, 2, launch.SPARE), (2, 1, 0), (1, 2, 0)],
    ids=["beside", "after", "alone"],
)
def test_products_leave_multiprocessors_free_where_other_chunks_travel(
    monkeypatch: pytest.MonkeyPatch, ranks: int, chunks: int, spare: int
) -> None:
    for name in ("current_stream", "Stream", "stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(CudaLanes, "_streams", {})
    tasks = [
        SimpleNamespace(name=f"{lane.value}{chunk}", lane=lane, waits=(), chunk=chunk)
        for lane in (Lane.COMMUNICATE, Lane.COMPUTE)
        for chunk in range(chunks)
    ]
    lanes = CudaLanes(
        cast(Any, SimpleNamespace(tasks=tasks, lanes={task.lane for task in tasks})),
        cast(Any, SimpleNamespace(size=ranks)),
        torch.device("cuda", 0),
    )
    found: dict[str, int] = {}
    for task in tasks:
        lanes.run(cast(Any, task), lambda task=task: found.update({task.name: launch._spare.get()}))
    assert all(found[task.name] == spare for task in tasks if task.lane is Lane.COMPUTE)
    assert launch._spare.get() == 0, "products of others have all multiprocessors again"
