"""No hidden waiting, over NCCL: one host synchronisation a layer at most in forward, none in backward."""

from __future__ import annotations

import pytest
import torch

from pmoe.schedule.tasks import Lane
from tests.gpu.support import (
    LAYERS,
    LONG,
    NEEDS_GPU,
    check_backward_runs_ahead,
    check_waiting,
    make_batch,
    make_layer,
    slow_copies,
    slow_link,
    step,
)

pytestmark = [*NEEDS_GPU, pytest.mark.usefixtures("nccl")]


@pytest.mark.parametrize("bypass_local", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_forward_waits_once_and_backward_never(name: str, dtype: torch.dtype, bypass_local: bool) -> None:
    layer = make_layer(dtype, bypass_local=bypass_local, **LAYERS[name]())
    check_waiting(layer, *make_batch(dtype=dtype))


@pytest.mark.parametrize("name", ["n=3", "user's experts"])
def test_under_autocast_too(name: str) -> None:
    layer = make_layer(torch.float32, bypass_local=False, **LAYERS[name]())
    check_waiting(layer, *make_batch(dtype=torch.float32), autocast=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["n=3", "capacity", "user's experts", "S1", "S4", "S1, user's experts"])
def test_backward_returns_before_the_device_begins_it(name: str, dtype: torch.dtype) -> None:
    layer = make_layer(dtype, bypass_local=False, **LAYERS[name]())
    check_backward_runs_ahead(layer, *make_batch(dtype=dtype))


@pytest.mark.parametrize("name", ["n=3", "S1", "S4"])
def test_forward_waits_for_the_counts_and_nothing_behind_them(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The host comes back from forward while the first message is still on its way."""
    layer, (x, _) = make_layer(bypass_local=False, **LAYERS[name]()), make_batch()
    for _ in range(2):
        layer(x)
    slow_link(monkeypatch, before=4 * LONG)
    torch.cuda.synchronize()
    layer(x)
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "forward returned only after the device had finished"
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["S1", "S1, user's experts"])
def test_the_host_waits_for_no_copy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It comes back from both passes while the first copy out is still to come."""
    layer, (x, grad) = make_layer(**LAYERS[name]()), make_batch()
    for _ in range(2):
        step(layer, x, grad)
    slow_copies(monkeypatch, 4 * LONG, Lane.COPY_OUT)
    torch.cuda.synchronize()
    y = layer(x.clone().requires_grad_())
    (y * grad).sum().backward()
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "backward returned only after the device had finished"
    torch.cuda.synchronize()
