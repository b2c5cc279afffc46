"""What the host pays for the calls of a pass: ``python -m tests.gpu.first_costs FILE``."""

from __future__ import annotations

import datetime
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.timing import write_json
from tests.gpu.ladder import tiles
from tests.gpu.ladder.machine import Machine, this_machine
from tests.gpu.ladder.nccl import streams_of

CALLS = 1000
WARM_UP = 20
LANE_OPERATIONS = 100
"""The number of operations in the graph on two streams.

A forward and a backward pass of a program have about as many.
"""
CLOCKS = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"


def calls_of(device: torch.device, machine: Machine | None) -> dict[str, Callable[[], object]]:
    """The calls by name. machine: launches pmoe's kernels; None leaves them out.

    The default process group must have one rank.
    """
    cuda = streams_of(device)
    one = torch.zeros(1, device=device)
    other = torch.empty_like(one)
    side, event = cuda.Stream(), cuda.Event()
    event.record()

    def enter_stream() -> None:
        with cuda.stream(side):
            pass

    calls: dict[str, Callable[[], object]] = {
        "torch, an empty launch": lambda: cuda._sleep(0),
        "torch, add of 1 element": lambda: one.add_(1),
        "event, record": event.record,
        "event, wait": lambda: cuda.current_stream().wait_event(event),
        "stream, enter and leave": enter_stream,
        "all_to_all_single by 1 rank": lambda: dist.all_to_all_single(other, one),
    }
    if machine is not None:
        side_of = tiles.SIDE
        a, b = (machine.put(torch.eye(side_of), torch.bfloat16) for _ in range(2))
        d = machine.poisoned(side_of, side_of)
        ends = machine.put(torch.tensor([side_of], dtype=torch.int32))
        calls["pmoe, a product of one tile"] = lambda: tiles.launch(machine, "forward", a, b, d, ends)
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one.add_(1)
        calls["graph, a replay of 1 operation"] = graph.replay
        of_lanes = f"graph, a replay of {LANE_OPERATIONS} operations on 2 streams"
        calls[of_lanes] = graph_of_two_lanes(one, other, side).replay
    return calls


def graph_of_two_lanes(
    one: torch.Tensor, other: torch.Tensor, side: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    """Captures `LANE_OPERATIONS` operations on two streams, which wait for each other after each pair."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for _ in range(LANE_OPERATIONS // 2):
            side.wait_stream(main)
            one.add_(1)
            with torch.cuda.stream(side):
                other.add_(1)
            main.wait_stream(side)
    return graph


def cost(call: Callable[[], object], device: torch.device, count: int) -> dict[str, float]:
    """Microseconds a call: of the host, and until the device has done all."""
    cuda = streams_of(device)
    for _ in range(min(WARM_UP, count)):
        call()
    cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    issued = time.perf_counter()
    cuda.synchronize()
    done = time.perf_counter()
    return {"host_us": (issued - began) / count * 1e6, "done_us": (done - began) / count * 1e6}


def clocks() -> str:
    """What nvidia-smi says of clocks, power and temperature, or why it does not."""
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"


def measure(device: torch.device, machine: Machine | None, count: int) -> dict[str, Any]:
    before = clocks()
    costs = {name: cost(call, device, count) for name, call in calls_of(device, machine).items()}
    return {"calls": count, "clocks_before": before, "clocks_after": clocks(), "costs": costs}


def main(file: str) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    machine: Machine | None = None
    reason = ""
    try:
        machine = this_machine("sm_80")
    except RuntimeError as error:
        reason = str(error)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1, device_id=device,
            timeout=datetime.timedelta(seconds=30),
        )  # fmt: skip
        found = measure(device, machine, CALLS)
        dist.destroy_process_group()
    write_json(Path(file), gpu=torch.cuda.get_device_name(device), without_pmoe=reason, **found)
    print("\n".join(f"{name}: {us}" for name, us in found["costs"].items()))


if __name__ == "__main__":
    main(sys.argv[1])
