"""Time of one layer on one GPU, forward and with backward, beside the same layer written plainly.

    python bench/bench_gpu.py [--out build/bench] [--rounds 20]

On one GPU nothing has to travel, so this measures what micro-batches cost, not what they hide. n = 1, 2, 4, 8
run with rows computed in place ("stays"), and with all rows sent to the rank itself through NCCL ("sent").
The plain layer is what one would write with autograd: the fastest of several spellings (`bench.plain`). One
of them has one product for all experts, where torch has such a product (bfloat16).

Output and gradients of every variant are first checked against the plain layer in float64. Then the variants
take turns, round by round, timed by CUDA events after a write that empties the L2 cache. Options are set
before the timed region. Each pass is timed twice:

    fwd, fwd+bwd   the device sleeps first while the host enqueues the call, as in a training loop, in which
                   the host runs ahead
    isolated       the device is idle when the call begins, so the host's time counts

    FLOP       of the two products of each routed row, three times as many with backward. Experts have no
               biases.
    / plain    time / time of the plain layer; below 1 is faster
    spread     (middle half of the samples) / median

Letters: T tokens, K choices, N = T * K rows, E experts, M = d_model, H = d_hidden.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.device import LEAD_CYCLES, file_name, need_gpu, relative_error, show_gpu, time_in_turn
from bench.plain import GROUPED, SPELLINGS, PlainMoE, fastest, name_of
from bench.timing import OUT, Timing, table, write_json
from pmoe.call.options import Switches

DEGREES = (1, 2, 4, 8)
FLOAT32_ERROR = 5e-5
"""Largest relative error of float32 results against float64. TF32 would exceed it."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Scenario:
    tokens: int
    d_model: int
    d_hidden: int
    experts: int
    top_k: int
    dtype: str

    @property
    def name(self) -> str:
        sizes = f"T={self.tokens} M={self.d_model} H={self.d_hidden} E={self.experts}"
        return f"{sizes} top-{self.top_k} {self.dtype}"

    @property
    def forward_flop(self) -> int:
        """Floating-point operations of a forward pass.

        Example: 1 row, M = 2, H = 3 -> 2 products of 6 multiply-adds -> 24.
        """
        return 4 * self.tokens * self.top_k * self.d_model * self.d_hidden


SCENARIOS = (
    Scenario(4096, 512, 2048, 8, 1, "float32"),
    Scenario(16384, 1024, 4096, 8, 2, "bfloat16"),
    Scenario(16384, 2048, 8192, 8, 1, "bfloat16"),
)


def one_launch(rows: Tensor) -> bool:
    """Returns whether torch has one product for all experts that does not need row counts on the host."""
    major, _ = torch.cuda.get_device_capability(rows.device)
    return rows.dtype == torch.bfloat16 and major in (9, 10)


# ---- correct first ---------------------------------------------------------------------------------


def results(
    run: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor, grad: Tensor
) -> list[Tensor]:
    """Runs forward and backward. Returns the output and the gradients of x and of ``parameters``."""
    x = x.detach().requires_grad_()
    y = run(x)
    gradients = torch.autograd.grad(y, [x, *parameters], grad)
    return [y.detach(), *gradients]


def check(
    scenario: Scenario, layer: pmoe.MoELayer, plain: PlainMoE, x: Tensor, grad: Tensor
) -> dict[str, Any]:
    """Returns the largest error of each tensor among all variants, and the error of the plain layer.

    Raises SystemExit if an error exceeds its limit: FLOAT32_ERROR, or in bfloat16 twice the plain layer's
    error.
    """
    expert_TK = layer.gate(x).expert
    exact = PlainMoE(layer, "unbound", torch.float64)
    expected = results(lambda x: exact(x, expert_TK), list(exact.parameters()), x.double(), grad.double())
    parameters = [layer.gate.weight, layer.experts.w1, layer.experts.w2]
    by_plain = results(lambda x: plain(x, expert_TK), list(plain.parameters()), x, grad)
    names = ("y", "x", "gate.weight", "experts.w1", "experts.w2")
    plain_error = {
        name: relative_error(got, right) for name, got, right in zip(names, by_plain, expected, strict=True)
    }
    worst = dict.fromkeys(names, 0.0)
    for variant, configure in variants(layer).items():
        configure()
        for name, got, right in zip(names, results(layer, parameters, x, grad), expected, strict=True):
            error = relative_error(got, right)
            limit = FLOAT32_ERROR if scenario.dtype == "float32" else 2 * plain_error[name]
            if not error <= limit:  # also true for NaN
                sys.exit(f"bench_gpu: {scenario.name}, {variant}: error of {name} is {error}, limit {limit}")
            worst[name] = max(worst[name], error)
    return {"largest_error": worst, "error_of_plain": plain_error}


def variants(layer: pmoe.MoELayer) -> dict[str, Callable[[], None]]:
    """Returns, by name of a variant, a function that sets the layer's options to it."""

    def configure(n: int, bypass_local: bool) -> Callable[[], None]:
        def set_both() -> None:
            layer.pipeline, layer.switches = n, Switches(bypass_local=bypass_local)

        return set_both

    return {
        f"n={n}, {'stays' if bypass_local else 'sent'}": configure(n, bypass_local)
        for bypass_local in (True, False)
        for n in DEGREES
    }


def path_of(model: nn.Module, configure: Callable[[], None], x: Tensor) -> str:
    """Returns the name of the runner that computes the layer's call; "" for a plain layer.

    configure: sets the options of a variant.
    """
    if not isinstance(model, pmoe.MoELayer):
        return ""
    configure()
    model(x)
    return "" if model.ran is None else model.ran.path


# ---- then time ---------------------------------------------------------------------------------------


def measure(scenario: Scenario, rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measures one scenario. Returns (content of the result file, rows of the table)."""
    torch.manual_seed(0)
    layer = pmoe.MoELayer(
        scenario.d_model,
        scenario.d_hidden,
        scenario.experts,
        scenario.top_k,
        bias=False,
        device="cuda",
        dtype=DTYPES[scenario.dtype],
    )
    spellings = (*SPELLINGS, GROUPED) if one_launch(layer.experts.w1) else SPELLINGS
    plain = {name_of(spelling): PlainMoE(layer, spelling) for spelling in spellings}
    x = torch.randn(scenario.tokens, scenario.d_model, device="cuda").to(DTYPES[scenario.dtype])
    grad = torch.randn_like(x)
    # This spelling has the layer's stacked parameters, so its gradients can be compared one by one.
    stacked = GROUPED if GROUPED in spellings else "unbound"
    checked = check(scenario, layer, plain[name_of(stacked)], x, grad)
    leaf = x.clone().requires_grad_()

    def forward_of(model: nn.Module) -> Callable[[], object]:
        return lambda: model(leaf)

    def both_of(model: nn.Module) -> Callable[[], object]:
        parameters = [leaf, *model.parameters()]
        return lambda: torch.autograd.grad(model(leaf), parameters, grad)

    every: dict[str, tuple[nn.Module, Callable[[], None]]] = {
        name: (module, lambda: None) for name, module in plain.items()
    }
    every |= {name: (layer, configure) for name, configure in variants(layer).items()}
    passes = {"forward": (forward_of, 1), "forward and backward": (both_of, 3)}
    configures = {name: configure for name, (_, configure) in every.items()}
    timings: dict[str, dict[str, Timing]] = {}
    for passed, (make, _) in passes.items():
        runs = {name: make(model) for name, (model, _) in every.items()}
        for name, lead_cycles in ((passed, LEAD_CYCLES), (f"{passed}, isolated", 0)):
            timings[name] = time_in_turn(runs, rounds, lead_cycles, configures)

    rows = []
    for name in every:
        row: dict[str, Any] = {"layer": name, "path": path_of(*every[name], leaf)}
        for passed, (_, factor) in passes.items():
            timing, base = timings[passed][name], timings[passed][fastest(timings[passed])]
            short = "fwd" if factor == 1 else "fwd+bwd"
            row[f"{short} ms"] = timing.median * 1e3
            row[f"{short} spread"] = timing.spread
            row[f"{short} / plain"] = 1 / timing.speedup_over(base)
            row[f"{short} isolated ms"] = timings[f"{passed}, isolated"][name].median * 1e3
            row[f"{short} TFLOP/s"] = factor * scenario.forward_flop / timing.median / 1e12
        rows.append(row)
    return {"scenario": asdict(scenario), "check": checked, "rows": rows, "timings": timings}, rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Times the layer on one GPU beside the same layer written plainly."
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each time")
    arguments = parser.parse_args()
    need_gpu("bench_gpu")
    torch.set_float32_matmul_precision("highest")
    with tempfile.TemporaryDirectory(prefix="pmoe-bench-") as folder:
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder}/rendezvous",
            rank=0,
            world_size=1,
            timeout=datetime.timedelta(seconds=60),
            device_id=torch.device("cuda", 0),
        )
        try:
            machine = show_gpu()
            measured = []
            for scenario in SCENARIOS:
                document, rows = measure(scenario, arguments.rounds)
                measured.append(document)
                print(f"\n{scenario.name}\n{table(rows)}", flush=True)
                torch.cuda.empty_cache()
        finally:
            torch.cuda.synchronize()
            dist.destroy_process_group()
    path = arguments.out / file_name("gpu_layer", machine)
    write_json(path, **machine, rounds=arguments.rounds, scenarios=measured)
    print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
