"""`pmoe.run_experts` with experts of a caller spread over ranks, against one rank that holds them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pmoe
from tests.pool import ranks
from tests.reference import relative_error

K, E, M, H = 2, 4, 6, 5
TOKENS = {1: (12,), 2: (7, 5), 4: (5, 0, 6, 1)}


def batch(rank: int, world: int) -> list[torch.Tensor]:
    """x, index, weights and dy of a rank: its part of the same 12 tokens for every number of ranks."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(12, M, dtype=torch.float64, generator=generator)
    index = torch.rand(12, E + 1, generator=generator).topk(K).indices
    weights = torch.rand(12, K, dtype=torch.float64, generator=generator)
    dy = torch.randn(12, M, dtype=torch.float64, generator=generator)
    start = sum(TOKENS[world][:rank])
    return [each[start : start + TOKENS[world][rank]].clone() for each in (x, index, weights, dy)]


def step(rank: int, world: int, group: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    local = E // world
    whole = [torch.randn(E, 2 * H, M, dtype=torch.float64), torch.randn(E, M, H, dtype=torch.float64)]
    w1, w2 = (each[rank * local : (rank + 1) * local].clone().requires_grad_() for each in whole)
    x, index, weights, dy = batch(rank, world)
    leaves = {"x": x.requires_grad_(), "weights": weights.requires_grad_(), "w1": w1, "w2": w2}
    y = pmoe.run_experts(nn.Identity(), x, index, weights, w1, w2, group=group, **options)
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def job(rank: int, world: int, options: dict[str, Any]) -> None:
    whole = step(0, 1, None, {})
    got = step(rank, world, dist.group.WORLD, options)
    local = E // world
    start = sum(TOKENS[world][:rank])
    for name, value in got.items():
        first, count = (rank * local, local) if name in ("w1", "w2") else (start, TOKENS[world][rank])
        wanted = whole[name][first : first + count]
        assert not count or relative_error(value, wanted) < 1e-12, name


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("options", [{}, {"pipeline": 2, "memory_reuse": "S4"}], ids=["default", "S4"])
def test_ranks_with_few_tokens_and_none_get_the_results_of_one_rank(
    world: int, options: dict[str, Any]
) -> None:
    ranks(world).run(job, options)
