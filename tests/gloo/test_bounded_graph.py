"""Training steps in a graph, over heaps, without padding: several ranks, kernels in the emulator.

`tests.captured` takes the place of CUDA graphs. The reference is a loop without a graph, in which the host
reads row counts before each call. Bits are compared.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pmoe
from pmoe.comm.heap import close_heaps
from pmoe.comm.ranks import Ranks
from pmoe.experts.marks import is_expert
from tests.captured import Graph
from tests.emulated import emulated, load_kernels
from tests.gloo.test_comet_emulated import BF16, D_HIDDEN, D_MODEL
from tests.pool import ranks

pytestmark = pytest.mark.timeout(300)
TOKENS = (16, 9, 16, 0)
SKEWED = {1: (0,), 2: (2, 0), 4: (0,)}
"""Batches whose rows go to the two experts of rank 0, and the ranks on which they do."""
BATCHES = 5


def build() -> tuple[pmoe.MoELayer, torch.optim.Optimizer]:
    torch.manual_seed(3)
    layer = pmoe.MoELayer(
        D_MODEL, D_HIDDEN, 2 * dist.get_world_size(), 2, dtype=BF16, fused="persistent", slack=1.0
    )
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight.fill_diagonal_(8)
    return layer, torch.optim.AdamW(layer.parameters(), lr=0.01, fused=True)


def batch(rank: int, world: int, index: int, skewed: dict[int, tuple[int, ...]] = SKEWED) -> Tensor:
    """(T, M): tokens for two neighbouring experts, which go through all experts; or for those of rank 0."""
    generator = torch.Generator().manual_seed(10 * index + rank)
    x = torch.rand(TOKENS[rank], D_MODEL, generator=generator)
    token = torch.arange(TOKENS[rank])
    first = 2 * ((token + index) % world) * (rank not in skewed.get(index, ()))
    x[token, first] += 3
    x[token, first + 1] += 2
    return x.to(BF16)


def compute(layer: pmoe.MoELayer, x: Tensor) -> None:
    """Computes gradients, and reduces those that do not belong to experts."""
    layer.zero_grad()
    (layer(x).float().square().sum() + 0.01 * layer.l_aux).backward()
    for parameter in layer.parameters():
        if not is_expert(parameter):
            dist.all_reduce(parameter.grad)


def values(layer: pmoe.MoELayer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in layer.state_dict().items()}
    for index, slots in optimizer.state_dict()["state"].items():
        found |= {f"{index} {name}": value.clone() for name, value in slots.items()}
    return found


def trained_plainly(rank: int, world: int) -> tuple[dict[str, Tensor], int]:
    """Returns the values after training without a graph, and how often the rows did not fit."""
    layer, optimizer = build()
    crowded = 0
    for index in range(BATCHES):
        compute(layer, batch(rank, world, index))
        assert layer.ran is not None
        crowded += layer.ran.path == "pipeline"
        optimizer.step()
    return values(layer, optimizer), crowded


class InGraph:
    """Training steps that a graph repeats."""

    def __init__(self, rank: int, world: int, path: Path, skewed: dict[int, tuple[int, ...]]) -> None:
        self.layer, self.optimizer = build()
        self.graph = Graph(load_kernels(path))
        self.batch = lambda index: batch(rank, world, index, skewed)
        self.static_x = self.batch(0)
        self.steps = pmoe.BoundedSteps(
            self.layer, self.optimizer, self.replay, lambda index: compute(self.layer, self.batch(index))
        )

    def capture(self) -> None:
        compute(self.layer, self.static_x)  # ranks agree on the heap
        self.layer.zero_grad()
        with self.steps.bounded_calls(), self.graph.capture():
            compute(self.layer, self.static_x)

    def replay(self, index: int) -> None:
        self.static_x.copy_(self.batch(index))
        self.graph.replay()


def job(rank: int, world: int, path: Path) -> tuple[list[str], int, int]:
    with emulated(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, crowded = trained_plainly(rank, world)
        training = InGraph(rank, world, path, SKEWED)
        training.capture()
        for index in range(BATCHES):
            training.steps.step(index)
        training.steps.finish()
        found = values(training.layer, training.optimizer)
        close_heaps(Ranks())
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    return wrong, crowded, training.steps.repeated


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_graph_trains_as_a_loop_without_it(kernels: Path, world: int) -> None:
    for wrong, crowded, repeated in ranks(world).run(job, kernels):
        assert not wrong
        assert repeated == crowded == len(SKEWED)
