"""Layers that share the n that trials found: everything that changes the seconds is equal in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

import pmoe
from pmoe.call.options import LayerOptions, Switches
from pmoe.choose.search import key_of_degrees
from pmoe.comm.grid import Grid
from pmoe.comm.ranks import Ranks
from pmoe.measure import bench


class PicksSome(nn.Module):
    """A gate of a user's own. Only its attributes say how many rows it makes."""

    def __init__(self, rows_a_token: int) -> None:
        super().__init__()
        self.rows_a_token = rows_a_token


def key(**options: Any) -> dict[str, Any]:
    given = {"d_model": 16, "d_hidden": 32, "num_experts": 8, "top_k": 2, "pipeline": True, **options}
    return key_of_degrees(pmoe.MoELayer(**given).layer_modules)


def key_with(change: Callable[[pmoe.MoELayer], None]) -> dict[str, Any]:
    layer = pmoe.MoELayer(16, 32, 8, top_k=2, pipeline=True)
    change(layer)
    return key_of_degrees(layer.layer_modules)


def ranks_of(size: int) -> Ranks:
    found = Ranks.single()
    found.size = size
    return found


def spread_over(across: int, inside: int) -> Callable[[pmoe.MoELayer], None]:
    def change(layer: pmoe.MoELayer) -> None:
        layer.grid = Grid(ranks_of(1), ranks_of(across), ranks_of(inside))

    return change


OPTIONS: dict[str, dict[str, Any]] = {
    "d_model": {"d_model": 24},
    "d_hidden": {"d_hidden": 64},
    "num_experts": {"num_experts": 4},
    "top_k": {"top_k": 1},
    "capacity": {"capacity_factor": 1.0},
    "another capacity": {"capacity_factor": 1.5},
    "padded": {"capacity_factor": 1.0, "pad_to_capacity": True},
    "S1": {"memory_reuse": "S1"},
    "S4": {"memory_reuse": "S4"},
    "slack": {"slack": 1.5},
    "backward": {"pipeline": 2, "pipeline_backward": 4},
    "send_once": {"send_once": True},
    "wire": {"wire": "e4m3"},
    "another wire": {"wire": "bfloat16"},
    "wire_backward": {"wire_backward": "e4m3"},
    "wire_combine": {"wire_combine": "e4m3"},
    "narrow pairs allowed": {"memory_reuse": True, "allow": "e4m3"},
    "products": {"products": "e4m3"},
    "other products": {"products": "mxfp8"},
    "pmoe takes the pair": {"memory_reuse": True},
    "fused": {"fused": "auto"},
    "check_finite": {"check_finite": True},
    "balance": {"balance": 1},
    "hierarchical": {"dispatch": "hierarchical_1d", "nodes": [0]},
    "hierarchical back": {"combine": "hierarchical_1d", "nodes": [0]},
    "hierarchical 2D": {"dispatch": "hierarchical_2d", "nodes": [0]},
    "order": {"order": "einsum"},
    "swiglu": {"expert": "swiglu"},
    "activation": {"activation": "relu"},
    "bias": {"bias": False},
    "dtype": {"dtype": torch.bfloat16},
    "shared": {"shared_expert": 8},
    "wider shared": {"shared_expert": 16},
    "shared gate": {"shared_expert": 8, "shared_gate": True},
    "gate": {"gate": "sigmoid"},
    "z loss": {"z_loss_weight": 0.1},
    "expert choice": {"gate": "expert_choice"},
    "a user's gate of 1 row": {"gate": PicksSome(1)},
    "a user's gate of 2 rows": {"gate": PicksSome(2)},
}

CHANGES: dict[str, Callable[[pmoe.MoELayer], None]] = {
    "4 x 1 ranks": spread_over(4, 1),
    "2 x 2 ranks": spread_over(2, 2),
    **{
        f"{field.name} switched": lambda layer, name=field.name: setattr(
            layer, "switches", replace(Switches(), **{name: not getattr(Switches(), name)})
        )
        for field in fields(Switches)
    },
    "a reducer": lambda layer: setattr(layer, "gradients", object()),
}


def test_layers_that_differ_in_what_changes_the_time_learn_apart() -> None:
    keys = {"plain": key()}
    keys |= {name: key(**options) for name, options in OPTIONS.items()}
    keys |= {name: key_with(change) for name, change in CHANGES.items()}
    names: dict[str, str] = {}
    for name, found in keys.items():
        text = json.dumps(found, sort_keys=True)
        assert text not in names, f"{name} learns with {names[text]}"
        names[text] = name


def test_layers_that_are_alike_learn_together_whatever_pipeline_was() -> None:
    assert key() == key() == key(pipeline=4)


def test_every_option_of_a_layer_is_part_of_the_key() -> None:
    assert {field.name for field in fields(LayerOptions)} - set(key()) == {"pipeline"}


@pytest.mark.parametrize("path", ["_full_name", "_backend"])
def test_another_device_or_backend_has_another_key(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(bench, path, lambda *_: "another")
    assert key() != before


def test_deterministic_mode_has_another_key() -> None:
    before = key()
    torch.use_deterministic_algorithms(True)
    try:
        assert key() != before
    finally:
        torch.use_deterministic_algorithms(False)
