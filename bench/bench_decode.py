"""CPU time of a decoding step of a transformers model, by each implementation of experts. Paired runs.

    python bench/bench_decode.py

The model is Qwen3-MoE with 4 layers, d_model 256, 32 experts of width 192 and top-4, in float32 on one
thread. The implementations take turns, and each round starts with another one. For each implementation, the
ratio of its time to grouped_mm's in the same round is formed; the median of the ratios is shown, and the
median of its own times. CPU time counts only this process, so a busy machine disturbs it less than the time
on a clock.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench, and pmoe from this checkout

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import pmoe.integrations.transformers  # noqa: F401 (registers "pmoe")
from bench.timing import OUT, Timing, table, write_json
from pmoe.measure.timing import in_rounds

IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager", "pmoe")
PROMPT = 16


def made() -> Any:
    """Returns the model, in evaluation mode, with the same weights each time."""
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


def step_seconds(model: Any, name: str, ids: torch.Tensor, steps: int) -> tuple[float]:
    """Returns the least seconds of CPU time of some decoding steps after a prompt.

    model: the model.
    name: the implementation of experts.
    ids: (batch, PROMPT), the tokens of the prompts.
    steps: number of decoding steps.
    """
    model.set_experts_implementation(name)
    out = model(input_ids=ids, use_cache=True)
    seconds = []
    for _ in range(steps):
        last = out.logits[:, -1:].argmax(-1)
        began = time.process_time()
        out = model(input_ids=last, past_key_values=out.past_key_values, use_cache=True)
        seconds.append(time.process_time() - began)
    return (min(seconds),)


@torch.no_grad()
def measured(batch: int, names: tuple[str, ...], rounds: int, steps: int) -> dict[str, Timing]:
    """Returns the CPU time of a decoding step of each implementation, a sample for each round.

    batch: number of sequences that are decoded together.
    names: the implementations of experts.
    rounds: number of rounds, in each of which every implementation has a turn.
    steps: number of decoding steps of a turn, of which the fastest counts.
    """
    model = made()
    ids = torch.randint(512, (batch, PROMPT))
    runs = [functools.partial(step_seconds, model, name, ids, steps) for name in names]
    samples = in_rounds(runs, rounds, rotate=True)
    return {
        name: Timing(tuple(seconds for (seconds,) in own)) for name, own in zip(names, samples, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--names", nargs="+", default=list(IMPLEMENTATIONS), help="grouped_mm among them")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for batch in arguments.batches:
        times = measured(batch, tuple(arguments.names), arguments.rounds, arguments.steps)
        for name, timing in times.items():
            rows.append(
                {
                    "batch": batch,
                    "implementation": name,
                    "ms": timing.median * 1e3,
                    "spread": timing.spread,
                    "/ grouped_mm": 1 / timing.speedup_over(times["grouped_mm"]),
                }
            )
    print(table(rows))
    path = arguments.out / "decode.json"
    write_json(path, rounds=arguments.rounds, steps=arguments.steps, rows=rows)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
