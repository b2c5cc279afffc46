"""Runs a function on some ranks, each a new process, over a slow link."""

import contextlib
import ctypes
import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.links.link import INFINITE, Link, check_rate, refuse_latency
from bench.links.modelled import register_modelled
from bench.links.real import SharedMedium, enter_namespace, interface, namespace, shared_medium

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class _Setup:
    """The facts that a rank needs to join the others; they are the same for all ranks."""

    world: int
    link: str
    bytes_per_second: float
    latency_seconds: float
    rendezvous: str
    timeout_seconds: float
    cores: tuple[int, ...]  # core of each rank; empty if ranks are not pinned
    ranks_per_node: int
    inside_bytes_per_second: float


def launch(
    world: int,
    function: Callable[..., Any],
    link: str,
    rate: float,
    args: Sequence[Any] = (),
    *,
    latency_seconds: float = 0.0,
    ranks_per_node: int = 1,
    intra_rate: float = INFINITE,
    pin: bool = True,
    timeout_seconds: float = 600.0,
) -> list[Any]:
    """Runs function(link, *args) on `world` ranks over a slow link. Returns the results in rank order.

    function: a function at module level (a script's own will do, below its `if __name__ == "__main__"`). It
        finds the default process group ready. Arguments and result are pickled.
    link: "modelled" or "real".
    rate: bytes per second, as in `Link.set_rate`.
    ranks_per_node: number of ranks on a node.
    intra_rate: rate of the links inside nodes, as in `Link.set_rates`.
    pin: gives each rank a core of its own, its gloo threads too, if there are enough cores. On two cores with
        other work, a pipelined loop then took a quarter less time and varied less. But collectives of a few
        bytes, which must wait for that one core, took 1 to 10 times as long (up to 3 ms).
    timeout_seconds: limit of the whole run. A single collective gets half of it. Near the end, ranks that
        still run print where they are.

    Each rank is a new process with one thread for computation. Raises RuntimeError with the failure of each
    rank, LinkUnavailableError if the machine cannot make the link.
    """
    check_rate(rate)
    check_rate(intra_rate)
    if link not in ("modelled", "real"):
        raise ValueError(f"link ({link!r}) must be 'modelled' or 'real'")
    if ranks_per_node < 1 or world % ranks_per_node:
        raise ValueError(f"ranks_per_node ({ranks_per_node}) must be at least 1 and divide world ({world})")
    if link == "real":
        refuse_latency(latency_seconds)
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        if link == "real":
            stack.enter_context(shared_medium(world, rate, ranks_per_node, intra_rate))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pmoe_link_"))
        setup = _Setup(
            world=world,
            link=link,
            bytes_per_second=rate,
            latency_seconds=latency_seconds,
            rendezvous=f"file://{folder}/rendezvous",  # not on the link, so the same for both
            timeout_seconds=timeout_seconds,
            cores=tuple(cores[:world]) if pin and len(cores) >= world else (),
            ranks_per_node=ranks_per_node,
            inside_bytes_per_second=intra_rate,
        )
        processes, pipes = [], []
        stack.callback(_stop, processes)
        # These variables are read when a rank starts and when it imports torch, so they are set before.
        with _environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"):
            for rank in range(world):
                process, pipe = _start(rank, setup, function, args)
                processes.append(process)
                pipes.append(stack.enter_context(pipe))
        return _collect(processes, pipes, time.monotonic() + timeout_seconds)


def _start(rank: int, setup: _Setup, function: Callable[..., Any], args: Sequence[Any]):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    start_args = (rank, setup, theirs, function, tuple(args))
    process = context.Process(target=_rank_main, args=start_args, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _rank_main(rank: int, setup: _Setup, pipe, function: Callable[..., Any], args: tuple) -> None:
    pr_set_pdeathsig = 1  # <sys/prctl.h>
    _LIBC.prctl(pr_set_pdeathsig, signal.SIGKILL)  # a benchmark that is killed leaves no ranks behind
    faulthandler.dump_traceback_later(0.9 * setup.timeout_seconds)
    try:
        pipe.send(("ok", function(_join(rank, setup), *args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    else:
        with contextlib.suppress(EOFError):
            pipe.recv()  # wait for the parent: other ranks may still need this rank's connections
    sys.stdout.flush()
    os._exit(0)  # without waiting for gloo's threads; peers see the connections close


def _join(rank: int, setup: _Setup) -> Link:
    if setup.cores:
        os.sched_setaffinity(0, {setup.cores[rank]})
    torch.set_num_threads(1)
    if setup.link == "real":
        node = rank // setup.ranks_per_node
        enter_namespace(namespace(node))
        os.environ["GLOO_SOCKET_IFNAME"] = interface(node)
        link: Link = SharedMedium(rank, setup.world, setup.ranks_per_node)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        link = links = register_modelled()
        links.ranks_per_node = setup.ranks_per_node
        link.set_rates(
            inter=setup.bytes_per_second,
            intra=setup.inside_bytes_per_second,
            inter_latency_seconds=setup.latency_seconds,
        )
    dist.init_process_group(
        "gloo" if setup.link == "real" else "modelled",
        init_method=setup.rendezvous,
        rank=rank,
        world_size=setup.world,
        timeout=datetime.timedelta(seconds=setup.timeout_seconds / 2),
    )
    return link


def _collect(processes: list, pipes: list, end: float) -> list[Any]:
    """Waits for all ranks, and returns their results.

    After the first failure of a rank, the others get a few seconds to report theirs.
    """
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while missing := [r for r in range(len(pipes)) if r not in results and r not in failures]:
        left_seconds = max(0.0, end - time.monotonic())
        ready = multiprocessing.connection.wait([pipes[rank] for rank in missing], left_seconds)
        if not ready:
            failures.update(dict.fromkeys(missing, "no answer in time"))
        for rank in (r for r in missing if pipes[r] in ready):
            try:
                kind, value = pipes[rank].recv()
            except EOFError:
                processes[rank].join(timeout=5)
                kind, value = "error", f"died, exit code {processes[rank].exitcode}"
            (results if kind == "ok" else failures)[rank] = value
            if kind == "error":
                end = min(end, time.monotonic() + 5)
    if failures:
        raise RuntimeError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
    return [results[rank] for rank in range(len(pipes))]


def _stop(processes: list) -> None:
    for process in processes:
        process.kill()
        process.join()


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
