"""Callbacks in one process: which rows they get, which tensors they must not change, and their own
parameters.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe

D_MODEL = 4


class Scale(nn.Module, pmoe.Callback):
    """A callback that multiplies rows by a learned factor before they are sent, and results by another
    one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.there = nn.Parameter(torch.tensor([1.3, 0.7, 1.1, 0.9], dtype=torch.float64))
        self.back = nn.Parameter(torch.tensor(0.8, dtype=torch.float64))

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * self.there

    def after_combine(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * self.back.exp()


def build(**options: object) -> pmoe.MoELayer:
    torch.manual_seed(3)
    return pmoe.MoELayer(D_MODEL, 8, 4, 2, dtype=torch.float64, pipeline=2, **options)


@pytest.mark.parametrize("reuse", [False, "S4"])
def test_parameters_of_a_callback_are_trained_with_the_layer(reuse: bool | str) -> None:
    layer = build(callbacks=[Scale()], memory_reuse=reuse)
    assert sum("callback_modules" in name for name, _ in layer.named_parameters()) == 2
    x = torch.randn(7, D_MODEL, dtype=torch.float64)
    dy = torch.randn(7, D_MODEL, dtype=torch.float64)
    (layer(x) * dy).sum().backward()
    for parameter in layer.callback_modules.parameters():
        for at in range(parameter.numel()):
            sides = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.view(-1)[at] += sign * 1e-6
                    sides.append((layer(x) * dy).sum())
                    parameter.view(-1)[at] -= sign * 1e-6
            numeric = float(sides[0] - sides[1]) / 2e-6
            assert float(parameter.grad.view(-1)[at]) == pytest.approx(numeric, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("frozen", ["there", "back"])
def test_a_frozen_parameter_of_a_callback_changes_no_other_gradient(frozen: str) -> None:
    """Backward must not ask autograd for the gradient of a frozen parameter, because autograd would raise."""
    layer, x = build(callbacks=[Scale()]), torch.randn(7, D_MODEL, dtype=torch.float64)
    layer(x).sum().backward()
    expected = {name: each.grad for name, each in layer.named_parameters()}
    layer.zero_grad()
    layer.callback_modules[0].get_parameter(frozen).requires_grad_(False)
    layer(x).sum().backward()
    for name, parameter in layer.named_parameters():
        if name.endswith(frozen):
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, expected[name]), name


def test_a_copy_has_callbacks_of_its_own_and_replaced_parameters_are_seen() -> None:
    layer = build(callbacks=[Scale()])
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.callback_modules[0].back.fill_(2.0)
    x = torch.randn(5, D_MODEL, dtype=torch.float64)
    assert not torch.equal(layer(x), other(x))
    layer.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(layer(x), other(x))
    layer(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.callback_modules.parameters())


class Seen(pmoe.Callback):
    def __init__(self) -> None:
        self.points: list[tuple[str, int, int]] = []

    def note(self, point: str, rows: Tensor, chunk: int) -> Tensor:
        self.points.append((point, chunk, rows.shape[0]))
        return rows

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return self.note("before_dispatch", rows, chunk)

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return self.note("after_dispatch", rows, chunk)

    def before_combine(self, rows: Tensor, chunk: int) -> Tensor:
        return self.note("before_combine", rows, chunk)

    def after_combine(self, rows: Tensor, chunk: int) -> Tensor:
        return self.note("after_combine", rows, chunk)


@pytest.mark.parametrize("reuse", [False, "S2", "S4"])
def test_each_chunk_passes_every_point_and_rows_that_are_sent_again_pass_theirs_again(
    reuse: bool | str,
) -> None:
    seen = Seen()
    layer = build(callbacks=[seen], memory_reuse=reuse)
    y = layer(torch.randn(10, D_MODEL, dtype=torch.float64))
    points = ("before_dispatch", "after_dispatch", "before_combine", "after_combine")
    assert sorted(seen.points) == sorted((point, chunk, 10) for point in points for chunk in range(2))
    seen.points.clear()
    y.sum().backward()
    again = [(point, chunk, 10) for point in points[:2] for chunk in range(2)] if reuse else []
    assert sorted(seen.points) == sorted(again)  # S2 and S4 send T_DI again


class Weighed(pmoe.Callback):
    def before_combine(self, rows: Tensor, chunk: int) -> Tensor:
        self.rows = rows.detach().clone()
        return rows


def test_before_combine_sees_rows_with_the_routing_weight_applied() -> None:
    weighed = Weighed()
    layer = pmoe.MoELayer(D_MODEL, 8, 1, dtype=torch.float64, normalize_gate=False, callbacks=[weighed])
    with torch.no_grad():
        y = layer(torch.randn(6, D_MODEL, dtype=torch.float64))
    assert torch.equal(weighed.rows, y)


def test_checkpointing_runs_the_hooks_again_and_changes_no_gradient() -> None:
    plain, layer = build(callbacks=[Scale()]), build(callbacks=[Scale()])
    x = torch.randn(6, D_MODEL, dtype=torch.float64)
    plain(x).square().sum().backward()
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), layer.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
