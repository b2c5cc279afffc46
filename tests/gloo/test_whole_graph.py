"""torch.compile(model, backend="pmoe") on several ranks, against the same model without it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmoe
from examples.lm_model import ByteGPT
from pmoe.graph import run
from tests.pool import ranks
from tests.reference import relative_error
from tests.spread import named

SIZES = {"d_model": 16, "d_hidden": 24, "layers": 2, "heads": 2, "context": 8, "num_experts": 8}
STEPS = 20
SEQUENCES = {1: (4,), 2: (4, 4), 4: (4, 4, 4, 4)}
UNEVEN = {2: ((3, 5), (5, 1), (2, 4), (1, 3)), 4: ((3, 1, 5, 1), (2, 6, 2, 1), (1, 4, 1, 2))}


def build(top_k: int = 1, **options: Any) -> ByteGPT:
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    try:
        model = ByteGPT(top_k=top_k, **SIZES)
        for block in model.blocks:
            if isinstance(block.ffn, pmoe.MoELayer):
                block.ffn = pmoe.MoELayer(
                    SIZES["d_model"], SIZES["d_hidden"] // top_k, SIZES["num_experts"], top_k, **options
                )
    finally:
        torch.set_default_dtype(torch.float32)
    return model


def batch(rank: int, step: int, sequences: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 256, (sequences, SIZES["context"]), generator=generator)


def layers(model: nn.Module) -> list[pmoe.MoELayer]:
    return [each for each in model.modules() if isinstance(each, pmoe.MoELayer)]


def loss_of(model: nn.Module, run: Any, x: Tensor) -> Tensor:
    y = run(x)
    scale = torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype)
    return (y * scale).mean() + 0.01 * sum(layer.l_aux for layer in layers(model))


def compare(rank: int, world: int, steps: list[tuple[int, ...]], options: dict[str, Any]) -> list[Any]:
    """Returns for each step the largest error of the loss, a gradient or a parameter."""
    torch._dynamo.reset()
    plain = build(**options)
    graph = copy.deepcopy(plain)
    compiled = torch.compile(graph, backend="pmoe")
    models = ((plain, plain), (graph, compiled))
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model, _ in models]
    errors = []
    for step, counts in enumerate(steps):
        x, losses = batch(rank, step, counts[rank]), []
        for model, call in models:
            model.zero_grad()
            loss = loss_of(model, call, x)
            loss.backward()
            losses.append(loss.detach())
        error = relative_error(losses[1], losses[0])
        for one, other in zip(plain.parameters(), graph.parameters(), strict=True):
            error = max(error, relative_error(other.grad, one.grad))
        for one, other in zip(layers(plain), layers(graph), strict=True):
            assert torch.equal(one.tokens_per_expert, other.tokens_per_expert)
            assert torch.equal(one.row_counts.recv.sum(0), other.row_counts.recv[0])
            assert one.max_tokens == other.max_tokens == SIZES["context"] * max(counts)
            assert other.ran.path == "whole graph", other.ran
        for optimizer in optimizers:
            optimizer.step()
        errors.append(error)
    return errors


LAYERS = [
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 2, "capacity_factor": 0.8},
    {"top_k": 1, "capacity_factor": 0.6, "gate": "switch"},
    {"top_k": 2, "expert": "swiglu", "bias": False, "shared_expert": 12, "shared_gate": True},
    {"top_k": 2, "gate": "sigmoid", "z_loss_weight": 0.01},
]


MARKS: list[Any] = [pytest.mark.nightly, pytest.mark.slow, ()]


def cases(first: list[Any], others: list[Any]) -> list[Any]:
    """Returns test cases: each of ``first`` and ``others`` with all layers.

    The third layer is quick for ``first`` and slow for ``others``, which are nightly with the other layers.
    """
    found = []
    for at, options in enumerate(LAYERS):
        for each in (*first, *others):
            values = each if isinstance(each, tuple) else (each,)
            found.append(pytest.param(*values, options, marks=MARKS[(each in first) + (at == 2)]))
    return found


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("world", "options"), cases([2], [4]), ids=named)
def test_losses_and_gradients_are_those_of_the_layer(world: int, options: dict[str, Any]) -> None:
    for errors in ranks(world).run(compare, [SEQUENCES[world]] * STEPS, options):
        assert max(errors) < 1e-12, errors


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("options", LAYERS[:4], ids=named)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_may_have_different_numbers_of_tokens(world: int, options: dict[str, Any]) -> None:
    for errors in ranks(world).run(compare, [*UNEVEN[world]] * (STEPS // 4), options):
        assert max(errors) < 1e-12, errors


def in_parts(
    rank: int, world: int, k: int, lag: int, steps: list[tuple[int, ...]], options: dict[str, Any]
) -> list[Any]:
    """Does what `compare` does, with everything that can be cut in k parts, in both passes."""
    torch._dynamo.reset()
    run.PROGRAMS.clear()
    known = {
        name: getattr(run, name)
        for name in ("solve", "total_seconds", "peak_bytes", "lags", "BACKWARD_PARTS")
    }

    def all_in_parts(graph: Any, costs: Any) -> Any:
        return 0.0, [replace(each, lag=lag) for each in run.whole_ranges(graph, k)]

    run.solve = all_in_parts
    run.total_seconds = lambda instructions: -len(instructions)  # plans of many instructions are taken
    run.peak_bytes, run.lags, run.BACKWARD_PARTS = lambda *_: 0, lambda _: [lag], (k,)
    try:
        errors = compare(rank, world, steps, options)
    finally:
        for name, each in known.items():
            setattr(run, name, each)
    (cut,) = [program for key, program in run.PROGRAMS.items() if key[0] == "forward"]
    (back,) = [program for key, program in run.PROGRAMS.items() if key[0] == "backward"]
    assert cut.plan.ranges and back.plan.ranges, "nothing was cut"
    return errors


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "k", "lag", "options"), cases([(2, 3, 1)], [(2, 2, 2), (4, 3, 2)]), ids=named
)
def test_parts_change_no_number(world: int, k: int, lag: int, options: dict[str, Any]) -> None:
    for errors in ranks(world).run(in_parts, k, lag, [SEQUENCES[world]] * 4, options):
        assert max(errors) < 1e-12, errors


@pytest.mark.nightly
@pytest.mark.parametrize("lag", [1, 3])
def test_a_rank_of_one_sequence_sends_its_parts_in_the_order_of_the_others(lag: int) -> None:
    for errors in ranks(2).run(in_parts, 3, lag, [SEQUENCES[2], *UNEVEN[2]], LAYERS[2]):
        assert max(errors) < 1e-12, errors
