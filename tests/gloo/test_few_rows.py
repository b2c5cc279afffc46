"""Calls of few rows without gradients on several ranks: one exchange of counts and two all-to-alls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pmoe import MoELayer
from tests.gloo.kit import build, counted_collectives, error_of, inputs
from tests.pool import ranks
from tests.reference import relative_error

KINDS: dict[str, dict[str, Any]] = {
    "default": {"pipeline": False},
    "swiglu": {"pipeline": False, "expert": "swiglu"},
    "dropping": {"pipeline": False, "capacity_factor": 0.7},
    "sigmoid gate": {"pipeline": False, "gate": "sigmoid"},
}


def both_ways(layer: MoELayer, x: Tensor) -> tuple[Tensor, list[str]]:
    """The output without gradients, and the collectives, after a check against the output with gradients."""
    layer.eval()
    expected = layer(x.clone().requires_grad_())
    expected.sum().backward()
    assert layer.ran is not None and layer.ran.path == "pipeline"
    rows = layer.tokens_per_expert
    with torch.no_grad(), counted_collectives() as calls:
        y = layer(x)
    assert layer.ran.path == "few rows"
    assert torch.equal(layer.tokens_per_expert, rows)
    assert not x.shape[0] or relative_error(y, expected.detach()) < 1e-12
    return y, calls


def few_job(rank: int, world: int, name: str) -> list[str]:
    x, _ = inputs(rank, world)  # one of four ranks has no tokens
    return both_ways(build(**KINDS[name]), x)[1]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", KINDS)
def test_three_collectives_give_the_output_of_a_call_with_gradients(name: str, world: int) -> None:
    assert ranks(world).run(few_job, name) == [["all_to_all_single"] * 3] * world


def skewed_job(rank: int, world: int) -> None:
    """All tokens go to the experts of rank 0; rank 1 ends before the others and has one token."""
    layer = build(pipeline=False)
    with torch.no_grad():
        for parameter in layer.gate.parameters():
            parameter.zero_()
            parameter[:2] = 1
    x = inputs(0, 1)[0][: 1 if rank == 1 else 5].abs()
    y, _ = both_ways(layer, x)
    assert y.shape == x.shape


def test_a_rank_may_get_all_rows_and_another_have_one() -> None:
    ranks(4).run(skewed_job)


def many_job(rank: int, world: int) -> str:
    """Rank 1 has too many rows, so every rank goes the usual way."""
    layer = build(pipeline=False).eval()
    x = torch.randn(600 if rank == 1 else 2, 6, dtype=torch.float64)
    with torch.no_grad():
        layer(x)
    assert layer.ran is not None
    return layer.ran.path


def test_many_rows_on_one_rank_are_the_usual_way_on_all() -> None:
    assert ranks(2).run(many_job) == ["pipeline"] * 2


def training_job(rank: int, world: int) -> str:
    """Rank 1 is in training mode, which is a warning, and no other collectives than on rank 0."""
    layer = build(pipeline=False).train(rank == 1)
    with torch.no_grad():
        for _ in range(2):
            layer(inputs(rank, world)[0])
    assert layer.ran is not None
    return layer.ran.path


def test_training_on_one_rank_is_the_usual_way_on_all() -> None:
    assert ranks(2).run(training_job) == ["pipeline"] * 2


def partly_job(rank: int, world: int) -> str:
    """Gradients are enabled on both ranks, but only rank 0 has something to differentiate."""
    layer = build(pipeline=False).eval()
    layer.requires_grad_(rank == 0)
    y = layer(inputs(rank, world)[0])
    y.sum().backward()
    assert layer.ran is not None
    return layer.ran.path


def test_gradients_on_one_rank_are_the_usual_way_on_all() -> None:
    assert ranks(2).run(partly_job) == ["pipeline"] * 2


def fault_job(rank: int, world: int) -> str:
    layer = build(pipeline=False).eval()
    x = inputs(rank, world)[0]
    layer(x)
    with torch.no_grad():
        return error_of(lambda: layer(x * float("nan") if rank == 1 else x))


def test_a_fault_of_one_rank_raises_on_all() -> None:
    first, second = ranks(2).run(fault_job)
    assert "rank 1: its gate logits are not finite" in first
    assert "rank 1: its gate logits are not finite" in second
