"""A rank is killed, stops or raises at any task of its schedule.

Every other rank then raises within the group's timeout, names layer, stage and rank, and ends normally.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from pmoe import MoELayer
from pmoe.engine.lanes import base as lanes_base
from pmoe.engine.lanes.base import Action
from pmoe.schedule.tasks import Schedule, Task
from tests.pool import Pool

TIMEOUT_SECONDS = 6.0
"""Timeout of groups that run beside several others."""
AT_ONCE = 8
"""Number of groups that wait at the same time, because waiting takes no processor time."""

LAYERS: dict[str, dict[str, Any]] = {
    "keep": {},
    "S1": {"memory_reuse": "S1"},
    "S4": {"memory_reuse": "S4"},
    "esp": {"memory_reuse": "S4", "mesh": "esp"},
    "padded": {"pad_to_capacity": True, "capacity_factor": 1.0},
    "hierarchical": {"dispatch": "hierarchical_2d", "nodes": 2},
    "copies": {"balance": 1},
}
"""Options of layers. ``nodes`` is the number of ranks on a node: two ranks are one node, and use one
collective.
"""
ENDINGS = ("dies", "stops", "raises")


def build(options: dict[str, Any], world: int) -> MoELayer:
    torch.manual_seed(7)
    if options.get("mesh"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("ep", "esp"))
        for name in mesh.mesh_dim_names:  # they have torch's timeout, whatever the default group's is
            _set_pg_timeout(datetime.timedelta(seconds=TIMEOUT_SECONDS), mesh.get_group(name))
        options = {**options, "mesh": mesh}
    return MoELayer(6, 8, 4, 2, pipeline=4, dtype=torch.float64, **options)


class Failing:
    """Watches passes, and ends this rank at ``task`` of a pass in ``direction``.

    task: "" ends nothing, and records the tasks.
    """

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
    """Returns the tasks of a step as (direction, name)."""
    watcher = Failing("", "", "")
    lanes_base.watchers.append(watcher)
    step(build(options, world), rank)
    lanes_base.watchers.remove(watcher)
    return watcher.seen


def failing_job(
    rank: int, world: int, options: dict[str, Any], direction: str, task: str, ending: str
) -> tuple[str, float]:
    """Returns what this rank met in two steps, in the first of which rank 1 ends.

    It also returns the seconds of the longer step.
    """
    layer = build(options, world)
    step(layer, rank)  # connections are made
    if rank == 1:
        lanes_base.watchers.append(Failing(direction, task, ending))
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


def what_is_wrong(world: int, options: dict[str, Any], direction: str, task: str, ending: str) -> str:
    """Returns what is wrong with the result of one case; "" for nothing."""
    pool = Pool(world, TIMEOUT_SECONDS)
    told_by = (
        "global rank 1 raised .*it was planted" if ending == "raises" else "(a peer has died|global rank)"
    )
    try:
        pool.start(failing_job, options, direction, task, ending)
        survivors = [rank for rank in range(world) if rank != 1]
        for rank in survivors:
            told, seconds = pool.answer(rank, timeout=60)
            expected = rf"RuntimeError: pmoe: rank {rank} of {world} failed in .+ of MoELayer 1; {told_by}"
            if not re.match(expected, told, re.DOTALL):
                return f"rank {rank} was told {told!r}"
            if seconds > TIMEOUT_SECONDS + 20:
                return f"rank {rank} waited {seconds:.0f} s"
        if ending == "raises":
            told, _ = pool.answer(1, timeout=60)
            survivors.append(1)
            if "it was planted" not in told:
                return f"rank 1 was told {told!r}"
        for rank in survivors:  # the interpreter's end, with gloo's threads alive
            with contextlib.suppress(BrokenPipeError):
                pool.pipes[rank].send(None)
            if (code := pool.exit_code(rank, 30)) != 0:
                return f"rank {rank} ended with {code}"
        return ""
    except AssertionError as error:
        return str(error)[-500:]
    finally:
        pool.stop()


def shared_memory() -> set[str]:
    """Returns the names in /dev/shm, without semaphores of Python pools.

    Other tests use such semaphores at the same time.
    """
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@pytest.mark.sampled(1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name, every, world",
    [
        ("S4", 12, 2),
        *(pytest.param(name, 2, 2, marks=pytest.mark.slow) for name in LAYERS),
        *(pytest.param(name, 5, 4, marks=pytest.mark.slow) for name in LAYERS),
    ],
)
def test_whatever_task_a_rank_ends_at_the_others_are_told_in_time_and_end_cleanly(
    name: str, every: int, world: int
) -> None:
    with Pool(world) as pool:  # of its own: `build` shortens the timeout of groups
        found, *others = map(sorted, pool.run(tasks_job, LAYERS[name]))  # threads begin in any order
    assert all(found == each for each in others)
    cases = [(*task, ENDINGS[i % 3]) for i, task in enumerate(found)][::every]
    assert {direction for direction, _, _ in cases} == {"forward", "backward"}
    before = shared_memory()
    with ThreadPoolExecutor(AT_ONCE * 2 // world) as threads:
        wrong = list(threads.map(lambda case: what_is_wrong(world, LAYERS[name], *case), cases))
    assert not any(wrong), {" ".join(case): each for case, each in zip(cases, wrong, strict=True) if each}
    left_behind = shared_memory() - before
    if left_behind:
        time.sleep(2)  # other tests send tensors: each is for a moment a file
        left_behind &= shared_memory()
    assert not left_behind
