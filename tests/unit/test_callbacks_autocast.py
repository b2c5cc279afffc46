"""Callbacks with parameters under autocast: their hooks run in the autocast state of the layer's caller."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import MoELayer, Restore
from pmoe.engine.plan.callbacks import POINTS
from pmoe.schedule.restore import ALL_PAIRS
from tests.kit import (
    D_MODEL,
    assert_same,
    build,
    loss_of,
    one_thread,  # noqa: F401 (a fixture)
    tokens,
)
from tests.own_experts import mlp
from tests.recomputed import FROZEN
from tests.spread import spread

STATES: list[bool] = []


class Linear(nn.Module, pmoe.Callback):
    """A callback with a linear map at one point.

    is_plain: whether it casts its rows itself instead of leaving that to autocast.
    """

    def __init__(self, point: str, is_plain: bool) -> None:
        super().__init__()
        self.linear, self.is_plain = nn.Linear(D_MODEL, D_MODEL, bias=False), is_plain
        nn.init.eye_(self.linear.weight)

    def changed(self, rows: Tensor) -> Tensor:
        STATES.append(torch.is_autocast_enabled("cpu"))
        if not self.is_plain:
            return self.linear(rows)
        with torch.autocast("cpu", enabled=False):
            return rows @ self.linear.weight.to(rows.dtype).t()


class BeforeDispatch(Linear):
    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return self.changed(rows)


class AfterDispatch(Linear):
    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return self.changed(rows)


class BeforeCombine(Linear):
    def before_combine(self, rows: Tensor, chunk: int) -> Tensor:
        return self.changed(rows)


class AfterCombine(Linear):
    def after_combine(self, rows: Tensor, chunk: int) -> Tensor:
        return self.changed(rows)


KINDS = dict(zip(POINTS, (BeforeDispatch, AfterDispatch, BeforeCombine, AfterCombine), strict=True))


def layer_of(point: str, is_plain: bool, **options: Any) -> MoELayer:
    return build(
        callbacks=[KINDS[point](point, is_plain)], dtype=torch.float32, pipeline=2, **options
    ).float()


def step(layer: MoELayer, wrap: Callable[..., Any] | None = None, enabled: bool = True) -> dict[str, Tensor]:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x), layer.l_aux

    layer.zero_grad(set_to_none=True)
    x = tokens(dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        y, l_aux = both(x) if wrap is None else wrap(both, x)
        loss = loss_of(layer, y, l_aux)
    loss.backward()
    return {"y": y.detach(), "x": x.grad, **{name: each.grad for name, each in layer.named_parameters()}}


@pytest.mark.parametrize(
    "point, pair, expert", spread([*POINTS], [False, True, *ALL_PAIRS], ["ffn", mlp], every=3)
)
def test_hooks_meet_the_callers_autocast_in_both_passes(
    point: str, pair: Restore | bool, expert: Any
) -> None:
    expected = step(layer_of(point, True, memory_reuse=pair, expert=expert))
    layer = layer_of(point, False, memory_reuse=pair, expert=expert)
    STATES.clear()
    assert_same(step(layer), expected)
    assert STATES and all(STATES)


@pytest.mark.parametrize("point", POINTS)
def test_without_autocast_hooks_run_without_it(point: str) -> None:
    """The hooks run without autocast even if backward runs in an autocast context that forward was not in."""
    layer = layer_of(point, False, memory_reuse="S4")
    STATES.clear()
    loss = loss_of(layer, layer(tokens(dtype=torch.float32).requires_grad_()))
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    passes = 2 if point.endswith("dispatch") else 1  # S4 sends rows again
    assert [False] * passes * 2 == STATES


@pytest.mark.parametrize(
    "options", [{"use_reentrant": True}, {"use_reentrant": False}, {"use_reentrant": False, **FROZEN}]
)
@pytest.mark.parametrize("pair", [False, "S1", "S4"])
@pytest.mark.parametrize("point", POINTS)
def test_hooks_under_autocast_in_a_checkpoint(point: str, pair: Any, options: dict[str, Any]) -> None:
    layer = layer_of(point, False, memory_reuse=pair)
    expected = step(layer)
    assert_same(step(layer, functools.partial(checkpoint, **options)), expected)


class Norm(nn.Module, pmoe.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D_MODEL)

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return self.norm(rows)

    def before_combine(self, rows: Tensor, chunk: int) -> Tensor:
        return self.norm(rows)


@pytest.mark.parametrize("pair", [False, "S4"])
def test_a_norm_that_autocast_computes_in_float32_is_cast_back(pair: Any) -> None:
    found = step(build(callbacks=[Norm()], dtype=torch.float32, memory_reuse=pair).float())
    assert found["y"].dtype == torch.bfloat16
    assert all(each is not None and each.isfinite().all() for each in found.values())


def test_a_call_without_gradients_leaves_no_copy_in_autocasts_cache() -> None:
    layer = layer_of("after_dispatch", False)
    expected = step(layer)
    x = tokens(dtype=torch.float32).requires_grad_()
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer(x)
        loss_of(layer, layer(x)).backward()
    assert torch.equal(
        layer.callback_modules[0].linear.weight.grad, expected["callback_modules.0.linear.weight"]
    )
