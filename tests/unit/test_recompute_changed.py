"""Checkpoints that do not keep the routing: a routing that differs in the second pass is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import pmoe
from pmoe.checkpointing import routing_check
from pmoe.decide import exact_counts, padded_counts, solver_counts
from pmoe.gates import GATES
from pmoe.planner.degree import Choice
from pmoe.runners import one_rank
from tests.kit import (
    TOKENS,
    assert_same,
    one_thread,  # noqa: F401 (a fixture)
    tokens,
)
from tests.own_gates import OwnGate
from tests.plain_steps import PlainSteps, using
from tests.recomputed import FROZEN, OPTIONS, Block, build, step

CHANGED = "routing changed in recomputation.*pmoe.checkpoint_contexts"


def plain(function: Callable[[Tensor], Tensor], use_reentrant: bool, **options: Any) -> None:
    y = checkpoint(function, tokens().requires_grad_(), use_reentrant=use_reentrant, **options)
    y.square().sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("gate", [*(each for each in GATES if each not in ("hash", "soft")), OwnGate])
def test_routing_that_changed_in_recomputation_is_refused(gate: Any, use_reentrant: bool) -> None:
    layer, drop = build(gate=gate if isinstance(gate, str) else gate()), nn.Dropout(0.5)

    def function(x: Tensor) -> Tensor:
        return 2 * layer(drop(x))

    plain(function, use_reentrant)
    with pytest.raises(ValueError, match=CHANGED):
        plain(function, use_reentrant, preserve_rng_state=False)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("way", ["alone", "fused", "padded", "dropped by the gate"])
def test_on_every_path(way: str, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, dict[str, Any]] = {
        "alone": {},
        "fused": {"fused": True},
        "padded": {"capacity_factor": 1.0, "pad_to_capacity": True},
        "dropped by the gate": {"gate": "batch_prioritised", "capacity_factor": 0.5},
    }
    layer, drop = build(**options[way]), nn.Dropout(0.5)
    if way == "alone":
        monkeypatch.setattr(one_rank, "DEVICES", ("cpu",))
        monkeypatch.setattr(one_rank, "kernel_refusal", lambda *_, **__: None)
    with using(lambda request: PlainSteps(request.ranks)) if way == "fused" else nullcontext():
        plain(lambda x: 2 * layer(drop(x)), use_reentrant)
        with pytest.raises(ValueError, match=CHANGED):
            plain(lambda x: 2 * layer(drop(x)), use_reentrant, preserve_rng_state=False)


def saving_products(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE


def saving_nothing(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy: Callable[..., CheckpointPolicy]) -> dict[str, Any]:
    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}


@pytest.mark.parametrize("name", [*OPTIONS, "alone"])
def test_selective_checkpointing_finds_the_same_operations_in_both_passes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the measurements of the first call nor the comparison of routings count as operations."""
    measured: list[Tensor] = []

    def measure(*_: Any, **__: Any) -> None:
        if len(measured) < 3:
            measured.append(torch.ones(3, 2) @ torch.ones(2, 4))

    def measured_first(choose: Callable[..., Choice]) -> Callable[..., Choice]:
        def measured_and_chosen(*given: Any, **named: Any) -> Choice:
            measure()
            return choose(*given, **named)

        return measured_and_chosen

    for counts in (exact_counts, padded_counts, solver_counts):
        monkeypatch.setattr(counts, "choose", measured_first(counts.choose))
    if name == "alone":
        monkeypatch.setattr(one_rank, "DEVICES", ("cpu",))
        monkeypatch.setattr(one_rank, "kernel_refusal", measure)
    block = Block(build(**OPTIONS.get(name, {})))
    got = step(block, lambda x: checkpoint(block, x, use_reentrant=False, **selective(saving_products)))
    assert len(measured) >= 2
    assert_same(got, step(block, block))


@pytest.mark.parametrize("way", ["alone", "chunks"])
def test_and_routing_that_changed_is_refused_whatever_a_policy_saves(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer runs again as a whole. Together with a policy, the routing may be kept."""
    layer, drop = build(), nn.Dropout(0.5)
    if way == "alone":
        monkeypatch.setattr(one_rank, "DEVICES", ("cpu",))
        monkeypatch.setattr(one_rank, "kernel_refusal", lambda *_, **__: None)
    for policy in (saving_nothing, saving_products):
        for preserved in (True, False):
            with nullcontext() if preserved else pytest.raises(ValueError, match=CHANGED):
                plain(lambda x: 2 * layer(drop(x)), False, preserve_rng_state=preserved, **selective(policy))
            kept = {"context_fn": functools.partial(pmoe.checkpoint_contexts, policy)}
            plain(lambda x: 2 * layer(drop(x)), False, preserve_rng_state=preserved, **kept)


def test_what_the_gate_keeps_is_part_of_the_routing() -> None:
    hashes = [
        routing_check.routing_hash(3, (expert, keep, None))
        for expert in (torch.tensor([[0], [1], [2]]), torch.tensor([[1], [0], [2]]))
        for keep in (None, torch.tensor([[True], [True], [False]]), torch.tensor([[True], [False], [True]]))
    ]
    assert len({hash_.item() for hash_ in hashes}) == 6


def test_routings_that_differ_in_one_number_differ_in_their_hash() -> None:
    routings = torch.eye(300, dtype=torch.int64)
    assert (
        len({routing_check.routing_hash(300, (each.unsqueeze(1), None)).item() for each in routings}) == 300
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_new_tokens_inside_of_a_backward_are_not_taken_for_old_ones(use_reentrant: bool) -> None:
    layer = build()
    called: list[int] = []

    def look(count: int, context: Any) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            with context:
                layer(tokens(count, 77))
            called.append(count)

        return hook

    cases = [(TOKENS - 1, nullcontext()), (TOKENS, torch.no_grad()), (TOKENS, torch.inference_mode())]
    for count, context in cases:
        y = checkpoint(layer, tokens().requires_grad_(), use_reentrant=use_reentrant)
        y.register_hook(look(count, context))
        y.sum().backward()
    layer.eval()  # as nothing is known of calls in eval mode without gradients
    y = checkpoint(layer, tokens(seed=8).requires_grad_(), use_reentrant=use_reentrant)
    y.sum().backward()
    assert called == [count for count, _ in cases]


def test_new_tokens_inside_of_a_backward_are_welcome_where_the_routing_is_kept() -> None:
    layer, called = build(), []

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            called.append(checkpoint(layer, tokens(seed=77).requires_grad_(), use_reentrant=False, **FROZEN))

    y = checkpoint(layer, tokens().requires_grad_(), use_reentrant=False, **FROZEN)
    y.register_hook(hook)
    y.sum().backward()
    called[0].sum().backward()
    assert not routing_check._remembered[layer].num_tokens


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_plain_checkpoint_around_one_that_keeps_the_routing_notices_that_it_changed(
    use_reentrant: bool,
) -> None:
    layer, drop = build(), nn.Dropout(0.5)

    def function(x: Tensor) -> Tensor:
        return 2 * checkpoint(layer, drop(x), use_reentrant=False, **FROZEN)

    with set_checkpoint_early_stop(False):  # or the outer second pass may end before the layer
        plain(function, use_reentrant)
        with pytest.raises(ValueError, match=CHANGED):
            plain(function, use_reentrant, preserve_rng_state=False)


def test_hashes_are_bounded_and_only_made_for_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, made = build(), []
    hash_ = routing_check.routing_hash
    monkeypatch.setattr(routing_check, "routing_hash", lambda *args: (made.append(1), hash_(*args))[1])
    x = tokens().requires_grad_()
    layer(x).sum().backward()
    with torch.inference_mode():
        layer(x)
    layer.eval()
    with torch.no_grad():
        layer(x)
    assert not made
    layer.train()
    monkeypatch.setattr(routing_check, "REMEMBERED_AT_FIRST", 2)
    monkeypatch.setattr(routing_check, "REMEMBERED", 8)
    ys = [checkpoint(layer, tokens(seed=i).requires_grad_(), use_reentrant=False) for i in range(21)]
    for y in ys[-8:]:
        y.sum().backward()
    assert len(made) == 21 + 8
    remembered = routing_check._remembered[layer]
    assert remembered.hashes.shape == (8,) and remembered.num_tokens == [TOKENS] * 8
