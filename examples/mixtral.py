"""Trains a tiny Mixtral of Hugging Face transformers. pmoe spreads its experts over the ranks.

    torchrun --nproc-per-node 2 examples/mixtral.py

A random model is made and saved. Then all ranks load it, as they would load a real checkpoint. The lines that
end in "# pmoe" are all that pmoe adds: without them the script trains the same model with transformers alone.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]  # no re-export, says mypy

import pmoe.integrations.transformers  # pmoe

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


def save_random_model() -> str:
    """Saves a random model and returns its folder. Rank 0 makes it, and all ranks return the same name."""
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        MixtralForCausalLM(MixtralConfig(**SIZES)).save_pretrained(folder[0])
    dist.broadcast_object_list(folder)
    return folder[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    parallel = DistributedConfig(fsdp_size=world)
    parallel = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="pmoe")  # pmoe
    pmoe.integrations.transformers.configure(pipeline=2, memory_reuse="S4")  # pmoe
    model = MixtralForCausalLM.from_pretrained(save_random_model(), distributed_config=parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    with open(argparse.__file__, "rb") as file:  # any file will do: the model is trained on its bytes
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        starts = torch.randint(len(text) - 32, (8 * world,), generator=generator)
        rows = torch.stack([text[start : start + 32] for start in starts])[rank::world]
        rows = rows.to(model.device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
