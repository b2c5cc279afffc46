"""A loss that, on one rank, needs no output of a layer: its peers wait in the layer's backward pass.

The rank goes on without an error. Errors of all ranks then name the layer, the pass, the rank and the cure.
"""

from __future__ import annotations

import time
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.comm import failures
from pmoe.training.parallel import make_meshes, reduce_gradients
from tests.gloo.kit import error_of
from tests.gloo.test_left import TIMEOUT_SECONDS, M, build, tokens
from tests.pool import SHORT_TIMEOUT_SECONDS, Pool, ranks

CURE = "a rank whose loss does not need the output y adds 0 * y.sum() to its loss"


class Branches(nn.Module):
    """A dense module, and two layers beside each other, whose messages all have the same size."""

    def __init__(self, **where: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense = nn.Linear(M, M)
        self.first, self.second = (
            pmoe.MoELayer(M, 8, 4, 2, pad_to_capacity=True, capacity_factor=1.0, **where) for _ in range(2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.dense(x)
        return h, self.first(h), self.second(h)


def omits_job(rank: int, world: int, then: str, ep: int = 0) -> list[str]:
    """Returns the errors of three steps. The loss of the last rank leaves out a layer in the second one."""
    meshes = make_meshes(ep=ep or world)
    model = Branches(mesh=meshes.experts)
    found = []
    for at in range(3):

        def step(leaves_out: bool = at == 1 and rank == world - 1) -> None:
            h, first, second = model(tokens(rank))
            loss = h.sum() if leaves_out and then != "the other layer" else h.sum() + first.sum()
            (loss if leaves_out else loss + second.sum()).backward()
            if then == "reduce":
                reduce_gradients(model, meshes)
            if then == "clip":
                pmoe.clip_grad_norm_(model, 1.0)

        found.append(error_of(step))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("then", ["clip", "reduce", "call", "the other layer"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_loss_that_leaves_out_a_layer_on_one_rank_is_told_to_all(world: int, then: str) -> None:
    with Pool(world, TIMEOUT_SECONDS) as pool:
        found = pool.run(omits_job, then, timeout=100)
    for rank, (first, second, third) in enumerate(found):
        message = second or third
        assert first == "" and "took longer than the group's timeout" not in message
        assert f"rank {world - 1} goes on without the backward pass of MoELayer 2, which rank" in message
        assert CURE in message
        assert bool(second) == (rank < world - 1 or then in ("clip", "reduce")), (then, found)


@pytest.mark.slow
@pytest.mark.parametrize("then", ["clip", "reduce"])
def test_ranks_of_another_group_of_experts_are_told_too(then: str) -> None:
    """Ranks 0 and 1 hold copies of the experts of ranks 2 and 3. Rank 3 leaves out a layer."""
    with Pool(4, TIMEOUT_SECONDS) as pool:
        found = pool.run(omits_job, then, 2, timeout=100)
    for first, second, _ in found:
        assert first == "" and "took longer than the group's timeout" not in second
        assert "goes on without the backward pass of MoELayer 2" in second and CURE in second


def absent_job(rank: int, world: int) -> tuple[str, list[str]]:
    """The last rank leaves the layer out, and stays where pmoe sees nothing. Returns error and warnings."""
    layer = build()
    layer(tokens(rank)).sum().backward()
    y = layer(tokens(rank))
    if rank == world - 1:
        time.sleep(3 * SHORT_TIMEOUT_SECONDS)
        return "", []
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(failures, "WARN_AFTER_SECONDS", 1.0),
    ):
        warnings.simplefilter("always")
        message = error_of(y.sum().backward)
    return message, [str(each.message) for each in caught]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_waiting_ranks_name_the_layer_the_pass_and_the_rank_that_stays_away(world: int) -> None:
    with Pool(world, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        pool.start(absent_job)
        found = [pool.answer(rank) for rank in range(world - 1)]
    for rank, (message, warned) in enumerate(found):
        assert f"rank {rank} of {world} failed in dispatch (S0) of chunk 0, backward of MoELayer 1" in message
        assert f"(rank {world - 1} has not reported to wait in this backward pass: every rank must" in message
        assert CURE in message
        (warning,) = (text for text in warned if "waits for more than 1 s" in text)
        assert f"rank {rank} of {world} waits for more than 1 s in the backward pass of MoELayer 1" in warning
        assert f"and rank {world - 1} has not reported the same" in warning and CURE in warning


def aborted_job(rank: int, world: int) -> str:
    """Rank 1 leaves out the layer that it called last, and gloo ends rank 0. Returns an error."""
    layers = [build(), build()]
    for layer in layers:
        layer(tokens(rank)).sum().backward()
    x = tokens(rank)
    y = layers[0](torch.cat(3 * [x])).sum()
    later = layers[1](x).sum()
    return error_of((y + later if rank == 0 else y).backward)


def test_a_layer_that_is_left_out_is_named_where_gloo_ends_a_peer() -> None:
    """The error said only "Connection reset by peer"."""
    with Pool(2, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        pool.start(aborted_job)
        message = pool.answer(1)
    assert "of chunk 0, backward of MoELayer 1" in message
    assert "has not run the backward pass of MoELayer 2, which it called after MoELayer 1: if gloo" in message
    assert CURE in message


def alike_job(rank: int, world: int) -> list[str]:
    """All ranks leave out the same layer, clip, call again, and run the left out pass later."""
    meshes = make_meshes(ep=world)
    model = Branches(mesh=meshes.experts)

    def leaving_out() -> None:
        for _ in range(2):
            h, first, second = model(tokens(rank))
            (h.sum() + first.sum()).backward(retain_graph=True)
            pmoe.clip_grad_norm_(model, 1.0)
            second.sum().backward()
        for _ in range(3):
            model(tokens(rank))[1].sum().backward()

    return [error_of(leaving_out)]


def test_ranks_that_leave_out_the_same_layer_go_on() -> None:
    assert ranks(2).run(alike_job) == [[""], [""]]
