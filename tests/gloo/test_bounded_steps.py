"""pmoe.BoundedSteps: training with bounded rows ends with the values of training without a bound.

The reference is the same model, whose layers have no capacity, trained in a plain loop.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pmoe
from pmoe.experts.marks import is_expert
from pmoe.training import bounded_steps
from tests.pool import ranks
from tests.reference import differing, relative_error

M, EXPERTS, TOP_K, TOKENS, FACTOR = 6, 4, 2, 16, 1.3
CAPACITY = math.ceil(TOKENS * TOP_K / EXPERTS * FACTOR)
BATCHES = 9
SKEWED = {0: (0,), 2: (0,), 3: (0, 1), 5: (1,), 8: (0, 1)}
"""Batches whose rows exceed the bound, and the ranks on which they do. The first and last are among them."""

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
    wrong = differing(result, expected)
    return wrong, exceeded, repeated


@pytest.mark.sampled(1)
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


def test_the_host_waits_for_an_answer_that_the_device_has_not_copied_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA the answer of a step arrives later, and an event says when."""
    queries: list[int] = []

    class Event:
        def query(self) -> bool:
            queries.append(1)
            return len(queries) % 3 == 0

    note = bounded_steps._Step.note

    def note_later(step: Any, *answers: Tensor) -> None:
        note(step, *answers)
        step.was_copied = Event()

    monkeypatch.setattr(bounded_steps._Step, "note", note_later)
    layer = layer_alone(**BOUND)
    optimizer, run = adam_and_run(layer)
    steps = pmoe.BoundedSteps(layer, optimizer, run)
    for index in range(1, 6):
        steps.step(batch(index, 0))
    steps.finish()
    check_alike(layer, trained_plainly(range(1, 6)))
    assert len(queries) == 3 * 5


def layer_alone(**options: Any) -> pmoe.MoELayer:
    """A layer whose rows exceed its bound of 13 of 16 rows in skewed batches only."""
    torch.manual_seed(5)
    layer = pmoe.MoELayer(M, 8, EXPERTS, TOP_K, dtype=torch.float64, **options)
    with torch.no_grad():
        layer.gate.weight.copy_(8 * torch.eye(EXPERTS, M))
    return layer


BOUND = {"capacity_factor": 1.6, "pad_to_capacity": True}


def check_alike(layer: pmoe.MoELayer, plain: pmoe.MoELayer) -> None:
    for (name, value), expected in zip(layer.state_dict().items(), plain.state_dict().values(), strict=True):
        assert relative_error(value.double(), expected.double()) <= 1e-12, name


def adam_and_run(layer: pmoe.MoELayer) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = OPTIMIZERS["fused AdamW"](layer.parameters())

    def run(x: Tensor) -> None:
        optimizer.zero_grad()
        layer(x).square().mean().backward()

    return optimizer, run


def trained_plainly(indices: Any, **options: Any) -> pmoe.MoELayer:
    plain = layer_alone(**options)
    optimizer, run = adam_and_run(plain)
    for index in indices:
        run(batch(index, 0))
        optimizer.step()
        if options:
            plain.gate.update_bias()
    return plain


def test_a_state_dict_of_a_model_that_lacks_its_last_step_is_refused() -> None:
    layer = layer_alone(**BOUND)
    optimizer, run = adam_and_run(layer)
    steps = pmoe.BoundedSteps(layer, optimizer, run)
    steps.step(batch(1, 0))
    layer.state_dict()
    steps.step(batch(2, 0))
    for owner in (layer, optimizer):
        with pytest.raises(RuntimeError, match=re.escape("call BoundedSteps.finish() on every rank")):
            owner.state_dict()
    steps.finish()
    layer.state_dict()
    optimizer.state_dict()


def test_gradients_in_the_memory_of_a_graph_stay_those_that_the_optimizer_reads() -> None:
    """A CUDA graph writes gradients into the tensors of its capture. A function on the CPU does the same."""
    layer = layer_alone(**BOUND)
    optimizer, run = adam_and_run(layer)
    run(batch(1, 0))
    captured = [parameter.grad for parameter in layer.parameters()]

    def replay(x: Tensor) -> None:
        before = [parameter.grad for parameter in layer.parameters()]
        run(x)
        for memory, old, parameter in zip(captured, before, layer.parameters(), strict=True):
            assert memory is not None and parameter.grad is not None
            memory.copy_(parameter.grad)
            parameter.grad = old

    steps = pmoe.BoundedSteps(layer, optimizer, replay, run)
    for index in range(1, 6):
        steps.step(batch(index, 0))
    steps.finish()
    check_alike(layer, trained_plainly(range(1, 6)))
    assert steps.repeated == 2


def test_a_repeated_step_that_drops_rows_too_raises() -> None:
    layer = layer_alone(**BOUND)
    optimizer, run = adam_and_run(layer)

    def replay(x: Tensor) -> None:  # as a graph, it keeps the bound that it was captured with
        was = layer.capacity_factor, layer.pad_to_capacity
        layer.capacity_factor = BOUND["capacity_factor"]
        layer.pad_to_capacity = True
        run(x)
        layer.pad_to_capacity = was[1]
        layer.capacity_factor = was[0]

    steps = pmoe.BoundedSteps(layer, optimizer, replay)
    steps.step(batch(2, 0))
    with pytest.raises(RuntimeError, match="run_exactly must call the model itself"):
        steps.finish()


def test_a_step_that_no_layer_counts_raises() -> None:
    layer = layer_alone(**BOUND)
    other = layer_alone(**BOUND)
    optimizer, _ = adam_and_run(layer)
    _, run_other = adam_and_run(other)
    steps = pmoe.BoundedSteps(layer, optimizer, run_other)
    steps.step(batch(1, 0))
    with pytest.raises(RuntimeError, match="no MoELayer of the model counted its dropped rows"):
        steps.finish()


def test_random_numbers_between_steps_are_drawn_once() -> None:
    def drawn(bounded: bool) -> list[int]:
        layer = layer_alone(**(BOUND if bounded else {}))
        optimizer, run = adam_and_run(layer)
        steps = pmoe.BoundedSteps(layer, optimizer, run) if bounded else None
        numbers = []
        torch.manual_seed(1)
        for index in range(1, 6):
            numbers.append(int(torch.randint(1000, ())))
            steps.step(batch(index, 0)) if steps else run(batch(index, 0))
        return numbers

    assert drawn(True) == drawn(False)


def test_changes_of_buffers_after_a_step_are_repeated_with_it() -> None:
    layer = layer_alone(gate="deepseek", **BOUND)
    optimizer, run = adam_and_run(layer)
    steps = pmoe.BoundedSteps(layer, optimizer, run, after_step=layer.gate.update_bias)
    for index in range(1, 6):
        steps.step(batch(index, 0))
    steps.finish()
    assert steps.repeated
    check_alike(layer, trained_plainly(range(1, 6), gate="deepseek"))


@pytest.mark.parametrize("kind", ["fused AdamW", "AdamW"])
def test_a_step_whose_repetition_fails_may_be_repeated_again(kind: str) -> None:
    layer = layer_alone(**BOUND)
    optimizer = OPTIMIZERS[kind](layer.parameters())
    failing = [True]

    def run(x: Tensor) -> None:
        optimizer.zero_grad()
        layer(x).square().mean().backward()

    def fail_once(x: Tensor) -> None:
        if failing.pop() if failing else False:
            raise OSError("no data")
        run(x)

    steps = pmoe.BoundedSteps(layer, optimizer, run, fail_once)
    steps.step(batch(1, 0))
    with pytest.raises(OSError, match="no data"):
        steps.step(batch(2, 0))
        steps.finish()
    assert layer.pad_to_capacity and layer.capacity_factor == BOUND["capacity_factor"]
    if kind == "fused AdamW":
        steps.finish()
    else:
        steps.step(batch(2, 0))
    check_alike(layer, trained_plainly((1, 2)))


def test_values_that_are_loaded_end_a_step_that_waits_to_be_repeated() -> None:
    layer = layer_alone(**BOUND)
    optimizer, run = adam_and_run(layer)
    steps = pmoe.BoundedSteps(layer, optimizer, run)
    start = copy.deepcopy(layer.state_dict())
    steps.step(batch(2, 0))
    layer.load_state_dict(start)
    steps.step(batch(1, 0))
    steps.finish()
    assert steps.repeated == 0
    assert {value["step"].item() for value in optimizer.state_dict()["state"].values()} == {1}


def test_a_copy_of_the_model_counts_nothing_and_hooks_can_be_removed() -> None:
    layer = layer_alone(**BOUND)
    optimizer, run = adam_and_run(layer)
    steps = pmoe.BoundedSteps(layer, optimizer, run)
    steps.step(batch(1, 0))
    copied = copy.deepcopy(layer)
    copied(batch(2, 0))
    steps.finish()
    assert steps.repeated == 0
    steps.remove()
    assert not layer._forward_hooks


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"model": build()}, "model must have a MoELayer with pad_to_capacity (True)"),
        ({"model": 3}, "model (3) must be a torch.nn.Module"),
        ({"optimizer": "adam"}, "optimizer ('adam') must be a torch.optim.Optimizer"),
        ({"run": None}, "run (None) must be a function"),
        ({"run_exactly": 4}, "run_exactly (4) must be a function"),
        ({"after_step": "x"}, "after_step ('x') must be a function"),
    ],
)
def test_what_is_wrong_is_named(arguments: dict[str, Any], message: str) -> None:
    model = build(capacity_factor=FACTOR, pad_to_capacity=True)
    right = {"model": model, "optimizer": OPTIMIZERS["AdamW"](model.parameters()), "run": print}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        pmoe.BoundedSteps(**{**right, **arguments})
