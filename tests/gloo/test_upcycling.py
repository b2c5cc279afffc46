"""Upcycling over ranks: an expert's random values do not depend on how many ranks share the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import pmoe
from pmoe.comm.ranks import Ranks
from tests.gloo.kit import build, part_of
from tests.kit import D_HIDDEN, D_MODEL, tokens
from tests.pool import ranks

VARIED = {"noise": 0.1, "drop": 0.5, "router_std": 0.02}


def dense(expert: str) -> dict[str, Tensor]:
    factor = 2 if expert == "swiglu" else 1
    torch.manual_seed(9)
    shapes = {"w1": (factor * D_HIDDEN, D_MODEL), "w2": (D_MODEL, D_HIDDEN), "b1": (factor * D_HIDDEN,)}
    shapes["b2"] = (D_MODEL,)
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def upcycled(layer: pmoe.MoELayer, expert: str) -> pmoe.MoELayer:
    torch.manual_seed(3)
    pmoe.copy_into_experts(layer, dense(expert), **VARIED)
    return layer


def job(rank: int, world: int, expert: str, esp: bool) -> None:
    options: dict[str, Any] = {"expert": expert}
    whole = upcycled(build(group=Ranks.single(), **options), expert)
    if esp:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("ep", "esp"))
        layer = upcycled(pmoe.parallelize(build(group=Ranks.single(), **options), mesh), expert)
        for name, parameter in layer.experts.named_parameters():
            mine = parameter.to_local()
            other = getattr(pmoe.parallelize(whole, mesh).experts, name).to_local()
            assert torch.equal(mine, other), name
    else:
        layer = upcycled(build(**options), expert)
        for name, value in layer.state_dict().items():
            assert torch.equal(value, part_of(whole.state_dict(), name, rank, world)), name
    x = tokens(5, rank)
    layer(x).sum().backward()


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_varied_copies_do_not_depend_on_the_number_of_ranks(world: int, expert: str) -> None:
    ranks(world).run(job, expert, False)


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_ranks_that_split_an_expert_take_their_columns_of_it(expert: str) -> None:
    ranks(4).run(job, expert, True)
