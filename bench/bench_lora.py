"""What do adapters save beside full training? Bytes of gradients, peak of a step, and its time.

    python bench/bench_lora.py [--d-model 512] [--d-hidden 2048] [--experts 8] [--tokens 2048] [--rank 16]

One rank, one thread, float32. It prints, for each restore pair and for what is trained:

    state       bytes of the gradients and of Adam's two moments
    predicted   the peak of a step by `MoELayer.predict_memory`, without parameters and moments
    measured    the same, counted by the allocator's events
    products    multiply-adds of a row in both passes, by the sizes that the planner prices
    step        the median seconds of forward and backward; PEFT makes W + B A as whole weights in each call
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.timing import interleaved, table
from pmoe.call.sizes import memory_shape
from pmoe.measure.step_memory import step_peak_bytes

PAIRS = ("none", "S4")


def full(layer: pmoe.MoELayer, rank: int) -> torch.nn.Module:
    return layer


def frozen(layer: pmoe.MoELayer, rank: int) -> torch.nn.Module:
    return layer.requires_grad_(False)


def adapters(layer: pmoe.MoELayer, rank: int) -> torch.nn.Module:
    pmoe.add_lora(layer.requires_grad_(False), rank=rank)
    return layer


def shared(layer: pmoe.MoELayer, rank: int) -> torch.nn.Module:
    pmoe.add_lora(layer.requires_grad_(False), rank=rank, shared=True)
    return layer


def by_peft(layer: pmoe.MoELayer, rank: int) -> torch.nn.Module:
    import peft

    config = peft.LoraConfig(r=rank, target_parameters=["0.experts.w1", "0.experts.w2"])
    return peft.get_peft_model(torch.nn.Sequential(layer), config)


TRAINED: dict[str, Callable[[pmoe.MoELayer, int], torch.nn.Module]] = {
    "all": full,
    "an adapter for each expert": adapters,
    "one shared adapter": shared,
    "nothing": frozen,
    "PEFT's target_parameters": by_peft,
}


def products(layer: pmoe.MoELayer, pair: str) -> int:
    """Multiply-adds of one row in both passes. S4 computes T_M, the product with w1, a second time."""
    sizes = memory_shape(layer.layer_modules)
    columns = sizes.columns
    again = sizes.d_model * columns.hidden + columns.adapter * (sizes.d_model + columns.hidden)
    return 2 * sizes.multiply_adds + sizes.gradient_multiply_adds + again * (pair == "S4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("d-model", 512), ("d-hidden", 2048), ("experts", 8), ("tokens", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(args.tokens, args.d_model, requires_grad=True)
    dy = torch.randn(args.tokens, args.d_model)
    rows: list[dict[str, Any]] = []
    steps = {}
    for pair in PAIRS:
        for name, prepare in TRAINED.items():
            torch.manual_seed(0)
            reuse: Any = False if pair == "none" else pair
            layer = pmoe.MoELayer(
                args.d_model, args.d_hidden, args.experts, pipeline=4, memory_reuse=reuse, bias=False
            )
            model = prepare(layer, args.rank)
            model(x).backward(dy)  # what is made only once is there
            x.grad = None
            measured = step_peak_bytes(model, x, dy)
            x.grad = None
            trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
            predicted = layer.predict_memory(args.tokens, layer.row_counts).peak
            rows.append(
                {
                    "pair": pair,
                    "trained": name,
                    "state, MiB": 12 * trained / 2**20,
                    "predicted, MiB": "" if prepare is by_peft else predicted / 2**20,
                    "measured, MiB": measured / 2**20,
                    "products, million": "" if prepare is by_peft else products(layer, pair) / 1e6,
                }
            )

            def step(model: torch.nn.Module = model) -> None:
                model.zero_grad(set_to_none=True)
                x.grad = None
                model(x).backward(dy)

            steps[f"{pair}, {name}"] = step
    timings = interleaved(steps, args.rounds)
    for row, timing in zip(rows, timings.values(), strict=True):
        row["step, ms"] = 1e3 * timing.median
    print(table(rows))


if __name__ == "__main__":
    main()
