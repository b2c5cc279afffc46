"""Do copies hide behind computation on one GPU, and is the measured memory the predicted one?

    python bench/bench_gpu_memory.py [--out build/bench] [--rounds 10]

d_model 2048, d_hidden 8192, 128k tokens, bfloat16, one rank, n = 8: the products of a chunk take 2 ms on an
H200. (The stored file has 16k tokens, whose chunks took longer to launch than to compute.) For each restore
pair it measures:

- the time of each pass;
- the time of its computation alone: the pass of the same pair with "keep" in place of "offload";
- the time of its copies alone: their bytes at copy rates that are measured here;
- the pass over the larger of these two. The goal is 1.15;
- the time of the kernels of its computation alone, summed by the profiler. If they take less than 0.75 of
  that pass, the host's launches took the rest. The ratio then compares launches and says nothing of copies:
  it is printed as "launches", and the file has it as `pass over larger`;
- the peak that torch.cuda counts, beside the predicted peak.

Last it prints which of S1 to S4 the cost model picks with the profile of this machine.

If copies take longer than computation, they cannot hide. The ratio then says how well computation hides
behind them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.bench_alone import device_work
from bench.timing import OUT, Progress, table, write_json
from pmoe.cli.arguments import dtype_name
from pmoe.comm.ranks import Ranks
from pmoe.layer.predict_memory import memory_shape
from pmoe.measure.rates import measure
from pmoe.planner.cost_model import cheapest_pair
from pmoe.planner.profile import Profile
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES, Restore


def seconds_of(device: torch.device, run: Callable[[], object]) -> float:
    """Returns the seconds of a call: by events on a GPU, by the clock elsewhere."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def without_copies(pair: Restore) -> Restore:
    return replace(
        pair,
        dispatched="keep" if pair.dispatched == "offload" else pair.dispatched,
        hidden="keep" if pair.hidden == "offload" else pair.hidden,
    )


class Passes:
    """Forward and backward of one layer, with any restore pair."""

    def __init__(self, sizes: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.device = device
        self.layer = pmoe.MoELayer(
            sizes.d_model,
            sizes.d_hidden,
            sizes.experts,
            bias=False,
            pipeline=sizes.n,
            memory_reuse="S1",
            device=device,
            dtype=dtype,
        )
        self.x = torch.randn(sizes.tokens, sizes.d_model, device=device, dtype=dtype, requires_grad=True)
        self.dy = torch.randn_like(self.x)

    def step(self, pair: Restore) -> tuple[float, float]:
        self.layer.memory_reuse = pair
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        kept: list[torch.Tensor] = []
        forward = seconds_of(self.device, lambda: kept.append(self.layer(self.x)))
        return forward, seconds_of(self.device, lambda: kept[0].backward(self.dy))

    def kernel_seconds(self, pair: Restore) -> tuple[float, float]:
        """Returns the summed seconds of the kernels of forward and of backward, without copies and memsets.

        Both are 0 on the CPU.
        """
        if self.device.type != "cuda":
            return 0.0, 0.0
        self.layer.memory_reuse = pair
        kept: list[torch.Tensor] = []
        device_work(lambda: self.layer(self.x))  # discarded: at its first use the profiler sets itself up
        works = (
            device_work(lambda: kept.append(self.layer(self.x))),
            device_work(lambda: kept[0].backward(self.dy)),
        )
        sums = [
            sum(kernel["us"] for kernel in work if not kernel["name"].startswith("Mem")) / 1e6
            for work in works
        ]
        return sums[0], sums[1]

    def peak(self, pair: Restore) -> tuple[int, int]:
        """Measures one step with a pair. Returns (measured peak bytes, predicted peak bytes).

        The measured bytes are those that torch.cuda counted in the step, in addition to those before it.
        """
        self.step(pair)
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        predicted = self.layer.predict_memory(self.x.shape[0], self.layer.row_counts).peak
        if self.device.type != "cuda":
            return 0, predicted
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step(pair)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, predicted


def copy_seconds(profile: Profile, pair: Restore, sizes: argparse.Namespace, size: int) -> list[float]:
    """Returns the seconds of all copies in forward, to the host, and of all in backward, from the host.

    They are computed from the bytes that the restore pair offloads and from measured rates.

    profile: the measured rates of copies.
    pair: the restore pair, which says what is offloaded.
    sizes: sizes of the layer and the batch, from the command line.
    size: bytes of an element.
    """
    columns = sizes.d_model * (pair.dispatched == "offload") + sizes.d_hidden * (pair.hidden == "offload")
    total = sizes.tokens * columns * size
    return [line.beta_seconds * total for line in (profile.copy_out, profile.copy_in)]


BUSY = 0.75
"""The least share of a pass that its kernels must take, so that the pass measures the device."""


def judged(ratio: float, kernel_seconds: float, pass_seconds: float) -> float | str:
    """Returns a ratio, or "launches" if the device waited for the host in the pass it is compared with.

    kernel_seconds: summed seconds of the kernels of the computation alone; 0 if unknown.
    pass_seconds: seconds of that computation's pass.

    Example: 5 ms of kernels in a pass of 7.5 ms -> "launches".
    """
    return "launches" if 0 < kernel_seconds < BUSY * pass_seconds else ratio


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--d-model", type=int, default=2048)
    parser.add_argument("--d-hidden", type=int, default=8192)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--dtype", type=dtype_name, choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=OUT)
    sizes = parser.parse_args()
    device, dtype = torch.device(sizes.device), getattr(torch, sizes.dtype)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("bench_gpu_memory: not run, torch sees no CUDA device")
    profile = measure(Ranks(), device, dtype)
    passes = Passes(sizes, device, dtype)
    samples: dict[Restore, list[tuple[float, float]]] = {pair: [] for pair in ALL_PAIRS}
    progress = Progress()
    for round_ in range(-2, sizes.rounds):
        progress.at(f"round {round_ + 1} of {sizes.rounds}")
        for pair in ALL_PAIRS:
            times = passes.step(pair)
            if round_ >= 0:
                samples[pair].append(times)
    medians = {
        pair: [statistics.median(times[i] for times in taken) for i in (0, 1)]
        for pair, taken in samples.items()
    }
    kernels = {pair: passes.kernel_seconds(pair) for pair in {without_copies(pair) for pair in ALL_PAIRS}}
    rows = []
    for pair in ALL_PAIRS:
        copies = copy_seconds(profile, pair, sizes, dtype.itemsize)
        alone = medians[without_copies(pair)]
        counted, predicted = passes.peak(pair)
        row: dict[str, Any] = {"pair": f"{pair} {pair.strategy or ''}".strip()}
        for i, name in enumerate(("forward", "backward")):
            row[f"{name} ms"] = medians[pair][i] * 1e3
            row[f"{name} computation ms"] = alone[i] * 1e3
            row[f"{name} copies ms"] = copies[i] * 1e3
            ratio = medians[pair][i] / max(alone[i], copies[i])
            row[f"{name} kernels ms"] = kernels[without_copies(pair)][i] * 1e3
            row[f"{name} pass over larger"] = ratio
            row[f"{name} / larger"] = judged(ratio, kernels[without_copies(pair)][i], alone[i])
        row |= {"peak MiB": counted / 2**20, "predicted MiB": predicted / 2**20}
        row["predicted / peak"] = predicted / counted if counted else None
        rows.append(row)
    print(table(rows))
    shape = memory_shape(passes.layer.layer_modules, passes.x)
    pick, seconds = cheapest_pair(shape, profile, sizes.tokens, STRATEGIES.values())
    costs = ", ".join(f"{pair} {pair.strategy}: {time * 1e3:.2f} ms" for pair, time in seconds.items())
    print(f"Eq. 10 picks {pick} ({costs})")
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu"
    path = sizes.out / f"gpu_memory_{''.join(c if c.isalnum() else '_' for c in name.lower())}.json"
    write_json(
        path,
        device=name,
        torch_cuda=torch.version.cuda,
        tokens=sizes.tokens,
        profile=asdict(profile),
        rows=rows,
        picks=str(pick),
    )
    print(f"written: {path}")


if __name__ == "__main__":
    main()
