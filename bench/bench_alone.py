"""A whole layer on one GPU, with pmoe's kernels and without them: rates, memory, launches.

    python bench/bench_alone.py [--out build/bench] [--rounds 20] [--quick]

The layer: W = 1, SwiGLU experts without biases, bfloat16, T = 32768, M = 4096, H = 2048, E = 64, K = 4. It
runs in four ways, with the same values of parameters:

    pmoe       pmoe.MoELayer by the kernels of one rank (`pmoe.runners.one_rank`)
    beside     the same, with tiles that are stored beside the products of the next tiles, in the way that is
               predicted to be the faster one (`pmoe.kernels.grouped_gemm.launch.STORING`)
    without    pmoe.MoELayer by the pipeline with F.grouped_mm for the products, as where the extension is
               missing
    plain      what one would write with autograd and F.grouped_mm (`bench.plain`): no loss of the gate, no
               pipeline, nothing of pmoe. It is the baseline of the speed of a layer.

The output and the file also say which way the layer chooses by itself, from products that it measured.

Output and gradients of all ways are compared first. Then the ways take turns, round by round, timed by CUDA
events. The device sleeps before each, while the host enqueues the passes.

    FLOP       of the experts' products: 6 T K M H forward, 12 T K M H backward. Beside them stand the rates
               that SonicMoE's authors state for an H100, as the project's issue quotes them.
    saved      bytes that autograd keeps between the passes, without parameters. The bound is
               2 T M + 4 T K H + 16 T K + 4 T E.
    peak       bytes that torch.cuda counts beyond those held before, with the output and all gradients
    kernels    kernels, copies and memsets of a forward pass, by the profiler. 7 are allowed.
    kernels ms sum of their times, of one profiled pass. Samples of whole passes vary with the clock rate and
               with the place in the round; the sum is steadier, but has no gaps between kernels in it.

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

from bench.device import (
    LEAD_CYCLES,
    WARMUP,
    difference,
    drawn_layer,
    file_name,
    need_gpu,
    part_seconds,
    show_gpu,
    stored_beside,
)
from bench.plain import GROUPED, PlainMoE
from bench.timing import OUT, Timing, table, write_json
from pmoe.kernels import extension
from pmoe.kernels.grouped_gemm.launch import FASTEST
from pmoe.kernels.registry import GROUPED_MM, PMOE, PRODUCTS
from pmoe.measure.timing import in_rounds
from pmoe.runners import one_rank

DEVICE = torch.device("cuda", 0)
SONIC_FORWARD, SONIC_BACKWARD = 598e12, 588e12
"""FLOP/s of SonicMoE on an H100, as the project's issue states them.

They are of another GPU and not measured here.
"""
MAX_KERNELS = 7
"""Six launches, and a permute before a wide first product (`gathers_in_load`)."""

LIMIT = 2.0**-6
"""Largest relative difference that is accepted between the bfloat16 results of two ways.

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
SHAPES = {
    "120B, n=2048": WHOLE,
    "1.4B, n=256": Scenario(32768, 768, 256, 128, 8),
    "30B, n=256": Scenario(32768, 4096, 256, 256, 16),
    "7B, n=256": Scenario(32768, 1536, 256, 128, 8),
    "7B, n=1024": Scenario(32768, 1536, 1024, 32, 2),
    "30B, n=1024": Scenario(32768, 4096, 1024, 64, 4),
    "120B, n=1024": Scenario(32768, 4096, 1024, 128, 8),
}
"""The shapes of SonicMoE's paper, with one number of tokens for all. Only the first has been measured."""
QUICK = Scenario(4096, 1024, 512, 16, 4)


# ---- the four ways


@contextlib.contextmanager
def with_kernels() -> Iterator[None]:
    """Makes layers in the block use pmoe's kernels, even if the registry measured that others are faster."""
    with PRODUCTS.forcing(PMOE):
        yield


@contextlib.contextmanager
def with_stores_beside() -> Iterator[None]:
    """As `with_kernels`, and tiles are stored beside other products (`launch.STORING`)."""
    with stored_beside(FASTEST), with_kernels():
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


PLAIN = "plain"
WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "pmoe": with_kernels,
    "beside": with_stores_beside,
    "without": without_kernels,
    PLAIN: contextlib.nullcontext,
}


class Step:
    """Forward and backward of one layer, by pmoe with its kernels or without them, or written plainly."""

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
        self.plain = PlainMoE(self.layer, GROUPED)
        names = [name for name, _ in self.layer.named_parameters()]
        copies = {"gate.weight": self.plain.gate_weight}
        copies |= {f"experts.{name}": copy for name, copy in self.plain.experts.named_parameters()}
        self.of = [self.x, *self.layer.parameters()]
        self.of_plain = [self.x, *(copies[name] for name in names)]
        self.names = ["x", *names]

    def forward(self, way: str, expert_TK: Tensor | None = None) -> Tensor:
        """Returns the output of one way.

        expert_TK: experts for the plain layer to use in place of its gate's choice, for comparisons.
        """
        y: Tensor = self.plain(self.x, expert_TK) if way == PLAIN else self.layer(self.x)
        return y

    def backward(self, way: str, y: Tensor) -> list[Tensor]:
        of = self.of_plain if way == PLAIN else self.of
        return list(torch.autograd.grad(y, of, self.grad))

    def parts(self, way: str) -> list[Callable[[], object]]:
        """Returns two functions, to be called in order: one runs forward, the other the backward of that
        forward.
        """
        kept: list[Tensor] = []
        return [lambda: kept.append(self.forward(way)), lambda: self.backward(way, kept[0])]


def refusal(step: Step) -> str | None:
    """Returns the reason why the kernels of one rank cannot compute this layer; None if they can.

    If the kernels' products have not been measured yet, they are measured first.
    """
    gate, experts = step.layer.gate, step.layer.experts
    return one_rank.kernel_refusal(
        gate, experts, step.x.detach(), torch.bfloat16, ranks=step.layer.ranks, needs_grad=True
    )


# ---- correct first


def check(step: Step) -> dict[str, dict[str, float]]:
    """Returns the relative differences of each other way's results from those with the kernels, by name.

    Raises SystemExit if a difference is larger than `LIMIT`.
    """
    results: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        expert_TK = step.layer.gate(step.x).expert
    for name, way in WAYS.items():
        with way():
            y = step.forward(name, expert_TK)
            results[name] = [y.detach(), *step.backward(name, y)]
    differences: dict[str, dict[str, float]] = {}
    for other in WAYS:
        if other == "pmoe":
            continue
        differences[other] = {}
        for name, ours, theirs in zip(["y", *step.names], results["pmoe"], results[other], strict=True):
            differences[other][name] = apart = difference(ours, theirs)
            if not apart <= LIMIT:  # also true for NaN
                sys.exit(f"bench_alone: {name} of {other} differs by {apart} from pmoe's, limit {LIMIT}")
    return differences


# ---- then time


def time_in_turn(step: Step, rounds: int) -> dict[str, tuple[Timing, Timing]]:
    """Returns the times of (forward, backward) of each way. All ways run once in each round."""

    def timed(name: str) -> list[float]:
        with WAYS[name]():
            return part_seconds(step.parts(name), lead_cycles=LEAD_CYCLES)

    runs = [functools.partial(timed, name) for name in WAYS]
    samples = in_rounds(runs, rounds, warm_up=WARMUP, rotate=True)
    return {
        name: (Timing(tuple(a for a, _ in taken)), Timing(tuple(b for _, b in taken)))
        for name, taken in zip(WAYS, samples, strict=True)
    }


def saved_bytes(step: Step, way: str) -> int:
    """Returns the bytes of distinct storages that autograd keeps between the passes, without parameters."""
    kept: dict[int, int] = {}
    parameters = {tensor.untyped_storage().data_ptr() for tensor in (*step.of[1:], *step.of_plain[1:])}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = step.forward(way)
    del y  # held until here, so that no freed storage's address was counted for another
    return sum(kept.values())


def peaks(step: Step, way: str) -> dict[str, int]:
    """Returns the most bytes that a pass and a step allocate, in addition to those before.

    Keys: "forward_peak_bytes", "peak_bytes" of both passes, and "held_bytes", those in use between the
        passes, with
    the output.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = step.forward(way)
    torch.cuda.synchronize()
    forward = torch.cuda.max_memory_allocated() - before
    live = torch.cuda.memory_allocated() - before
    gradients = step.backward(way, y)
    torch.cuda.synchronize()
    both = torch.cuda.max_memory_allocated() - before
    del y, gradients
    return {"forward_peak_bytes": forward, "held_bytes": live, "peak_bytes": both}


def device_work(function: Callable[[], object]) -> list[dict[str, Any]]:
    """Returns the kernels, copies and memsets that a call started, in order, with their microseconds."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        kept = function()
        torch.cuda.synchronize()
    del kept
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return [{"name": event.name, "us": event.time_range.elapsed_us()} for event in events]


def kernels_ms(work: list[dict[str, Any]]) -> float:
    """Returns the sum of the times of kernels, copies and memsets, in milliseconds."""
    return float(sum(kernel["us"] for kernel in work)) / 1e3


def short(name: str) -> str:
    """Returns a kernel's name without its arguments. Example: "void pmoe::f<int>(int*)" -> "pmoe::f<int>"."""
    name = name.removeprefix("void ")
    return name.split("(")[0][:90] if not name.startswith("Mem") else name


def measure(step: Step, scenario: Scenario, rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measures one scenario. Returns (content of the result file, rows of the printed table)."""
    differences = check(step)
    torch.cuda.empty_cache()
    timings = time_in_turn(step, rounds)
    rows = []
    measured = {}
    for name, way in WAYS.items():
        with way():
            saved = saved_bytes(step, name)
            memory = peaks(step, name)
            forward_pass = functools.partial(step.forward, name)
            device_work(forward_pass)  # discarded: at its first use the profiler sets itself up
            forward_work = device_work(forward_pass)
            y = step.forward(name)
            backward_work = device_work(functools.partial(step.backward, name, y))
            del y
        forward, backward = timings[name]
        rows.append(
            {
                "layer": name,
                "fwd ms": forward.median * 1e3,
                "fwd spread": forward.spread,
                "fwd kernels ms": kernels_ms(forward_work),
                "fwd TFLOP/s": scenario.forward_flop / forward.median / 1e12,
                "bwd ms": backward.median * 1e3,
                "bwd spread": backward.spread,
                "bwd kernels ms": kernels_ms(backward_work),
                "bwd TFLOP/s": 2 * scenario.forward_flop / backward.median / 1e12,
                "kernels": len(forward_work),
                "saved MB": saved / 1e6,
                "of bound": saved / scenario.saved_bound_bytes,
                "peak MB": memory["peak_bytes"] / 1e6,
            }
        )
        measured[name] = {
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
        "differences": differences,
        "speedups": {
            other: {
                passed: timings["pmoe"][i].speedup_over(timings[other][i])
                for i, passed in enumerate(("forward", "backward"))
            }
            for other in WAYS
            if other != "pmoe"
        },
        "ways": measured,
    }
    return document, rows


def report(document: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    for way in WAYS:
        for passed in ("forward", "backward"):
            work = document["ways"][way][f"{passed}_kernels"]
            lines = [{"us": kernel["us"], f"{way}, {passed}": short(kernel["name"])} for kernel in work]
            print(f"\n{table(lines[:40])}")
            if len(lines) > 40:
                print(f"... and {len(lines) - 40} more")
    print(f"\n{table(rows)}")
    for other, ratios in document["speedups"].items():
        print(f"pmoe over {other}: forward {ratios['forward']:.3f} x, backward {ratios['backward']:.3f} x")
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
        description="Rates, memory and launches of a whole layer on one GPU: pmoe's, and written plainly."
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each time")
    parser.add_argument("--quick", action="store_true", help="a small layer, 5 rounds, no file")
    arguments = parser.parse_args()
    need_gpu("bench_alone")
    scenario = QUICK if arguments.quick else WHOLE
    rounds = 5 if arguments.quick else arguments.rounds
    path, reason = extension.path(DEVICE)
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
