"""Hooks of one rank that call a layer: all ranks raise soon, and learn which rank made which call.

Without a check, the row counts of the call would be paired with row counts, or with rows, of other ranks.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pmoe
from tests.gloo.kit import error_of
from tests.pool import Pool, ranks

M, H, E = 8, 16, 4
TIMEOUT_SECONDS = 25.0
"""The timeout of the process groups. Each error must come much earlier."""

SOON_SECONDS = 12.0
"""How long an error may take on a busy machine; about 1.5 s on a quiet one."""


def tokens(seed: int) -> Tensor:
    return torch.randn(6, M, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(pmoe.MoELayer(M, H, E, 2) for _ in range(2)))


def step(model: nn.Module, rank: int) -> None:
    model(tokens(rank)).square().sum().backward()


def calling(layer: nn.Module) -> Callable[..., None]:
    """Returns a hook that calls a layer, for example to log its output. The call in the hook has no hook."""
    is_running = [False]

    def hook(*_: object) -> None:
        if not is_running[0]:
            is_running[0] = True
            try:
                layer(tokens(7))
            finally:
                is_running[0] = False

    return hook


def of_forward(model: nn.Sequential) -> None:
    model[0].register_forward_hook(calling(model[1]))


def of_the_last_layer(model: nn.Sequential) -> None:
    model[1].register_forward_hook(calling(model[0]))


def before_forward(model: nn.Sequential) -> None:
    model[0].register_forward_pre_hook(calling(model[1]))


def of_a_copy(model: nn.Sequential) -> None:
    model[0].register_forward_hook(calling(copy.deepcopy(model[1])))


def before_backward(model: nn.Sequential) -> None:
    model[1].register_full_backward_pre_hook(calling(model[0]))


def between_backward_passes(model: nn.Sequential) -> None:
    model[1].register_full_backward_hook(calling(model[0]))


def after_backward(model: nn.Sequential) -> None:
    model[0].register_full_backward_hook(calling(model[1]))


def of_a_gradient(model: nn.Sequential) -> None:
    model[1].experts.w1.register_post_accumulate_grad_hook(calling(model[0]))


IN_BACKWARD = (
    "calls a layer in a hook of a backward pass, and other ranks do not: every rank must call the layers"
)
HOOKS: dict[Callable[[nn.Sequential], None], str] = {
    of_forward: "goes on without the backward pass of MoELayer 2",
    of_the_last_layer: "goes on without the backward pass of MoELayer 2",
    before_forward: "at this call the ranks are in different layers, numbered by their first calls: rank 0: ",
    of_a_copy: "calls a layer for the first time, and other ranks call a layer that they have called before",
    before_backward: IN_BACKWARD,
    between_backward_passes: IN_BACKWARD,
    after_backward: IN_BACKWARD,
    of_a_gradient: IN_BACKWARD,
}
"""Functions that register a hook, and what the errors of all ranks say."""


def one_rank_job(rank: int, world: int, register: Callable[[nn.Sequential], None]) -> tuple[str, float]:
    """The last rank gets a hook after two steps. Returns the error of one of the next steps, and its time."""
    model = build()
    for _ in range(2):
        step(model, rank)
    if rank == world - 1:
        register(model)
    start = time.monotonic()
    errors = (error_of(lambda: step(model, rank)) for _ in range(3))
    return next(filter(None, errors), ""), time.monotonic() - start


@pytest.mark.sampled(4)
@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_hook_of_one_rank_that_calls_a_layer_is_told_to_all(
    world: int, register: Callable[[nn.Sequential], None]
) -> None:
    with Pool(world, TIMEOUT_SECONDS) as pool:
        found = pool.run(one_rank_job, register)
    for error, seconds in found:
        assert HOOKS[register] in error, found
        assert seconds < SOON_SECONDS
        if "different layers" not in error:
            assert f"rank {world - 1} " in error


def all_ranks_job(rank: int, world: int, register: Callable[[nn.Sequential], None]) -> bool:
    """Makes steps with the hook on all ranks. Returns whether gradients are those without the hook."""
    model = build()
    step(model, rank)
    without = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    register(model)
    step(model, rank)
    return all(
        torch.equal(parameter.grad, before)
        for parameter, before in zip(model.parameters(), without, strict=True)
    )


@pytest.mark.parametrize(
    "register", [of_the_last_layer, between_backward_passes, after_backward, of_a_gradient]
)
def test_hooks_of_all_ranks_may_call_layers(register: Callable[[nn.Sequential], None]) -> None:
    assert all(ranks(2).run(all_ranks_job, register))
