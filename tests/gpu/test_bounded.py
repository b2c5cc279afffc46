"""A layer over bounded programs in a CUDA graph, on 2 ranks: steps that replay it train as a loop without it.

`tests/unit/test_gpu_first.py` runs `trained` with stand-ins for graphs and programs.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pmoe
from pmoe.experts.marks import is_expert
from tests.gpu import first_bounded
from tests.gpu.first_bounded import CudaGraph, Graph, Sizes, build, job_on_gpus
from tests.gpu.support import NEEDS_GPU

pytestmark = [*NEEDS_GPU, pytest.mark.timeout(200)]

SMALL = Sizes(tokens=64, d_model=64, d_hidden=64, experts=8, chunks=2)
SKEWED = (2, 5)
"""Steps in which all rows of rank 0 go to the first two experts, and do not fit."""
STEPS = 6


def batch(rank: int, step: int, sizes: Sizes, device: torch.device) -> Tensor:
    """(T, M): column e of a token leads to expert e. Rank 1 has fewer tokens than rank 0."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    token = torch.arange(sizes.tokens - rank * sizes.tokens // 4)
    x = torch.rand(len(token), sizes.d_model, generator=generator)
    experts = 2 if step in SKEWED and rank == 0 else sizes.experts
    x[token, (token + step) % experts] += 3
    x[token, (token + step + 1) % experts] += 2
    return x.to(device, getattr(torch, sizes.dtype))


def compute(layer: pmoe.MoELayer, x: Tensor) -> None:
    layer.zero_grad()
    (layer(x).float().square().mean() + 0.01 * layer.l_aux).backward()
    for parameter in layer.parameters():
        if not is_expert(parameter):
            dist.all_reduce(parameter.grad)


def steered(sizes: Sizes, device: torch.device) -> tuple[pmoe.MoELayer, torch.optim.Optimizer]:
    layer = build(sizes, device, slack=1.25)
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight.fill_diagonal_(8)
    return layer, torch.optim.AdamW(layer.parameters(), lr=0.01, fused=True)


def trained(device: torch.device, graph: Graph, sizes: Sizes = SMALL) -> dict[str, Any]:
    """Returns the largest difference of each parameter from that of a loop, and the repeated steps."""
    rank = dist.get_rank()
    layer, optimizer = steered(sizes, device)
    for step in range(STEPS):
        compute(layer, batch(rank, step, sizes, device))
        optimizer.step()
    expected = {name: value.detach().float().cpu() for name, value in layer.named_parameters()}
    layer, optimizer = steered(sizes, device)
    x = batch(rank, 0, sizes, device)

    def replay(step: int) -> None:
        x.copy_(batch(rank, step, sizes, device))
        graph.replay()

    def exactly(step: int) -> None:
        compute(layer, batch(rank, step, sizes, device))

    steps = pmoe.BoundedSteps(layer, optimizer, replay, exactly)
    compute(layer, x)  # the ranks agree on the bound
    layer.zero_grad()
    with steps.bounded_calls(), graph.capture():
        compute(layer, x)
    for step in range(STEPS):
        steps.step(step)
    steps.finish()
    steps.remove()
    differences = {
        name: float((value.detach().float().cpu() - expected[name]).abs().max())
        for name, value in layer.named_parameters()
    }
    return {"differences": differences, "repeated": steps.repeated}


def test_a_graph_trains_as_a_loop_without_it() -> None:
    """The same kernels compute in the same order. Sums of the gate's gradient may be rounded differently."""
    found, _ = first_bounded.run_ranks(trained, job_on_gpus(), CudaGraph)
    for of_rank in found:
        assert of_rank["repeated"] == len(SKEWED)
        assert max(of_rank["differences"].values()) <= 2**-8, of_rank["differences"]


def test_the_part_of_the_first_ten_minutes_runs(tmp_path: Path) -> None:
    file = tmp_path / "bounded.json"
    assert first_bounded.run(file, job_on_gpus(), SMALL, CudaGraph, 5) == 0
    (first, second) = json.loads(file.read_text())["ranks"]
    assert set(first["costs"]) == set(second["costs"])
    assert functools.reduce(max, first["differences"]) <= first_bounded.MOST_DIFFERENCE
