"""Timing of a user's own module: the fitted costs are right, and the module is left as it was.

Time is a clock that the modules themselves advance, so the results do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pmoe.measure import module_cost
from pmoe.measure.module_cost import RUNS, profile_module
from pmoe.planner.costs import LineCost


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Charge(torch.autograd.Function):
    """The identity, whose forward and backward each advance the clock by a given number of seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward: float, backward: float) -> Tensor:
        ctx.clock, ctx.backward_seconds = clock, backward
        clock.seconds += forward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.seconds += ctx.backward_seconds
        return dy, None, None, None


class Priced(nn.Module):
    """A module with known costs: 1 ms and 2 us a row in forward, 3 ms and 4 us a row in backward.

    extra: extra(n) is the seconds that the n-th call takes in addition.
    """

    def __init__(self, clock: Clock, extra: Callable[[int], float] = lambda call: 0.0) -> None:
        super().__init__()
        self.clock, self.extra, self.log = clock, extra, []
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(len(x))  # inside the list: stays
        late = self.extra(len(self.log))
        return Charge.apply(
            x * self.weight, self.clock, 1e-3 + 2e-6 * len(x) + late, 3e-3 + 4e-6 * len(x) + late
        )


def profile_by(clock: Clock, *given: Any) -> Any:
    with mock.patch.object(module_cost, "clock_of", return_value=clock):
        return profile_module(*given)


def line_of(found: Any) -> tuple[float, float]:
    return found.line.alpha_seconds, found.line.beta_seconds


def test_both_directions_have_their_own_line() -> None:
    clock = Clock()
    forward, backward = profile_by(clock, Priced(clock), [100, 200, 400], 4)
    assert line_of(forward) == pytest.approx((1e-3, 2e-6))
    assert line_of(backward) == pytest.approx((3e-3, 4e-6))
    assert forward.r_squared == pytest.approx(1.0) and backward.r_squared == pytest.approx(1.0)
    assert forward.num_sizes == backward.num_sizes == 3


def test_the_first_run_and_interruptions_do_not_count() -> None:
    clock = Clock()
    module = Priced(clock, lambda call: 60.0 if call % (RUNS + 1) in (1, 3) else 0.0)
    forward, backward = profile_by(clock, module, [100, 200], 4)
    assert line_of(forward) == pytest.approx((1e-3, 2e-6))
    assert line_of(backward) == pytest.approx((3e-3, 4e-6))
    assert module.log == [100] * (RUNS + 1) + [200] * (RUNS + 1)


class Busy(nn.Module):
    """A module that changes everything a module may change: buffers, attributes, and random numbers.

    Some buffers are changed in place, others are replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("none", None)
        self.l_aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(x))
        self.replaced = self.replaced + 1
        self.none = torch.ones(1)
        self.l_aux = y.sum()
        self.fresh = y
        return y


def test_the_module_is_left_as_it_was() -> None:
    module = Busy()
    module(torch.randn(8, 4)).sum().backward()  # gradients, and buffers that are not at their start
    del module.fresh
    module.l_aux, module.none = None, None
    keys = [set(part.__dict__) for part in module.modules()]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    buffers = dict(module.named_buffers())
    gradients = {name: (p.grad, p.grad.clone()) for name, p in module.named_parameters()}
    fired: list[Tensor] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    keys_now = [set(part.__dict__) for part in module.modules()]
    random = torch.get_rng_state()

    with torch.no_grad():
        profile_module(module, [4, 8], 4)

    assert torch.equal(torch.get_rng_state(), random)
    assert keys == keys_now == [set(part.__dict__) for part in module.modules()]
    assert module.state_dict().keys() == state.keys()
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert {name: id(buffer) for name, buffer in module.named_buffers()} == {
        name: id(buffer) for name, buffer in buffers.items()
    }
    assert module.l_aux is None and module.none is None
    assert module.training
    for name, parameter in module.named_parameters():
        held, value = gradients[name]
        assert parameter.grad is held and torch.equal(held, value), name
    assert not fired, "a gradient was accumulated"


def test_the_module_is_left_as_it_was_when_it_fails_too() -> None:
    class Failing(Busy):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise RuntimeError("out of sorts")

    module, random = Failing(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="out of sorts"):
        profile_module(module, [4, 8], 4)
    assert torch.equal(torch.get_rng_state(), random)
    assert module.norm.num_batches_tracked == 0 and module.replaced.sum() == 0 and module.l_aux is None


@dataclass
class Routed:
    expert: Tensor
    weight: Tensor


class Gate(nn.Module):
    """A gate whose result is a dict with an object that has the tensors, instead of tensors.

    Its backward advances the clock only if the gradient of the routing weights is asked for.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.proj = nn.Linear(4, 3)

    def forward(self, x: Tensor, top_k: int) -> dict[str, list[Routed]]:
        weight, expert = self.proj(x).topk(top_k)
        return {"routings": [Routed(expert, Charge.apply(weight, self.clock, 0.0, 1e-6 * len(x)))]}


def test_a_gate_takes_several_arguments_and_returns_what_it_likes() -> None:
    clock = Clock()
    gate = Gate(clock)
    forward, backward = profile_by(clock, gate, [10, 20, 30], lambda rows: (torch.randn(rows, 4), 2))
    assert line_of(backward) == pytest.approx((0.0, 1e-6))
    assert forward.line == LineCost(0.0, 0.0)


class Order(nn.Module):
    def forward(self, expert: Tensor) -> Tensor:
        return expert.argsort(stable=True)


def test_what_has_no_gradient_takes_no_time_backward() -> None:
    forward, backward = profile_module(Order(), [1000, 2000], lambda rows: torch.arange(rows).flip(0))
    assert backward.line == LineCost(0.0, 0.0)
    assert forward(1e6) > 0


def test_a_real_expert_takes_time_in_both_directions() -> None:
    expert = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).double()
    for found in profile_module(expert, [64, 256, 1024], 8):
        assert found(1e9) > 0 and 0 <= found.r_squared <= 1
    assert all(parameter.grad is None for parameter in expert.parameters())


@pytest.mark.parametrize("rows", [[], [4], [4, 4], [0, 4], [-1, 4]])
def test_rows_that_make_no_line_are_refused(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rows \(\[.*\]\) must be two or more distinct numbers"):
        profile_module(nn.Identity(), rows, 4)


def test_a_width_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"make_input \(0\) must be at least 1"):
        profile_module(nn.Identity(), [1, 2], 0)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
        nn.ReLU(inplace=True),
        nn.Identity(),
    ],
    ids=str,
)
def test_a_module_may_change_its_input_in_place(module: nn.Module) -> None:
    """The timed input is no leaf, because autograd refuses to change a leaf in place."""
    given: list[Tensor] = []

    def make(count: int) -> Tensor:
        given.append(torch.randn(count, 4))
        return given[-1]

    forward, backward = profile_module(module, [100, 200], make)
    assert forward.num_sizes == backward.num_sizes == 2
    assert any((each < 0).any() for each in given), "its own rows were written over"


def test_gradients_are_timed_behind_the_modules_first_operation() -> None:
    """A module gets a copy of the timed input, which it may change. The copy's backward is not timed."""
    clock = Clock()

    class InPlace(Priced):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2.0))

    forward, backward = profile_by(clock, InPlace(clock), [100, 200, 400], 4)
    assert line_of(forward) == pytest.approx((1e-3, 2e-6))
    assert line_of(backward) == pytest.approx((3e-3, 4e-6))
