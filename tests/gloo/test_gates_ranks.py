"""The bias of `DeepSeekGate` on several ranks: all ranks have the loads of all, and so the same bias."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pmoe.gates import DeepSeekGate
from tests.pool import ranks


def gate_that_saw(tokens_of_expert: list[int]) -> DeepSeekGate:
    gate = DeepSeekGate(4, 4, update_speed=0.5)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(4))
    gate(torch.eye(4).repeat_interleave(torch.tensor(tokens_of_expert), dim=0))
    assert gate.load.tolist() == tokens_of_expert
    return gate


LOADS = [[5, 1, 0, 0], [0, 2, 4, 0]]  # of both ranks: 5, 3, 4, 0, the mean is 3


def update_job(rank: int, world: int) -> tuple[list[float], list[float], list[int]]:
    pairs = [dist.new_group([r]) for r in range(world)]
    alone, together = gate_that_saw(LOADS[rank]), gate_that_saw(LOADS[rank])
    alone.update_bias(pairs[rank])
    together.update_bias()
    return alone.bias.tolist(), together.bias.tolist(), together.load.tolist()


def test_ranks_update_the_bias_from_the_load_of_their_group() -> None:
    first, second = ranks(2).run(update_job)
    assert first == ([-0.5, 0.5, 0.5, 0.5], [-0.5, 0.0, -0.5, 0.5], [0, 0, 0, 0])
    assert second == ([0.5, -0.5, -0.5, 0.5], [-0.5, 0.0, -0.5, 0.5], [0, 0, 0, 0])
