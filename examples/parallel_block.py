"""Trains transformer blocks with four kinds of parallelism at once (FSMoE, Fig. 2).

The kinds are data, model, expert and expert-sharding parallelism. Some ways to run it:

    torchrun --standalone --nproc-per-node 4 examples/parallel_block.py                    # Fig. 2: all are 2
    torchrun --standalone --nproc-per-node 4 examples/parallel_block.py --mp 2 --ep 4 --esp 1
    torchrun --standalone --nproc-per-node 1 examples/parallel_block.py --mp 1 --ep 1 --esp 1

Three dimensions of the device meshes split the model:

- torch.distributed.tensor.parallel splits the attention over "mp".
- Experts are spread over "ep".
- Each expert is split over "esp".

Outside of attention each rank has a part of every sequence: in the MoE layer, the norms, the embedding and
the loss.

The data are random sequences in which most tokens follow from the one before. The whole batch does not depend
on the sizes, so loss and gradient norm do not either, up to rounding and except for the load-balance loss:
each rank balances its own tokens.

It runs one rank a GPU if the machine has GPUs, else on the CPU with gloo.

Letters: B sequences of a "dp" group, S tokens of a sequence, M = d_model.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from lm_ranks import leave, start_ranks, stop_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import pmoe
from pmoe.training.parallel import Meshes, make_meshes, reduce_gradients

VOCABULARY, HEAD, GLOBAL_BATCH, LENGTH, AUX_WEIGHT, MAX_NORM = 64, 16, 8, 32, 0.01, 1.0


class Attention(nn.Module):
    """Causal attention, of which each rank of "mp" computes its own heads.

    The number of heads follows from the columns of q, k and v.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x_BSM: Tensor) -> Tensor:
        q, k, v = (
            projection(x_BSM).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y_BSM: Tensor = self.out(heads.transpose(1, 2).flatten(-2))
        return y_BSM


class Block(nn.Module):
    """Transformer block with a MoE layer as feed-forward network."""

    def __init__(self, d_model: int, num_experts: int, meshes: Meshes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = Attention(d_model)
        self.moe = pmoe.MoELayer(d_model, 2 * d_model, num_experts, 2, pipeline=2, mesh=meshes.experts)

    def forward(self, x_BSM: Tensor) -> Tensor:
        """Maps this rank's part (B, S / MP, M) of the sequences to the same shape."""
        x_BSM = x_BSM + self.attention(self.norm1(x_BSM))
        return x_BSM + self.moe(self.norm2(x_BSM))


class Model(nn.Module):
    """Language model of two blocks."""

    def __init__(self, d_model: int, num_experts: int, meshes: Meshes) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, d_model)
        self.head = nn.Linear(d_model, VOCABULARY)
        self.blocks = nn.ModuleList(Block(d_model, num_experts, meshes) for _ in range(2))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSM = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSM = block(x_BSM)
        logits: Tensor = self.head(x_BSM)
        return logits


def split_attention(model: Model, meshes: Meshes) -> None:
    """Splits attention over "mp", as in Fig. 2.

    Each rank gathers the sequences before attention and computes its own heads. Their outputs are summed, and
    each rank gets its part of the sequences again (ReduceScatter). All other modules are copied to every rank
    and see that rank's tokens only.
    """
    part = Shard(1)
    plan = {
        "attention": PrepareModuleInput(input_layouts=part, desired_input_layouts=Replicate()),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=part),
    }
    for block in model.blocks:
        parallelize_module(block, meshes.dense["mp"], plan)


def sequences(step: int, meshes: Meshes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets, both (B, S / MP) int64: this rank's part of its "dp" group's share of the
    batch.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
    for at in range(
        LENGTH
    ):  # three of four tokens follow from the one before, so that there is much to learn
        is_ruled = torch.rand(GLOBAL_BATCH, generator=generator) < 0.75
        tokens[:, at + 1] = torch.where(is_ruled, (5 * tokens[:, at] + 3) % VOCABULARY, tokens[:, at + 1])
    group, part = (meshes.dense.get_local_rank(name) for name in ("dp", "mp"))
    tokens = tokens.chunk(meshes.size("dp"))[group].to(device)
    inputs, targets = (
        sequence.chunk(meshes.size("mp"), dim=1)[part] for sequence in (tokens[:, :-1], tokens[:, 1:])
    )
    return inputs, targets


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    """Trains the model and prints loss and gradient norm."""
    meshes = make_meshes(mp=arguments.mp, ep=arguments.ep, esp=arguments.esp)
    torch.manual_seed(0)  # all ranks get the same dense part, and together the experts of one process
    model = Model(arguments.d_model, arguments.experts, meshes).to(device)
    split_attention(model, meshes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    say(
        f"{meshes.num_ranks} ranks: dp {meshes.size('dp')} x mp {meshes.size('mp')}; "
        f"edp {meshes.size('edp')} x ep {meshes.size('ep')} x esp {meshes.size('esp')}"
    )
    for step in range(arguments.steps):
        inputs, targets = sequences(step, meshes, device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        layers = [module for module in model.modules() if isinstance(module, pmoe.MoELayer)]
        auxiliary = sum(layer.l_aux for layer in layers)
        (loss + AUX_WEIGHT * auxiliary).backward()
        reduce_gradients(model, meshes)
        norm = pmoe.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        mean = loss.detach() / meshes.num_ranks
        dist.all_reduce(mean)
        if step % 5 == 0 or step == arguments.steps - 1:
            say(f"step {step:3}: loss {mean.item():.4f}, gradient norm {norm.item():.4f}")


def say(text: str) -> None:
    """Prints a line on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    for name in ("mp", "ep", "esp"):
        parser.add_argument(
            f"--{name}", type=int, default=2, help=f'number of ranks along "{name}" (default: 2)'
        )
    parser.add_argument("--experts", type=int, default=4, help="experts of all ranks together (default: 4)")
    parser.add_argument("--d-model", type=int, default=64, help=f"a multiple of {HEAD} * mp (default: 64)")
    parser.add_argument("--steps", type=int, default=30, help="(default: 30)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    ranks = start_ranks()
    try:
        train(arguments, ranks.device)
    finally:
        stop_ranks()


if __name__ == "__main__":
    main()
    leave()
