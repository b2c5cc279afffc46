"""The backward pass in two halves: gradients of inputs first, of parameters later; each product once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pmoe import Callback, MoELayer
from pmoe.engine import halves
from pmoe.engine.passes.backward import Backward
from pmoe.engine.plan.plan import PassModules
from pmoe.schedule.separate_buffers import backward_schedule
from pmoe.schedule.tasks import Schedule, Stages, Task, sequential
from tests.kit import build, tokens
from tests.own_experts import mlp

SPLITS: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks": {"pipeline": 3},
    "swiglu": {"pipeline": 2, "expert": "swiglu"},
    "shared expert": {"shared_expert": 8, "shared_gate": True},
    "padded": {"pad_to_capacity": True, "capacity_factor": 1.5},
    "dropping": {"capacity_factor": 0.7},
}
"""Layers whose tasks W are left to the second half."""


class Doubled(Callback, nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * self.factor


AT_ONCE: dict[str, dict[str, Any]] = {
    "ring slots": {"pipeline": 2, "memory_reuse": "S4"},
    "modules": {"expert": mlp, "pipeline": 2},
}
"""Layers whose first half computes everything."""


def built(name: str) -> MoELayer:
    if name == "callbacks":
        return build(callbacks=[Doubled()], pipeline=2)
    return build(**{**SPLITS, **AT_ONCE}[name])


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the tasks of backward passes by their kind."""
    counts: Counter[str] = Counter()
    plain = Backward.run_schedule

    def run_schedule(self: Backward) -> None:
        counts.update(task.kind.value for task in self.schedule.tasks)
        plain(self)

    with mock.patch.object(Backward, "run_schedule", run_schedule):
        yield counts


def upstream(y: Tensor) -> Tensor:
    """The mean of squares: its gradient is another tensor in each run of autograd."""
    return y.square().mean()


@pytest.mark.parametrize("name", [*SPLITS, *AT_ONCE, "callbacks"])
@pytest.mark.parametrize("upstream_again", [False, True])
def test_both_halves_equal_one_backward_pass_and_run_each_task_once(name: str, upstream_again: bool) -> None:
    layer = built(name)
    x = tokens().requires_grad_()
    y = layer(x * 2)
    parameters = list(layer.parameters())
    out, grad = (upstream(y), None) if upstream_again else (y, tokens(seed=4))
    with counted() as whole:
        expected = torch.autograd.grad(out, [x, *parameters], grad, retain_graph=True)
    with counted() as first:
        (of_x,) = torch.autograd.grad(out, [x], grad, retain_graph=True)
    with counted() as second:
        of_parameters = torch.autograd.grad(out, parameters, grad)
    assert torch.equal(of_x, expected[0])
    assert all(torch.equal(a, b) for a, b in zip(of_parameters, expected[1:], strict=True))
    assert first + second == whole
    is_split = name in SPLITS or name == "callbacks"
    assert set(second) <= {"W", "LW", "XW"} and bool(second) is is_split


def test_the_gate_may_be_asked_for_between_the_halves() -> None:
    layer = build()
    x = tokens().requires_grad_()
    y, dy = layer(x * 2), tokens(seed=4)
    experts = list(layer.experts.parameters())
    expected = torch.autograd.grad(y, [x, layer.gate.weight, *experts], dy, retain_graph=True)
    with counted() as counts:
        (of_x,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
        (of_gate,) = torch.autograd.grad(y, [layer.gate.weight], dy, retain_graph=True)
        of_experts = torch.autograd.grad(y, experts, dy)
    assert all(torch.equal(a, b) for a, b in zip((of_x, of_gate, *of_experts), expected, strict=True))
    assert counts["L"] == counts["LW"] == 1


def test_another_gradient_of_the_output_runs_the_whole_pass() -> None:
    layer = build()
    x = tokens().requires_grad_()
    y = layer(x * 2)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(y, parameters, tokens(seed=5), retain_graph=True)
    torch.autograd.grad(y, [x], tokens(seed=4), retain_graph=True)
    got = torch.autograd.grad(y, parameters, tokens(seed=5))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_gradient_that_was_changed_in_place_runs_the_whole_pass() -> None:
    layer = build()
    x = tokens().requires_grad_()
    y, dy = layer(x * 2), tokens(seed=4)
    parameters = list(layer.parameters())
    torch.autograd.grad(y, [x], dy, retain_graph=True)
    dy.mul_(3)
    expected = torch.autograd.grad(y, parameters, dy, retain_graph=True)
    torch.autograd.grad(y, [x], tokens(seed=4), retain_graph=True)
    got = torch.autograd.grad(y, parameters, dy)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_graph_that_is_kept_gives_the_second_half_twice() -> None:
    layer = build()
    x = tokens().requires_grad_()
    y, dy = layer(x * 2), tokens(seed=4)
    torch.autograd.grad(y, [x], dy, retain_graph=True)
    first = torch.autograd.grad(y, list(layer.parameters()), dy, retain_graph=True)
    second = torch.autograd.grad(y, list(layer.parameters()), dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_frozen_parameters_get_no_gradient_in_the_second_half() -> None:
    layer = build()
    layer.experts.w2.requires_grad_(False)
    x = tokens().requires_grad_()
    y, dy = layer(x * 2), tokens(seed=4)
    trained = [each for each in layer.parameters() if each.requires_grad]
    expected = torch.autograd.grad(y, trained, dy, retain_graph=True)
    torch.autograd.grad(y, [x], dy, retain_graph=True)
    torch.autograd.backward(y, dy, inputs=trained)
    assert layer.experts.w2.grad is None
    for parameter, value in zip(trained, expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, value)


def test_a_usual_step_knows_nothing_of_halves() -> None:
    with mock.patch.object(halves, "asked_gradients", side_effect=AssertionError):
        layer = build()
        layer(tokens()).sum().backward()


def test_what_cannot_be_split_is_computed_at_once() -> None:
    modules: list[PassModules] = [built(name).layer_modules for name in AT_ONCE]
    assert not any(halves.InputsFirst.fits(each) for each in modules)
    assert all(halves.InputsFirst.fits(built(name).layer_modules) for name in SPLITS)


# ---- the two schedules


def waits_for(schedule: Schedule) -> dict[str, set[str]]:
    """All tasks that must end before a task, by name, over any number of others."""
    found: dict[str, set[str]] = {}
    for task in schedule.tasks:
        found[task.name] = set(task.waits).union(*(found[name] for name in task.waits))
    return found


@pytest.mark.parametrize("is_sequential", [False, True])
def test_each_half_keeps_the_order_of_the_whole(is_sequential: bool) -> None:
    whole = backward_schedule(3, Stages(local=True, remote=True, shared=True))
    whole = sequential(whole) if is_sequential else whole
    inputs, parameters = whole.halves

    def names(tasks: tuple[Task, ...]) -> list[str]:
        return [task.name for task in tasks]

    assert sorted(names(inputs.tasks) + names(parameters.tasks)) == sorted(names(whole.tasks))
    assert {task.kind.value for task in parameters.tasks} == {"W", "LW", "XW"}
    before = waits_for(whole)
    for half in whole.halves:
        kept = waits_for(half)
        for task in half.tasks:
            assert kept[task.name] == before[task.name] & set(names(half.tasks))
