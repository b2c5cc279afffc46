"""On a GPU, the first call with about so many rows times the kernels of the experts' products."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pmoe
from pmoe.choose import open_choice
from pmoe.choose.choose import choose
from pmoe.comm.counts import RankCounts
from pmoe.experts import FFNExperts


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the hidden columns of the experts of each call that asked for times."""
    widths: list[int] = []

    def measured(modules: Any, counts: RankCounts, inputs: Any) -> bool:
        widths.append(modules.experts.num_hidden)
        return True

    monkeypatch.setattr(open_choice, "measure_products_of", measured)
    return widths


def ask(layer: pmoe.MoELayer, num_tokens: int, needs_grad: bool = True) -> None:
    """Chooses as in a call on a GPU."""
    rows = torch.zeros(1, 1, 4, dtype=torch.int64)
    counts = RankCounts(send=rows, recv=rows, recv_device=rows, max_tokens=num_tokens, needs_grad=needs_grad)
    x_TM = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    inputs: Any = SimpleNamespace(x_TM=x_TM, autocast_for=lambda experts: contextlib.nullcontext())
    layer.experts.operands()  # a call reads them first
    choose(layer.layer_modules, counts, inputs, orders=None)  # type: ignore[arg-type]


def test_later_calls_with_about_so_many_rows_do_not_ask_again(timed: list[int]) -> None:
    layer = pmoe.MoELayer(8, 16, 4, pipeline=2)
    for num_tokens, needs_grad, asked in (
        (100, True, 1),
        (100, True, 1),
        (128, True, 1),  # the same power of two
        (129, True, 2),
        (129, False, 3),
        (100, True, 3),
    ):
        ask(layer, num_tokens, needs_grad)
        assert len(timed) == asked, (num_tokens, needs_grad)


def test_other_experts_are_timed_again(timed: list[int]) -> None:
    """Their products may have other sizes. A rank that has not noted the old ones would time alone."""
    layer = pmoe.MoELayer(8, 16, 4, pipeline=2)
    ask(layer, 100)
    layer.experts = FFNExperts(8, 32, 4)
    ask(layer, 100)
    layer._modules["experts"] = FFNExperts(8, 64, 4)  # as some tools write it
    ask(layer, 100)
    assert timed == [16, 32, 64]


def test_experts_whose_biases_were_removed_are_timed_again(timed: list[int]) -> None:
    layer = pmoe.MoELayer(8, 16, 4, pipeline=2)
    ask(layer, 100)
    layer.experts.b1 = None
    layer.experts.b2 = None
    ask(layer, 100)
    ask(layer, 100)
    assert timed == [16, 16]


def test_another_group_times_again(timed: list[int]) -> None:
    layer = pmoe.MoELayer(8, 16, 4, pipeline=2)
    ask(layer, 100)
    layer.cache.forget_ranks()
    ask(layer, 100)
    assert timed == [16, 16]
