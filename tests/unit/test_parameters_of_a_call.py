"""The parameters of a call are those that its modules have when it begins."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import pmoe
from tests.kit import build, tokens


def assigned(layer: pmoe.MoELayer) -> None:
    layer.experts.w1 = nn.Parameter(2 * layer.experts.w1.detach())
    layer.gate.weight = nn.Parameter(-layer.gate.weight.detach())


def cast(layer: pmoe.MoELayer) -> None:
    layer.to(torch.float32)


def parametrized(layer: pmoe.MoELayer) -> None:
    parametrizations.weight_norm(layer.experts, "w1")


def adapted(layer: pmoe.MoELayer) -> None:
    pmoe.add_lora(layer, rank=2)


def frozen(layer: pmoe.MoELayer) -> None:
    layer.requires_grad_(False)


@pytest.mark.parametrize("change", [assigned, cast, parametrized, adapted, frozen])
def test_a_call_computes_with_the_parameters_of_this_moment(change: Callable[[pmoe.MoELayer], None]) -> None:
    """A layer that was called before and then changed computes as a changed layer that was never called."""
    fresh = build()
    called = copy.deepcopy(fresh)
    x = tokens()
    called(x).sum().backward()
    called.zero_grad()
    outputs: list[tuple[Tensor, list[Tensor | None]]] = []
    for layer in (called, fresh):
        torch.manual_seed(0)
        change(layer)
        dtype = next(layer.gate.parameters()).dtype
        y = layer(x.detach().to(dtype))
        if y.requires_grad:
            y.square().sum().backward()
        outputs.append((y.detach(), [value.grad for value in layer.parameters()]))
    (y, gradients), (wanted_y, wanted) = outputs
    torch.testing.assert_close(y, wanted_y, rtol=0, atol=0)
    assert [value is None for value in gradients] == [value is None for value in wanted]
    for one, other in zip(gradients, wanted, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_values_of_functional_call_are_used_in_that_call_alone() -> None:
    layer = build()
    x = tokens().detach()
    before = layer(x).detach()
    values = {name: (3 * value.detach()).requires_grad_() for name, value in layer.named_parameters()}
    y = torch.func.functional_call(layer, values, (x,))
    y.sum().backward()
    assert values["experts.w1"].grad is not None
    assert all(value.grad is None for value in layer.parameters())
    other = copy.deepcopy(layer)
    other.load_state_dict({name: value.detach() for name, value in values.items()})
    torch.testing.assert_close(y.detach(), other(x).detach(), rtol=0, atol=0)
    torch.testing.assert_close(layer(x).detach(), before, rtol=0, atol=0)
