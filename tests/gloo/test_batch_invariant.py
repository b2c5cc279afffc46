"""Batch invariance over ranks: a token's bits are those of one rank that computes the token alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pmoe
from pmoe.comm.ranks import Ranks
from tests.gloo.kit import error_of
from tests.pool import ranks

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "swiglu": {"expert": "swiglu", "gate": "deepseek", "shared_expert": 9},
    "hierarchical": {"dispatch": "hierarchical_2d", "nodes": 2},
    "copies": {"balance": 1},
}
TOKENS = {2: (range(0, 30), range(5, 12)), 4: (range(0, 19), range(0), range(28, 3, -1), range(2, 30, 9))}
"""Which of 30 tokens each rank has. Some are on several ranks; one of four ranks has none."""


def build(sizes: tuple[int, int], dtype: torch.dtype, **options: Any) -> pmoe.MoELayer:
    torch.manual_seed(0)
    return pmoe.make_batch_invariant(pmoe.MoELayer(*sizes, 8, 2, dtype=dtype, **options))


def job(rank: int, world: int, kind: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    options = KINDS[kind]
    on_one = {name: options[name] for name in options if name not in ("dispatch", "nodes", "balance")}
    alone = build(sizes, dtype, group=Ranks.single(), **on_one)
    layer = build(sizes, dtype, **options)
    torch.manual_seed(1)
    x, dy = (torch.randn(30, sizes[0]).to(dtype) for _ in range(2))
    x[:, 0] += 2  # skewed, so that busy experts get copies
    expected = []
    for token in range(30):
        one = x[token : token + 1].clone().requires_grad_()
        y = alone(one)
        (y * dy[token]).sum().backward()
        assert one.grad is not None
        expected.append(torch.cat([y.detach(), one.grad]))
    wanted = torch.stack(expected)
    pairs = [(1, False), (3, False)] if kind == "copies" else [(1, False), (2, "S1"), (4, "S4")]
    for n, pair in pairs:
        layer.pipeline = n
        layer.memory_reuse = pair
        own = list(TOKENS[world][rank])
        tokens = x[own].clone().requires_grad_()
        y = layer(tokens)
        (y * dy[own]).sum().backward()
        assert tokens.grad is not None
        assert torch.equal(y, wanted[own, 0]), (n, pair)
        assert torch.equal(tokens.grad, wanted[own, 1]), (n, pair)
        if kind == "copies":
            assert layer.ran is not None and layer.ran.balance is not None and layer.ran.balance.copies
    with torch.no_grad():
        assert torch.equal(layer.eval()(x[own]), wanted[own, 0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_a_token_has_the_bits_of_one_rank_that_computes_it_alone(world: int, dtype: torch.dtype) -> None:
    ranks(world).run(job, "default", dtype, (17, 33))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "default"])
def test_other_layers_keep_the_bits(kind: str) -> None:
    ranks(4).run(job, kind, torch.float32, (12, 20))


def one_sided_job(rank: int, world: int) -> str:
    torch.manual_seed(0)
    layer = pmoe.MoELayer(12, 20, 8, 2)
    if rank == 0:
        pmoe.make_batch_invariant(layer)
    return error_of(lambda: layer(torch.ones(3, 12)))


def test_a_layer_that_is_invariant_on_one_rank_only_is_refused_on_all() -> None:
    assert all("must be the same on every rank" in error for error in ranks(2).run(one_sided_job))


def wired_job(rank: int, world: int) -> str:
    torch.manual_seed(0)
    layer = pmoe.MoELayer(128, 20, 8, 2, wire="e4m3")
    return error_of(lambda: pmoe.make_batch_invariant(layer))


def test_rows_in_another_form_are_refused() -> None:
    assert all("dispatched rows are sent in another form" in error for error in ranks(2).run(wired_job))
