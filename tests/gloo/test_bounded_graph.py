"""Training steps in a graph, over heaps, without padding: several ranks, kernels in the emulator.

`tests.captured` takes the place of CUDA graphs. The reference is a loop without a graph, in which the host
reads row counts before each call. Bits are compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pmoe
from pmoe.comm.heap import close_heaps
from pmoe.comm.ranks import Ranks
from pmoe.experts.marks import is_expert
from pmoe.kernels.heap import Heap
from tests.captured import Graph
from tests.emulated import emulated, load_kernels
from tests.gloo.test_comet_emulated import BF16, D_HIDDEN, D_MODEL
from tests.pool import ranks

pytestmark = pytest.mark.timeout(600)  # the kernels are compiled for the CPU first
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


def compute(layer: pmoe.MoELayer, x: Tensor, *, frees: bool = True) -> None:
    """Computes gradients, and reduces those that do not belong to experts.

    frees: whether the memory of the gradients before is freed. Several graphs write into the same gradients,
        so they do not free it.
    """
    layer.zero_grad(set_to_none=frees)
    (layer(x).float().square().sum() + 0.01 * layer.l_aux).backward()
    for parameter in layer.parameters():
        if not is_expert(parameter):
            dist.all_reduce(parameter.grad)


def values(layer: pmoe.MoELayer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in layer.state_dict().items()}
    for index, slots in optimizer.state_dict()["state"].items():
        found |= {f"{index} {name}": value.clone() for name, value in slots.items()}
    return found


def trained_plainly(batch_of: Callable[[int], Tensor]) -> tuple[dict[str, Tensor], int]:
    """Returns the values after training without a graph, and how often the rows did not fit."""
    layer, optimizer = build()
    crowded = 0
    for index in range(BATCHES):
        compute(layer, batch_of(index))
        assert layer.ran is not None
        crowded += layer.ran.path == "pipeline"
        optimizer.step()
    return values(layer, optimizer), crowded


class InGraph:
    """Training steps that graphs repeat.

    repeats: for each graph, how often a batch is repeated in its input. Batches go to the graphs in turn.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        path: Path,
        skewed: dict[int, tuple[int, ...]],
        repeats: tuple[int, ...] = (1,),
    ) -> None:
        self.layer, self.optimizer = build()
        self.batch = lambda index: batch(rank, world, index, skewed).repeat(repeats[index % len(repeats)], 1)
        self.inputs = [self.batch(index) for index in range(len(repeats))]
        self.graphs = [Graph(load_kernels(path)) for _ in repeats]
        self.steps = pmoe.BoundedSteps(
            self.layer, self.optimizer, self.replay, lambda index: self.compute(self.batch(index))
        )

    def compute(self, x: Tensor) -> None:
        compute(self.layer, x, frees=len(self.graphs) == 1)

    @property
    def heaps(self) -> list[Heap]:
        """The open heaps of the layer's bounded calls, that for the fewest tokens first."""
        bound = self.layer.cache.row_bound
        assert bound is not None
        return sorted(bound.open_heaps, key=lambda heap: heap.shape.home_rows)

    def capture(self, wait_seconds: float | None = None) -> None:
        """Captures all graphs.

        wait_seconds: how long their kernels wait, in the emulator's time; None for the usual time.
        """
        for graph, x in zip(self.graphs, self.inputs, strict=True):
            self.compute(x)  # ranks agree on the heap
            for heap in self.heaps if wait_seconds else ():
                heap.bound_seconds = wait_seconds
            if len(self.graphs) == 1:
                self.layer.zero_grad()
            with self.steps.bounded_calls(), graph.capture():
                self.compute(x)

    def take(self, index: int) -> Graph:
        """Copies a batch into the input of its graph, and returns the graph."""
        number = index % len(self.graphs)
        self.inputs[number].copy_(self.batch(index))
        return self.graphs[number]

    def replay(self, index: int) -> None:
        self.take(index).replay()


def job(
    rank: int, world: int, path: Path, repeats: tuple[int, ...]
) -> tuple[list[str], int, int, list[tuple[int, bool]]]:
    """Returns the values that differ from those without a graph, and how many batches do not fit.

    Also returns the number of repeated steps, and for each heap the tokens for which it has room, and whether
    a graph uses it.
    """
    with emulated(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = InGraph(rank, world, path, SKEWED, repeats)
        expected, crowded = trained_plainly(training.batch)
        close_heaps(Ranks())
        training.capture()
        heaps = [(heap.shape.home_rows, heap.is_in_graph) for heap in training.heaps]
        for index in range(BATCHES):
            training.steps.step(index)
        training.steps.finish()
        found = values(training.layer, training.optimizer)
        close_heaps(Ranks())
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    return wrong, crowded, training.steps.repeated, heaps


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_graph_trains_as_a_loop_without_it(kernels: Path, world: int) -> None:
    for wrong, crowded, repeated, heaps in ranks(world).run(job, kernels, (1,)):
        assert not wrong
        assert repeated == crowded == len(SKEWED)
        assert heaps == [(16, True)]


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 4])
def test_graphs_in_turn_over_heaps_of_other_sizes_train_as_a_loop_without_them(
    kernels: Path, world: int
) -> None:
    """Each repeated step is a call without a graph, between two replays."""
    for wrong, crowded, repeated, heaps in ranks(world).run(job, kernels, (1, 2)):
        assert not wrong
        assert repeated == crowded == len(SKEWED)
        assert heaps == [(16, True), (32, True)]
