"""One GPU: its description, times of work in turn with other work, and how far two results are apart."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

import pmoe
from bench.timing import Timing
from pmoe.kernels.grouped_gemm import launch
from pmoe.measure.rounds import in_turns

Name = TypeVar("Name")

WARMUP = 3
FLUSH_BYTES = 1 << 28
"""Far more than any L2 cache holds."""
COPY_BYTES = 2 << 30
"""Of the source of a copy whose rate is a ceiling: far more than any L2 cache holds."""


def flush_buffer() -> Tensor:
    """A write to it empties the L2 cache."""
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def part_seconds(
    parts: Sequence[Callable[[], object]], flush: Tensor | None = None, lead_cycles: int = 0
) -> list[float]:
    """Device seconds of each part, one behind the other.

    flush: is written before them.
    lead_cycles: the device then sleeps so long, while the host enqueues the parts: device time counts.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
    if flush is not None:
        flush.zero_()
    if lead_cycles:
        torch.cuda._sleep(lead_cycles)
    events[0].record()
    for part, event in zip(parts, events[1:], strict=True):
        part()
        event.record()
    events[-1].synchronize()
    return [float(begin.elapsed_time(end)) / 1e3 for begin, end in itertools.pairwise(events)]


def time_in_turn(
    runs: Mapping[Name, Callable[[], object]], rounds: int, lead_cycles: int = 0
) -> dict[Name, Timing]:
    """Every run once a round behind a write that empties the L2 cache. Each round begins with another run."""
    flush = flush_buffer()
    timed = [functools.partial(part_seconds, [run], flush, lead_cycles) for run in runs.values()]
    samples = in_turns(timed, rounds, warm_up=WARMUP, rotate=True)
    return {name: Timing(tuple(each for (each,) in taken)) for name, taken in zip(runs, samples, strict=True)}


def sharing(operand: Literal["none", "B", "A"], run: Callable[[], object]) -> Callable[[], object]:
    """``run`` with two blocks each of its grouped products on one operand, as `launch.SHARING` has it."""

    def shared() -> object:
        before, launch.SHARING = launch.SHARING, {"none": 1, "B": 2, "A": 3}[operand]
        try:
            return run()
        finally:
            launch.SHARING = before

    return shared


def drawn_layer(*sizes: int, **options: Any) -> pmoe.MoELayer:
    """A layer on the GPU whose parameters are drawn there. Those of any other are drawn by the CPU, the same
    on every machine: a billion of them take it some ten seconds."""
    layer = pmoe.MoELayer(*sizes, device="meta", **options).to_empty(device="cuda")
    for parameter in layer.parameters():
        bound = parameter.shape[-1] ** -0.5
        torch.nn.init.uniform_(parameter, -bound, bound)
    return layer


# ---- results


def relative_error(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected|| in float64."""
    return ((got.double() - expected).norm() / expected.norm()).item()


def difference(one: Tensor, other: Tensor) -> float:
    """||one - other|| / ||other||, some rows at a time: in float32 all of them may not fit."""
    parts = zip(one.flatten(0, -2).split(4096), other.flatten(0, -2).split(4096), strict=True)
    sums = torch.zeros(2, dtype=torch.float64, device=one.device)
    for a, b in parts:
        sums += torch.stack([(a.float() - b.float()).square().sum(), b.float().square().sum()])
    return float((sums[0] / sums[1]).sqrt())


# ---- the machine


def need_gpu(benchmark: str) -> None:
    """Makes GPU 0 the current one. Raises SystemExit where there is none."""
    if not torch.cuda.is_available():
        sys.exit(f"{benchmark}: not run, torch sees no CUDA device")
    torch.cuda.set_device(0)


def show_gpu() -> dict[str, Any]:
    """What `describe_gpu` says, printed in a line."""
    machine = describe_gpu()
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    return machine


def describe_gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": torch.cuda.get_device_name(0),
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "driver": _driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _driver_version() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return found.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown: nvidia-smi did not answer"


def file_name(of: str, machine: Mapping[str, Any]) -> str:
    """Of stored results. Example: "permute" on an NVIDIA H100 PCIe -> "permute_nvidia_h100_pcie.json"."""
    slug = re.sub(r"[^a-z0-9]+", "_", machine["gpu"].lower()).strip("_")
    return f"{of}_{slug}.json"
