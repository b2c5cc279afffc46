"""Layers from the meta device: `reset_parameters` draws the values that building under the same seed
draws.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pmoe
from pmoe.gates import GATES

D_MODEL, D_HIDDEN, NUM_EXPERTS = 6, 10, 4


def build(device: str, **options: Any) -> pmoe.MoELayer:
    torch.manual_seed(3)
    return pmoe.MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, device=device, **options)


def emptied(**options: Any) -> pmoe.MoELayer:
    layer = build("meta", **options).to_empty(device="cpu")
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.detach().fill_(7)
    return layer


def tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_a_layer_that_is_reset_is_as_if_built(gate: str, expert: str) -> None:
    options = {"gate": gate, "expert": expert, "top_k": 1}
    if gate != "soft":
        options |= {"shared_expert": 8, "shared_gate": True}
    layer, built = emptied(**options), build("cpu", **options)
    torch.manual_seed(3)
    layer.reset_parameters()
    assert tensors(layer).keys() == tensors(built).keys()
    for name, value in tensors(built).items():
        assert torch.equal(tensors(layer)[name], value), name
    assert all(each.requires_grad and each.is_leaf for each in layer.parameters())


@pytest.mark.parametrize("calls", [0, 1])
def test_a_deepseek_gate_from_the_meta_device_balances_after_its_state_is_assigned(calls: int) -> None:
    """Its load is not part of a state dict and stayed on the meta device, where nothing was counted."""
    built, layer = build("cpu", gate="deepseek"), build("meta", gate="deepseek")
    layer.load_state_dict(built.state_dict(), assign=True)
    for each in (built, layer):
        for _ in range(calls):
            each(torch.randn(7, D_MODEL, generator=torch.Generator().manual_seed(1)))
        each.gate.update_bias()
    assert layer.gate.load.device.type == "cpu"
    assert torch.equal(layer.gate.bias, built.gate.bias)
    assert built.gate.bias.any() == bool(calls)


def test_experts_that_are_modules_are_drawn_each_under_its_own_seed() -> None:
    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(D_MODEL, D_HIDDEN), nn.ReLU(), nn.Linear(D_HIDDEN, D_MODEL))

    layer, built = emptied(expert=mlp), build("cpu", expert=mlp)
    torch.manual_seed(3)
    layer.reset_parameters()
    for name, value in tensors(built).items():
        assert torch.equal(tensors(layer)[name], value), name


def test_a_gate_of_ones_own_is_asked_part_by_part() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(D_MODEL, NUM_EXPERTS)

    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, gate=Own())
    before = layer.gate.router.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.gate.router.weight, before)
