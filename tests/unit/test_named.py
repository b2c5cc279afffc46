"""The names that a layer and each task of its passes have in profilers and errors."""

from __future__ import annotations

import copy

import pytest
import torch

import pmoe
from pmoe.engine.lanes import recorder


def test_each_task_of_a_pass_is_a_range_with_chunk_direction_and_layer() -> None:
    layer = pmoe.MoELayer(8, 16, 4, pipeline=2, memory_reuse="S4")
    layer(torch.randn(3, 8))  # a name comes with the first call
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        layer(torch.randn(12, 8, requires_grad=True)).sum().backward()
    found = [event.name for event in profiled.events() if event.name.endswith(layer.ranks.layer)]
    computed = {f"L{j} {direction}" for j in (0, 1) for direction in ("forward", "backward")}
    assert computed <= {name.removesuffix(f" {layer.ranks.layer}") for name in found}
    assert len(found) == len(set(found)), "a task has one range"


def test_without_a_profiler_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "record_function", None)
    pmoe.MoELayer(8, 16, 4, pipeline=2)(torch.randn(12, 8))


def test_layers_have_numbers_by_their_first_calls_and_copies_numbers_of_their_own() -> None:
    first = pmoe.MoELayer(8, 16, 4)
    x = torch.randn(12, 8)
    assert first.ranks.layer == ""
    first(x)
    second = copy.deepcopy(first)
    second(x)
    first(x)
    numbers = [int(each.ranks.layer.removeprefix("MoELayer ")) for each in (first, second)]
    assert numbers == [numbers[0], numbers[0] + 1]
