"""What does pmoe's machinery cost if there is nothing to hide? One rank, n = 1, against plain autograd.

    python bench/bench_plain.py --threads 2
    python bench/bench_plain.py --threads 1 --tokens 2048 --d-model 128 --d-hidden 256 \\
        --num-experts 32 --top-k 2

The second command has the sizes of a layer of `make train`.
All layers have the same weights and give the same output. The plain layer is written in several ways
(`bench.plain`). "/ plain" is the time / the time of the fastest of them. "/ products" is the time / the time
of the experts' products alone, with an equal number of rows for each expert.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.passes import products_of_experts
from bench.plain import SPELLINGS, PlainMoE, fastest, name_of
from bench.timing import OUT, Timing, interleaved, table, write_json

PRODUCTS = "products alone"


@dataclass(frozen=True)
class Setting:
    """Sizes of layer and batch (letters as in docs/how_it_works.md): rows = T * K."""

    tokens: int = 4096
    d_model: int = 512
    d_hidden: int = 2048
    num_experts: int = 8
    top_k: int = 1


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    layer(x).backward(dy)


def products(setting: Setting) -> Callable[[], None]:
    """Returns a function that computes the experts' products of a step, and nothing else."""
    rows = setting.tokens * setting.top_k // setting.num_experts
    forward, backward = products_of_experts(setting.num_experts, rows, setting.d_model, setting.d_hidden)

    def run() -> None:
        forward()
        backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--d-hidden", type=int, default=2048)
    parser.add_argument("--num-experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    setting = Setting(
        tokens=args.tokens,
        d_model=args.d_model,
        d_hidden=args.d_hidden,
        num_experts=args.num_experts,
        top_k=args.top_k,
    )
    torch.manual_seed(0)
    layer = pmoe.MoELayer(setting.d_model, setting.d_hidden, setting.num_experts, setting.top_k)
    plain = {name_of(spelling): PlainMoE(layer, spelling) for spelling in SPELLINGS}
    x = torch.randn(setting.tokens, setting.d_model, requires_grad=True)
    dy = torch.randn(setting.tokens, setting.d_model)
    for module in plain.values():
        torch.testing.assert_close(layer(x), module(x), rtol=1e-4, atol=1e-5)
    runs: dict[str, Callable[[], object]] = {}
    for n in (1, 2, 4, 8):
        # A layer of its own, as each plain layer has: setting an option takes time, too.
        chunked = copy.deepcopy(layer)
        chunked.pipeline = n
        runs[f"pmoe n={n}"] = functools.partial(step, chunked, x, dy)
    runs |= {name: functools.partial(step, module, x, dy) for name, module in plain.items()}
    runs[PRODUCTS] = products(setting)
    times: dict[str, Timing] = interleaved(runs, args.rounds)
    baseline = fastest(times)
    rows = [
        {
            "layer": name,
            "forward+backward ms": timing.median * 1e3,
            "spread": timing.spread,
            "/ plain": 1 / timing.speedup_over(times[baseline]),
            "/ products": 1 / timing.speedup_over(times[PRODUCTS]),
        }
        for name, timing in times.items()
    ]
    print(f"{setting}, float32, {args.threads} threads, medians of {args.rounds} rounds; / {baseline}")
    print(table(rows))
    experts = f"_{args.num_experts}_experts" if args.num_experts != Setting.num_experts else ""
    path = args.out / f"plain_{args.threads}_threads{experts}.json"
    write_json(
        path,
        setting=asdict(setting),
        threads=args.threads,
        baseline=baseline,
        rows=rows,
        times=times,
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
