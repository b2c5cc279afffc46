"""Renamed modules warn under their old names, and layers that were pickled before still load."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

import pmoe

STORED = Path(__file__).resolve().parents[1] / "stored" / "layer_before_rooms.pt"
"""A file that torch.save(layer) wrote in a version whose classes were in other modules."""

OLD_NAMES = {
    "pmoe.engine.recording": ("pmoe.engine.lanes.recorder", ["Journal", "Span"]),
    "pmoe.layer.module": ("pmoe.layer.moe_layer", ["MoELayer"]),
    "pmoe.layer.spec": ("pmoe.call.options", ["FusedName", "LayerSpec", "Switches"]),
    "pmoe.measure.black_box": ("pmoe.measure.module_cost", ["profile_module"]),
    "pmoe.schedule.straight": ("pmoe.schedule.separate_buffers", ["forward_schedule"]),
}
"""Old names of modules that documents named: the new name, and what the modules had."""


@pytest.mark.parametrize("old", OLD_NAMES)
def test_an_old_name_works_and_says_the_new_one(old: str) -> None:
    new, names = OLD_NAMES[old]
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now"):
        module = importlib.import_module(old)
    assert all(hasattr(module, name) for name in names)


@pytest.mark.filterwarnings("ignore:.*is called.*:DeprecationWarning")
def test_a_layer_that_was_pickled_before_the_renaming_loads_and_computes() -> None:
    layer = torch.load(STORED, weights_only=False)
    assert isinstance(layer, pmoe.MoELayer)
    torch.manual_seed(0)
    fresh = pmoe.MoELayer(
        8, 16, 4, top_k=2, pipeline=2, memory_reuse="S4", shared_expert=8, capacity_factor=1.0
    )
    x = torch.randn(5, 8)
    assert torch.equal(layer(x), fresh(x))
    assert layer.ran == fresh.ran


def test_the_old_names_of_a_layers_attributes_work_and_say_the_new_ones() -> None:
    layer = pmoe.MoELayer(8, 16, 4)
    with pytest.warns(DeprecationWarning, match=r"MoELayer\.parts is called MoELayer\.layer_modules now"):
        assert layer.parts is layer.layer_modules
    with pytest.warns(DeprecationWarning, match=r"MoELayer\.spec is called MoELayer\.options now"):
        assert layer.spec is layer.options
