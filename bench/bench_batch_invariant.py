"""The price of batch invariance: CPU time of a step and of a call of few tokens, beside the plain layer.

    python bench/bench_batch_invariant.py [--d-model 512 --d-hidden 1024 --num-experts 16 --top-k 2]

One rank and one thread, in float32. Rounds take both layers in turn. The median over rounds of the ratio of
their times is shown. CPU time counts only this process, so a busy machine disturbs it less than a clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench, and pmoe from this checkout

import pmoe
from bench.timing import counted
from pmoe.text import table


def seconds(layer: pmoe.MoELayer, x: torch.Tensor, with_backward: bool) -> float:
    """CPU seconds of a step, or of a call without gradients."""
    began = time.process_time()
    if with_backward:
        layer(x).sum().backward()
    else:
        with torch.no_grad():
            layer(x)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, size in {"d-model": 512, "d-hidden": 1024, "num-experts": 16, "top-k": 2, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (options.d_model, options.d_hidden, options.num_experts, options.top_k)
    plain = pmoe.MoELayer(*sizes)
    invariant = pmoe.make_batch_invariant(pmoe.MoELayer(*sizes))
    lines = []
    for tokens, with_backward in ((2048, True), (256, True), (2048, False), (64, False), (1, False)):
        x = torch.randn(tokens, options.d_model)
        for layer in (plain, invariant):
            seconds(layer.train(with_backward), x, with_backward)
        pairs = [
            (seconds(plain, x, with_backward), seconds(invariant, x, with_backward))
            for _ in counted(range(options.rounds), "round")
        ]
        ratio = statistics.median(slow / fast for fast, slow in pairs)
        what = "step" if with_backward else "call without gradients"
        lines.append(
            [
                f"{tokens} tokens, {what}",
                f"{statistics.median(p[0] for p in pairs) * 1e3:.1f}",
                f"{ratio:.2f}",
            ]
        )
    print(table([["", "plain, ms of CPU time", "invariant over plain"], *lines]))


if __name__ == "__main__":
    main()
