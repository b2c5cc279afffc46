"""W ranks that stay alive between tests, since starting processes is the slow part. A job is a module-level
function. The ranks use gloo, or what PMOE_TESTS_BACKEND says (tests/backend.py)."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from tests import backend

GROUP_TIMEOUT_SECONDS = float(os.environ.get("PMOE_TESTS_GROUP_SECONDS", "28"))
"""Of the ranks that tests share. Shorter than 30, the bound of a heap's waits."""
SHORT_TIMEOUT_SECONDS = 4.0
"""Of ranks that wait for a peer that never comes: a busy machine may keep one that does come for seconds."""
JOB_SECONDS = 5 * GROUP_TIMEOUT_SECONDS
START_SECONDS, STARTS = 240, 3
"""For how long a start may take, in which torch is imported on a busy machine, and how often it is tried."""
MAX_GROUPS = 12
"""Process groups that a rank may hold before new ranks take its place: gloo wakes a thread of each a hundred
times a second, and hundreds of them leave no time for anything else."""

_one_at_a_time = threading.Lock()
"""A start polls all children of this process: beside another thread's poll one of the two reads 255."""


def _worker(rank: int, world: int, init_file: str, pipe: Any, timeout_seconds: float, switch: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place = backend.prepare(switch, rank, world)
    dist.init_process_group(
        place.backend,
        init_method=f"file://{init_file}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        device_id=place.device if place.is_gpu else None,
    )
    if place.device is not None:
        backend.run_job(place, first_collectives, ())
    pipe.send(("ready",))
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            value = backend.run_job(place, function, (rank, world, *args))
            pipe.send(("ok", value, len(dist.distributed_c10d._world.pg_map)))
        except BaseException:
            pipe.send(("error", f"rank {rank}:\n{traceback.format_exc()}"))


def first_collectives() -> None:
    """Ranks are connected here, and not in the middle of the first job."""
    import torch
    import torch.distributed as dist

    rows = torch.ones(dist.get_world_size())
    dist.all_reduce(rows)
    dist.all_to_all_single(torch.empty_like(rows), rows)
    rows.tolist()


def forks() -> Any:
    """Of multiprocessing: forks of a process that has imported `tests.imported`, and never ran anything."""
    context = multiprocessing.get_context("forkserver")  # fork hangs after a product by threads
    context.set_forkserver_preload(["tests.imported"])
    return context


class Pool:
    """``run(function, *args)`` calls function(rank, world, *args) on every rank and returns the results.

    After a failure the ranks may be out of step, so the pool stops and `usable` turns False. ``start`` and
    ``answer`` are for jobs that not every rank survives: stop the pool afterwards.
    """

    def __init__(self, world: int, timeout_seconds: float = GROUP_TIMEOUT_SECONDS) -> None:
        self.world = world
        for attempt in range(1, STARTS + 1):
            try:
                self._start(timeout_seconds)
                return
            except AssertionError:  # ranks that met too late for a short timeout
                if attempt == STARTS:
                    raise

    def _start(self, timeout_seconds: float) -> None:
        context, switch = forks(), backend.chosen()
        timeout_seconds *= backend.patience(switch)
        self.patience = backend.patience(switch)
        self.usable, self.num_groups = True, 1
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        init_file = os.path.join(tempfile.mkdtemp(prefix="pmoe-pool-"), "rendezvous")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            args = (rank, self.world, init_file, theirs, timeout_seconds, switch)
            process = context.Process(target=_worker, args=args, daemon=True)
            with _one_at_a_time:
                process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self._answers(START_SECONDS)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = JOB_SECONDS) -> list[Any]:
        self.start(function, *args)
        return self._answers(timeout * self.patience)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        for pipe in self.pipes:
            pipe.send((function, args))

    def answer(self, rank: int, timeout: float = JOB_SECONDS) -> Any:
        """What the job returned on ``rank``; AssertionError where it raised, died or took too long."""
        pipe = self.pipes[rank]
        try:
            if not pipe.poll(max(0.0, timeout)):
                raise AssertionError(f"rank {rank}: no answer in {timeout:.0f} s")
            kind, *answer = pipe.recv()
        except EOFError:
            raise AssertionError(f"rank {rank}: died with exit code {self.exit_code(rank, 5)}") from None
        if kind == "error":
            raise AssertionError(*answer)
        value, num_groups = answer or (None, 1)
        self.num_groups = max(self.num_groups, num_groups)
        return value

    def exit_code(self, rank: int, timeout: float) -> int | None:
        """Of the process of ``rank``; None where it has not ended in time."""
        wait([self.processes[rank].sentinel], timeout)
        with _one_at_a_time:
            return self.processes[rank].exitcode

    def _answers(self, timeout: float) -> list[Any]:
        results, errors, end = [], [], time.monotonic() + timeout
        for rank in range(self.world):
            try:
                results.append(self.answer(rank, end - time.monotonic()))
            except AssertionError as error:
                errors.append(str(error))
        if errors:
            self.stop()
            raise AssertionError("\n".join(errors))
        return results

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kills the ranks that still run.

        The exit code is asked for first, because kill() also sends its signal to the number of a process that
        ended long ago. That number may belong to another process by now.
        """
        self.usable = False
        for process in self.processes:
            with _one_at_a_time:
                if process.exitcode is None:
                    process.kill()


_pools: dict[int, Pool] = {}


def ranks(world: int) -> Pool:
    """The pool of ``world`` ranks that all tests of this run share."""
    if world in _pools and _pools[world].num_groups > MAX_GROUPS:
        _pools[world].stop()
    if world not in _pools or not _pools[world].usable:
        _pools[world] = Pool(world)
    return _pools[world]


def stop_all() -> None:
    """The next test that asks for ranks starts them again."""
    for pool in _pools.values():
        pool.stop()
    _pools.clear()
