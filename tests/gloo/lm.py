"""A small language model of two blocks with an MoE layer each, its batches, and its wrappers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import pmoe

# B sequences of S tokens in all, M = D_MODEL columns.
D_MODEL, D_HIDDEN, VOCABULARY, S = 8, 12, 11, 5
SLOW_IMPORT = 240
"""Seconds that a rank's first use of FSDP may take, because it imports it, on a busy machine."""


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh | None, **options: Any) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(D_MODEL), nn.Linear(D_MODEL, D_MODEL)
        self.moe = pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, 2, mesh=mesh, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(self.mix(self.norm(x)))
        return y


class Model(nn.Module):
    """A language model: maps tokens to logits of the next token."""

    def __init__(self, mesh: DeviceMesh | None, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, D_MODEL)
        self.blocks = nn.ModuleList(Block(mesh, **options) for _ in range(2))
        self.head = nn.Linear(D_MODEL, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def build(mesh: DeviceMesh | None, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    """Builds a model from one seed: ranks have the same dense part, and together the experts of one
    process.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(3)
        return Model(mesh, **options)
    finally:
        torch.set_default_dtype(before)


def batch(step: int, world: int, sequences: int = 2) -> Tensor:
    """Returns the tokens of all ranks, (world * sequences, S + 1), by rank. Each token follows from the one
    before.
    """
    generator = torch.Generator().manual_seed(100 + step)
    columns = [torch.randint(VOCABULARY, (world * sequences,), generator=generator)]
    for _ in range(S):
        columns.append((3 * columns[-1] + 1) % VOCABULARY)
    return torch.stack(columns, dim=1)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns the loss without l_aux, because each rank computes l_aux of its own tokens only."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def shared(wrap: str, model: Model) -> nn.Module:
    if wrap == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh, experts = init_device_mesh("cpu", (dist.get_world_size(),)), pmoe.expert_parameters(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)
    return model


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def square(rank: int, world: int) -> DeviceMesh:
    """Returns a mesh of the ranks: copies of the experts x ranks that share them."""
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "ep"))


def submesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the part of a mesh that a layer takes."""
    return mesh[tuple(name for name in mesh.mesh_dim_names if name in ("ep", "esp"))]


def make_mesh(sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def alone(**options: Any) -> Model:
    """Builds a model with a group of this rank only, so that each rank has all experts."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return build(None, torch.float64, group=groups[dist.get_rank()], **options)


def backward_passes(wrapped: nn.Module, wrap: str, step: int, passes: int, rank: int, world: int) -> float:
    """Runs the passes of a step, of which the last one reduces the dense part. Returns the sum of losses."""
    total = 0.0
    for at in range(passes):
        with contextlib.ExitStack() as waiting:
            if wrap == "fsdp":
                wrapped.set_requires_gradient_sync(at == passes - 1)
            elif at < passes - 1:
                waiting.enter_context(wrapped.no_sync())
            loss = loss_of(wrapped, batch(passes * step + at, world).chunk(world)[rank]) / passes
            loss.backward()
        total += loss.item()
    return total
