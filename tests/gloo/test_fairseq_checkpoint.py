"""Experts in fairseq's checkpoints, and what a rank takes of them: functions that need no fairseq."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.comm.ranks import Ranks
from pmoe.integrations.fairseq.checkpoint import gather_model, gather_optimizer, own_experts, own_optimizer
from tests.pool import ranks


def build(group: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model with a dense part, and AdamW on it. Experts also have fairseq's mark."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), pmoe.MoELayer(8, 16, num_experts=8, top_k=2, group=group))
    for parameter in model[1].experts.parameters():
        parameter.expert = True
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def whole_checkpoint() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the checkpoint of one process with all experts after a step. All its tensors have different
    values.
    """
    model, optimizer = build(Ranks.single())
    model(torch.randn(32, 8)).square().sum().backward()
    optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def load_and_gather(rank: int, num_ranks: int) -> tuple[Any, Any, Any, Any]:
    """Lets each rank load its part of one process's checkpoint, and gathers what the ranks then have.

    Returns the checkpoint, and the gathered one.
    """
    parameters, moments = whole_checkpoint()
    model, optimizer = build()
    model.load_state_dict(own_experts(model, parameters))
    optimizer.load_state_dict(own_optimizer(optimizer, moments, model[1].ranks))
    layer = model[1]
    held = layer.num_local_experts
    assert held == 8 // num_ranks
    assert torch.equal(layer.experts.w1, parameters["1.experts.w1"][rank * held : (rank + 1) * held])
    assert optimizer.state[layer.experts.w1]["exp_avg"].shape == layer.experts.w1.shape
    before = model.state_dict()
    kept = {name: value.clone() for name, value in before.items()}
    gathered = gather_model(model, before)
    gathered_moments = gather_optimizer(optimizer, optimizer.state_dict(), model[1].ranks)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in kept.items())
    return parameters, moments, gathered, gathered_moments


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_load_one_process_checkpoint_together_hold_its_bits(world: int) -> None:
    parameters, moments, found_parameters, found_moments = ranks(world).run(load_and_gather)[0]
    assert found_parameters.keys() == parameters.keys()
    for name, value in parameters.items():
        assert torch.equal(found_parameters[name], value), name
    assert found_moments["param_groups"] == moments["param_groups"]
    assert found_moments["state"].keys() == moments["state"].keys()
    for index, kept in moments["state"].items():
        for name, value in kept.items():
            assert torch.equal(found_moments["state"][index][name], value), (index, name)


def refused(rank: int, world: int) -> str:
    parameters, _ = whole_checkpoint()
    model, _ = build()
    short = {**parameters, "1.experts.w2": parameters["1.experts.w2"][:6]}
    with pytest.raises(ValueError, match="must hold") as error:
        own_experts(model, short)
    return str(error.value)


def test_a_checkpoint_with_another_number_of_experts_is_refused_by_name() -> None:
    for message in ranks(2).run(refused):
        assert message == "1.experts.w2 of the checkpoint (experts: 6) must hold --moe-num-experts (8)"
