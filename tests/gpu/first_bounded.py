"""What a replay of a bounded layer costs the host, on 2 ranks: ``python -m tests.gpu.first_bounded FILE``.

A graph holds both passes of a layer over bounded programs. docs/gpu.md predicts the host's time of a replay
from an assumed cost. Where there is one GPU, both ranks share it: the host's times then still count, and the
device's do not.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

import pmoe
from bench.timing import write_json
from pmoe.call.options import Switches
from pmoe.comm.heap import close_heaps
from pmoe.comm.ranks import Ranks
from pmoe.experts.marks import is_expert
from tests.gpu.first_costs import cost
from tests.gpu.ladder.nccl import Job

CALLS = 200
SECONDS = 25
RANKS = 2
MOST_DIFFERENCE = 2**-6
"""Largest difference between a replay and exact passes, divided by the largest value of the tensor."""


@dataclass(frozen=True)
class Sizes:
    """tokens: of each rank. experts: of all ranks."""

    tokens: int = 4096
    d_model: int = 1024
    d_hidden: int = 1024
    experts: int = 16
    top_k: int = 2
    chunks: int = 4
    dtype: str = "bfloat16"


class Graph(Protocol):
    """A CUDA graph, or what stands in for one."""

    def capture(self) -> contextlib.AbstractContextManager[None]: ...
    def replay(self) -> None: ...


class CudaGraph:
    """A CUDA graph."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self.replay: Callable[[], None] = self._graph.replay

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        with torch.cuda.graph(self._graph):
            yield


def build(sizes: Sizes, device: torch.device, slack: float = 2.0) -> pmoe.MoELayer:
    """Returns a layer whose calls can be bounded."""
    torch.manual_seed(0)
    layer = pmoe.MoELayer(
        sizes.d_model, sizes.d_hidden, sizes.experts, sizes.top_k, pipeline=sizes.chunks, memory_reuse="S4",
        slack=slack, bias=False, device=device, dtype=getattr(torch, sizes.dtype),
    )  # fmt: skip
    layer.switches = Switches(program=True, program_heaps=True)
    return layer


class Training:
    """A layer over bounded programs, and a graph of both of its passes, with the reduction of its gate."""

    def __init__(self, sizes: Sizes, device: torch.device, graph: Graph) -> None:
        dtype = getattr(torch, sizes.dtype)
        self.layer = build(sizes, device)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self.x = torch.randn(sizes.tokens, sizes.d_model, generator=generator).to(device, dtype)
        self.y = torch.empty_like(self.x)
        self.graph = graph
        self.steps = pmoe.BoundedSteps(self.layer, self.optimizer, self.replay, self.compute)
        self.compute(None)  # the ranks agree on the bound
        self.expected = [self.y.clone(), *self.gradients()]
        self.layer.zero_grad()
        with self.steps.bounded_calls(), graph.capture():
            self.compute(None)

    def compute(self, _: object) -> None:
        self.layer.zero_grad()
        y = self.layer(self.x)
        self.y.copy_(y.detach())
        (y.float().square().mean() + 0.01 * self.layer.l_aux).backward()
        for parameter in self.layer.parameters():
            if not is_expert(parameter):
                dist.all_reduce(parameter.grad)

    def replay(self, _: object) -> None:
        self.graph.replay()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in self.layer.parameters() if parameter.grad is not None]

    def differences(self) -> list[float]:
        """The largest difference of a replay from exact passes, over the largest value: of each tensor."""
        self.graph.replay()
        found = [self.y, *self.gradients()]
        return [
            float((one.float() - other.float()).abs().max() / other.float().abs().max())
            for one, other in zip(found, self.expected, strict=True)
        ]

    def launched(self) -> None:
        """Both bounded passes without the graph."""
        with self.steps.bounded_calls():
            self.compute(None)


def measure(device: torch.device, graph: Graph, sizes: Sizes, count: int) -> dict[str, Any]:
    """Collective. Microseconds of a call by name, and how far a replay is from exact passes."""
    training = Training(sizes, device, graph)
    differences = training.differences()
    costs = {
        "a replay of both passes": cost(graph.replay, device, count),
        "a step that replays": cost(lambda: training.steps.step(None), device, count),
        "both passes, launched": cost(training.launched, device, count),  # last: it makes other gradients
    }
    training.steps.finish()
    training.steps.remove()
    return {"calls": count, "costs": costs, "differences": differences, "repeated": training.steps.repeated}


def run_ranks(
    work: Callable[[torch.device, Graph], dict[str, Any]], job: Job, make: Callable[[], Graph]
) -> tuple[list[dict[str, Any]], str]:
    """Calls a function on all ranks, each in a process. Returns the results of all, and the GPU's name.

    make: makes a graph in the process of a rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_one_rank, (work, job, make, folder), nprocs=job.num_ranks)
        found = json.loads((Path(folder) / "found.json").read_text())
    return found["ranks"], found["gpu"]


def _one_rank(
    rank: int,
    work: Callable[[torch.device, Graph], dict[str, Any]],
    job: Job,
    make: Callable[[], Graph],
    folder: str,
) -> None:
    os.environ.update(job.environment(rank))  # before CUDA and NCCL are used
    device = job.device(rank)
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        job.backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=job.num_ranks,
        timeout=datetime.timedelta(seconds=SECONDS * job.patience), device_id=device if is_gpu else None,
    )  # fmt: skip
    everyone: list[Any] = [None] * job.num_ranks
    dist.all_gather_object(everyone, work(device, make()))
    if rank == 0:
        gpu = torch.cuda.get_device_name(device) if is_gpu else "none"
        (Path(folder) / "found.json").write_text(json.dumps({"ranks": everyone, "gpu": gpu}))
    gc.collect()  # a graph must not outlive the group
    if is_gpu:
        torch.cuda.synchronize()
    close_heaps(Ranks())
    dist.destroy_process_group()


def run(file: Path, job: Job, sizes: Sizes, make: Callable[[], Graph], count: int) -> int:
    """Measures on all ranks, and writes the file. Returns 1 if a replay is far from exact passes."""
    found, gpu = run_ranks(functools.partial(measure, sizes=sizes, count=count), job, make)
    write_json(file, gpu=gpu, is_shared=job.is_shared, sizes=asdict(sizes), ranks=found)
    print("\n".join(f"{name}: {us}" for name, us in found[0]["costs"].items()))
    worst = max(difference for of_rank in found for difference in of_rank["differences"])
    print(f"largest difference {worst:.1e}, repeated steps: {found[0]['repeated']}")
    return int(not worst <= MOST_DIFFERENCE)  # NaN fails, too


def job_on_gpus(num_ranks: int = RANKS) -> Job:
    """Ranks over NCCL. If there are fewer GPUs than ranks, ranks share a GPU."""
    return Job("nccl", num_ranks, torch.cuda.device_count(), tuple(torch.cuda.nccl.version()[:3]))


def main(file: str) -> int:
    return run(Path(file), job_on_gpus(), Sizes(), CudaGraph, CALLS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
