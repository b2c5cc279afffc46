"""pmoe.BoundedSteps: training with bounded rows ends with the values of training without a bound.

The reference is the same model, whose layers have no capacity, trained in a plain loop.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pmoe
from pmoe.experts.marks import is_expert
from tests.pool import ranks
from tests.reference import relative_error

M, EXPERTS, TOP_K, TOKENS, FACTOR = 6, 4, 2, 16, 1.3
CAPACITY = math.ceil(TOKENS * TOP_K / EXPERTS * FACTOR)
BATCHES = 9
SKEWED = {2: (0,), 3: (0, 1), 5: (1,), 8: (0, 1)}
"""Batches whose rows exceed the bound, and the ranks on which they do. The last batch is one of them."""

OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, fused=True),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
}


class Model(nn.Module):
    """Two MoE layers, a dropout, and a module with buffers that each forward pass changes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = pmoe.MoELayer(M, 8, EXPERTS, TOP_K, dtype=torch.float64, **options)
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(M, dtype=torch.float64)
        self.second = pmoe.MoELayer(M, 8, EXPERTS, TOP_K, dtype=torch.float64, **options)
        with torch.no_grad():
            self.first.gate.weight.copy_(8 * torch.eye(EXPERTS, M))  # column e of a token leads to expert e

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.dropout(self.first(x))
        return hidden + self.second(self.norm(hidden))


def build(**options: Any) -> Model:
    torch.manual_seed(5)
    return Model(**options)


def batch(index: int, rank: int) -> Tensor:
    """(TOKENS, M): rows of experts in turn, or for a skewed batch mostly those of experts 0 and 1."""
    generator = torch.Generator().manual_seed(100 * index + rank)
    x = torch.randn(TOKENS, M, generator=generator, dtype=torch.float64)
    token = torch.arange(TOKENS)
    is_skewed = rank in SKEWED.get(index, ())
    x[token, token % (2 if is_skewed else EXPERTS)] += 3
    x[token, (token + 1) % (2 if is_skewed else EXPERTS)] += 2
    return x


def run_step(model: Model, optimizer: torch.optim.Optimizer, x: Tensor, world: int) -> float:
    """Sets gradients to zero, computes them, and reduces those that do not belong to experts."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    if world > 1:
        for parameter in model.parameters():
            if not is_expert(parameter):
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
    return loss.item()


def state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns copies of parameters, buffers, the optimizer's tensors, and the next random number."""
    values = {name: value.double().clone() for name, value in model.state_dict().items()}
    for index, slots in optimizer.state_dict()["state"].items():
        values |= {f"{index} {name}": value.double().clone() for name, value in slots.items()}
    return {**values, "random": torch.rand(1, dtype=torch.float64)}


def plain(rank: int, world: int, kind: str) -> tuple[dict[str, Tensor], int]:
    """Returns the state after training without a bound, and in how many steps a bound would be exceeded."""
    model = build()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    exceeded = 0
    for index in range(BATCHES):
        run_step(model, optimizer, batch(index, rank), world)
        rows = torch.stack([layer.tokens_per_expert.max() for layer in (model.first, model.second)]).max()
        if world > 1:
            dist.all_reduce(rows, dist.ReduceOp.MAX)
        exceeded += rows.item() > CAPACITY
        optimizer.step()
        scheduler.step()
    return state(model, optimizer), exceeded


def bounded(rank: int, world: int, kind: str) -> tuple[dict[str, Tensor], int]:
    """Returns the state after training with `pmoe.BoundedSteps`, and the number of repeated steps."""
    model = build(capacity_factor=FACTOR, pad_to_capacity=True)
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    steps = pmoe.BoundedSteps(model, optimizer, lambda x: run_step(model, optimizer, x, world))
    for index in range(BATCHES):
        steps.step(batch(index, rank))
        scheduler.step()
    steps.finish()
    steps.finish()  # a second call changes nothing
    assert model.first.pad_to_capacity and model.first.capacity_factor == FACTOR
    return state(model, optimizer), steps.repeated


def both(rank: int, world: int, kind: str) -> tuple[list[str], int, int]:
    """Returns the values that differ between `plain` and `bounded`, and both numbers of steps."""
    expected, exceeded = plain(rank, world, kind)
    result, repeated = bounded(rank, world, kind)
    assert set(result) == set(expected)
    wrong = [
        f"{name}: {relative_error(result[name], value)}"
        for name, value in expected.items()
        if not relative_error(result[name], value) <= 1e-12
    ]
    return wrong, exceeded, repeated


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_are_those_of_training_without_a_bound(world: int, kind: str) -> None:
    for wrong, exceeded, repeated in ranks(world).run(both, kind):
        assert not wrong
        assert len(SKEWED) <= exceeded < BATCHES, "the batches do not test what they should"
        assert repeated == exceeded


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_values_of_one_process_are_those_of_training_without_a_bound(kind: str) -> None:
    wrong, exceeded, repeated = both(0, 1, kind)
    assert not wrong
    assert 0 < exceeded == repeated < BATCHES


def test_the_host_reads_one_step_late_whether_rows_were_dropped() -> None:
    model = build(capacity_factor=1.6, pad_to_capacity=True)  # only skewed batches exceed 13 of 16 rows
    optimizer = OPTIMIZERS["fused AdamW"](model.parameters())
    ran: list[int] = []

    def run(index: int) -> float:
        ran.append(index)
        return run_step(model, optimizer, batch(index, 0), 1)

    steps = pmoe.BoundedSteps(model, optimizer, run)
    for index in range(1, 6):
        steps.step(index)
    # Batches 2 and 3 are skewed. Batch 3 is skipped because of batch 2, and again because of its own rows.
    assert ran == [1, 2, 3, 2, 3, 4, 3, 4, 5]
    assert steps.repeated == 2


def test_a_state_dict_of_a_model_that_lacks_its_last_step_is_refused() -> None:
    model = build(capacity_factor=FACTOR, pad_to_capacity=True)
    optimizer = OPTIMIZERS["fused AdamW"](model.parameters())
    steps = pmoe.BoundedSteps(model, optimizer, lambda x: run_step(model, optimizer, x, 1))
    steps.step(batch(0, 0))
    model.state_dict()
    steps.step(batch(2, 0))
    for owner in (model, optimizer):
        with pytest.raises(RuntimeError, match=re.escape("call BoundedSteps.finish() on every rank")):
            owner.state_dict()
    steps.finish()
    model.state_dict()
    optimizer.state_dict()


def test_options_come_back_after_an_error_in_a_repeated_step() -> None:
    model = build(capacity_factor=FACTOR, pad_to_capacity=True)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())

    def fail(x: Tensor) -> float:
        raise OSError("no data")

    steps = pmoe.BoundedSteps(model, optimizer, lambda x: run_step(model, optimizer, x, 1), fail)
    with pytest.raises(OSError, match="no data"):
        steps.step(batch(2, 0))
    assert model.first.pad_to_capacity and model.first.capacity_factor == FACTOR


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"model": build()}, "model must have a MoELayer with pad_to_capacity (True)"),
        ({"model": 3}, "model (3) must be a torch.nn.Module"),
        ({"optimizer": "adam"}, "optimizer ('adam') must be a torch.optim.Optimizer"),
        ({"run": None}, "run (None) must be a function that takes a batch"),
        ({"run_exactly": 4}, "run_exactly (4) must be a function that takes a batch"),
    ],
)
def test_what_is_wrong_is_named(arguments: dict[str, Any], message: str) -> None:
    model = build(capacity_factor=FACTOR, pad_to_capacity=True)
    right = {"model": model, "optimizer": OPTIMIZERS["AdamW"](model.parameters()), "run": print}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        pmoe.BoundedSteps(**{**right, **arguments})
