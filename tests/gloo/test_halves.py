"""The backward pass in two halves on several ranks: what the second half sends, and when it runs all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gloo.kit import build, counted_collectives, inputs
from tests.pool import ranks

ONCE = ["all_reduce"]
AGAIN = ["all_reduce", *["all_to_all_single"] * 3]
"""Collectives of a second half: an agreement; and after a disagreement a whole backward pass, S, R and P."""


def halves_job(rank: int, world: int, options: dict[str, Any], differs_on: int) -> list[list[str]]:
    """Collectives of the second half: with the first half's tensor, and with another one of its values.

    differs_on: the rank on which the second tensor has other values; -1 for none.
    """
    layer = build(**options)
    x, dy = inputs(rank, world)
    x.requires_grad_()
    y = layer(x * 2)
    leaves = list(layer.experts.parameters())
    counted = []
    for given in (dy, dy * 3 if rank == differs_on else dy.clone()):
        expected = torch.autograd.grad(y, [x, *leaves], given, retain_graph=True)
        (of_x,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
        with counted_collectives() as calls:
            got = torch.autograd.grad(y, leaves, given, retain_graph=True)
        counted.append(list(calls))
        assert given is not dy or torch.equal(of_x, expected[0])
        assert all(torch.equal(a, b) for a, b in zip(got, expected[1:], strict=True))
    return counted


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("options", [{"pipeline": False}, {"pipeline": False, "memory_reuse": "S1"}])
def test_the_second_half_sends_no_rows(options: dict[str, Any], world: int) -> None:
    assert ranks(world).run(halves_job, options, -1) == [[[], ONCE]] * world


@pytest.mark.parametrize("rank", [0, 1])
def test_another_gradient_on_one_rank_runs_the_pass_on_all(rank: int) -> None:
    assert ranks(2).run(halves_job, {"pipeline": False}, rank) == [[[], AGAIN]] * 2


def alone_job(rank: int, world: int, frozen: bool, is_constant: bool) -> None:
    """Runs a whole pass twice. On rank 0 alone, experts are frozen, the input needs no gradient, or both."""
    layer = build(pipeline=2)
    layer.experts.requires_grad_(not (frozen and rank == 0))
    x, dy = inputs(rank, world)
    x.requires_grad_(not (is_constant and rank == 0))
    loss = (layer(x) * dy).sum()
    loss.backward(retain_graph=True)
    first = layer.gate.weight.grad.clone()
    loss.backward()
    assert torch.equal(layer.gate.weight.grad, 2 * first)


@pytest.mark.parametrize("frozen, is_constant", [(True, False), (False, True), (True, True)])
def test_a_rank_that_needs_fewer_gradients_than_others_runs_their_pass(
    frozen: bool, is_constant: bool
) -> None:
    ranks(2).run(alone_job, frozen, is_constant)


def frozen_job(rank: int, world: int, options: dict[str, Any], first: str, is_same: bool) -> list[list[str]]:
    """Asks for gradients twice, with all experts of rank 1 frozen. Returns the second call's collectives.

    first: the first call asks for the gradient of the input ("input"), or also for that of w1. The second
        call then asks for that of the gate alone ("some"), or of all others ("some, then others").
    is_same: whether the second call has the tensor of the first one as the output's gradient.
    """
    counted = []
    for is_divided in (False, True):
        layer = build(**options)
        layer.experts.requires_grad_(rank != 1)
        x, dy = inputs(rank, world)
        x.requires_grad_()
        y = layer(x * 2)
        early = [x] if first == "input" or rank == 1 else [x, layer.experts.w1]
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        late = [layer.gate.weight] if first == "some" else trained
        if first == "some, then others":
            late = [parameter for parameter in trained if parameter is not layer.experts.w1]
        if not is_divided:
            expected = torch.autograd.grad(y, [*early, *late], dy)
            continue
        got = torch.autograd.grad(y, early, dy, retain_graph=True)
        with counted_collectives() as calls:
            got += torch.autograd.grad(y, late, dy if is_same else dy.clone(), retain_graph=True)
        counted.append(list(calls))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        again = torch.autograd.grad(y, late, dy)
        assert all(torch.equal(a, b) for a, b in zip(again, expected[len(early) :], strict=True))
    return counted


@pytest.mark.parametrize(
    "options, first, is_same",
    [
        ({}, "input", True),
        ({}, "input", False),
        ({"memory_reuse": "S4"}, "input", True),
        ({"balance": 1}, "input", True),
        ({}, "some", True),
        ({}, "some, then others", True),
    ],
)
def test_a_rank_that_trains_only_its_gate_has_a_second_half_as_the_others(
    options: dict[str, Any], first: str, is_same: bool
) -> None:
    assert ranks(2).run(frozen_job, options, first, is_same) == [[[] if is_same else ONCE]] * 2
