"""bench/bench_launches.py: what launches something is counted, once; the numbers of docs/flashdmoe.md."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from bench import bench_launches
from bench.bench_launches import launched, operations

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flashdmoe.md"


def test_views_launch_nothing_and_an_operation_inside_another_is_not_counted() -> None:
    x, w = torch.ones(4, 6), torch.ones(3, 6)
    assert launched(lambda: x.t()[1:].view(5, 2, 2)) == []
    assert launched(lambda: x.view(24).add(1).relu_()) == ["aten::add", "aten::relu_"]
    assert launched(lambda: torch.nn.functional.linear(x, w)) == ["aten::linear"]
    assert launched(lambda: x.to(torch.float64)) == ["aten::_to_copy"]  # what a view calls counts


def test_more_chunks_launch_more_and_the_page_says_how_many() -> None:
    numbers = [len(operations(n)) for n in (1, 4)]
    assert numbers[0] < numbers[1]
    told = re.search(r"(\d+) operations with n = 1, (\d+) with n = 4", " ".join(PAGE.read_text().split()))
    assert told is not None and [int(each) for each in told.groups()] == numbers


def test_the_table_has_every_way_and_says_how_each_was_counted() -> None:
    ways = {name.split(", ")[1] for name, _, how in bench_launches.rows() if how == "construction"}
    assert ways == {"one rank's kernels", "fused=True", 'fused="persistent"'}
