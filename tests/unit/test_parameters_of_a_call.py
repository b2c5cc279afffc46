"""The parameters of a call are those that its modules have when it begins."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import pmoe
from pmoe.experts.borrowed import BorrowedSwiGLU, Stacks
from pmoe.experts.operands import parameters_own_first
from pmoe.experts.wrapper_checks import may_be_wrapped
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


class Scaled(nn.Module):
    """A wrapper of experts with a parameter of its own."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.inner = experts
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.scale * self.inner(*args, **options)


def wrapped(layer: pmoe.MoELayer) -> None:
    """Only the parameter of the wrapper needs a gradient."""
    layer.requires_grad_(False)
    layer.experts = Scaled(layer.experts)  # type: ignore[assignment]


@pytest.mark.parametrize("change", [assigned, cast, parametrized, adapted, frozen, wrapped])
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
        assert y.requires_grad == (change is not frozen)
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


@pytest.mark.parametrize("bias", [False, True])
def test_experts_without_biases_whose_weights_are_parametrized_are_not_taken_for_wrapped(bias: bool) -> None:
    """All their parameters are in submodules. Biases that were removed leave None in their places."""
    layer = build(expert="ffn", bias=bias)
    if bias:
        layer.experts.b1 = layer.experts.b2 = None
    for name in ("w1", "w2"):
        parametrize.register_parametrization(layer.experts, name, nn.Identity())
    assert list(layer.experts._parameters.values()) == [None] * (2 * bias)
    assert list(parameters_own_first(layer.experts)) == list(layer.experts.parameters())
    assert not may_be_wrapped(layer.experts)
    layer.gate.requires_grad_(False)
    layer(tokens().detach()).sum().backward()
    assert all(value.grad is not None for value in layer.experts.parameters())


@pytest.mark.parametrize("trained", ["w1", "w2"])
def test_a_trained_parameter_of_borrowed_experts_needs_a_gradient(trained: str) -> None:
    """Borrowed experts list parameters of another module, which may be frozen but for one."""
    layer = build()
    experts, _, width = layer.experts.w1.shape
    torch.manual_seed(0)
    shapes = {"w1": (experts, 2 * 5, width), "w2": (experts, width, 5)}
    owned = {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    for name, value in owned.items():
        value.requires_grad_(name == trained)
    borrowed = BorrowedSwiGLU(Stacks(w1=owned["w1"], w2=owned["w2"], b1=None, b2=None, transposed=False))
    layer = build(d_hidden=5, expert=borrowed)
    layer.gate.requires_grad_(False)
    y = layer(tokens().detach())
    assert y.requires_grad
    y.sum().backward()
    assert [value.grad is not None for value in owned.values()] == [name == trained for name in owned]
