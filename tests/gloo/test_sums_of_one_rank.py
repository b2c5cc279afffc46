"""Sums over ranks between calls of layers, which one rank alone asks for: all ranks raise soon.

They are the loads of `DeepSeekGate.update_bias`, statistics, and the counts of a `BalanceLoss`. Before, the
rank waited in the sum, and its peers in their next call, until the timeout of the process group: 30 minutes
with torch's defaults.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pmoe
from pmoe.gates import DeepSeekGate
from tests.gloo.kit import error_of
from tests.gloo.test_hooks_of_one_rank import SOON_SECONDS, TIMEOUT_SECONDS, E, H, M, tokens
from tests.pool import Pool, ranks


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(pmoe.MoELayer(M, H, E, 2, gate="deepseek") for _ in range(2)))


def step(model: nn.Module, rank: int) -> None:
    model(tokens(rank)).square().sum().backward()


def update_bias(model: nn.Sequential) -> None:
    model[1].gate.update_bias()  # type: ignore[operator,union-attr]


def update_bias_of_a_copy(model: nn.Sequential) -> None:
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model[0].gate)))
    assert isinstance(copied, DeepSeekGate)
    copied.update_bias()


def statistics(model: nn.Sequential) -> None:
    pmoe.stats(model, all_ranks=True)


def balance_loss(model: nn.Sequential) -> None:
    balance = model.balance
    assert isinstance(balance, pmoe.BalanceLoss)
    balance.loss()


SUMS: dict[Callable[[nn.Sequential], None], str] = {
    update_bias: "summing the loads of DeepSeekGate.update_bias",
    update_bias_of_a_copy: "summing the loads of DeepSeekGate.update_bias",
    statistics: "summing statistics",
    balance_loss: "summing expert counts",
}
"""Functions that sum over ranks, and what all errors say."""


def one_rank_job(rank: int, world: int, add_up: Callable[[nn.Sequential], None]) -> tuple[str, float]:
    """The last rank asks for a sum, the others for a step. Returns this rank's error, and its time."""
    model = build()
    if add_up is balance_loss:
        model.balance = pmoe.BalanceLoss(model)  # type: ignore[assignment]
    for _ in range(2):
        step(model, rank)
    start = time.monotonic()
    error = error_of(lambda: add_up(model) if rank == world - 1 else step(model, rank))
    return error, time.monotonic() - start


@pytest.mark.parametrize("add_up", SUMS)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sum_that_one_rank_asks_for_is_told_to_all(
    world: int, add_up: Callable[[nn.Sequential], None]
) -> None:
    with Pool(world, TIMEOUT_SECONDS) as pool:
        found = pool.run(one_rank_job, add_up)
    for error, seconds in found:
        assert SUMS[add_up] in error, found
        assert seconds < SOON_SECONDS
    for error, _ in found[:-1]:
        assert f"rank {world - 1} waits for other ranks in" in error


def late_job(rank: int, world: int) -> tuple[list[float], list[float]]:
    """The first rank comes late to each sum. Returns the biases of both gates after two steps."""
    model = build()
    for _ in range(2):
        step(model, rank)
        for layer in model:
            time.sleep(1.5 * (rank == 0))
            layer.gate.update_bias()
        pmoe.stats(model, all_ranks=True)
    return model[0].gate.bias.tolist(), model[1].gate.bias.tolist()


def test_a_rank_that_is_late_is_waited_for() -> None:
    first, second = ranks(2).run(late_job)
    assert first == second
    assert any(first[0]) and any(first[1])


def group_job(rank: int, world: int) -> str:
    """A pair of ranks waits for its slower rank in a sum, while the other rank of another pair calls a layer.

    Each layer is on ranks 0 and 1; the sum is over ranks 0 and 2.
    """
    import torch.distributed as dist

    layers = dist.new_group([0, 1])
    sums = dist.new_group([0, 2])
    if rank == 3:
        return ""
    if rank == 2:
        time.sleep(2.5)
        gate = DeepSeekGate(M, E, 2)
        return error_of(lambda: gate.update_bias(sums))
    layer = pmoe.MoELayer(M, H, E, 2, gate="deepseek", group=layers)
    step(layer, rank)

    def go_on() -> None:
        if rank == 0:
            layer.gate.update_bias(sums)  # type: ignore[operator,union-attr]
        step(layer, rank)

    return error_of(go_on)


@pytest.mark.slow
def test_a_peer_outside_of_the_sum_waits_until_it_has_ended() -> None:
    with Pool(4, TIMEOUT_SECONDS) as pool:
        assert pool.run(group_job) == ["", "", "", ""]
