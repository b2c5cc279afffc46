"""A whole layer on one GPU, with pmoe's kernels and without them: rates, memory, launches.

    python bench/bench_alone.py [--out build/bench] [--rounds 20] [--quick]

The layer: W = 1, SwiGLU experts without biases, bfloat16, T = 32768, M = 4096, H = 2048, E = 64, K = 4. The
same module with the same parameters runs in two ways:

    pmoe       by the kernels of one rank (`pmoe.runners.one_rank`)
    without    by the pipeline with F.grouped_mm for the products, as where the extension is missing

The output and the file also say which way the layer chooses by itself, from products that it measured.

Output and gradients of both ways are compared first. Then the ways take turns, round by round, timed by CUDA
events.

    FLOP       of the experts' products: 6 T K M H forward, 12 T K M H backward. Beside them stand the rates
               that SonicMoE's authors state for an H100, as the project's issue quotes them.
    saved      bytes that autograd keeps between the passes, without parameters. The bound is
               2 T M + 4 T K H + 16 T K + 4 T E.
    peak       bytes that torch.cuda counts beyond those held before, with the output and all gradients
    kernels    kernels, copies and memsets of a forward pass, by the profiler. 6 are allowed.

Letters: T tokens, K choices, E experts, M = d_model, H = d_hidden.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.device import WARMUP, difference, drawn_layer, file_name, need_gpu, part_seconds, show_gpu
from bench.timing import OUT, Timing, table, write_json
from pmoe.kernels import grouped_gemm
from pmoe.kernels.registry import GROUPED_MM, PMOE, PRODUCTS
from pmoe.measure.timing import in_turns
from pmoe.runners import one_rank

DEVICE = torch.device("cuda", 0)
LEAD_CYCLES = 4_000_000
"""Cycles for which the device sleeps before timed work: 2 ms at 2 GHz.

Meanwhile the host enqueues the work, so that the measured time is that of the device, not of the host.
"""

SONIC_FORWARD, SONIC_BACKWARD = 598e12, 588e12
"""FLOP/s of SonicMoE on an H100, as the project's issue states them.

They are of another GPU and not measured here.
"""
MAX_KERNELS = 6

LIMIT = 2.0**-6
"""Largest relative difference that is accepted between the bfloat16 results of both ways.

It corresponds to a few roundings of 2^-9 each.
"""


@dataclass(frozen=True)
class Scenario:
    tokens: int
    d_model: int
    d_hidden: int
    experts: int
    top_k: int

    @property
    def forward_flop(self) -> int:
        """Floating-point operations of a forward pass.

        Example: 1 row, M = 2, H = 3 -> products of 2 x 6 and 3 x 2 -> 24 + 12 = 36.
        """
        return 6 * self.tokens * self.top_k * self.d_model * self.d_hidden

    @property
    def saved_bound_bytes(self) -> int:
        """The most bytes that autograd should keep between the passes: 2 T M + 4 T K H + 16 T K + 4 T E."""
        slots = self.tokens * self.top_k
        rows = 2 * self.tokens * self.d_model + 4 * slots * self.d_hidden
        return rows + 16 * slots + 4 * self.tokens * self.experts


WHOLE = Scenario(32768, 4096, 2048, 64, 4)
QUICK = Scenario(4096, 1024, 512, 16, 4)


# ---- the two ways


@contextlib.contextmanager
def with_kernels() -> Iterator[None]:
    """Makes layers in the block use pmoe's kernels, even if the registry measured that others are faster."""
    with PRODUCTS.forcing(PMOE):
        yield


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Makes layers in the block use the pipeline with F.grouped_mm instead of pmoe's kernels."""
    refusal = one_rank.kernel_refusal
    one_rank.kernel_refusal = lambda *_, **__: "the benchmark wants the path of all layers"
    try:
        with PRODUCTS.forcing(GROUPED_MM):
            yield
    finally:
        one_rank.kernel_refusal = refusal


WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "pmoe": with_kernels,
    "without": without_kernels,
}


class Step:
    """Forward and backward of one layer, with pmoe's kernels or without them."""

    def __init__(self, scenario: Scenario) -> None:
        torch.manual_seed(0)
        self.layer = drawn_layer(
            scenario.d_model,
            scenario.d_hidden,
            scenario.experts,
            scenario.top_k,
            expert="swiglu",
            bias=False,
            dtype=torch.bfloat16,
        )
        shape = (scenario.tokens, scenario.d_model)
        self.x = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
        self.grad = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
        self.of = [self.x, *self.layer.parameters()]
        self.names = ["x", *(name for name, _ in self.layer.named_parameters())]

    def forward(self) -> Tensor:
        y: Tensor = self.layer(self.x)
        return y

    def backward(self, y: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(y, self.of, self.grad))

    def parts(self) -> list[Callable[[], object]]:
        """Returns two functions, to be called in order: one runs forward, the other the backward of that
        forward.
        """
        kept: list[Tensor] = []
        return [lambda: kept.append(self.forward()), lambda: self.backward(kept[0])]


def refusal(step: Step) -> str | None:
    """Returns the reason why the kernels of one rank cannot compute this layer; None if they can.

    If the kernels' products have not been measured yet, they are measured first.
    """
    gate, experts = step.layer.gate, step.layer.experts
    return one_rank.kernel_refusal(
        gate, experts, step.x.detach(), torch.bfloat16, ranks=step.layer.ranks, needs_grad=True
    )


# ---- correct first


def check(step: Step) -> dict[str, float]:
    """Returns the relative differences between the results with and without the kernels, by name.

    Raises SystemExit if a difference is larger than `LIMIT`.
    """
    results: dict[str, list[Tensor]] = {}
    for name, way in WAYS.items():
        with way():
            y = step.forward()
            results[name] = [y.detach(), *step.backward(y)]
    found = {}
    for name, ours, other in zip(["y", *step.names], results["pmoe"], results["without"], strict=True):
        found[name] = difference(ours, other)
        if not found[name] <= LIMIT:  # also true for NaN
            sys.exit(f"bench_alone: {name} of the two ways differs by {found[name]}, limit {LIMIT}")
    return found


# ---- then time


def time_in_turn(step: Step, rounds: int) -> dict[str, tuple[Timing, Timing]]:
    """Returns the times of (forward, backward), with and without the kernels. Both run once in each round."""

    def timed(name: str) -> list[float]:
        with WAYS[name]():
            return part_seconds(step.parts(), lead_cycles=LEAD_CYCLES)

    runs = [functools.partial(timed, name) for name in WAYS]
    samples = in_turns(runs, rounds, warm_up=WARMUP, rotate=True)
    return {
        name: (Timing(tuple(a for a, _ in taken)), Timing(tuple(b for _, b in taken)))
        for name, taken in zip(WAYS, samples, strict=True)
    }


def saved_bytes(step: Step) -> int:
    """Returns the bytes of distinct storages that autograd keeps between the passes, without parameters."""
    kept: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in step.layer.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = step.forward()
    del y  # held until here, so that no freed storage's address was counted for another
    return sum(kept.values())


def peaks(step: Step) -> dict[str, int]:
    """Returns the most bytes that a pass and a step allocate, in addition to those before.

    Keys: "forward_peak_bytes", "peak_bytes" of both passes, and "held_bytes", those in use between the
        passes, with
    the output.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = step.forward()
    torch.cuda.synchronize()
    forward, held = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    gradients = step.backward(y)
    torch.cuda.synchronize()
    both = torch.cuda.max_memory_allocated() - before
    del y, gradients
    return {"forward_peak_bytes": forward, "held_bytes": held, "peak_bytes": both}


def device_work(function: Callable[[], object]) -> list[dict[str, Any]]:
    """Returns the kernels, copies and memsets that a call started, in order, with their microseconds."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        kept = function()
        torch.cuda.synchronize()
    del kept
    events = [each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda each: each.time_range.start)
    return [{"name": each.name, "us": each.time_range.elapsed_us()} for each in events]


def short(name: str) -> str:
    """Returns a kernel's name without its arguments. Example: "void pmoe::f<int>(int*)" -> "pmoe::f<int>"."""
    name = name.removeprefix("void ")
    return name.split("(")[0][:90] if not name.startswith("Mem") else name


def measure(step: Step, scenario: Scenario, rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measures one scenario. Returns (content of the result file, rows of the printed table)."""
    differences = check(step)
    torch.cuda.empty_cache()
    timings = time_in_turn(step, rounds)
    rows, found = [], {}
    for name, way in WAYS.items():
        with way():
            saved, memory = saved_bytes(step), peaks(step)
            device_work(step.forward)  # discarded: at its first use the profiler sets itself up
            forward_work = device_work(step.forward)
            y = step.forward()
            backward_work = device_work(lambda y=y: step.backward(y))
            del y
        forward, backward = timings[name]
        rows.append(
            {
                "layer": name,
                "fwd ms": forward.median * 1e3,
                "fwd spread": forward.spread,
                "fwd TFLOP/s": scenario.forward_flop / forward.median / 1e12,
                "bwd ms": backward.median * 1e3,
                "bwd spread": backward.spread,
                "bwd TFLOP/s": 2 * scenario.forward_flop / backward.median / 1e12,
                "kernels": len(forward_work),
                "saved MB": saved / 1e6,
                "of bound": saved / scenario.saved_bound_bytes,
                "peak MB": memory["peak_bytes"] / 1e6,
            }
        )
        found[name] = {
            "forward": forward,
            "backward": backward,
            "saved_bytes": saved,
            **memory,
            "forward_kernels": forward_work,
            "backward_kernels": backward_work,
        }
    document = {
        "scenario": asdict(scenario),
        "forward_flop": scenario.forward_flop,
        "saved_bound_bytes": scenario.saved_bound_bytes,
        "difference_of_the_two": differences,
        "forward_speedup": timings["pmoe"][0].speedup_over(timings["without"][0]),
        "backward_speedup": timings["pmoe"][1].speedup_over(timings["without"][1]),
        "ways": found,
    }
    return document, rows


def report(document: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    for way in WAYS:
        for passed in ("forward", "backward"):
            work = document["ways"][way][f"{passed}_kernels"]
            lines = [{"us": each["us"], f"{way}, {passed}": short(each["name"])} for each in work]
            print(f"\n{table(lines[:40])}")
            if len(lines) > 40:
                print(f"... and {len(lines) - 40} more")
    print(f"\n{table(rows)}")
    print(f"pmoe over without: forward {document['forward_speedup']:.3f} x, "
          f"backward {document['backward_speedup']:.3f} x")  # fmt: skip
    ours = rows[0]
    for name, key, stated in (
        ("forward", "fwd TFLOP/s", SONIC_FORWARD),
        ("backward", "bwd TFLOP/s", SONIC_BACKWARD),
    ):
        print(f"{name}: {ours[key]:.1f} TFLOP/s; SonicMoE on an H100, as its authors state: "
              f"{stated / 1e12:.0f} TFLOP/s")  # fmt: skip
    ways = document["ways"]["pmoe"]
    print(f"saved: {ways['saved_bytes']} bytes, bound {document['saved_bound_bytes']}, and 8 an expert for "
          "rows by expert and their running sums")  # fmt: skip
    print(f"kernels of a forward: {ours['kernels']}, {MAX_KERNELS} are allowed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Rates, memory and launches of a whole layer on one GPU, with pmoe's kernels and without."
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each time")
    parser.add_argument("--quick", action="store_true", help="a small layer, 5 rounds, no file")
    arguments = parser.parse_args()
    need_gpu("bench_alone")
    scenario = QUICK if arguments.quick else WHOLE
    rounds = 5 if arguments.quick else arguments.rounds
    path, reason = grouped_gemm.launch.path(DEVICE)
    if path is None:
        sys.exit(f"bench_alone: not run, {reason}")
    machine = show_gpu()
    step = Step(scenario)
    with with_kernels():
        why = refusal(step)
    if why is not None:
        sys.exit(f"bench_alone: not run, the kernels do not compute this layer: {why}")
    slower = refusal(step)
    print(f"by itself the layer takes {'pmoe' if slower is None else f'the path of all layers: {slower}'}")
    print(f"the kernels of {path}; {scenario}", flush=True)
    document, rows = measure(step, scenario, rounds)
    report(document, rows)
    if arguments.quick:
        return
    file = arguments.out / file_name("alone", machine)
    stated = {
        "source": "SonicMoE's for an H100, as the project's issue states them",
        "forward_flop_per_second": SONIC_FORWARD,
        "backward_flop_per_second": SONIC_BACKWARD,
    }
    write_json(
        file, **machine, kernels=path, rounds=rounds, stated=stated, slower=slower, **document, rows=rows
    )
    print(f"written: {file}")


if __name__ == "__main__":
    main()
