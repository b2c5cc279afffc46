"""A balance loss that is attached to a tensor: a program that drops the tensor is warned."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import warn

DROPPED = "the result of BalanceLoss.attach was dropped"


@pytest.fixture(autouse=True)
def every_warning() -> Iterator[None]:
    """Each warning is issued again, and is an error unless a test expects it."""
    given = set(warn.GIVEN)
    warn.GIVEN.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    warn.GIVEN.update(given)


def parts() -> tuple[nn.Module, pmoe.BalanceLoss, Tensor]:
    torch.manual_seed(1)
    layer = pmoe.MoELayer(6, 10, 4, top_k=2, dtype=torch.float64)
    return layer, pmoe.BalanceLoss(layer), torch.randn(7, 6, dtype=torch.float64)


def drop(layer: nn.Module, balance: pmoe.BalanceLoss, x: Tensor) -> None:
    y = layer(x)
    balance.attach(y, 0.1, None)
    y.sum().backward()


def test_the_next_attach_warns_of_a_result_that_was_dropped() -> None:
    layer, balance, x = parts()
    drop(layer, balance, x)
    y = layer(x)
    with pytest.warns(UserWarning, match=DROPPED):
        y = balance.attach(y, 0.1, None)
    y.sum().backward()
    balance.attach(layer(x), 0.1, None).sum().backward()


@pytest.mark.parametrize("of_model", [True, False])
def test_the_next_step_of_an_optimizer_warns(of_model: bool) -> None:
    layer, balance, x = parts()
    drop(layer, balance, x)
    other = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD(layer.parameters() if of_model else [other], lr=0.1)
    with pytest.warns(UserWarning, match=DROPPED):
        optimizer.step()
    optimizer.step()


def test_totals_and_loss_warn() -> None:
    for method in (pmoe.BalanceLoss.totals, pmoe.BalanceLoss.loss):
        warn.GIVEN.clear()
        layer, balance, x = parts()
        drop(layer, balance, x)
        layer(x)
        with pytest.warns(UserWarning, match=DROPPED):
            method(balance)
        balance.remove()


def test_a_result_that_is_detached_later_is_noticed() -> None:
    layer, balance, x = parts()
    balance.attach(layer(x), 0.1, None).detach()
    layer(x)
    with pytest.warns(UserWarning, match=DROPPED):
        balance.totals()


def test_results_that_are_used_give_no_warning() -> None:
    """Several losses before a backward pass, a graph that is kept, checkpoints, and no gradients."""
    layer, balance, x = parts()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    step = pmoe.StepTotals(num_tokens=14, counts={"": torch.ones(4, dtype=torch.int64)})
    outputs = [balance.attach(layer(x), 0.1, step) for _ in range(2)]
    for y in outputs:
        y.sum().backward(retain_graph=True)
    del outputs, y
    balance.attach(checkpoint(layer, x, use_reentrant=False), 0.1, None).sum().backward()
    with torch.no_grad():
        balance.attach(layer(x), 0.1, None)
    balance.totals()
    only_x = x.clone().requires_grad_()
    torch.autograd.grad(balance.attach(layer(only_x), 0.1, None).sum(), only_x)
    optimizer.step()


def test_the_hook_keeps_no_model_alive_and_is_removed() -> None:
    layer, balance, x = parts()
    balance.attach(layer(x), 0.1, None).sum().backward()
    model = weakref.ref(layer)
    kept = balance._attached
    del layer, balance
    gc.collect()
    assert model() is None
    kept.remove()
    kept._unused.append(1)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()
