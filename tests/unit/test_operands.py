"""The parameters of a module are read anew in each call: those that torch's own walk finds, and no others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import pmoe
from pmoe.experts import FFNExperts
from pmoe.experts.operands import need_gradients, parameters_of
from tests.kit import build, tokens


class Overriding(nn.Module):
    """A module whose parameters are not those that it has registered."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(1))
        self.hidden = nn.Parameter(torch.ones(1))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield self.own


class OverridingNames(Overriding):
    """A module that overrides the walk behind ``parameters()``."""

    parameters = nn.Module.parameters

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield "own", self.own


MODULES: dict[str, Callable[[], nn.Module]] = {
    "without submodules": lambda: FFNExperts(4, 8, 2),
    "without bias": lambda: FFNExperts(4, 8, 2, bias=False),
    "a parameter that is None": lambda: nn.Linear(2, 2, bias=False),
    "with submodules": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)),
    "no parameters": nn.Identity,
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    "parameters() is overridden": Overriding,
    "named_parameters() is overridden": OverridingNames,
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
def test_the_parameters_of_a_module_are_those_of_its_own_walk(make: Callable[[], nn.Module]) -> None:
    module = make()
    assert [id(value) for value in parameters_of(module)] == [id(value) for value in module.parameters()]


def test_any_tensor_that_requires_a_gradient_asks_for_one() -> None:
    frozen = torch.ones(1)
    assert not need_gradients([])
    assert not need_gradients([frozen, frozen])
    assert need_gradients([frozen, torch.ones(1, requires_grad=True), frozen])


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
