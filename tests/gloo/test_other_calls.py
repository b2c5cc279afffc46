"""A rank that makes another call than the others: all ranks get an error, and may use their group again."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import warn
from tests.gloo.kit import error_of
from tests.pool import ranks

M, H, E = 6, 8, 4
KINDS: dict[str, dict[str, Any]] = {
    "exact counts": {"pipeline": 2, "memory_reuse": "S4"},
    "padded": {"pad_to_capacity": True, "capacity_factor": 1.0},
}


def build(**options: Any) -> pmoe.MoELayer:
    torch.manual_seed(3)
    return pmoe.MoELayer(M, H, E, 2, **options)


def tokens(rank: int) -> Tensor:
    return torch.randn(5, M, generator=torch.Generator().manual_seed(rank))


def step(layer: nn.Module, rank: int) -> None:
    layer(tokens(rank)).sum().backward()


# ---- gradient modes


def mode_job(rank: int, world: int, options: dict[str, Any]) -> tuple[list[str], int]:
    """Returns this rank's errors if rank 0 has no gradients, and the bytes of rows that were sent then."""
    layer = build(**options)
    step(layer, rank)
    told, sent = [], layer.traffic.rows
    for off in (torch.no_grad, torch.inference_mode):
        with off(rank == 0) if off is torch.inference_mode else torch.set_grad_enabled(rank != 0):
            told.append(error_of(lambda: layer(tokens(rank))))
    sent = layer.traffic.rows - sent
    step(layer, rank)  # the group is whole
    with torch.no_grad():
        layer(tokens(rank))  # all of them without
    return told, sent


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_gradients_that_are_off_on_one_rank_are_told_to_all_at_that_call(
    options: dict[str, Any], world: int
) -> None:
    wanting = "rank 1" if world == 2 else "ranks 1, 2, 3"
    for told, sent in ranks(world).run(mode_job, options):
        assert sent == 0
        for message in told:
            assert message.startswith("FaultError: MoELayer ") and "calls backward" in message
            assert f"(torch.no_grad or inference_mode) on rank 0, and with them on {wanting}:" in message


def own_fault_job(rank: int, world: int) -> str:
    layer = build()
    with torch.set_grad_enabled(rank == 0):
        return error_of(lambda: layer(tokens(rank)[:, : M - rank]))


def test_a_wrong_input_is_told_before_another_mode() -> None:
    first, second = ranks(2).run(own_fault_job)
    assert first == "FaultError: rank 1: the last dimension of its input is not d_model"
    assert second.startswith("FaultError: x of shape (5, 5) must end in d_model (6)")


def reentrant_job(rank: int, world: int) -> list[Tensor]:
    layer = build()
    found = []
    for reentrant in (None, True, False):
        layer.zero_grad(set_to_none=True)
        x = tokens(rank).requires_grad_()
        y = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        y.square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    return found


def test_checkpoints_of_both_kinds_are_right_on_ranks_that_do_the_same() -> None:
    for plain, *others in ranks(2).run(reentrant_job):
        assert all(torch.equal(each, plain) for each in others)


def recomputing_job(rank: int, world: int) -> tuple[str, bool]:
    """Rank 1 skips the backward pass of a layer under the older kind of checkpoint, and goes on."""
    layer = build()

    def call() -> Tensor:
        y: Tensor = checkpoint(layer, tokens(rank).requires_grad_(), use_reentrant=True)
        return y

    y = call()
    told = error_of(y.sum().backward if rank == 0 else lambda: layer(tokens(rank)))
    step(layer, rank)
    return told, layer.gate.weight.grad is not None


def test_a_checkpoint_that_runs_again_beside_a_forward_pass_is_told_to_all() -> None:
    for told, has_gradient in ranks(2).run(recomputing_job):
        assert "runs again for a checkpoint in the backward pass of rank 0" in told
        assert "is called in a forward pass of rank 1: every rank must call backward" in told
        assert "adds 0 * y.sum() to it" in told and has_gradient


# ---- training and evaluation


def eval_job(rank: int, world: int, options: dict[str, Any]) -> list[str]:
    warn.GIVEN.clear()
    layer = build(**options)
    layer.train(rank == 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(layer, rank)
        layer.train()
        step(layer, rank)
    return [str(each.message) for each in caught if "mode on" in str(each.message)]


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_rank_that_evaluates_while_another_trains_works_and_is_a_warning(options: dict[str, Any]) -> None:
    for caught in ranks(2).run(eval_job, options):
        assert len(caught) == 1
        assert "is in training mode on rank 0 and in evaluation mode on rank 1" in caught[0]
        assert "model.train()" in caught[0]


# ---- layers


def order_job(rank: int, world: int) -> tuple[list[str], Tensor]:
    first, second = build(), build()
    x = tokens(rank)
    for _ in range(2):
        second(first(x)).sum().backward()
    told = []
    one, other = (first, second) if rank == 0 else (second, first)
    told.append(error_of(lambda: one(x)))
    told.append(error_of(lambda: other(x)))
    y = second(first(x))
    y.sum().backward()
    return told, first(x).detach()


def test_layers_that_are_called_in_another_order_are_told_to_all() -> None:
    for told, y in ranks(2).run(order_job):
        for message, numbers in zip(told, ((1, 2), (2, 1)), strict=True):
            assert message.startswith(
                "FaultError: every rank must call the layers of a group in the same order"
            )
            found = [
                int(each.partition("number ")[2]) for each in message.partition("calls: ")[2].split("; ")
            ]
            assert found[1] - found[0] == numbers[1] - numbers[0]
        assert y.isfinite().all()
