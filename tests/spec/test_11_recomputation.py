"""Activation checkpointing runs a block again in backward: it is routed as in the first pass, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.gates import GATES
from tests.spec.kit import K, M, Step, assert_close, error_of, make, on_ranks, step, tokens


def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False, context_fn=pmoe.checkpoint_contexts)


def steps(options: dict[str, Any], seed: int = 3) -> tuple[Step, Step]:
    """A step with a checkpoint, and without one."""
    found = []
    for around in (checkpointed, None):
        layer = make(**options)
        torch.manual_seed(1)
        run = None if around is None else lambda x, layer=layer: checkpointed(layer, x)
        found.append(step(layer, tokens(9, seed), run=run))
    return found[0], found[1]


BY_NAME = sorted(set(GATES) - {"hash"})


@pytest.mark.parametrize("gate", BY_NAME)
def test_a_checkpoint_changes_no_bit_whatever_the_gate(gate: str) -> None:
    assert_close(*steps({"gate": gate, "top_k": 1 if gate == "switch" else K}), limit=0)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("reuse", [False, "S1", "S2", "S3", "S4"])
def test_a_checkpoint_changes_no_bit_with_chunks_and_rings(reuse: bool | str, n: int) -> None:
    assert_close(*steps({"pipeline": n, "memory_reuse": reuse}), limit=0)


@pytest.mark.parametrize(
    "options",
    [
        {"expert": "swiglu"},
        {"capacity_factor": 0.6},
        {"capacity_factor": 0.6, "pad_to_capacity": True},
        {"shared_expert": 8},
        {"order": "einsum"},
    ],
    ids=lambda options: "+".join(options),
)
def test_a_checkpoint_changes_no_bit_with_any_option(options: dict[str, Any]) -> None:
    assert_close(*steps({"pipeline": 2, **options}), limit=0)


def on_rank(rank: int, world: int, options: dict[str, Any], is_checkpointed: bool) -> Step:
    layer = make(**options)
    run = (lambda x: checkpointed(layer, x)) if is_checkpointed else None
    torch.manual_seed(1)
    return step(layer, tokens((9, 4, 0, 7)[rank], 10 + rank), run=run)


@pytest.mark.parametrize("options", [{}, {"pipeline": 2, "memory_reuse": "S4"}, {"gate": "noisy_topk"}])
@pytest.mark.parametrize("world", [2, 4])
def test_a_checkpoint_changes_no_bit_on_several_ranks(world: int, options: dict[str, Any]) -> None:
    some, other = (on_ranks(world, on_rank, options, around) for around in (True, False))
    for got, expected in zip(some, other, strict=True):
        assert_close(got, expected, limit=0)


def dropped_out(x: Tensor, context: Any, preserve: bool = True) -> tuple[pmoe.MoELayer, Tensor]:
    """Dropout before the gate, whose random numbers are not kept: other tokens in the second pass."""
    layer = make(num_experts=8)
    block = nn.Sequential(nn.Dropout(0.5), layer)
    options = {} if context is None else {"context_fn": context}
    y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=preserve, **options)
    return layer, y


def test_the_routing_of_the_first_pass_is_taken_over_whatever_is_random_before_the_gate() -> None:
    layer, y = dropped_out(tokens(30).requires_grad_(), pmoe.checkpoint_contexts, preserve=False)
    before = layer.tokens_per_expert
    y.sum().backward()
    assert torch.equal(layer.tokens_per_expert, before)


def test_routing_that_changes_in_an_ordinary_checkpoint_is_an_error_that_says_what_to_do() -> None:
    _, y = dropped_out(tokens(30).requires_grad_(), None, preserve=False)
    message = error_of(lambda: y.sum().backward())
    assert "routing changed in recomputation" in message
    assert "context_fn=pmoe.checkpoint_contexts" in message


def test_an_ordinary_checkpoint_with_the_same_routing_is_fine() -> None:
    layer, x = make(pipeline=2), tokens(9)
    found = step(layer, x, run=lambda x: checkpoint(layer, x, use_reentrant=False))
    assert_close(found, step(layer, x), limit=0)


def changed_on_one(rank: int, world: int) -> str:
    torch.manual_seed(rank)
    layer, x = make(num_experts=8), tokens(30, rank).requires_grad_()
    block = nn.Sequential(nn.Dropout(0.5 if rank == 1 else 0.0), layer)
    y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    return error_of(lambda: y.sum().backward())


def test_routing_that_changes_on_one_rank_is_an_error_on_every_rank() -> None:
    messages = on_ranks(2, changed_on_one)
    assert all("rank 1: routing changed in recomputation" in message for message in messages), messages


def sent(rank: int, world: int, is_checkpointed: bool) -> tuple[int, int]:
    layer = make(pipeline=2)
    x = tokens(9, 10 + rank).requires_grad_()
    y = checkpointed(layer, x) if is_checkpointed else layer(x)
    first = layer.traffic.counts
    y.sum().backward()
    return first, layer.traffic.counts


def test_the_second_pass_exchanges_no_row_counts() -> None:
    assert all(before == after > 0 for before, after in on_ranks(2, sent, True))


def test_a_checkpoint_around_a_model_keeps_every_layers_routing() -> None:
    def run(around: bool) -> Step:
        first, second = make(gate="noisy_topk"), make(gate="noisy_topk", pipeline=2, memory_reuse="S4")
        model = nn.Sequential(first, nn.Linear(M, M).double(), second)
        torch.manual_seed(1)
        x = tokens(9).requires_grad_()
        y = checkpointed(model, x) if around else model(x)
        y.square().sum().backward()
        return {"x": x.grad, **{name: each.grad for name, each in first.named_parameters()}}

    torch.manual_seed(0)
    some = run(True)
    torch.manual_seed(0)
    assert set(some) == set(run(False))


def test_memory_reuse_recomputes_no_gate() -> None:
    calls = []
    layer = make(pipeline=2, memory_reuse="S4")
    layer.gate.register_forward_hook(lambda *_: calls.append(1))
    step(layer, tokens(9))
    assert calls == [1]


def test_a_checkpoint_with_the_contexts_calls_the_gate_twice_and_routes_once() -> None:
    layer = make(gate="random", num_experts=8)
    y = checkpointed(layer, tokens(30).requires_grad_())
    first = layer.tokens_per_expert
    y.sum().backward()
    assert torch.equal(layer.tokens_per_expert, first)


def test_a_second_derivative_is_refused() -> None:
    x = tokens(5).requires_grad_()
    y = make()(x)
    assert "create_graph (True) must be False" in error_of(
        lambda: torch.autograd.grad(y.sum(), x, create_graph=True)
    )
