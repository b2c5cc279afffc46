"""What does `skip_padding` save in a training step of a transformers model?

    python bench/bench_padding.py [--rounds 12]

The model is a Mixtral of 4 layers with 8 experts, top-2, hidden 256, intermediate 512, in float32 on one
thread. A batch has 8 sequences of 256 positions, and half of the 2,048 positions are padding. Steps (forward
and backward) with and without `skip_padding` take turns. A ratio is the median over the rounds of (step that
skips / the step before it, which does not).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench, and pmoe from this checkout

from bench.timing import counted

LENGTHS = (256, 192, 128, 128, 128, 96, 64, 32)
POSITIONS = 256


def make_model() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).train()
    model.set_experts_implementation("pmoe")
    return model


def make_batch() -> dict[str, torch.Tensor]:
    """Returns a training batch with padding on the right, where libraries that collect batches put it."""
    mask = torch.arange(POSITIONS) < torch.tensor(LENGTHS).unsqueeze(1)
    ids = torch.randint(3, 1000, mask.shape).where(mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


def step_seconds(model: Any, inputs: dict[str, torch.Tensor]) -> float:
    start = time.perf_counter()
    model(**inputs).loss.backward()
    model.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    import pmoe.integrations.transformers as integration

    torch.set_num_threads(1)
    model, inputs = make_model(), make_batch()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    rows: dict[bool, int] = {}
    for _ in counted(range(2 + rounds), "round"):
        for skips in (False, True):
            handle = integration.skip_padding(model)
            if not skips:
                handle.remove()
            seconds[skips].append(step_seconds(model, inputs))
            rows[skips] = max(
                int(layer.tokens_per_expert.sum()) for layer in integration.layers(model).values()
            )
    for skips, name in ((False, "all rows"), (True, "skip_padding")):
        print(f"{name:12}  rows of a layer {rows[skips]:5}  step {1e3 * median(seconds[skips][2:]):7.1f} ms")
    pairs = zip(seconds[True][2:], seconds[False][2:], strict=True)
    print(f"ratio of steps {median(ours / theirs for ours, theirs in pairs):.2f}")


if __name__ == "__main__":
    main()
