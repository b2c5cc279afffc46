"""CPU time of a decoding step of a transformers model, by each implementation of experts. Paired runs.

    python bench/bench_decode.py

The model is Qwen3-MoE with 4 layers, d_model 256, 32 experts of width 192 and top-4, in float32 on one
thread. Rounds take the implementations in turn. For each, the ratio of its time to grouped_mm's in the same
round is formed; the median of the ratios is shown, and the lower quartile of its own times. CPU time counts
only this process, so a busy machine disturbs it less than the time on a clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench, and pmoe from this checkout

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import pmoe.integrations.transformers  # noqa: F401 (registers "pmoe")
from bench.timing import counted
from pmoe.text import table

IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager", "pmoe")
PROMPT = 16


def made() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(config).eval()


def step_seconds(model: Any, name: str, ids: torch.Tensor, steps: int) -> list[float]:
    """Seconds of CPU time of each of some decoding steps after a prompt."""
    model.set_experts_implementation(name)
    out = model(input_ids=ids, use_cache=True)
    seconds = []
    for _ in range(steps):
        last = out.logits[:, -1:].argmax(-1)
        began = time.process_time()
        out = model(input_ids=last, past_key_values=out.past_key_values, use_cache=True)
        seconds.append(time.process_time() - began)
    return seconds


@torch.no_grad()
def measured(batch: int, names: tuple[str, ...], rounds: int, steps: int) -> dict[str, tuple[float, float]]:
    """For each implementation the lower quartile of milliseconds, and the median ratio to grouped_mm's."""
    model = made()
    ids = torch.randint(512, (batch, PROMPT))
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        step_seconds(model, name, ids, 2)
    for _ in counted(range(rounds), f"batch {batch}, round"):
        for name in names:
            times[name].append(min(step_seconds(model, name, ids, steps)))
    base = times["grouped_mm"]
    return {
        name: (
            1e3 * statistics.quantiles(own, n=4)[0],
            statistics.median(one / other for one, other in zip(own, base, strict=True)),
        )
        for name, own in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--names", nargs="+", default=list(IMPLEMENTATIONS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [("batch", *(f"{name}: ms, ratio" for name in arguments.names))]
    for batch in arguments.batches:
        found = measured(batch, tuple(arguments.names), arguments.rounds, arguments.steps)
        rows.append((str(batch), *(f"{ms:.2f}, {ratio:.2f}" for ms, ratio in found.values())))
    print(table(rows))


if __name__ == "__main__":
    main()
