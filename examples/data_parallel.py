"""A model with MoE layers under DistributedDataParallel or FSDP2, with checkpoints.

    torchrun --standalone --nproc-per-node 4 examples/data_parallel.py --steps 40 --folder runs/copies
    torchrun --standalone --nproc-per-node 2 examples/data_parallel.py --steps 60 --folder runs/copies \
        --wrap fsdp

With an even number of ranks, half of them hold copies of the other half's experts. The second command
continues where the first one ended or was killed, on another number of ranks and with another wrapper.

It runs one rank a GPU if the machine has GPUs, else on the CPU with gloo.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lm_ranks import leave, start_ranks, stop_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pmoe

D_MODEL, VOCABULARY, SEQUENCES, TOKENS = 32, 61, 8, 16


class Block(nn.Module):
    """A block of the model: mixes each token with the one before it, then applies experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D_MODEL)
        self.mix = nn.Linear(2 * D_MODEL, D_MODEL)
        self.moe = pmoe.MoELayer(D_MODEL, 64, num_experts=8, top_k=2, pipeline=2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(self.mix(torch.cat([self.norm(x), self.norm(x).roll(1, dims=1)], dim=-1)))
        return y


def batch(step: int, rank: int) -> Tensor:
    """Returns (SEQUENCES, TOKENS + 1) random sequences. Each token is computed from the one before it."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    columns = [torch.randint(VOCABULARY, (SEQUENCES,), generator=generator)]
    for _ in range(TOKENS):
        columns.append((5 * columns[-1] + 3) % VOCABULARY)
    return torch.stack(columns, dim=1)


def train(arguments: argparse.Namespace) -> None:
    """Trains the model on all ranks, from the last checkpoint if there is one."""
    torch.manual_seed(0)  # the same on all ranks
    # Built before the process group exists, so that each rank builds all experts. `parallelize` spreads them.
    blocks = [Block() for _ in range(2)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, D_MODEL), *blocks, nn.Linear(D_MODEL, VOCABULARY))
    ranks = start_ranks()
    copies = 2 if ranks.world % 2 == 0 else 1
    shape = (copies, ranks.world // copies)
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("dp", "ep"))

    pmoe.parallelize(model.to(ranks.device), mesh)  # each rank keeps its share of the experts
    wrapped: nn.Module = model
    if arguments.wrap == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for part in (*blocks, model):
            fully_shard(part, mesh=mesh._flatten("all"), ignored_params=pmoe.expert_parameters(model))
    optimizer = torch.optim.AdamW(pmoe.parameter_groups(wrapped), lr=3e-3, foreach=True)

    first = 0
    if (arguments.folder / "latest.json").exists():
        first = pmoe.load_checkpoint(arguments.folder, wrapped, optimizer).step
    for step in range(first, arguments.steps):
        tokens = batch(step, ranks.rank).to(ranks.device)
        logits = wrapped(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        l_aux = sum(block.moe.l_aux for block in blocks)
        (loss + 0.01 * l_aux).backward()
        norm = pmoe.clip_grad_norm_(wrapped, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % arguments.every == 0:
            pmoe.save_checkpoint(arguments.folder, wrapped, optimizer, step=step + 1)
            if ranks.rank == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}, norm {norm.item():.4f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="folder of checkpoints; the run continues from the last one",
    )
    parser.add_argument(
        "--wrap", choices=("ddp", "fsdp"), default="ddp", help="wrapper that manages the dense part"
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="number of steps, earlier runs included (default: 40)"
    )
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints (default: 10)")
    return parser.parse_args()


def main() -> None:
    try:
        train(parse_arguments())
    finally:
        stop_ranks()


if __name__ == "__main__":
    main()
    leave()
