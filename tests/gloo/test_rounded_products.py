"""``products`` on several ranks: rows are rounded one by one, so they give what they give on one rank.

tests/unit/test_rounded_products.py has the definition.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from pmoe import MoELayer, Restore
from pmoe.comm.ranks import Ranks
from tests.gloo.kit import TOKENS, build, counted_collectives, error_of, take_all_experts
from tests.kit import loss_of, tokens
from tests.pool import ranks

WIDTH = 130
SLOW = pytest.mark.slow


def step(layer: MoELayer, x: Tensor) -> dict[str, Tensor]:
    layer.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    loss_of(layer, y).backward()
    return {"y": y.detach(), "x": x.grad, **{name: each.grad for name, each in layer.named_parameters()}}


def compare(layer: MoELayer, x: Tensor, rank: int, world: int, **options: Any) -> None:
    """Compares a step with the same layer on one rank, whose experts' gradients all ranks add."""
    single = build(group=Ranks.single(), **options)
    take_all_experts(single, layer, world)
    found, expected = step(layer, x), step(single, x)
    count = single.num_experts // world
    for name, value in expected.items():
        if name.startswith("experts."):
            dist.all_reduce(value)
            value = value[rank * count : (rank + 1) * count]
        close = (found[name] - value).double().norm() <= 2e-3 * value.double().norm() + 1e-6
        assert close, (name, rank, options)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "S4, two chunks": {"memory_reuse": "S4", "pipeline": 2},
    "S1, three chunks": {"memory_reuse": "S1", "pipeline": 3},
    "other chunks in backward": {"memory_reuse": "S4", "pipeline": 2, "pipeline_backward": 3},
    "gated, top 3, sent once": {"expert": "swiglu", "top_k": 3, "send_once": True},
    "padded": {"pad_to_capacity": True, "capacity_factor": 1.0},
    "dropped rows": {"capacity_factor": 0.7},
    "a shared expert": {"shared_expert": 8},
    "expert choice": {"gate": "expert_choice"},
}


def case_job(rank: int, world: int, products: str, options: dict[str, Any]) -> None:
    num_tokens = 9 if "pad_to_capacity" in options else TOKENS[world][rank]
    x = tokens(num_tokens, 10 + rank, torch.float32, WIDTH)
    options = {"d_model": WIDTH, "dtype": torch.float32, "products": products, **options}
    layer = build(**options)
    if layer.shared_expert is None:
        compare(layer, x, rank, world, **options)
        return
    plain = build(**{**options, "shared_expert": None})
    take = {name: value for name, value in layer.state_dict().items() if name in plain.state_dict()}
    plain.load_state_dict(take)
    found, rest = step(layer, x)["y"], step(plain, x)["y"]
    shared = layer.shared_expert(x).detach()  # not rounded
    assert (found - rest - shared).norm() <= 1e-5 * found.norm()


@pytest.mark.parametrize(
    "world, products",
    [(2, "e4m3"), pytest.param(2, "mxfp8", marks=SLOW), pytest.param(4, "e4m3", marks=SLOW)],
)
@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_rank_computes(case: str, world: int, products: str) -> None:
    ranks(world).run(case_job, products, CASES[case])


def together_job(rank: int, world: int) -> None:
    """With messages in e4m3, T_M in e4m3, hierarchical exchanges and sharded experts."""
    x = tokens(TOKENS[world][rank], 10 + rank, torch.bfloat16, 256)
    options = {"d_model": 256, "d_hidden": 12, "dtype": torch.bfloat16}
    exact = step(build(**options), x)
    others: list[dict[str, Any]] = [
        {},
        {"wire": "e4m3", "wire_combine": "e4m3", "memory_reuse": Restore("message", "e4m3")},
        {"dispatch": "hierarchical_1d", "nodes": 2, "wire_backward": "e4m3"},
    ]
    for extra in others:
        found = step(build(products="e4m3", **options, **extra), x)
        for name in ("y", "x"):
            noise = (found[name].double() - exact[name].double()).square().sum()
            assert noise <= 0.012 * exact[name].double().square().sum() + 1e-9, (name, extra)  # 19 dB
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "esp"))
    exact = step(build(mesh=mesh, **options), x)
    found = step(build(mesh=mesh, products="mxfp8", **options), x)
    noise = (found["y"].double() - exact["y"].double()).square().sum()
    assert noise <= 0.012 * exact["y"].double().square().sum() + 1e-9


def test_rounded_products_go_with_narrow_messages_and_sharded_experts() -> None:
    ranks(4).run(together_job)


def agreed_job(rank: int, world: int) -> tuple[str, list[str], list[str]]:
    x = tokens(TOKENS[world][rank], 10 + rank, torch.float32, 16)
    plain, round_ = (build(d_model=16, dtype=torch.float32, products=each) for each in (None, "e4m3"))
    collectives = []
    for layer in (plain, round_):
        with counted_collectives() as calls:
            step(layer, x)
        collectives.append(list(calls))
    differing = build(d_model=16, dtype=torch.float32, products=("e4m3", "mxfp8")[rank])
    return error_of(lambda: differing(x)), *collectives


def test_rounding_adds_no_collective_and_ranks_with_other_formats_are_told() -> None:
    for error, plain, round_ in ranks(2).run(agreed_job):
        assert plain == round_
        assert "products" in error and "e4m3" in error and "mxfp8" in error


def test_copies_of_busy_experts_are_refused_by_name() -> None:
    for error in ranks(2).run(refused_job):
        assert "products ('e4m3') must be None where busy experts may have copies (balance=1)" in error


def refused_job(rank: int, world: int) -> str:
    return error_of(lambda: build(d_model=16, dtype=torch.float32, products="e4m3", balance=1))
