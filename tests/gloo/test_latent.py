"""Latent experts over ranks: the plain definition's step, whatever the ranks, n and restore pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.comm.ranks import Ranks
from pmoe.runners.features import Feature
from tests import featured
from tests.gloo.kit import TOKENS, build, error_of, one_step, part_of
from tests.gloo.test_footprint import step_bytes
from tests.kit import D_MODEL, tokens
from tests.pool import Pool, ranks
from tests.reference import relative_error

WAYS: tuple[tuple[int, Any], ...] = ((1, False), (3, False), (4, "S1"), (2, "S2"), (2, "S3"), (3, "S4"))


def definition_job(rank: int, world: int, features: tuple[Feature, ...]) -> list[str]:
    layer = featured.build([Feature.LATENT, *features])
    wanted = featured.expected(layer)

    def wrong() -> Iterator[str]:
        for n, pair in WAYS:
            layer.pipeline = n
            layer.memory_reuse = pair
            for why in featured.differences(featured.found(layer), wanted):
                yield f"n = {n}, {pair}: {why}"

    return list(wrong())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("features", [(), (Feature.SHARED_EXPERT, Feature.CAPACITY)], ids=["plain", "shared"])
def test_a_step_is_that_of_the_definition(features: tuple[Feature, ...], world: int) -> None:
    assert ranks(world).run(definition_job, features) == [[]] * world


KINDS: dict[str, dict[str, Any]] = {
    "swiglu": {"expert": "swiglu", "gate": "deepseek", "shared_expert": 5, "shared_gate": True},
    "soft": {"gate": "soft"},
    "padded": {"capacity_factor": 1.5, "pad_to_capacity": True, "gate": "switch", "top_k": 1},
    "once": {"send_once": True},
    "hierarchical": {"dispatch": "hierarchical_1d", "nodes": 2},
    "copies": {"balance": 1},
}


def as_one_rank_job(rank: int, world: int, kind: str) -> None:
    """A step is that of one rank, which has all tokens; parts of dense gradients add up to its gradients."""
    options = {"d_latent": 3, **KINDS[kind]}
    alone = {name: options[name] for name in options if name not in ("dispatch", "nodes", "balance")}
    layer = build(**options)
    whole = build(group=Ranks.single(), **alone)
    padded = bool(options.get("pad_to_capacity"))
    counts = (6,) * world if padded else TOKENS[world]
    sums: dict[str, Tensor] = {}
    for other in range(world):
        x = tokens(counts[other], 10 + other)
        whole.zero_grad(set_to_none=True)
        y = whole(x)
        (y.square().sum() + whole.l_aux).backward()
        for name, parameter in whole.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, torch.zeros_like(parameter.grad)) + parameter.grad
        if other == rank:
            own_y = y.detach()
            dense = {name: parameter.grad for name, parameter in whole.named_parameters()}
    y = layer(tokens(counts[rank], 10 + rank))
    (y.square().sum() + layer.l_aux).backward()
    assert not own_y.numel() or relative_error(y.detach(), own_y) <= 1e-12
    for name, parameter in layer.named_parameters():
        wanted = part_of(sums, name, rank, world) if name.startswith("experts.") else dense[name]
        assert wanted is not None and parameter.grad is not None, name
        assert not wanted.any() or relative_error(parameter.grad, wanted) <= 1e-12, name


@pytest.mark.parametrize("kind", KINDS)
def test_other_layers_give_the_step_of_one_rank(kind: str) -> None:
    ranks(4).run(as_one_rank_job, kind)


def few_rows_job(rank: int, world: int) -> str:
    layer = build(d_latent=3, pipeline=False, shared_expert=4)
    x = tokens(TOKENS[world][rank], 10 + rank)
    expected = layer(x.clone().requires_grad_())
    expected.sum().backward()
    with torch.no_grad():
        y = layer.eval()(x)
    assert not x.shape[0] or relative_error(y, expected.detach()) <= 1e-12
    assert layer.ran is not None
    return layer.ran.path


def test_few_rows_go_the_short_way() -> None:
    assert ranks(4).run(few_rows_job) == ["few rows"] * 4


def traffic_job(rank: int, world: int) -> tuple[int, int]:
    wide = build(pipeline=False)
    narrow = build(d_latent=D_MODEL // 2, pipeline=False)
    narrow.gate.load_state_dict(wide.gate.state_dict())  # the same rows travel
    for layer in (wide, narrow):
        one_step(layer, rank, world)
    return wide.traffic.rows, narrow.traffic.rows


def test_rows_take_the_bytes_of_the_latent_width() -> None:
    assert all(wide == 2 * narrow > 0 for wide, narrow in ranks(2).run(traffic_job))


def memory_job(rank: int, world: int, dtype: torch.dtype, reuse: Any) -> tuple[float, float]:
    torch.manual_seed(0)
    layer = pmoe.MoELayer(
        128, 128, 4, d_latent=48, top_k=2, pipeline=2, memory_reuse=reuse, shared_expert=32, dtype=dtype
    )
    generator = torch.Generator().manual_seed(rank)
    num_tokens = 1024 - 37 * rank
    found = step_bytes(layer, torch.randn(num_tokens, 128, generator=generator).to(dtype))
    predicted = layer.predict_memory(num_tokens, layer.row_counts)
    return predicted.peak / found.peak, layer.predict_memory(1024).peak / found.peak


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reuse", [False, "S1", "S2", "S3", "S4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_on_every_rank_is_within_three_percent_of_the_prediction(
    dtype: torch.dtype, reuse: Any
) -> None:
    for exact, bound in ranks(2).run(memory_job, dtype, reuse):
        assert 0.98 <= exact <= 1.03
        assert bound >= 1


class Failing(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        raise RuntimeError("no memory for the projection")


def failing_job(rank: int, world: int, name: str) -> str:
    layer = build(d_latent=3)
    assert layer.latent is not None
    if rank == 1:
        setattr(layer.latent, name, Failing(2, 2))
    step = one_step if name == "down" else (lambda layer, *_: (layer(tokens(3, 1)), layer(tokens(3, 1))))
    return error_of(lambda: step(layer, rank, world))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["down", "up"])
def test_a_projection_that_fails_on_one_rank_raises_on_all(name: str) -> None:
    with Pool(2) as pool:  # a group of its own, because the failure breaks it
        first, second = pool.run(failing_job, name)
    assert "no memory for the projection" in second
    assert "rank 1" in first


def wrong_job(rank: int, world: int) -> str:
    return error_of(lambda: build(d_latent=3)(tokens(3, 1, width=D_MODEL + (rank == 1))))


def test_a_wrong_input_on_one_rank_raises_on_all() -> None:
    first, second = ranks(2).run(wrong_job)
    assert first == "FaultError: rank 1: the last dimension of its input is not d_model"
    assert "must end in d_model (6)" in second


def differing_job(rank: int, world: int) -> str:
    return error_of(lambda: build(d_latent=3 + rank)(tokens(3, 1)))


def test_ranks_with_another_width_are_named() -> None:
    assert all("d_latent must be the same on every rank" in error for error in ranks(2).run(differing_job))


def frozen_job(rank: int, world: int) -> None:
    """Only the projections are trained, and one rank's input needs no gradient."""
    layer = build(d_latent=3)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith("latent."))
    layer(tokens(4, rank).requires_grad_(rank == 0)).sum().backward()
    assert layer.latent is not None
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.latent.parameters())


def test_projections_can_be_trained_alone() -> None:
    ranks(2).run(frozen_job)


def test_public_layers_have_the_argument() -> None:
    assert pmoe.MoELayer(4, 4, 2, d_latent=2).d_latent == 2
