"""What does pmoe's machinery cost where there is nothing to hide? One rank, n = 1, against plain autograd.

Both layers hold the same weights and give the same output; the plain one is a loop over experts that anyone
would write first.

    python bench/bench_plain.py --threads 2
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.timing import Timing, interleaved, table, write_json


@dataclass(frozen=True)
class Setting:
    """Letters as in DESIGN.md: rows = T * K."""

    tokens: int = 4096
    d_model: int = 512
    d_hidden: int = 2048
    num_experts: int = 8
    top_k: int = 1


class PlainMoE(nn.Module):
    """The layer as plain autograd: each expert picks its tokens, and adds its weighted output to them."""

    def __init__(self, layer: pmoe.MoELayer) -> None:
        super().__init__()
        self.gate_weight = nn.Parameter(layer.gate.weight.detach().clone())
        self.w1, self.b1, self.w2, self.b2 = (
            nn.Parameter(getattr(layer.experts, name).detach().clone()) for name in ("w1", "b1", "w2", "b2")
        )
        self.top_k = layer.top_k

    def forward(self, x: Tensor) -> Tensor:
        probability = (x @ self.gate_weight.t()).softmax(-1)
        weight, expert = probability.topk(self.top_k)
        if self.top_k > 1:
            weight = weight / weight.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e in range(self.w1.shape[0]):
            token, choice = (expert == e).nonzero(as_tuple=True)
            hidden = F.gelu(F.linear(x[token], self.w1[e], self.b1[e]))
            out = F.linear(hidden, self.w2[e], self.b2[e]) * weight[token, choice].unsqueeze(1)
            y = y.index_add(0, token, out)
        return y


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    layer(x).backward(dy)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    setting = Setting(tokens=args.tokens, top_k=args.top_k)
    torch.manual_seed(0)
    layer = pmoe.MoELayer(setting.d_model, setting.d_hidden, setting.num_experts, setting.top_k)
    plain = PlainMoE(layer)
    x = torch.randn(setting.tokens, setting.d_model, requires_grad=True)
    dy = torch.randn(setting.tokens, setting.d_model)
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-4, atol=1e-5)
    runs: dict[str, Callable[[], object]] = {}
    for n in (1, 2, 4, 8):

        def forward_backward(n: int = n) -> None:
            layer.pipeline = n
            step(layer, x, dy)

        runs[f"pmoe n={n}"] = forward_backward
    runs["plain autograd"] = functools.partial(step, plain, x, dy)
    times: dict[str, Timing] = interleaved(runs, args.rounds)
    rows = [
        {
            "layer": name,
            "forward+backward ms": timing.median * 1e3,
            "spread": timing.spread,
            "/ plain": 1 / timing.speedup_over(times["plain autograd"]),
        }
        for name, timing in times.items()
    ]
    print(f"{setting}, float32, {args.threads} threads, medians of {args.rounds} rounds")
    print(table(rows))
    path = args.out / f"plain_{args.threads}_threads.json"
    write_json(path, setting=asdict(setting), threads=args.threads, rows=rows, times=times)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
