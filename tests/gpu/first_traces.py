"""Profiles of forward passes with chunks and offloading: ``python -m tests.gpu.first_traces FOLDER``."""

from __future__ import annotations

import datetime
import gzip
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity

import pmoe
from bench.bench_gpu import SCENARIOS, Scenario
from bench.timing import write_json
from pmoe.call.options import Switches

DEGREES = (1, 4, 8)


def variants() -> dict[str, dict[str, Any]]:
    """Options of layers by name. Rows of the own rank are sent, so that there are collectives."""
    sent = {f"n{n}_sent": {"pipeline": n} for n in DEGREES}
    return {**sent, "n8_offload": {"pipeline": 8, "memory_reuse": "S1"}}


def build(scenario: Scenario, device: torch.device, options: dict[str, Any]) -> tuple[pmoe.MoELayer, Tensor]:
    dtype = getattr(torch, scenario.dtype)
    torch.manual_seed(0)
    sizes = (scenario.d_model, scenario.d_hidden, scenario.experts, scenario.top_k)
    layer = pmoe.MoELayer(*sizes, bias=False, device=device, dtype=dtype, **options)
    layer.switches = Switches(bypass_local=False)
    x = torch.randn(scenario.tokens, scenario.d_model, device=device).to(dtype).requires_grad_()
    return layer, x


def trace(call: Callable[[], object], device: torch.device, file: Path) -> dict[str, float]:
    """Profiles one call, and writes the trace. Returns milliseconds, and how many operations ran."""
    is_gpu = device.type == "cuda"
    synchronize = torch.cuda.synchronize if is_gpu else torch.cpu.synchronize
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    for _ in range(3):
        call()
    synchronize()
    with torch.profiler.profile(activities=activities, with_stack=True) as profile:
        began = time.perf_counter()
        call()
        issued = time.perf_counter()
        synchronize()
        done = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(file, "wb") as target:
            shutil.copyfileobj(source, target)
        # `profile.events()` raises UnicodeDecodeError for some names of stacks.
        events = json.loads(plain.read_text(errors="replace"), strict=False)["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if is_gpu else ("cpu_op",)
    ran = [event for event in events if event.get("cat") in kinds]
    return {
        "host_ms": (issued - began) * 1e3,
        "done_ms": (done - began) * 1e3,
        "operations": len(ran),
        "operations_ms": sum(event.get("dur", 0) for event in ran) / 1e3,
    }


def run(folder: Path, device: torch.device, scenario: Scenario) -> dict[str, dict[str, float]]:
    """Writes a trace of each variant, and after each of them a file with the sums of all so far."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, float]] = {}
    for name, options in variants().items():
        layer, x = build(scenario, device, options)
        found[name] = trace(lambda layer=layer, x=x: layer(x), device, folder / f"trace_{name}.json.gz")
        write_json(folder / "traces.json", scenario=scenario.name, forward=found)
        print(name, found[name], flush=True)
    return found


def main(folder: str) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as rendezvous:
        dist.init_process_group(
            "nccl", init_method=f"file://{rendezvous}/rendezvous", rank=0, world_size=1, device_id=device,
            timeout=datetime.timedelta(seconds=30),
        )  # fmt: skip
        run(Path(folder), device, SCENARIOS[2])
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
