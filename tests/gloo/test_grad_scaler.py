"""pmoe.GradScaler: an overflow on one rank makes all ranks skip the step.

One optimizer has plain tensors and DTensors.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import pmoe
from pmoe.experts.operands import local_part
from tests.own_experts import mlp
from tests.pool import ranks

STEPS, OVERFLOWS, SCALE = 4, 1, 1024.0


def build(expert: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), pmoe.MoELayer(4, 6, 4, 2, expert=expert, **options))


def rows(step: int, world: int) -> Tensor:
    return torch.randn(3 * world, 4, generator=torch.Generator().manual_seed(step))


def expected(expert: Any, world: int) -> list[float]:
    """Returns the losses of one process that leaves a step out."""
    model = build(expert)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(rows(step, world)).square().mean()
        loss.backward()
        if step != OVERFLOWS:
            optimizer.step()
        losses.append(loss.item())
    return losses


def trained(
    rank: int, world: int, expert: Any, options: dict[str, bool], unscales: bool
) -> tuple[list[float], list[float]]:
    """Returns losses and scales. The experts of the last rank overflow once."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    model = pmoe.parallelize(build(expert, mesh=mesh), mesh)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(pmoe.parameter_groups(model), lr=0.05, **options)
    scaler = pmoe.GradScaler("cpu", init_scale=SCALE)
    losses, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = wrapped(rows(step, world).chunk(world)[rank]).square().mean()
        scaler.scale(loss).backward()
        if step == OVERFLOWS and rank == world - 1:
            local_part(next(model[1].experts.parameters()).grad).fill_(math.inf)
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
        scales.append(scaler.get_scale())
    return losses, scales


@pytest.mark.sampled(4)
@pytest.mark.parametrize("expert", ["ffn", mlp], ids=["stacked", "modules"])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("unscales", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    expert: Any, options: dict[str, bool], unscales: bool
) -> None:
    losses = expected(expert, 2)
    for found, scales in ranks(2).run(trained, expert, options, unscales):
        assert found == pytest.approx(losses, rel=1e-5)
        assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]


def without_gradients(rank: int, world: int) -> tuple[float, bool]:
    """Unscales gradients that only rank 1 has."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = pmoe.GradScaler("cpu", init_scale=SCALE)
    loss = scaler.scale(model(torch.ones(1, 2)).sum())
    if rank:
        loss.backward()
        before = model.weight.grad.clone()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), rank == 0 or torch.equal(model.weight.grad, before / SCALE)


def test_a_rank_without_gradients_takes_part() -> None:
    assert ranks(2).run(without_gradients) == [(SCALE, True)] * 2


def test_alone_it_is_torchs() -> None:
    model, other = build("ffn"), build("ffn")
    for each, scaler in ((model, pmoe.GradScaler("cpu")), (other, torch.amp.GradScaler("cpu"))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        scaler.scale(each(rows(0, 1)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
