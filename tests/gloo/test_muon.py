"""Muon for experts over ranks: the same steps as on one rank, on the experts that each rank holds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import pmoe
from pmoe.comm.ranks import Ranks
from tests.gloo.kit import build, error_of, part_of
from tests.kit import tokens
from tests.pool import ranks
from tests.reference import relative_error

OPTIONS = {"expert": "swiglu"}


def trained(layer: pmoe.MoELayer, batches: list[torch.Tensor], divide_by: int) -> pmoe.MoELayer:
    optimizer = pmoe.ExpertMuon(layer, lr=0.02, dtype=torch.float64)
    for x in batches:
        optimizer.zero_grad()
        (layer(x).square().sum() / divide_by).backward()
        optimizer.step()
    return layer


def job(rank: int, world: int, ep: int) -> None:
    steps = 3
    own = [tokens(6, 10 * step + rank) for step in range(steps)]
    every = [torch.cat([tokens(6, 10 * step + r) for r in range(world)]) for step in range(steps)]
    whole = trained(build(group=Ranks.single(), **OPTIONS), every, world)
    if ep == world:
        layer = build(**OPTIONS)
        trained(layer, own, world)  # gradients of experts are sums over the ranks
        place = rank
    else:
        mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))
        layer = pmoe.parallelize(build(group=Ranks.single(), **OPTIONS), mesh)
        trained(layer, own, 1)  # divided by parallelize
        place = rank % ep
    for name, parameter in layer.experts.named_parameters():
        value = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        wanted = part_of(whole.state_dict(), f"experts.{name}", place, ep)
        assert relative_error(value.detach(), wanted) <= 1e-12, name


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_ranks_take_the_steps_of_one_rank(world: int, ep: int) -> None:
    ranks(world).run(job, ep)


def split_job(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("ep", "esp"))
    layer = pmoe.parallelize(build(group=Ranks.single(), **OPTIONS), mesh)
    error = error_of(lambda: pmoe.ExpertMuon(layer))
    dist.barrier()
    return error


def test_experts_that_are_split_over_ranks_are_refused() -> None:
    assert all("are split over 2 ranks (esp)" in error for error in ranks(2).run(split_job))
