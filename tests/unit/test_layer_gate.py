"""MoELayer with gates of users' own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe import MoELayer, Routing
from tests.kit import AUX, D_HIDDEN, D_MODEL, NUM_EXPERTS, assert_same, build, gradients, tokens
from tests.own_gates import ByPosition
from tests.reference import Definition


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_a_gate_of_ones_own_is_followed(capacity_factor: float | None, top_k: int, n: int) -> None:
    """The gate may choose another number of experts for each token than the layer's top_k."""
    layer = build(gate=ByPosition(top_k), pipeline=n, capacity_factor=capacity_factor)
    got = gradients(layer, tokens())
    parameters = dict(layer.named_parameters())
    x = tokens().requires_grad_()
    definition = Definition(parameters, top_k)
    capacity = math.inf if capacity_factor is None else math.ceil(capacity_factor * 11 * top_k / 4)
    used, rows = [0] * NUM_EXPERTS, []
    for t in range(11):
        row = torch.zeros(D_MODEL, dtype=torch.float64)
        for k in range(top_k):
            e = (t + k) % NUM_EXPERTS
            used[e] += 1
            if used[e] <= capacity:
                row = row + layer.gate.factor[k] * definition.run_expert(e, x[t])
        rows.append(row)
    y = torch.stack(rows)
    loss = (y * tokens(seed=4)).sum() + AUX * layer.gate.factor.square().sum()
    grads = torch.autograd.grad(loss, [x, *parameters.values()])
    expected = dict(zip(["x", *parameters], grads, strict=True))
    assert_same(got, {"y": y.detach(), "l_aux": got["l_aux"], **expected}, 1e-12)
    assert got["l_aux"] == layer.gate.factor.square().sum()


def test_a_subclass_of_gate_without_parameters_works_with_experts_without_parameters() -> None:
    class First(pmoe.Gate):
        def forward(self, x: Tensor) -> Routing:
            expert = torch.zeros(x.shape[0], 1, dtype=torch.int64)
            return Routing(expert=expert, weight=torch.full((x.shape[0], 1), 2.0), l_aux=torch.zeros(()))

    layer = MoELayer(D_MODEL, D_HIDDEN, 2, gate=First(), expert=nn.Identity)
    x = tokens().requires_grad_()
    y = layer(x)
    assert torch.equal(y, 2 * x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_a_float32_gate_may_route_bfloat16_rows() -> None:
    layer = build(dtype=torch.bfloat16)
    layer.gate.float()
    x = tokens(dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    layer(x).sum().backward()
    assert layer.gate.weight.grad.dtype == torch.float32
    with pytest.raises(
        ValueError, match=r"dtype torch.float32 must be of the layer's dtype \(torch.bfloat16\)"
    ):
        layer(x.float())


@pytest.mark.parametrize(
    "gate, error_type, match",
    [
        (nn.Identity(), TypeError, r"gate \(Identity\) must return a pmoe.Routing, not Tensor"),
        (ByPosition(expert=torch.zeros(11, dtype=torch.int64)), ValueError, r"expert of shape \(11,\)"),
        (
            ByPosition(expert=torch.zeros(5, 2, dtype=torch.int64)),
            ValueError,
            r"must have shape \(11, 2\) and dtype torch.int64, to fit T = 11 tokens",
        ),
        (
            ByPosition(weight=torch.ones(11, 1)),
            ValueError,
            r"weight of shape \(11, 1\) and dtype torch.float\d+; it must have shape \(11, 2\)",
        ),
        (
            ByPosition(expert=torch.zeros(11, 2, dtype=torch.int32)),
            ValueError,
            "dtype torch.int32; it must have",
        ),
        (ByPosition(num_experts=9), ValueError, "rank 0: its gate returned expert indices outside"),
        (ByPosition(expert=torch.full((11, 2), -1)), ValueError, "its gate returned expert indices outside"),
    ],
)
def test_what_is_no_routing_is_refused(gate: nn.Module, error_type: type[Exception], match: str) -> None:
    layer = build(gate=gate)
    with pytest.raises(error_type, match=match):
        layer(tokens())


def test_the_logits_of_a_gate_of_ones_own_are_checked() -> None:
    bad = torch.full((11, NUM_EXPERTS), math.nan)
    with pytest.raises(ValueError, match=r"not finite \(check_finite=False"):
        build(gate=ByPosition(logits=bad))(tokens())
    build(gate=ByPosition(logits=bad), check_finite=False)(tokens())
    build(gate=ByPosition(), check_finite=True)(tokens())  # it has none to show


def test_an_error_of_the_gate_comes_through_as_it_is() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Routing:
            raise KeyError("number 17")

    with pytest.raises(KeyError, match="number 17"):
        build(gate=Broken())(tokens())
