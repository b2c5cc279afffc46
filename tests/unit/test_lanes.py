"""Lanes on the CPU that are threads: what does not run after a failure, and in which mode they compute."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from pmoe.comm.ranks import Ranks
from pmoe.engine.lanes.run import run_schedule
from pmoe.schedule.separate_buffers import forward_schedule
from pmoe.schedule.tasks import Kind, Stages

ROWS = torch.zeros(1, 1)
CHUNKS = 4


def run(dispatch: Callable[[int], None]) -> None:
    """Runs a forward pass whose communication lane is a thread, and which only dispatches."""
    schedule = forward_schedule(CHUNKS, Stages(local=False, remote=True))
    nothing = dict.fromkeys(Kind, lambda chunk: None)
    run_schedule(schedule, {**nothing, Kind.DISPATCH: dispatch}, ROWS, Ranks.single(), in_steps=True)


@pytest.mark.parametrize("error", [RuntimeError, ZeroDivisionError])
def test_nothing_is_sent_after_what_failed(error: type[Exception]) -> None:
    """A peer that still waits for chunk 1 would take the rows of chunk 2 for those of chunk 1."""
    begun = []

    def dispatch(chunk: int) -> None:
        begun.append(chunk)
        time.sleep(0.02)  # the others are in the lane's queue
        if chunk == 1:
            raise error("it was planted")

    with pytest.raises(error, match="it was planted"):
        run(dispatch)
    time.sleep(0.1)
    assert begun == [0, 1]
    again: list[int] = []
    run(again.append)
    assert again == list(range(CHUNKS)), "the next pass begins anew"


def test_threads_work_in_the_callers_inference_mode() -> None:
    modes = []
    for mode in (True, False):
        with torch.inference_mode(mode):
            run(lambda chunk: modes.append(torch.is_inference_mode_enabled()))
    assert modes == [True] * CHUNKS + [False] * CHUNKS
