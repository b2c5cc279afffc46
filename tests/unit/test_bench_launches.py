"""bench_launches: each operation that launches something is counted once."""

from __future__ import annotations

import torch

from bench import bench_launches
from bench.bench_launches import launched, operations


def test_views_launch_nothing_and_an_operation_inside_another_is_not_counted() -> None:
    x, w = torch.ones(4, 6), torch.ones(3, 6)
    assert launched(lambda: x.t()[1:].view(5, 2, 2)) == []
    assert launched(lambda: x.view(24).add(1).relu_()) == ["aten::add", "aten::relu_"]
    assert launched(lambda: torch.nn.functional.linear(x, w)) == ["aten::linear"]
    assert launched(lambda: x.to(torch.float64)) == ["aten::_to_copy"]  # what a view calls counts


def test_more_chunks_launch_more() -> None:
    assert len(operations(1)) < len(operations(4))


def test_the_table_has_every_way_and_says_how_each_was_counted() -> None:
    ways = {name.split(", ")[1] for name, _, how in bench_launches.rows() if how == "construction"}
    assert ways == {"one rank's kernels", "fused=True", 'fused="persistent"'}
