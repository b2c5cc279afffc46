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
