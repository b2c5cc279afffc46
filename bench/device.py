"""One GPU: its description, times of work that takes turns with other work, and differences of results."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

import pmoe
from bench.timing import Timing
from pmoe.kernels.grouped_gemm import launch
from pmoe.measure.timing import in_rounds

Name = TypeVar("Name")

WARMUP = 3
FLUSH_BYTES = 1 << 28
"""Bytes to write to empty the L2 cache: far more than any L2 cache holds."""
COPY_BYTES = 2 << 30
"""Bytes of the copy whose rate serves as a ceiling: far more than any L2 cache holds."""


def flush_buffer() -> Tensor:
    """Returns a buffer that is larger than the L2 cache. Writing to it empties the cache."""
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


LEAD_CYCLES = 40_000_000
"""Cycles for which the device sleeps before a timed call of a layer: 20 ms at 2 GHz.

Meanwhile the host enqueues the call, as in a training loop, where the host runs ahead. The stored H200 needed
up to 12 ms to enqueue a pass of these benchmarks. A call that waits for row counts waits for the sleep, too:
what it enqueues afterwards is not hidden.
"""


def part_seconds(
    parts: Sequence[Callable[[], object]],
    flush: Tensor | None = None,
    lead_cycles: int = 0,
    prepare: Callable[[], object] | None = None,
) -> list[float]:
    """Returns the device seconds of each part. The parts run one after the other.

    prepare: is called before all else, so that neither its host time nor its launches are timed.

    flush: buffer that is written first, to empty the L2 cache.
    lead_cycles: cycles for which the device then sleeps, while the host enqueues the parts, so that the
        measured time is that of the device.
    """
    if prepare is not None:
        prepare()
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
    runs: Mapping[Name, Callable[[], object]],
    rounds: int,
    lead_cycles: int = 0,
    prepare: Mapping[Name, Callable[[], object]] | None = None,
) -> dict[Name, Timing]:
    """Times every run once in each round, after a write that empties the L2 cache.

    Each round begins with another run.

    prepare: what is called before a run, outside of its time, by the run's name.
    """
    flush = flush_buffer()
    before = prepare or {}
    timed = [
        functools.partial(part_seconds, [run], flush, lead_cycles, before.get(name))
        for name, run in runs.items()
    ]
    samples = in_rounds(timed, rounds, warm_up=WARMUP, rotate=True)
    return {
        name: Timing(tuple(seconds for (seconds,) in taken))
        for name, taken in zip(runs, samples, strict=True)
    }


def sharing(operand: Literal["none", "B", "A"], run: Callable[[], object]) -> Callable[[], object]:
    """Returns ``run`` with another setting of `launch.SHARING`: which operand two neighbouring blocks share.

    operand: the operand of grouped products that pairs of blocks share, or "none".
    """

    def shared() -> object:
        before, launch.SHARING = launch.SHARING, {"none": 1, "B": 2, "A": 3}[operand]
        try:
            return run()
        finally:
            launch.SHARING = before

    return shared


@contextlib.contextmanager
def stored_beside(storing: int) -> Iterator[None]:
    """Makes products in the with-block store tiles beside other products, if there are kernels.

    storing: FASTEST, IN_TURNS or AS_BOXES of `pmoe.kernels.grouped_gemm.launch`.
    """
    before = launch.STORING
    launch.STORING = storing
    try:
        yield
    finally:
        launch.STORING = before


def storing_beside(storing: int, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Returns ``run`` with products as in a with-block of `stored_beside`."""

    def beside() -> Tensor:
        with stored_beside(storing):
            return run()

    return beside


def gathering(in_load: bool, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Returns ``run`` with another setting of `launch.GATHERING`.

    in_load: whether a first product gathers its rows in its load; False permutes them before it.
    """

    def gathered() -> Tensor:
        before, launch.GATHERING = launch.GATHERING, in_load
        try:
            return run()
        finally:
            launch.GATHERING = before

    return gathered


def drawn_layer(*sizes: int, **options: Any) -> pmoe.MoELayer:
    """Returns a layer on the GPU whose parameters are drawn on the GPU.

    Layers usually draw their parameters on the CPU, so that they are the same on every machine. A billion
    parameters then take some ten seconds.
    """
    layer = pmoe.MoELayer(*sizes, device="meta", **options).to_empty(device="cuda")
    for parameter in layer.parameters():
        bound = parameter.shape[-1] ** -0.5
        torch.nn.init.uniform_(parameter, -bound, bound)
    return layer


# ---- results


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Returns ||got - expected|| / ||expected|| in float64."""
    return ((got.double() - expected).norm() / expected.norm()).item()


def difference(one: Tensor, other: Tensor) -> float:
    """Returns ||one - other|| / ||other||, computed block by block.

    All rows in float32 may not fit in memory.
    """
    parts = zip(one.flatten(0, -2).split(4096), other.flatten(0, -2).split(4096), strict=True)
    sums = torch.zeros(2, dtype=torch.float64, device=one.device)
    for a, b in parts:
        sums += torch.stack([(a.float() - b.float()).square().sum(), b.float().square().sum()])
    return float((sums[0] / sums[1]).sqrt())


# ---- the machine


def need_gpu(benchmark: str) -> None:
    """Makes GPU 0 the current device. Raises SystemExit if there is none."""
    if not torch.cuda.is_available():
        sys.exit(f"{benchmark}: not run, torch sees no CUDA device")
    torch.cuda.set_device(0)


def show_gpu() -> dict[str, Any]:
    """Prints the description of GPU 0 in a line, and returns it (`describe_gpu`)."""
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
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return output.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown: nvidia-smi did not answer"


def file_name(of: str, machine: Mapping[str, Any]) -> str:
    """Returns the name of a file of results.

    Example: "permute" on an NVIDIA H100 PCIe -> "permute_nvidia_h100_pcie.json".
    """
    slug = re.sub(r"[^a-z0-9]+", "_", machine["gpu"].lower()).strip("_")
    return f"{of}_{slug}.json"
