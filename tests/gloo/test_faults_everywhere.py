"""A rank is killed, stopped or raises at a task of its schedule: whichever it is, every other rank raises
within the group's timeout, names stage and rank, and ends as a process that nothing happened to."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from pmoe import MoELayer
from pmoe.engine import lanes
from pmoe.engine.lanes import Action
from pmoe.schedule.tasks import Schedule, Task
from tests.pool import Pool, ranks

TIMEOUT_SECONDS = 6.0
"""Of groups that are at it beside several others."""
AT_ONCE = 8
"""Groups that wait at a time: waiting costs nothing."""

LAYERS: dict[str, dict[str, Any]] = {
    "keep": {},
    "S1": {"memory_reuse": "S1"},
    "S4": {"memory_reuse": "S4"},
    "esp": {"memory_reuse": "S4", "mesh": "esp"},
    "padded": {"pad_to_capacity": True, "capacity_factor": 1.0},
    "hierarchical": {"dispatch": "hierarchical_2d", "nodes": 1},
}
ENDINGS = ("dies", "stops", "raises")


def build(options: dict[str, Any]) -> MoELayer:
    torch.manual_seed(7)
    if options.get("mesh"):
        options = {**options, "mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "esp"))}
    return MoELayer(6, 8, 4, 2, pipeline=4, dtype=torch.float64, **options)


class Failing:
    """Watches passes: at ``task`` of a pass in ``direction`` it ends this rank. "" lets all pass, and notes
    their tasks."""

    def __init__(self, direction: str, task: str, ending: str) -> None:
        self.direction, self.task, self.ending = direction, task, ending
        self.seen: list[tuple[str, str]] = []

    def watch(self, schedule: Schedule, act: Action, device: torch.device, of: object) -> Action:
        def step(task: Task) -> Any:
            self.seen.append((schedule.direction, task.name))
            if (schedule.direction, task.name) == (self.direction, self.task):
                if self.ending == "raises":
                    raise ZeroDivisionError("it was planted")
                os.kill(os.getpid(), signal.SIGKILL if self.ending == "dies" else signal.SIGSTOP)
            return act(task)

        return step


def step(layer: MoELayer, rank: int) -> None:
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    layer(x.requires_grad_()).square().sum().backward()


def tasks_job(rank: int, world: int, options: dict[str, Any]) -> list[tuple[str, str]]:
    """The tasks of a step by direction and name."""
    watcher = Failing("", "", "")
    lanes.watchers.append(watcher)
    step(build(options), rank)
    lanes.watchers.remove(watcher)
    return watcher.seen


def failing_job(
    rank: int, world: int, options: dict[str, Any], direction: str, task: str, ending: str
) -> tuple[str, float]:
    """What this rank met in two steps, in the first of which rank 1 ends, and the seconds of the longer."""
    layer = build(options)
    step(layer, rank)  # connections are made
    if rank == 1:
        lanes.watchers.append(Failing(direction, task, ending))
    longest, told = 0.0, ""
    for _ in range(2):  # a rank that has all it needs gets through the first
        start = time.monotonic()
        try:
            step(layer, rank)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        longest = max(longest, time.monotonic() - start)
        if told:
            break
    return told, longest


def what_is_wrong(options: dict[str, Any], direction: str, task: str, ending: str) -> str:
    """Of one case, "" if nothing is."""
    pool = Pool(2, TIMEOUT_SECONDS)
    try:
        pool.start(failing_job, options, direction, task, ending)
        told, seconds = pool.answer(0, timeout=60)
        if not re.match(r"RuntimeError: pmoe: rank 0 of 2 failed in .+; a peer has died, never", told):
            return f"rank 0 was told {told!r}"
        if seconds > TIMEOUT_SECONDS + 20:
            return f"rank 0 waited {seconds:.0f} s"
        survivors = [0]
        if ending == "raises":
            told, _ = pool.answer(1, timeout=60)
            survivors.append(1)
            if "it was planted" not in told:
                return f"rank 1 was told {told!r}"
        for rank in survivors:  # the interpreter's end, with gloo's threads alive
            with contextlib.suppress(BrokenPipeError):
                pool.pipes[rank].send(None)
            pool.processes[rank].join(30)
            if pool.processes[rank].exitcode != 0:
                return f"rank {rank} ended with {pool.processes[rank].exitcode}"
        return ""
    except AssertionError as error:
        return str(error)[-500:]
    finally:
        pool.stop()


def shared_memory() -> set[str]:
    """Names in /dev/shm, without the semaphores of Python pools: other tests have theirs for as long."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name, every", [("S4", 12), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in LAYERS)]
)
def test_whatever_task_a_rank_ends_at_the_other_is_told_in_time_and_ends_cleanly(
    name: str, every: int
) -> None:
    found, others = map(sorted, ranks(2).run(tasks_job, LAYERS[name]))  # threads begin in any order
    assert found == others
    cases = [(*task, ENDINGS[i % 3]) for i, task in enumerate(found)][::every]
    assert {direction for direction, _, _ in cases} == {"forward", "backward"}
    before = shared_memory()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        wrong = list(threads.map(lambda case: what_is_wrong(LAYERS[name], *case), cases))
    assert not any(wrong), {" ".join(case): each for case, each in zip(cases, wrong, strict=True) if each}
    assert not shared_memory() - before
