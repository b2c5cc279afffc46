"""Whole layers without fused kernels, by COMET's kernels and by one persistent kernel a pass, on one GPU.

    python bench/bench_flashdmoe.py [--out build/bench] [--rounds 20] [--quick]

Experts of Mixtral and Phi-3.5-MoE: SwiGLU without biases, bfloat16. Layers route by newly drawn gates,
virtual ranks evenly.

    layers         one rank: a forward pass and a step of `pmoe.MoELayer` without fused=, by fused=True and by
                   fused="persistent". Without fused=, one rank's kernels compute a layer if they are faster
                   than the pipeline; the table names the way that ran. Beside it are the launches on the
                   device, counted by torch's profiler (FlashDMoE, Table 1.1: the paper has 1 a forward
                   pass; pmoe's gate comes before it). Capacities hold all tokens, so nothing waits for row
                   counts.
    virtual ranks  W = 2 and 4 in one launch: forward by the persistent kernel, beside COMET's pair

Results are compared first. Then every way runs once a round, and each round begins with another way. Times
are medians by CUDA events, after a write that empties the L2 cache.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.bench_alone import device_work
from bench.bench_comet import DEVICE, LIMIT, Fused, Scenario, in_turn, timing
from bench.device import difference, drawn_layer, file_name, flush_buffer, need_gpu, show_gpu
from bench.grouped_gemm_cases import MODELS, QUICK_ROWS, ROWS
from bench.timing import OUT, table, write_json
from bench.virtual_ranks import PersistentRanks
from pmoe.comm.heap import close_heaps
from pmoe.comm.ranks import Ranks
from pmoe.kernels import extension
from pmoe.kernels.comet.launcher import Division
from pmoe.kernels.flashdmoe import RankTensors

WAYS: dict[str, bool | str] = {"unfused": False, "COMET": True, "persistent": "persistent"}
PATHS = {"unfused": ("pipeline", "one rank"), "COMET": ("fused",), "persistent": ("persistent",)}
SHOWN = {
    "pipeline": "pipeline",
    "one rank": "one rank's kernels",
    "fused": "COMET",
    "persistent": "persistent",
}
"""How tables call the way that computed a layer, by `LastCall.path`."""


def measure_layers(scenario: Scenario, rounds: int, flush: Tensor) -> list[dict[str, Any]]:
    """Measures a layer of one rank by its three ways. Returns rows of the table.

    Raises SystemExit if one of the ways is not used, or gives another result.
    """
    model, x = scenario.model, scenario.x_TM.clone().requires_grad_()
    layers: dict[str, pmoe.MoELayer] = {}
    for name, way in WAYS.items():
        torch.manual_seed(0)
        layers[name] = drawn_layer(
            model.d_model, model.d_hidden, model.experts, model.top_k, expert="swiglu", bias=False, fused=way,
            dtype=torch.bfloat16,
        )  # fmt: skip
    outputs = {name: layer(x) for name, layer in layers.items()}
    for name, layer in layers.items():
        assert layer.ran is not None
        apart = difference(outputs[name], outputs["unfused"])
        if layer.ran.path not in PATHS[name] or not apart <= LIMIT:
            sys.exit(
                f"bench_flashdmoe: {model.name}, {name}: by {layer.ran.path}, {apart} from the unfused layer"
            )
    del outputs

    def step(layer: pmoe.MoELayer) -> Callable[[], list[Callable[[], object]]]:
        kept: list[Tensor] = []
        backward = lambda: kept.pop().backward(scenario.x_TM)  # noqa: E731 - the second part
        return lambda: [lambda: kept.append(layer(x)), backward]

    samples = in_turn({name: step(layer) for name, layer in layers.items()}, rounds, flush)
    rows = []
    for name, layer in layers.items():
        assert layer.ran is not None
        forward, whole = timing(samples[name], 0), timing(samples[name])
        rows.append(
            {
                "model": model.name,
                "layer": SHOWN[layer.ran.path],
                "fwd ms": forward.median * 1e3,
                "fwd spread": forward.spread,
                "step ms": whole.median * 1e3,
                "step spread": whole.spread,
                "fwd launches": len(device_work(lambda layer=layer: layer(x))),
                "step launches": len(device_work(lambda layer=layer: layer(x).backward(scenario.x_TM))),
            }
        )
    close_heaps(Ranks.single())
    return rows


def measure_ranks(scenario: Scenario, num_ranks: int, rounds: int, flush: Tensor) -> dict[str, Any]:
    """Measures forward of W virtual ranks by the persistent kernel, and by COMET's. Returns a row of the
    table.

    Raises SystemExit if the two give different results.
    """
    fused, model = Fused(scenario, num_ranks), scenario.model
    x, weight, expert = (
        tensor.chunk(num_ranks) for tensor in (scenario.x_TM, scenario.weight_TK, scenario.expert_TK)
    )
    most = max(int(chosen.reshape(-1).bincount().max()) for chosen in expert)
    world = PersistentRanks(
        num_ranks, model.experts // num_ranks, cell_rows=-(-most // 128) * 128, tokens=len(x[0]),
        d_model=model.d_model, d_hidden=model.d_hidden, dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip

    def persistent() -> list[RankTensors]:
        return world.forward(x, weight, expert, fused.operands)

    fused.divide(Division(4), Division(4))
    fused.dispatch()
    apart = difference(torch.cat([tensors["result"] for tensors in persistent()]), fused.combine())
    if not apart <= LIMIT:
        sys.exit(f"bench_flashdmoe: {model.name}, W = {num_ranks}: {apart} from COMET's pair, limit {LIMIT}")
    runs = {
        "pair": fused.pair(Division(8), Division(8)),
        "persistent": lambda: [persistent],
        "in place": scenario.in_place,
    }
    samples = {name: timing(taken) for name, taken in in_turn(runs, rounds, flush).items()}
    for ranks in (fused.virtual, world):
        ranks.check()
        ranks.close()
    return {
        "model": model.name,
        "W": num_ranks,
        "persistent ms": samples["persistent"].median * 1e3,
        "spread": samples["persistent"].spread,
        "pair ms": samples["pair"].median * 1e3,
        "in place ms": samples["in place"].median * 1e3,
        "x pair": samples["pair"].speedup_over(samples["persistent"]),
        "difference": apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Layers by the pipeline, by COMET's kernels and by a persistent one, on one GPU."
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each time")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows, 5 rounds, no file")
    arguments = parser.parse_args()
    need_gpu("bench_flashdmoe")
    path, reason = extension.path(DEVICE)
    if path is None:
        sys.exit(f"bench_flashdmoe: not run, {reason}")
    rounds, num_rows = (5, QUICK_ROWS) if arguments.quick else (arguments.rounds, ROWS)
    machine, flush = show_gpu(), flush_buffer()
    layers, ranks = [], []
    for model in MODELS:
        if model.by_bound:
            continue
        torch.manual_seed(0)
        scenario = Scenario(model, num_rows)
        with warnings.catch_warnings():
            # A way that falls back warns. Its time would be that of another way, so the warning is an error.
            warnings.filterwarnings("error", message="pmoe: ")
            layers += measure_layers(scenario, rounds, flush)
        ranks += [measure_ranks(scenario, num_ranks, rounds, flush) for num_ranks in (2, 4)]
        del scenario
        torch.cuda.empty_cache()
    print(f"\n{table(layers)}\n\n{table(ranks)}")
    if not arguments.quick:
        file = arguments.out / file_name("flashdmoe", machine)
        write_json(
            file, **machine, kernels=path, routed_rows=num_rows, rounds=rounds, layers=layers, ranks=ranks
        )
        print(f"written: {file}")


if __name__ == "__main__":
    main()
