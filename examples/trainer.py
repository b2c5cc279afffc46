"""Trains a tiny Mixtral with transformers' Trainer. pmoe spreads its experts over the ranks.

    torchrun --nproc-per-node 2 examples/trainer.py
    torchrun --nproc-per-node 1 examples/trainer.py --resume

The second line goes on from the newest checkpoint, on 1, 2, 4 or 8 ranks. Every step has 16 samples on any
number of ranks. The lines that end in "# pmoe" are all that pmoe adds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]  # no re-export, says mypy

from pmoe.integrations.transformers import SpreadCheckpoints  # pmoe

SAMPLES = 16
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


class SpreadTrainer(SpreadCheckpoints, Trainer):  # pmoe
    """The Trainer whose checkpoints resume on any number of ranks."""


def save_random_model(folder: Path) -> None:
    """Saves a random model. All ranks load it, as they would load a real checkpoint."""
    if dist.get_rank() == 0 and not folder.exists():
        torch.manual_seed(0)
        MixtralForCausalLM(MixtralConfig(**SIZES)).save_pretrained(folder)
    dist.barrier()


def make_data() -> list[dict[str, Tensor]]:
    """Returns sequences of 32 bytes of a text, as a Trainer takes them. Any file will do."""
    with open(argparse.__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in text[: 32 * 512].view(512, 32)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--out", type=Path, default=Path("trained"), help="folder of checkpoints (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    world = dist.get_world_size()
    save_random_model(options.out / "random")
    spread = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="pmoe")
    model = MixtralForCausalLM.from_pretrained(options.out / "random", distributed_config=spread)
    arguments = TrainingArguments(
        output_dir=str(options.out),
        per_device_train_batch_size=SAMPLES // world,
        max_steps=options.steps,
        save_steps=options.save_steps,
        save_only_model=True,  # SpreadCheckpoints saves the rest
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        optim="adamw_torch",
        optim_args="foreach=False",
    )
    trainer = SpreadTrainer(model=model, args=arguments, train_dataset=make_data())
    trainer.train(resume_from_checkpoint=options.resume)
    if dist.get_rank() == 0:
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {float(entry['loss']):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
