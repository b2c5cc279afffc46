"""Training steps in a graph, over heaps, without padding: several ranks, kernels in the emulator.

`tests.captured` takes the place of CUDA graphs. The reference is a loop without a graph, in which the host
reads row counts before each call. Bits are compared.
"""

from __future__ import annotations

import re
import tempfile
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
from tests.captured import Graph, is_launch
from tests.emulated import emulated, load_kernels
from tests.gloo.test_comet_emulated import BF16, D_HIDDEN, D_MODEL
from tests.pool import Pool, ranks

pytestmark = pytest.mark.timeout(300)
TOKENS = (16, 9, 16, 0)
SKEWED = {1: (0,), 2: (2, 0), 4: (0,)}
"""Batches whose rows go to the two experts of rank 0, and the ranks on which they do."""
BATCHES = 5
GOES_AT = 3
"""The batch from which on rank 1 launches no kernel, in the test in which it leaves."""


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

    def capture(self, bound_seconds: float | None = None) -> None:
        """bound_seconds: how long kernels wait, in the emulator's time; None for the usual time."""
        compute(self.layer, self.static_x)  # ranks agree on the heap
        for heap in self.layer.cache.row_bound.heaps if bound_seconds else ():
            heap.bound_seconds = bound_seconds
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


def several_job(rank: int, world: int, path: Path) -> list[str]:
    """Returns the names of gradients that two graphs in turn compute otherwise than calls without a graph.

    The second graph has more tokens, so that its heap takes the place of the first one's.
    """
    wrong = []
    with emulated(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = InGraph(rank, world, path, {})
        layer = training.layer
        graphs = []
        for times in (1, 2):
            x = training.batch(0).repeat(times, 1)
            graph = Graph(load_kernels(path))
            compute(layer, x)
            layer.zero_grad()
            with training.steps.bounded_calls(), graph.capture():
                compute(layer, x)
            graphs.append((graph, x, {name: value.grad for name, value in layer.named_parameters()}))
        for index in (1, 2):
            for times, (graph, x, gradients) in enumerate(graphs, 1):
                x.copy_(training.batch(index).repeat(times, 1))
                graph.replay()
                found = {name: value.clone() for name, value in gradients.items() if value is not None}
                layer.zero_grad()
                compute(layer, x)  # in between, launches without a graph
                wrong += [
                    f"graph {times}, batch {index}, {name}"
                    for name, parameter in layer.named_parameters()
                    if not torch.equal(found[name], parameter.grad)
                ]
        close_heaps(Ranks())
    return wrong


@pytest.mark.slow
def test_graphs_in_turn_over_heaps_of_other_sizes_and_calls_in_between(kernels: Path) -> None:
    assert ranks(2).run(several_job, kernels) == [[], []]


def leaving_job(rank: int, world: int, path: Path, folder: str) -> tuple[str, bool]:
    """Returns the error, and whether the parameters are those before the step that rank 1 did not finish."""

    class Leaving(InGraph):
        def replay(self, index: int) -> None:
            self.static_x.copy_(self.batch(index))
            is_gone = rank == 1 and index >= GOES_AT
            self.graph.replay(without=lambda work: is_gone and is_launch(work))

    told = ""
    before: list[Tensor] = []
    tempfile.tempdir = folder  # nobody closes the heaps, which are files
    with emulated(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Leaving(rank, world, path, {})
        training.capture(bound_seconds=0.02)
        try:
            for index in range(BATCHES):
                if index <= GOES_AT:
                    before = [parameter.detach().clone() for parameter in training.layer.parameters()]
                training.steps.step(index)
            training.steps.finish()
        except RuntimeError as error:
            told = f"{type(error).__name__}: {error}"
    return told, all(map(torch.equal, before, training.layer.parameters()))


@pytest.mark.slow
def test_a_rank_that_leaves_a_captured_step_is_named_and_nobody_makes_the_step(
    kernels: Path, tmp_path: Path
) -> None:
    with Pool(2) as pool:  # of its own: the group cannot be used afterwards
        (waiting, kept), (gone, kept_there) = pool.run(leaving_job, kernels, str(tmp_path))
    assert re.match(r"HeapError: pmoe: rank 0 waited \S+ s in vain for rank 1", waiting), waiting
    assert "rank 0 waited" in gone, gone
    assert kept and kept_there


def refused_job(rank: int, world: int, path: Path) -> list[str]:
    """Returns the errors of captures that a graph cannot hold."""
    told = []
    with emulated(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = InGraph(rank, world, path, {})

        def captured(x: Tensor) -> None:
            with pytest.raises(RuntimeError) as raised, Graph(load_kernels(path)).capture():
                compute(training.layer, x)
            told.append(str(raised.value))

        x = training.static_x
        captured(x)
        with training.steps.bounded_calls():
            captured(x)
            compute(training.layer, x)
            captured(x.new_zeros(40, D_MODEL))
            close_heaps(Ranks())
            captured(x)
    return told


@pytest.mark.slow
def test_calls_that_a_graph_cannot_hold_are_refused_with_the_reason(kernels: Path) -> None:
    for told in ranks(2).run(refused_job, kernels):
        outside, first, large, closed = told
        assert "its rows are not bounded here: capture it within BoundedSteps.bounded_calls()" in outside
        assert "no call of its kind" in first
        assert "x has 40 tokens, and the heap has room for 16" in large
        assert "its heap was closed after the last call of its kind" in closed
